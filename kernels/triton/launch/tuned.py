"""Launch configurations found by measuring, one file per GPU: `kernels/tuned/<gpu>.json`.

A file maps op to key to the fields of the op's configuration:
`{"w4_gemv": {"float16-4-64-4096x4096": {"block_n": 32, ...}}}`. Where there is no entry, the
launchers decide by compute capability.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

import torch

from qoff.errors import FormatError

FOLDER = Path(__file__).resolve().parents[2] / "tuned"

Entries = Mapping[str, Mapping[str, Mapping[str, int]]]  # op -> key -> field -> value


def file_name(gpu: str) -> str:
    """The name of the file of a GPU: "NVIDIA H200" is nvidia-h200.json."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def entries(op: str, device: torch.device) -> Mapping[str, Mapping[str, int]]:
    """All that was measured of `op` on the GPU `device`, by key.

    Raises FormatError for a file that is not as this module says.
    """
    if device.type != "cuda":
        return {}
    return _read(FOLDER / file_name(torch.cuda.get_device_name(device))).get(op, {})


def lookup(op: str, device: torch.device, key: str) -> Mapping[str, int] | None:
    """The measured configuration of `op` for `key`; None where there is none."""
    return entries(op, device).get(key)


@cache
def _read(path: Path) -> Entries:
    """All entries of a file, none where there is no file; read once per process."""
    if not path.is_file():
        return MappingProxyType({})
    try:
        entries = json.loads(path.read_text())
        valid = all(
            isinstance(value, int) and value >= 0
            for keys in entries.values()
            for fields in keys.values()
            for value in fields.values()
        )
    except (ValueError, AttributeError) as error:
        raise FormatError(f"{path} is no file of tuned configurations: {error}") from error
    if not valid:
        raise FormatError(f"{path}: every field of a tuned configuration is a number from 0 up")
    return MappingProxyType(entries)

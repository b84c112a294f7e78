"""The device that a model runs on, known before it is downloaded or converted."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from qoff.budgets import resolve_device
from qoff.errors import ArgumentError, QoffError
from qoff.kernels.ops import ops_for
from qoff.log import say_once
from qoff.models.families import converted
from qoff.models.modules.configs import is_native
from qoff.models.spec import DecoderSpec
from qoff.schema import read_object

from .hub import download_config, exists, is_own

logger = logging.getLogger(__name__)
CPU = torch.device("cpu")


def device_for(
    path_or_hub_id: str | PathLike[str],
    device: torch.device | str,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> torch.device:
    """The device of a name, as `resolve_device`; "auto" is the CPU for a model that only it runs.

    A line says so. Raises OpError for a GPU that cannot be used, ArgumentError for a GPU that was
    asked for by name and does not run the model, and what `resolve_device` and `download_config`
    do. Nothing is read of the model where the device is the CPU.
    """
    where = resolve_device(device)
    if where.type == "cpu":
        return where
    if device != "auto":
        ops_for(where)
    reason = _only_on_cpu(path_or_hub_id, revision, trust_remote_code)
    if reason and device != "auto":
        raise ArgumentError(f"{path_or_hub_id}: {reason} on the CPU only; use device='cpu'")
    if reason:
        say_once(logger, f"{path_or_hub_id}: {reason} on the CPU only, so device 'auto' is the CPU")
        return CPU
    ops_for(where)
    return where


def check_packing(
    name: str | PathLike[str], config: Mapping[str, Any], device: torch.device
) -> None:
    """Raise ArgumentError for weights of a checkpoint in the CPU's packing, on a GPU.

    config: its config.json.
    """
    quantization = config.get("quantization_config")
    packing = quantization.get("packing") if isinstance(quantization, Mapping) else None
    if device.type != "cpu" and packing == "rows16":
        raise ArgumentError(
            f"{name}: was converted for the CPU (--for cpu), and weights are not repacked on their "
            "way to a GPU; use device='cpu' (--device cpu), or convert the model again without "
            "--for cpu"
        )


def _only_on_cpu(path_or_hub_id: str | PathLike[str], revision: str | None, trust: bool) -> str:
    """How a model runs that no GPU does; "" for others, and what cannot be read."""
    if not exists(path_or_hub_id):
        return _by(read_object(download_config(str(path_or_hub_id), revision, trust)))
    with suppress(QoffError, OSError):  # which who opens it says
        return _by(_config(Path(path_or_hub_id)))
    return ""


def _config(path: Path) -> Mapping[str, Any]:
    """What a config.json says, or the metadata of a GGUF file."""
    if (path / "config.json").exists():
        return read_object(path / "config.json")
    from qoff.models.sources import open_source

    return open_source(path).config()


def _by(config: Mapping[str, Any]) -> str:
    if not is_native(config):
        return ""
    with suppress(QoffError):
        own = is_own(config.get("quantization_config"))
        config = config if own else converted(config, lambda name: False)[0]
        if not DecoderSpec.from_config(config).attention_layers:
            return "it has no layer that attends, and runs"
    return ""

"""What tells that a model's files, or how they are to be quantized, have changed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qoff.checkpoint.layout import KV_SENSITIVITY_FILE
from qoff.quant import QuantConfig
from qoff.quant.gguf_split import parts


def source_stamps(path: Path) -> list[Any]:
    """Path, names, sizes and times of a source's files: what tells that it has changed."""
    resolved = path.resolve()
    files = sorted(resolved.iterdir()) if resolved.is_dir() else list(parts(resolved))
    files = [one for one in files if KV_SENSITIVITY_FILE not in one.name and one.is_file()]
    found = [(file.name, file.stat()) for file in files]
    return [str(resolved), *([name, info.st_size, info.st_mtime_ns] for name, info in found)]


def digest(stamps: list[Any], quant: QuantConfig) -> str:
    """16 hex digits that change with the source and with how it is quantized."""
    described = {k: str(v) for k, v in asdict(quant).items() if k != "weights" or v}
    return hashlib.sha256(json.dumps([stamps, described]).encode()).hexdigest()[:16]

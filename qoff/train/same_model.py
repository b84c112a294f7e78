"""Whether a run goes on beside the weights that it began beside: those that do not learn."""

from __future__ import annotations

import hashlib
from pathlib import Path

from qoff.checkpoint import Checkpoint
from qoff.errors import DiskReadError, io_errors
from qoff.hf.checkpoints import is_checkpoint

_SAMPLE, _SAMPLES = 4096, 4096  # bytes of one, and how many of a file


def model_digest(path: Path) -> str:
    """16 hex digits that change with a model's weights, and not with its place.

    Of the checksums of a qoff checkpoint; of a folder of transformers, of its files, where these
    are larger than 16 MiB of samples. Raises FormatError and DiskReadError.
    """
    found = hashlib.sha256()
    if is_checkpoint(path):
        checkpoint = Checkpoint.open(path)
        for part in (*checkpoint.layers, checkpoint.outer):
            found.update(part.sha256.encode())
        return found.hexdigest()[:16]
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin"))
    for file in files:
        with io_errors(file, DiskReadError, "get the model again"), file.open("rb") as opened:
            size = file.stat().st_size
            found.update(size.to_bytes(8, "little"))
            for start in range(0, size, max(_SAMPLE, size // _SAMPLES)):
                opened.seek(start)
                found.update(opened.read(_SAMPLE))
    return found.hexdigest()[:16]

"""Checking every byte of a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike

import torch
from torch import Tensor

from qoff.errors import ChecksumError, DiskReadError, FormatError

from .layout import QuantEntry, WeightFile
from .reader import Checkpoint, read_weight, unread

_PIECE = 8 << 20


@dataclass(frozen=True)
class VerifyReport:
    """What was found intact."""

    files: int
    nbytes: int


def verify(
    path: str | PathLike[str], progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Read a whole checkpoint; compare checksums and look for scales that are not finite.

    progress: called with bytes done and bytes in all. Raises FormatError or ChecksumError naming
    the first file that is wrong, DiskReadError where one cannot be read.
    """
    files = Checkpoint.open(path).files
    total, done = sum(file.nbytes for file in files), 0
    for file in files:
        digest = hashlib.sha256()
        try:
            with file.path.open("rb") as source:
                while piece := source.read(_PIECE):
                    digest.update(piece)
                    done += len(piece)
                    if progress is not None:
                        progress(done, total)
        except OSError as error:
            raise DiskReadError(f"{file.path}: {unread(error)}") from error
        check_digest(file, digest.hexdigest())
        _check_scales(file)
    return VerifyReport(len(files), total)


def check_digest(file: WeightFile, found: str) -> None:
    """Raise ChecksumError unless `found` is the SHA-256 that the index has for the file."""
    if found != file.sha256:
        raise ChecksumError(
            f"{file.path}: SHA-256 is {found}, the index says {file.sha256}: the file is damaged; "
            "fetch it again or convert the model again"
        )


def _check_scales(file: WeightFile) -> None:
    for entry in file.weights.values():
        part = entry.scale_min if isinstance(entry, QuantEntry) else entry
        values = read_weight(file, part)
        assert isinstance(values, Tensor)
        if values.is_floating_point() and not bool(torch.isfinite(values).all()):
            raise FormatError(
                f"{file.path}: {part.name!r} holds NaN or infinity; convert the model again"
            )

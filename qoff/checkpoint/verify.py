"""Checking every byte of a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike

import numpy as np
import torch
from numpy.typing import NDArray

from qoff.errors import ChecksumError, DiskReadError, FormatError

from .layout import QuantEntry, TensorEntry, WeightFile
from .reader import Checkpoint, unread

_PIECE = 8 << 20
_EXPONENTS = {  # infinity, as an integer
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF << 52,
}


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
    files = Checkpoint.open(path).all_files
    total, done = sum(file.nbytes for file in files), 0
    for file in files:
        found = FileCheck(file)
        try:
            with file.path.open("rb") as source:
                while piece := source.read(_PIECE):
                    found.update(np.frombuffer(piece, np.uint8))
                    done += len(piece)
                    if progress is not None:
                        progress(done, total)
        except OSError as error:
            raise DiskReadError(f"{file.path}: {unread(error)}") from error
        found.finish()
    return VerifyReport(len(files), total)


class FileCheck:
    """Checks a file whose bytes pass by from first to last: checksum, and no NaN or infinity."""

    def __init__(self, file: WeightFile) -> None:
        self._file, self._at = file, 0
        self._digest = hashlib.sha256()
        parts = (x.scale_min if isinstance(x, QuantEntry) else x for x in file.weights.values())
        self._floats = sorted((x for x in parts if x.dtype in _EXPONENTS), key=lambda x: x.offset)
        self._next = 0  # of these: the first that does not end before `_at`
        self._wrong: TensorEntry | None = None

    def update(self, piece: NDArray[np.uint8]) -> None:
        """Add the bytes that follow, a multiple of 8 unless they are the last."""
        self._digest.update(piece.data)
        stop = self._at + len(piece)
        while self._wrong is None and self._next < len(self._floats):
            entry = self._floats[self._next]
            first, last = max(entry.offset, self._at), min(entry.offset + entry.nbytes, stop)
            if first < last and not _finite(piece[first - self._at : last - self._at], entry.dtype):
                self._wrong = entry
            if entry.offset + entry.nbytes > stop:
                break
            self._next += 1
        self._at = stop

    def finish(self) -> None:
        """Raise ChecksumError, or FormatError naming a tensor, when something was wrong."""
        found = self._digest.hexdigest()
        if found != self._file.sha256:
            raise ChecksumError(
                f"{self._file.path}: SHA-256 is {found}, the index says {self._file.sha256}: the "
                "file is damaged; fetch it again or convert the model again"
            )
        if self._wrong is not None:
            raise FormatError(
                f"{self._file.path}: {self._wrong.name!r} holds NaN or infinity; "
                "convert the model again"
            )


def _finite(raw: NDArray[np.uint8], dtype: torch.dtype) -> bool:
    """Whether the bytes of floats are those of finite ones.

    NaN and infinity have all bits of the exponent, so that as integers they are the largest of
    their sign. Two maxima need no memory and take a hundredth of the time of the checksum.
    """
    infinity = _EXPONENTS[dtype]
    positive = raw.view(f"i{dtype.itemsize}").max()
    negative = raw.view(f"u{dtype.itemsize}").max()
    return bool(positive < infinity and negative < infinity | 1 << 8 * dtype.itemsize - 1)

"""A reference model's predictions of a text, kept on disk so that they are computed once.

A ZIP file, which checks what it holds: `meta.json`; `nll`, float64 of each scored token; and for
each of them, by its number, the log-probabilities of all next tokens as 16-bit integers between
their own least and largest (two float32 before them; what is 40 nats below the largest is set
there), first all high bytes, then all low ones, deflated.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile

import numpy as np
import torch
from torch import Tensor

from qoff.errors import FormatError

VERSION = 2
_LEVELS = 65535
_DEPTH = 40.0  # nats below the likeliest token that are told apart
_LEVEL = 1  # of zlib: the low bytes are noise


@dataclass(frozen=True)
class ReferenceMeta:
    """What a reference is of."""

    model: str
    vocab_size: int
    text: str  # digest of the token ids and windows
    version: int = VERSION


class Reference:
    """A reference that was written before. Raises FormatError where it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._damage():
            self._file = ZipFile(path)
            self.meta = ReferenceMeta(**json.loads(self._file.read("meta.json")))
            self.nll: Any = np.frombuffer(self._file.read("nll"))

    def log_probabilities(self, first: int, count: int) -> Tensor:
        """float32 [count, vocab_size] of scored tokens from number `first` on."""
        numbers, size = range(first, first + count), self.meta.vocab_size
        with self._damage():
            rows = [_decode(self._file.read(str(number)), size) for number in numbers]
        return torch.log_softmax(torch.stack(rows), dim=-1)

    def close(self) -> None:
        self._file.close()

    @contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, TypeError, KeyError, BadZipFile, zlib.error) as error:
            what = f"not a reference, or damaged ({error}); remove it"
            raise FormatError(f"{self.path}: {what}") from error


def write_reference(
    path: Path, meta: ReferenceMeta, found: Iterable[tuple[Tensor, Tensor]]
) -> None:
    """Write predictions, float32 [r, vocab_size], of tokens int64 [r]; all of them or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    nll: list[float] = []
    try:
        with ZipFile(partial, "w", ZIP_DEFLATED, compresslevel=_LEVEL) as file:
            for logits, tokens in found:
                logs = torch.log_softmax(logits.double(), dim=-1)
                for number, row in enumerate(logs.float(), len(nll)):
                    file.writestr(str(number), _encode(row))
                nll += (-logs.gather(1, tokens[:, None])[:, 0]).tolist()
            file.writestr("nll", np.array(nll).tobytes())
            file.writestr("meta.json", json.dumps(asdict(meta)))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _encode(row: Tensor) -> bytes:
    top = float(row.max())
    low = max(float(row.min()), top - _DEPTH)
    scale = (top - low) / _LEVELS or 1.0
    codes = ((row.clamp_min(low) - low) / scale).round().numpy().astype("<u2")
    planes = np.concatenate((codes >> 8, codes & 255)).astype(np.uint8)
    return np.array([low, top], dtype="<f4").tobytes() + planes.tobytes()


def _decode(data: bytes, vocab_size: int) -> Tensor:
    low, top = np.frombuffer(data[:8], dtype="<f4")
    high, rest = np.frombuffer(data[8:], dtype=np.uint8).reshape(2, vocab_size).astype(np.float32)
    scale = (float(top) - float(low)) / _LEVELS
    return torch.from_numpy((high * 256 + rest) * np.float32(scale) + low)

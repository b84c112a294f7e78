"""A reference model's predictions of a text, kept on disk so that they are computed once.

A directory: `meta.json`, `nll.npy` (float64 [n]), `index.npy` (int64 [n + 1], where each token's
row begins in `rows.bin`), `hidden.npy` (float16 [layers - 1, tokens, hidden_size]). A row is the
log-probabilities of all next tokens as 16-bit integers between its own least and largest (two
float32 before them; what is 40 nats below the largest is set there), first all high bytes, then all
low ones, deflated.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from qoff.errors import FormatError

VERSION = 1
_LEVELS = 65535
_DEPTH = 40.0  # nats below the likeliest token that are told apart
_LEVEL = 1  # of zlib: the low bytes are noise


@dataclass(frozen=True)
class ReferenceMeta:
    """What a reference is of."""

    model: str
    vocab_size: int
    tokens: int  # scored
    text: str  # digest of the token ids and windows
    version: int = VERSION


class ReferenceWriter:
    """Writes a reference; a context manager. Nothing is left of one that was not finished."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        self._rows = (self._folder / "rows.bin").open("wb")
        self._index = [0]
        self._nll: list[float] = []

    def add(self, logits: Tensor, tokens: Tensor) -> None:
        """Append predictions, float32 [r, vocab_size], of tokens int64 [r]."""
        found = torch.log_softmax(logits.double(), dim=-1)
        self._nll += (-found.gather(1, tokens[:, None])[:, 0]).tolist()
        for row in found.float():
            data = _encode(row)
            self._rows.write(data)
            self._index.append(self._index[-1] + len(data))

    def finish(self, model: str, vocab_size: int, text: str, hidden: list[Tensor]) -> None:
        """Put the finished reference in its place."""
        self._rows.close()
        np.save(self._folder / "index.npy", np.array(self._index, dtype=np.int64))
        np.save(self._folder / "nll.npy", np.array(self._nll))
        states = torch.stack(hidden).half() if hidden else torch.empty(0, 0, 0).half()
        np.save(self._folder / "hidden.npy", states.numpy())
        meta = ReferenceMeta(model, vocab_size, len(self._nll), text)
        (self._folder / "meta.json").write_text(json.dumps(asdict(meta)))
        shutil.rmtree(self._path, ignore_errors=True)
        self._folder.replace(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._rows.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class Reference:
    """A reference that was written before. Raises FormatError where it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.meta = ReferenceMeta(**json.loads((path / "meta.json").read_text()))
            self.nll: Any = np.load(path / "nll.npy")
            self._index: Any = np.load(path / "index.npy")
            self._file = (path / "rows.bin").open("rb")
            hidden = np.load(path / "hidden.npy")
        except (OSError, ValueError, TypeError) as error:
            raise self._damaged(error) from error
        self.hidden = list(torch.from_numpy(hidden))
        size = (path / "rows.bin").stat().st_size
        tokens = self.meta.tokens
        if (len(self.nll), len(self._index), self._index[-1]) != (tokens, tokens + 1, size):
            raise self._damaged("files of different lengths")

    def log_probabilities(self, first: int, count: int) -> Tensor:
        """float32 [count, vocab_size] of scored tokens from number `first` on."""
        rows = []
        for number in range(first, first + count):
            begin, end = self._index[number : number + 2]
            self._file.seek(begin)
            try:
                rows.append(_decode(self._file.read(end - begin), self.meta.vocab_size))
            except (ValueError, zlib.error) as error:
                raise self._damaged(error) from error
        return torch.log_softmax(torch.stack(rows), dim=-1)

    def close(self) -> None:
        """Close its file."""
        self._file.close()

    def _damaged(self, why: object) -> FormatError:
        return FormatError(f"{self.path}: not a reference, or damaged ({why}); remove it")


def _encode(row: Tensor) -> bytes:
    top = float(row.max())
    low = max(float(row.min()), top - _DEPTH)
    scale = (top - low) / _LEVELS or 1.0
    codes = ((row.clamp_min(low) - low) / scale).round().numpy().astype("<u2")
    planes = np.concatenate((codes >> 8, codes & 255)).astype(np.uint8)
    return np.array([low, top], dtype="<f4").tobytes() + zlib.compress(planes.tobytes(), _LEVEL)


def _decode(data: bytes, vocab_size: int) -> Tensor:
    low, top = np.frombuffer(data[:8], dtype="<f4")
    planes = np.frombuffer(zlib.decompress(data[8:]), dtype=np.uint8)
    if len(planes) != 2 * vocab_size:
        raise ValueError(f"a row of {len(planes)} bytes for {vocab_size} tokens")
    high, rest = planes.reshape(2, -1).astype(np.float32)
    scale = (float(top) - float(low)) / _LEVELS
    return torch.from_numpy((high * 256 + rest) * np.float32(scale) + low)

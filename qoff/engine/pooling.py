"""Embeddings: the hidden states of a prompt as one vector."""

from __future__ import annotations

import json
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from qoff.checkpoint import Checkpoint
from qoff.checkpoint.layout import POOLING
from qoff.errors import ArgumentError, FormatError
from qoff.models.forward_pass import NOT_FINITE
from qoff.schema import plain_int, read_object, shown

Pooling = Literal["mean", "last", "first"]
MODULES_FILE = "modules.json"  # of sentence-transformers, as is what POOLING says
_MODES: dict[str, Pooling] = {
    "mean": "mean", "lasttoken": "last", "cls": "first",
    "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "first",
}  # fmt: skip


@dataclass(frozen=True)
class PoolingParams:
    """How a prompt's hidden states, after the final norm, become a vector.

    pooling: "mean" of all tokens, "last" or "first" token; None: what the model was made with
    (sentence-transformers' 1_Pooling), else "last". dimensions: the first ones alone; None: all.
    normalize: to length 1, after that; None: as the model was made, else yes. Raises ArgumentError
    for values out of range.
    """

    pooling: Pooling | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    n: ClassVar[int] = 1  # vectors of a prompt

    def __post_init__(self) -> None:
        if self.pooling not in (None, *get_args(Pooling)):
            raise ArgumentError(f"pooling is {shown(self.pooling)}; use mean, last or first")
        size = plain_int(self.dimensions)
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ArgumentError(f"dimensions is {shown(size)}; use a whole number from 1")
        object.__setattr__(self, "dimensions", size)
        if self.normalize not in (None, True, False):
            raise ArgumentError(f"normalize is {shown(self.normalize)}; use True or False")


@dataclass(frozen=True)
class Embedding:
    """The vector of a prompt, float32. prompt: its text; None where token ids were given."""

    index: int  # of the prompt
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    embedding: tuple[float, ...]


class Pooled:
    """What is known of a sequence's vector while its prompt is read. params: complete ones."""

    def __init__(self, params: PoolingParams, hidden_size: int) -> None:
        self._params = params
        self._sum = torch.zeros(hidden_size)
        self._count = 0  # tokens

    def add(self, rows: Tensor) -> None:
        """Take the hidden states of further tokens, float [m, hidden_size]."""
        rows = rows.float().cpu()
        if self._params.pooling == "mean":
            for row in rows:  # one by one: how rows come together changes no bit
                self._sum += row
        elif self._params.pooling == "last" or not self._count:
            self._sum = rows[-1 if self._params.pooling == "last" else 0].clone()
        self._count += len(rows)

    def begin_again(self) -> None:
        """Forget what was read."""
        self._sum, self._count = torch.zeros_like(self._sum), 0

    @property
    def error(self) -> str:
        """Why there is no vector, if so."""
        return "" if torch.isfinite(self._sum).all() else NOT_FINITE

    def vector(self) -> Tensor:
        """float32 [dimensions]."""
        mean = self._params.pooling == "mean"
        found = (self._sum / self._count if mean else self._sum)[: self._params.dimensions]
        return torch.nn.functional.normalize(found, dim=0) if self._params.normalize else found


class PassPooling:
    """Hands the hidden states of a pass to its sequences. spans: their (first row, rows)."""

    ROWS = 8  # that are normalized together: so few that no budget has to count them

    def __init__(self, spans: Rows[tuple[int, int]], pooled: Rows[Pooled]) -> None:
        self._parts = list(zip(spans, pooled, strict=True))

    def take(self, start: int, rows: Tensor) -> None:
        """Take the hidden states of the rows from `start` on."""
        for (first, count), one in self._parts:
            mine = rows[max(0, first - start) : max(0, first + count - start)]
            if len(mine):
                one.add(mine)


def complete(params: PoolingParams, checkpoint: Checkpoint, hidden_size: int) -> PoolingParams:
    """The parameters with what the model was made with. Raises ArgumentError, FormatError."""
    if (params.dimensions or 1) > hidden_size:
        raise ArgumentError(f"dimensions is {params.dimensions}; the model has {hidden_size}")
    pooling, normalize = params.pooling, params.normalize
    if pooling is None or normalize is None:
        own, normalizes = _own(checkpoint.path)
        pooling = own if pooling is None else pooling
        normalize = normalizes if normalize is None else normalize
    return PoolingParams(pooling, params.dimensions, normalize)


def _own(folder: Path) -> tuple[Pooling, bool]:
    """What a model of sentence-transformers was made with; of another one: last, normalized."""
    path = folder / POOLING
    if not path.exists():
        return "last", True
    said = read_object(path)
    names = [name for name, on in said.items() if name.startswith("pooling_mode_") and on is True]
    names += [said["pooling_mode"]] if isinstance(said.get("pooling_mode"), str) else []
    if len(names) != 1 or names[0] not in _MODES:
        raise FormatError(f"{path}: pools by {shown(names)}; give pooling: mean, last or first")
    return _MODES[names[0]], _normalizes(folder / MODULES_FILE)


def _normalizes(path: Path) -> bool:
    try:
        found: Any = json.loads(path.read_bytes())
        return any(str(one["type"]).endswith(".Normalize") for one in found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path}: is no list of sentence-transformers' modules") from error

"""The cells of a sweep: which weights with which KV cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, Self

from qoff.errors import ArgumentError
from qoff.eval.kv import kv_name
from qoff.kvcache import KVQuant
from qoff.quant import QuantConfig

FLOAT = "float"


@dataclass(frozen=True)
class Cell:
    """One point of a sweep. weights: None for those of a checkpoint as they are."""

    weights: QuantConfig | None
    kv: KVQuant | None  # None: float32

    @property
    def weights_name(self) -> str:
        """Like "4 bits, group 32, hqq"."""
        if self.weights is None:
            return "as they are"
        return f"{self.weights.bits} bits, group {self.weights.group_size}, {self.weights.solver}"

    @property
    def name(self) -> str:
        """Of weights and cache."""
        return f"{self.weights_name}; KV {kv_name(self.kv)}"


@dataclass(frozen=True)
class Grid:
    """The values of each axis; a float32 KV cache has no window."""

    bits: tuple[int, ...] = (4, 8)
    group: tuple[int, ...] = (32,)
    solver: tuple[str, ...] = ("hqq",)
    kv: tuple[str, ...] = (FLOAT, "4:4", "8:4", "8:8")  # bits of K and V
    window: tuple[int, ...] = (64,)  # newest tokens unpacked

    @classmethod
    def parse(cls, text: str) -> Self:
        """From text like "bits=4,8 kv=float,4:4 window=0,64"; axes left out are as they are.

        Raises ArgumentError for an unknown axis or value.
        """
        known = [f.name for f in fields(cls)]
        found: dict[str, Any] = {}
        for part in text.split():
            name, _, values = part.partition("=")
            if name not in known or not values or name in found:
                raise ArgumentError(
                    f"axis {part!r}; a grid is written like 'bits=4,8 group=32 kv=float,4:4 "
                    f"window=0,64', of {', '.join(known)}, each once"
                )
            items = tuple(dict.fromkeys(values.split(",")))
            found[name] = items if name in ("solver", "kv") else tuple(map(_number, items))
        grid = cls(**found)
        grid.cells(convertible=True)  # raises for what no cell can have
        return grid

    def cells(self, convertible: bool) -> list[Cell]:
        """All cells, those of the same weights together.

        convertible: whether the model can be quantized; otherwise its weights stay as they are.
        Raises ArgumentError for values that no cell can have.
        """
        weights: list[QuantConfig | None] = [None]
        if convertible:
            axes = product(self.bits, self.group, self.solver)
            weights = [QuantConfig(*values) for values in axes]
        return [Cell(w, kv) for w in weights for kv in dict.fromkeys(self._caches())]

    def _caches(self) -> Iterable[KVQuant | None]:
        for bits, window in product(self.kv, self.window):
            if bits == FLOAT:
                yield None
            else:
                k, _, v = bits.partition(":")
                yield KVQuant(_number(k), _number(v or k), window)


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ArgumentError(f"{text!r} is no whole number, in the grid of a sweep") from error

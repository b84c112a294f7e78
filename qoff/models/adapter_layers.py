"""Adapters' matrices in memory, with the weights that they are added to.

Each matrix's factors are kept as the adapter's file has them, in 16 bits or 32. Those of matrices
that stay on the device are there, those of matrices that stream are in host memory: a CPU computes
with them where they lie, to a GPU those of a layer come together when the layer does.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from qoff.budgets import device_guard
from qoff.errors import FormatError
from qoff.kernels.layout.low_rank import BLOCK, LowRank, LowRanks
from qoff.memory.arena import map_pages, round_up
from qoff.memory.io.pinned import pinned_memory
from qoff.units import format_size

from .names import Weight

Place = tuple[int, str]  # a layer, and the name of a packed matrix in it
_ALIGNED = 64
_KEPT = {"F16": torch.float16, "BF16": torch.bfloat16}  # other dtypes as float32


def kept_as(dtypes: Collection[str]) -> torch.dtype:
    """What factors are kept in that a file has in these dtypes, as safetensors calls them."""
    return _KEPT.get(next(iter(dtypes)), torch.float32) if len(dtypes) == 1 else torch.float32


@dataclass(frozen=True)
class Factors:
    """The tensors of one linear layer in an adapter's file."""

    down: str
    up: str
    rank: int
    times: float


@dataclass(frozen=True)
class Planned:
    """What a packed matrix gets of an adapter. factors: of its parts, kept in `dtype`."""

    weight: Weight
    factors: Sequence[Factors | None]
    dtype: torch.dtype

    @property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        assert self.weight.columns is not None
        ranks = [0 if one is None else one.rank for one in self.factors]
        return LowRank.shapes(self.weight.rows, self.weight.columns, ranks)

    @property
    def rank(self) -> int:
        """Rows of `down`."""
        return self._shapes[0][0]

    @property
    def _sizes(self) -> list[tuple[torch.dtype, tuple[int, ...], int]]:
        """Dtype, shape and bytes of down, up, first and times."""
        dtypes = (self.dtype, self.dtype, torch.int64, torch.float32)
        pairs = zip(dtypes, self._shapes, strict=True)
        return [(d, s, round_up(d.itemsize * math.prod(s), _ALIGNED)) for d, s in pairs]

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self._sizes)

    def views(self, memory: Tensor) -> LowRank:
        """As it lies in memory, uint8 [nbytes]."""
        found, at = list[Tensor](), 0
        for dtype, shape, nbytes in self._sizes:
            used = dtype.itemsize * math.prod(shape)
            found.append(memory[at : at + used].view(dtype).view(shape))
            at += nbytes
        return LowRank(*found)

    def load(self, file: Any, path: Path, memory: Tensor) -> None:
        """Read it. Raises FormatError for numbers that are not finite."""
        here = self.views(torch.zeros(self.nbytes, dtype=torch.uint8))
        at = 0
        for i, (part, one) in enumerate(zip(self.weight.parts, self.factors, strict=True)):
            if one is None:
                continue
            a, b = (file.get_tensor(name).float() for name in (one.down, one.up))
            if not (a.isfinite().all() and b.isfinite().all()):
                raise FormatError(f"{path}: {one.down} or {one.up} has numbers that are not finite")
            here.down[at : at + one.rank] = a
            rows = self.weight.destination(i, 0, part.rows)
            here.up[rows // BLOCK, : one.rank, rows % BLOCK] = b.to(self.dtype)
            here.first[rows // BLOCK] = at
            here.times[rows // BLOCK] = one.times
            at += one.rank
        there = self.views(memory)
        for x, y in zip(vars(there).values(), vars(here).values(), strict=True):
            x.copy_(y)


def _pinned(nbytes: int) -> Tensor:
    """Host memory that is pinned if the driver lets us; a warning says where it does not."""
    try:
        return pinned_memory(nbytes)
    except OSError as refused:
        warnings.warn(
            f"{format_size(nbytes)} of host memory for adapters cannot be pinned "
            f"({refused.strerror or refused}), so that they come to the GPU more slowly",
            stacklevel=2,
        )
        return map_pages(nbytes)


_Layer = Mapping[str, Sequence[Planned | None]]  # of each adapter, by the name of the matrix


def merged(each: Sequence[Mapping[str, Planned]]) -> _Layer:
    """What a layer gets of several adapters."""
    names = dict.fromkeys(name for one in each for name in one)
    return {name: [one.get(name) for one in each] for name in names}


class AdapterLayers(Sequence[Mapping[str, LowRanks]]):
    """What adapters add to the matrices of each layer, there until another layer is asked for."""

    def __init__(self, layers: Sequence[_Layer]) -> None:
        self._planned = layers
        self._memory: dict[tuple[Place, int], Tensor] = {}  # of each adapter's factors
        self._there: list[dict[str, LowRanks]] = []
        self._far: dict[int, Tensor] = {}  # of layers, in host memory
        self._near: frozenset[Place] = frozenset()
        self._slot: Tensor | None = None
        self._in_slot = -1

    @property
    def places(self) -> frozenset[Place]:
        """Matrices that any adapter adds to."""
        layers = enumerate(self._planned)
        return frozenset((layer, name) for layer, planned in layers for name in planned)

    def nbytes(self, near: Collection[Place], through_slot: bool) -> tuple[int, int]:
        """Bytes on the device and in host memory: see `allocate`."""
        slot = max(self._far_bytes(near), default=0) if through_slot else 0
        on_device = sum(self._bytes(place) for place in near)
        return on_device + slot, sum(self._far_bytes(near))

    def allocate(self, near: Collection[Place], device: torch.device, through_slot: bool) -> None:
        """Take memory: of the device for what is added to `near`, else of the host.

        through_slot: the device has a slot, to which the latter come layer by layer.
        """
        self._near = frozenset(near)
        with device_guard(device):  # which memory is pinned for
            self._allocate(device, through_slot)

    def _allocate(self, device: torch.device, through_slot: bool) -> None:
        near = self._near
        pages = _pinned if device.type == "cuda" else map_pages
        for layer, nbytes in enumerate(self._far_bytes(near)):
            here = [place for place in self._of(layer) if place in near]
            of_near = sum(map(self._bytes, here))
            self._divide(here, torch.zeros(of_near, dtype=torch.uint8, device=device))
            if nbytes:
                self._far[layer] = pages(nbytes)
                self._divide(self._far_of(layer), self._far[layer])
        if through_slot and self._far:
            most = max(len(one) for one in self._far.values())
            self._slot = torch.zeros(most, dtype=torch.uint8, device=device)

    def memory(self, place: Place, adapter: int) -> Tensor:
        """Where the factors of an adapter lie, uint8."""
        return self._memory[place, adapter]

    def loaded(self) -> None:
        """All memory is filled."""
        if self._slot is not None:  # where each layer will be
            for layer in self._far:
                self._divide(self._far_of(layer), self._slot)
        self._there = [
            {
                name: LowRanks(
                    [
                        None if one is None else one.views(self._memory[(layer, name), number])
                        for number, one in enumerate(each)
                    ]
                )
                for name, each in planned.items()
            }
            for layer, planned in enumerate(self._planned)
        ]

    @overload
    def __getitem__(self, layer: int) -> Mapping[str, LowRanks]: ...
    @overload
    def __getitem__(self, layer: slice) -> Sequence[Mapping[str, LowRanks]]: ...
    def __getitem__(self, layer: int | slice) -> Any:
        if isinstance(layer, slice):
            raise TypeError("adapters' layers are asked for one by one")
        far = self._far.get(layer)
        if self._slot is not None and far is not None and self._in_slot != layer:
            # In the order of the current stream: behind what is computed with the layer before.
            self._slot[: len(far)].copy_(far, non_blocking=True)
            self._in_slot = layer
        return self._there[layer]

    def __len__(self) -> int:
        return len(self._planned)

    def _bytes(self, place: Place) -> int:
        layer, name = place
        return sum(one.nbytes for one in self._planned[layer][name] if one is not None)

    def _far_bytes(self, near: Collection[Place]) -> list[int]:
        """Of each layer in host memory."""
        return [
            sum(self._bytes((layer, name)) for name in planned if (layer, name) not in near)
            for layer, planned in enumerate(self._planned)
        ]

    def _divide(self, places: Sequence[Place], memory: Tensor) -> None:
        at = 0
        for layer, name in places:
            for number, one in enumerate(self._planned[layer][name]):
                if one is not None:
                    self._memory[(layer, name), number] = memory[at : at + one.nbytes]
                    at += one.nbytes

    def _of(self, layer: int) -> list[Place]:
        return [(layer, name) for name in self._planned[layer]]

    def _far_of(self, layer: int) -> list[Place]:
        return [place for place in self._of(layer) if place not in self._near]

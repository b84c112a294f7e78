"""The units of a checkpoint and what each takes, computed once for all layers that lie alike."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache

from qoff.checkpoint import Checkpoint, QuantEntry, WeightFile, tensors_of

from .experts import CPU_PACKING, LayerExperts, expert_units, layer_experts
from .parts import Total, UnitPlan, plan_unit, streamed_bytes
from .units import (
    HEAD,
    Tile,
    Unit,
    WholeUnit,
    expert_number,
    local_names,
    placed_together,
    unit_files,
)

_KEPT = 1024  # choices and units' plans, of which other plans need some again


@dataclass(frozen=True)
class Choice:
    """The last `level` pieces of every layer stay, one more of `extra` layers, and `outer`.

    tile_bytes: units that stream more do so in tiles. one_by_one: experts are not of any piece.
    """

    outer: tuple[str, ...]
    level: int
    extra: int = 0
    tile_bytes: int | None = None
    one_by_one: bool = False


class Layouts:
    """What units take in a packing, for any number of plans.

    A layer is planned by how many of the pieces at its end stay, the head by the names of those of
    its weights that do. Plans name the first layer of those that lie alike.
    """

    def __init__(self, checkpoint: Checkpoint, packing: str) -> None:
        self.checkpoint, self.packing = checkpoint, packing
        self.units = lru_cache(_KEPT)(self._units)
        self.total = lru_cache(_KEPT)(self._total)
        self._unit = lru_cache(_KEPT)(self._plan)
        self.pieces = cache(self._pieces)
        self._bytes = lru_cache(_KEPT)(self._streamed_bytes)
        self._files = unit_files(checkpoint)
        self._alike = _first_alike(checkpoint.layers)

    @cached_property
    def has_experts(self) -> bool:
        """Whether any layer has."""
        files = self.checkpoint.layers
        return any(expert_number(name) is not None for file in files for name in file.weights)

    @cached_property
    def experts(self) -> list[LayerExperts]:
        """Those of each layer."""
        return layer_experts(self.checkpoint, self.packing)

    @cached_property
    def on_cpu(self) -> Layouts:
        """Of the same checkpoint, where a CPU computes."""
        return self if self.packing == CPU_PACKING else Layouts(self.checkpoint, CPU_PACKING)

    @cached_property
    def expert_bytes(self) -> Mapping[Unit, int]:
        """Bytes of each expert in a slot, in the order of the files."""
        return {unit: self.experts[unit.layer].nbytes for unit in expert_units(self.experts)}

    def kept(self, choice: Choice) -> frozenset[str]:
        """The weights that stay."""
        units = zip(self._files, self.units(choice), strict=True)
        return frozenset(name for unit, plan in units for name in self._named(unit, plan))

    def streamed(self, choice: Choice) -> dict[Unit, int]:
        """Bytes in a slot of what streams, in the order of computation."""
        found = dict[Unit, int]()
        for unit, plan in zip(self._files, self.units(choice), strict=True):
            found |= self._streamed(unit, plan)
        return found

    def _like(self, unit: WholeUnit) -> WholeUnit:
        """The first layer that lies as this one does; the head is like none."""
        return self._alike[unit] if isinstance(unit, int) else unit

    def _named(self, unit: WholeUnit, plan: UnitPlan) -> Iterator[str]:
        """What a unit keeps for which the plan is one of a layer alike."""
        for name, local in local_names(self._like(unit), plan.kept).items():
            yield name if local == name else f"model.layers.{unit}.{local}"

    def _streamed(self, unit: WholeUnit, plan: UnitPlan) -> dict[Unit, int]:
        """Bytes in a slot of what streams of a unit for which the plan is one of a layer alike."""
        found = self._bytes(self._like(unit), plan)
        return {
            replace(part, unit=unit) if isinstance(part, Tile) else unit: nbytes
            for part, nbytes in found.items()
        }

    def _pieces(self, one_by_one: bool) -> list[tuple[tuple[str, ...], ...]]:
        """The pieces of each layer that stay or stream as one."""
        return [placed_together(file.weights, one_by_one) for file in self.checkpoint.layers]

    def _units(self, choice: Choice) -> tuple[UnitPlan, ...]:
        """What each layer and then the head takes."""
        how, layers = (choice.tile_bytes, choice.one_by_one), len(self._alike)
        more = {i * layers // choice.extra for i in range(choice.extra)}
        counts = enumerate(map(len, self.pieces(choice.one_by_one)))
        kept = [min(choice.level + (i in more), there) for i, there in counts]
        found = [self._unit(like, n, *how) for like, n in zip(self._alike, kept, strict=True)]
        return (*found, self._unit(HEAD, choice.outer, *how))

    def _total(self, choice: Choice) -> Total:
        return Total.of(self.units(choice))

    def _plan(
        self, unit: WholeUnit, kept: int | tuple[str, ...], tile: int | None, one_by_one: bool
    ) -> UnitPlan:
        """A unit that keeps that many pieces at its end, or these weights."""
        if isinstance(kept, tuple):
            names = kept
        else:
            pieces = self.pieces(one_by_one)[int(unit)]
            names = tuple(name for piece in pieces[len(pieces) - kept :] for name in piece)
        return plan_unit(unit, self._files[unit], names, self.packing, tile, one_by_one)

    def _streamed_bytes(self, unit: WholeUnit, plan: UnitPlan) -> dict[Unit, int]:
        return streamed_bytes(unit, self._files[unit], plan, self.packing)


def _first_alike(layers: Sequence[WeightFile]) -> list[int]:
    """For each layer the first one whose weights lie in its file as they do in this one."""
    first: dict[Hashable, int] = {}
    alike: list[int] = []
    for layer, file in enumerate(layers):
        local = local_names(layer, file.weights)
        lies: list[Hashable] = [file.nbytes]
        for name, entry in file.weights.items():
            lies += (local[name], entry.shape)
            if isinstance(entry, QuantEntry):
                lies += (entry.bits, entry.group_size, entry.packing)
            lies += ((t.dtype, t.shape, t.offset) for t in tensors_of(entry))
        alike.append(first.setdefault(tuple(lies), layer))
    return alike

"""plan_residency: how much stays on the device, in which pieces the rest streams, and from where.

What streams of a layer is the beginning of its file, which is one read; every layer streams about
as much, because then every slot is small and the disk never waits for a run of resident layers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from qoff.checkpoint import Checkpoint, QuantEntry, WeightFile, tensors_of
from qoff.errors import BudgetError
from qoff.memory.arena import PAGE

from .experts import layer_experts
from .residency import (
    Residency,
    UnitPlan,
    check_slots,
    expert_units,
    plan_unit,
    residency_of,
    rows_image,
    streamed_images,
)
from .units import (
    EMBEDDING,
    HEAD,
    LM_HEAD,
    Unit,
    WholeUnit,
    is_expert,
    local_names,
    placed_together,
    unit_files,
    unit_weights,
)

_LOAD_BYTES = 64 << 20  # at most, of a staging buffer when all weights are resident
_LEAST_LOAD_BYTES = 256 << 10
_EXPERTS_AT_ONCE = 16  # read together, if there is room: the disk never waits
_HEAD_TILES = 8  # beside layers that stream whole, about as many tiles of a head, or fewer


def plan_residency(
    checkpoint: Checkpoint,
    device_memory: int | None,
    slots: int = 2,
    workspace: int = 0,
    packing: str = "rows16",
    host_memory: int | None = None,
    host_staging: int = 0,
    tiled_workspace: int | None = None,
    one_by_one: bool = True,
) -> Residency:
    """Keep as much as fits into `device_memory` bytes (None: everything), stream the rest.

    First the head, whose slot would be the largest; then the ends of all layers alike, a tensor at
    a time, the experts of a layer together; then one tensor more of as many layers as possible. An
    untied embedding stays only when everything does. `workspace` bytes are left free for
    computations, `tiled_workspace` (None: as many) where layers stream in parts. Where two whole
    units do not fit, first the head streams in tiles, then the largest units, in as few tiles as
    possible. With `one_by_one` the experts of a mixture come one by one where not all can stay:
    the other weights are placed as above, and the rest of the budget is slots for experts.

    Up to `host_memory` bytes (None: as many as buffers need) hold the sources of streaming units,
    evenly spread among those on disk, and `host_staging` buffers between disk and device (0: reads
    go straight to the device). A budget that is too small is refused with the minimum: raises
    BudgetError with the budget and the least bytes any plan takes.
    """
    search = _Search(checkpoint, slots, workspace, packing, tiled_workspace)
    choice = _Choice(tuple(checkpoint.outer.weights), search.levels)
    wanted = search.bytes_of(choice)
    if device_memory is not None and wanted > device_memory:
        found = None
        if one_by_one and any(is_expert(n) for file in checkpoint.layers for n in file.weights):
            for at_once in (_EXPERTS_AT_ONCE, 1):
                search = _Search(checkpoint, slots, workspace, packing, tiled_workspace, at_once)
                found = found or search.best(device_memory)
                if found:
                    break
        else:
            found = search.best(device_memory)
        if found is None:
            least, beside = min((search.least, search.least_workspace), (wanted, workspace))
            raise BudgetError(
                f"device memory: the weights of {checkpoint.path} take {wanted:,} bytes, and the "
                f"budget is {device_memory:,}; streaming them takes at least {least:,} "
                f"({slots} slots, {beside:,} bytes of working space): raise the "
                "budget to that"
            )
        choice = found
    plan = search.residency(choice, device_memory)
    return place_in_host(checkpoint, plan, host_memory, host_staging)


def place_in_host(
    checkpoint: Checkpoint, plan: Residency, host_memory: int | None, host_staging: int = 0
) -> Residency:
    """The plan with `host_staging` buffers and as many sources in host memory as fit beside them.

    Experts that come one by one are all loaded where all of them fit; else what other sources leave
    is slots for those that leave the device. Rows of an untied embedding come from host memory when
    there is room besides all that streams.
    Raises BudgetError when the buffers do not fit.
    """
    buffer = plan.slot_bytes or min(plan.resident_bytes, _LOAD_BYTES)
    if not plan.slot_bytes and host_staging and host_memory is not None:
        # Loading goes through what there is, piece by piece.
        room = host_memory // host_staging // PAGE * PAGE
        buffer = min(buffer, max(room, _LEAST_LOAD_BYTES))
    staging = host_staging * buffer
    plan = replace(plan, host_staging=host_staging, host_staging_bytes=staging)
    if host_memory is None:
        return plan
    if staging > host_memory:
        raise BudgetError(
            f"host memory: {host_staging} buffers between disk and device take {staging:,} bytes, "
            f"and the budget is {host_memory:,}; raise it to that"
        )
    left = host_memory - staging
    images = streamed_images(checkpoint, plan) if left else {}
    nbytes: dict[Unit, int] = {unit: image.nbytes for unit, image in images.items()}
    one_by_one = dict[Unit, int]()
    if left and plan.expert_slots:
        experts = layer_experts(checkpoint, plan.packing)
        one_by_one = {unit: experts[unit.layer].nbytes for unit in expert_units(experts)}
        if sum(nbytes.values()) + sum(one_by_one.values()) <= left:
            nbytes, one_by_one = nbytes | one_by_one, {}
    chosen = spread_evenly(nbytes, left)
    used = sum(nbytes[unit] for unit in chosen)
    if one_by_one:
        # Never on both: what is not on the device, and what is on its way there.
        away = len(one_by_one) - plan.expert_slots + min(plan.expert_slots, _EXPERTS_AT_ONCE)
        count = min((left - used) // plan.expert_bytes, away)
        plan = replace(plan, host_expert_slots=count)
        return replace(plan, host=chosen, host_weight_bytes=used)
    untied = LM_HEAD in checkpoint.outer.weights
    if len(chosen) == len(nbytes) and untied and EMBEDDING not in plan.resident:
        rows = rows_image(checkpoint).nbytes
        if used + rows <= left:
            chosen, used = chosen | {EMBEDDING}, used + rows
    return replace(plan, host=chosen, host_weight_bytes=used)


def spread_evenly(nbytes: Mapping[Unit, int], budget: int) -> frozenset[Unit]:
    """Choose units, given in streaming order with their bytes, that fit `budget` bytes together.

    Up to every unit, the chosen ones hold about the same share of the bytes, so that neither link
    idles while a run of units comes over the other. What is left takes the first units that fit.
    """
    share = min(1.0, budget / max(sum(nbytes.values()), 1))
    chosen: set[Unit] = set()
    held, due = 0, 0.0
    for unit, size in nbytes.items():
        due += size * share
        if held + size / 2 <= due and held + size <= budget:
            chosen.add(unit)
            held += size
    for unit, size in nbytes.items():
        if unit not in chosen and held + size <= budget:
            chosen.add(unit)
            held += size
    return frozenset(chosen)


@dataclass(frozen=True)
class _Choice:
    """The last `level` pieces of every layer stay, one more of `extra` layers, and `outer`."""

    outer: tuple[str, ...]
    level: int
    extra: int = 0
    tile_bytes: int | None = None


class _Search:
    """The choices of `plan_residency` in the order it prefers them.

    A unit's sizes are computed once for each part of it that stays, and once for all layers whose
    files lie alike. `least` is what the smallest choice looked at so far takes, in bytes.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        slots: int,
        workspace: int,
        packing: str,
        tiled_workspace: int | None,
        expert_slots: int = 0,
    ) -> None:
        check_slots(slots)
        experts = [e for e in layer_experts(checkpoint, packing) if e.count and expert_slots]
        self._experts = sum(e.count for e in experts)
        self._bias_bytes = max((e.bias_bytes for e in experts), default=0)
        self._expert_bytes = max((e.nbytes for e in experts), default=0) + self._bias_bytes
        self._expert_staging = max((e.staging_bytes for e in experts), default=0)
        self._expert_slots = min(expert_slots, self._experts)
        self._checkpoint = checkpoint
        self._slots, self._workspace, self._packing = slots, workspace, packing
        self._tiled_workspace = workspace if tiled_workspace is None else tiled_workspace
        one_by_one = expert_slots > 0
        self._pieces = [placed_together(file.weights, one_by_one) for file in checkpoint.layers]
        self._files = unit_files(checkpoint)
        self._alike = _first_alike(checkpoint.layers)
        self._head = unit_weights(HEAD, checkpoint.outer)
        self._unit = cache(self._plan)
        self.levels = max(map(len, self._pieces), default=0)
        self.least = 1 << 62
        self.least_workspace = workspace

    def residency(self, choice: _Choice, device_memory: int | None) -> Residency:
        """The plan of a choice, with all that is left of the budget as slots for experts."""
        layers = enumerate(self._counts(choice))
        names = [*choice.outer, *(n for layer, count in layers for n in self._last(layer, count))]
        workspace = self._workspace_beside(self._units(choice))
        cached = self._expert_slots
        if cached:
            assert device_memory is not None
            left = device_memory - self.bytes_of(choice)
            cached = min(cached + left // self._expert_bytes, self._experts)
        return residency_of(
            self._checkpoint,
            names,
            self._slots,
            workspace,
            self._packing,
            choice.tile_bytes,
            cached,
        )

    def bytes_of(self, choice: _Choice) -> int:
        """Bytes of the device that a choice takes."""
        units = self._units(choice)
        slots = self._slots * max(unit.slot_bytes for unit in units)
        staging = max([self._expert_staging, *(unit.staging_bytes for unit in units)])
        workspace = self._workspace_beside(units)
        nbytes = sum(unit.resident_bytes for unit in units) + slots + staging + workspace
        nbytes += self._expert_slots * self._expert_bytes + PAGE * (self._bias_bytes > 0)
        if nbytes < self.least:
            self.least, self.least_workspace = nbytes, workspace
        return nbytes

    def _workspace_beside(self, units: Sequence[UnitPlan]) -> int:
        """Bytes left free beside these units, the layers and the head."""
        tiled = self._expert_slots or any(unit.tiles for unit in units[:-1])
        return self._tiled_workspace if tiled else self._workspace

    def best(self, device_memory: int) -> _Choice | None:
        """The first choice that fits."""
        for outer in (self._head, ()):
            for level in range(self.levels, -1, -1):
                choice = _Choice(outer, level)
                if self.bytes_of(choice) <= device_memory:
                    return self._fill_up(choice, device_memory)
        return self._head_in_tiles(device_memory) or self._largest_in_tiles(device_memory)

    def _head_in_tiles(self, device_memory: int) -> _Choice | None:
        """Layers as when the head stays; the head in tiles that take about a layer's slot."""
        whole = self._units(_Choice((), 0))[-1].slot_bytes
        for level in range(self.levels, -1, -1):
            layer = max(unit.slot_bytes for unit in self._units(_Choice(self._head, level)))
            choice = _Choice((), level, tile_bytes=max(layer, -(-whole // _HEAD_TILES)))
            if self.bytes_of(choice) <= device_memory:
                return self._fill_up(choice, device_memory)
        return None

    def _largest_in_tiles(self, device_memory: int) -> _Choice | None:
        """Nothing but vectors stays: the largest units in tiles, the fewest units, then tiles."""
        slots = sorted({unit.slot_bytes for unit in self._units(_Choice((), 0))} - {0})[::-1]
        for size, below in zip(slots, [*slots[1:], PAGE], strict=True):
            if self.bytes_of(_Choice((), 0, tile_bytes=below)) <= device_memory:
                sizes = range(below, size + 1, PAGE)
                return self._most(sizes, lambda n: _Choice((), 0, tile_bytes=n), device_memory)
        return None

    def _fill_up(self, choice: _Choice, device_memory: int) -> _Choice:
        """The choice with one more piece of as many layers as fit."""
        layers = range(max(len(self._pieces), 1))
        return self._most(layers, lambda n: replace(choice, extra=n), device_memory)

    def _most(
        self, numbers: range, choice: Callable[[int], _Choice], device_memory: int
    ) -> _Choice:
        """The choice of the last number that fits; the first one does."""
        fit = bisect_right(numbers, device_memory, key=lambda n: self.bytes_of(choice(n)))
        return choice(numbers[max(fit, 1) - 1])

    def _units(self, choice: _Choice) -> list[UnitPlan]:
        """What each layer and then the head takes; names and tiles are of the first layer alike."""
        tile = choice.tile_bytes
        units = [
            self._unit(layer, count, tile)
            for layer, count in zip(self._alike, self._counts(choice), strict=True)
        ]
        return [*units, self._unit(HEAD, choice.outer, tile)]

    def _plan(self, unit: WholeUnit, kept: int | tuple[str, ...], tile: int | None) -> UnitPlan:
        """A unit that keeps that many pieces, or these weights."""
        names = kept if isinstance(kept, tuple) else self._last(int(unit), kept)
        file, one_by_one = self._files[unit], self._expert_slots > 0
        return plan_unit(unit, file, names, self._packing, tile, one_by_one)

    def _counts(self, choice: _Choice) -> list[int]:
        """How many of its pieces each layer keeps."""
        layers = len(self._pieces)
        more = {i * layers // choice.extra for i in range(choice.extra)}
        return [
            min(choice.level + (i in more), len(pieces)) for i, pieces in enumerate(self._pieces)
        ]

    def _last(self, layer: int, count: int) -> tuple[str, ...]:
        """The weights in the last `count` pieces of a layer."""
        pieces = self._pieces[layer]
        return tuple(name for piece in pieces[len(pieces) - count :] for name in piece)


def _first_alike(layers: Sequence[WeightFile]) -> list[int]:
    """For each layer the first one whose weights lie in its file as they do in this one."""
    first: dict[Hashable, int] = {}
    alike: list[int] = []
    for layer, file in enumerate(layers):
        local = local_names(layer, file.weights)
        lies: list[Hashable] = []
        for name, entry in file.weights.items():
            lies += (local[name], entry.shape)
            if isinstance(entry, QuantEntry):
                lies += (entry.bits, entry.group_size, entry.packing)
            lies += ((t.dtype, t.shape, t.offset) for t in tensors_of(entry))
        alike.append(first.setdefault(tuple(lies), layer))
    return alike

"""plan_residency: how much stays on the device, in which pieces the rest streams, and from where.

What streams of a layer is the beginning of its file, which is one read; every layer streams about
as much, because then every slot is small and the disk never waits for a run of resident layers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import replace

from qoff.checkpoint import Checkpoint
from qoff.errors import BudgetError
from qoff.memory.arena import PAGE, round_up

from .experts import passing_bytes_of, passing_together
from .layouts import Choice, Layouts
from .residency import Residency, check_slots, joined, rows_image
from .units import HEAD, Expert, Unit, row_tables, unit_weights

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
    layouts: Layouts | None = None,
    in_place: bool = False,
    cpu_experts: bool = False,
    passing_from: int | None = None,
) -> Residency:
    """Keep as much as fits into `device_memory` bytes (None: everything), stream the rest.

    First the head, whose slot would be the largest; then the ends of all layers alike, a tensor at
    a time, the experts of a layer together; then one tensor more of as many layers as possible.
    Tables of which rows are read (`row_tables`) stay only when everything does. `workspace` bytes
    are left free for computations, `tiled_workspace` (None: as many) where layers stream in parts.
    Where two whole units do not fit, first the head streams in tiles, then the largest units, in as
    few tiles as possible. With `one_by_one` the experts of a mixture come one by one where not all
    can stay: the other weights are placed as above, and the rest of the budget is slots for
    experts. layouts: those of the checkpoint in this packing, which other plans have asked before.

    Up to `host_memory` bytes (None: as many as buffers need) hold the sources of streaming units,
    evenly spread among those on disk, and `host_staging` buffers between disk and device (0: reads
    go straight to the device). With `in_place` these units are computed with where they lie; there
    are no slots where that is all of them. With `cpu_experts` those experts that have no room on
    the device are in host memory for the CPU to compute, as many as fit; with `passing_from` there
    is room on the device for groups of them, which passes of so many tokens or more bring there. A
    budget that is too small is refused with the minimum: raises BudgetError with the budget and the
    least bytes any plan takes.
    """
    layouts = layouts or Layouts(checkpoint, packing)
    search = _Search(layouts, slots, workspace, tiled_workspace)
    choice = Choice(tuple(checkpoint.outer.weights), search.levels)
    wanted = search.bytes_of(choice)
    if device_memory is not None and wanted > device_memory:
        found = None
        if one_by_one and layouts.has_experts:
            passing = 0
            if cpu_experts and passing_from is not None:
                passing = passing_together(layouts.on_cpu.experts)
            sizes = [passing >> half for half in range(max(1, passing.bit_length()))]
            tries = [*((_EXPERTS_AT_ONCE, size) for size in sizes), (1, sizes[-1])]
            for at_once, together in tries:
                search = _Search(layouts, slots, workspace, tiled_workspace, at_once, together)
                found = found or search.best(device_memory)
                if found:
                    break
        else:
            found = search.best(device_memory)
        if found is None:
            least, beside = min((search.least, search.least_workspace), (wanted, workspace))
            fewer = ", or use fewer or shorter sequences (batch_size, context)"
            through = ""
            if search.passing_bytes:
                through = f", {search.passing_bytes:,} for experts that pass through the device"
                fewer += ", or have the CPU compute experts of longer passes (cpu_expert_tokens)"
            refusal = BudgetError(
                f"device memory: the weights of {checkpoint.path}, {wanted - workspace:,} bytes, "
                f"and {workspace:,} bytes of KV cache and working space take {wanted:,} bytes, and "
                f"the budget is {device_memory:,}; streaming the weights takes at least {least:,} "
                f"({slots} slots, {beside:,} bytes of cache and working space{through}): raise the "
                f"budget to that{fewer if through or 2 * beside > least else ''}"
            )
            refusal.least = least
            raise refusal
        choice = found
    plan = search.residency(choice, device_memory)
    plan = place_in_host(checkpoint, plan, host_memory, host_staging, layouts, cpu_experts)
    plan = replace(plan, passing_from=passing_from if plan.passing else None)
    return replace(plan, slots=0) if in_place and plan.host.issuperset(plan.streamed) else plan


def place_in_host(
    checkpoint: Checkpoint,
    plan: Residency,
    host_memory: int | None,
    host_staging: int = 0,
    layouts: Layouts | None = None,
    cpu_experts: bool = False,
) -> Residency:
    """The plan with `host_staging` buffers and as many sources in host memory as fit beside them.

    Experts that come one by one are all loaded where all of them fit; else what other sources leave
    is slots for those that leave the device. With `cpu_experts` it is those that the CPU computes,
    evenly spread, up to all that the device has no slots for. Rows of tables come from host memory
    when there is room besides all that streams. Raises BudgetError when the buffers do not fit.
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
    layouts = layouts or Layouts(checkpoint, plan.packing)
    left = host_memory - staging
    nbytes: Mapping[Unit, int] = plan.streamed if left else {}
    one_by_one: Mapping[Unit, int] = {}
    if left and plan.expert_slots and not cpu_experts:
        one_by_one = layouts.expert_bytes
        if sum(nbytes.values()) + sum(one_by_one.values()) <= left:
            nbytes, one_by_one = {**nbytes, **one_by_one}, {}
    chosen = spread_evenly(nbytes, left)
    used = sum(nbytes[unit] for unit in chosen)
    if cpu_experts and plan.expert_slots:
        plan = _with_cpu_experts(layouts.on_cpu, plan, left - used)
        left -= plan.on_cpu_bytes
    if one_by_one:
        # Never on both: what is not on the device, and what is on its way there.
        away = len(one_by_one) - plan.expert_slots + min(plan.expert_slots, _EXPERTS_AT_ONCE)
        count = min((left - used) // plan.expert_bytes, away)
        plan = replace(plan, host_expert_slots=count)
        return replace(plan, host=chosen, host_weight_bytes=used)
    for table in row_tables(checkpoint.outer) if len(chosen) == len(nbytes) else ():
        rows = rows_image(checkpoint, table).nbytes
        if table not in plan.resident and used + rows <= left:
            chosen, used = chosen | {table}, used + rows
    return replace(plan, host=chosen, host_weight_bytes=used)


def _with_cpu_experts(layouts: Layouts, plan: Residency, room: int) -> Residency:
    """The plan with as many experts for the CPU as fit, of those that are not on the device.

    layouts: in the CPU's packing.
    """
    layers, each = layouts.experts, layouts.expert_bytes
    some = [experts for experts in layers if experts.count]
    staging = max(experts.staging_bytes for experts in some)
    bias = max(experts.bias_bytes for experts in some)
    nbytes = {one: size + bias for one, size in each.items()} if bias else each
    away = sum(nbytes.values()) - plan.expert_slots * max(nbytes.values())
    beside = round_up(staging, PAGE) + PAGE * (bias > 0)
    found = spread_evenly(nbytes, max(0, min(room - beside, away)))
    chosen = frozenset(one for one in found if isinstance(one, Expert))
    if not chosen:
        return plan
    return replace(
        plan,
        cpu_experts=chosen,
        cpu_expert_bytes=sum(layers[one.layer].nbytes for one in chosen),
        cpu_bias_bytes=len(chosen) * bias,
        cpu_staging_bytes=staging,
    )


def spread_evenly(nbytes: Mapping[Unit, int], budget: int) -> frozenset[Unit]:
    """Choose units, given in streaming order with their bytes, that fit `budget` bytes together.

    Up to every unit, the chosen ones hold about the same share of the bytes, so that neither link
    idles while a run of units comes over the other. What is left takes the first units that fit.
    """
    total = sum(nbytes.values())
    if total <= budget:
        return frozenset(nbytes)
    share = budget / total
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


class _Search:
    """The choices of `plan_residency` in the order it prefers them.

    `least` is what the smallest choice looked at so far takes, in bytes; `passing_bytes` what any
    takes for experts that pass through the device.
    """

    def __init__(
        self,
        layouts: Layouts,
        slots: int,
        workspace: int,
        tiled_workspace: int | None,
        expert_slots: int = 0,
        passing: int = 0,
    ) -> None:
        check_slots(slots)
        self._passing = passing
        self.passing_bytes = 0
        if passing:
            both = layouts.experts, layouts.on_cpu.experts
            self.passing_bytes = passing_bytes_of(passing, *both)
        experts = [e for e in layouts.experts if e.count] if expert_slots else []
        self._mixture, self._experts = experts, sum(e.count for e in experts)
        self._bias_bytes = max((e.bias_bytes for e in experts), default=0)
        self._expert_bytes = max((e.nbytes for e in experts), default=0) + self._bias_bytes
        self._expert_staging = max((e.staging_bytes for e in experts), default=0)
        self._expert_slots = min(expert_slots, self._experts)
        self._layouts, self._slots, self._workspace = layouts, slots, workspace
        self._tiled_workspace = workspace if tiled_workspace is None else tiled_workspace
        self._one_by_one = expert_slots > 0
        self._head = unit_weights(HEAD, layouts.checkpoint.outer)
        self.levels = max(map(len, layouts.pieces(self._one_by_one)), default=0)
        self.least = 1 << 62
        self.least_workspace = workspace

    def residency(self, choice: Choice, device_memory: int | None) -> Residency:
        """The plan of a choice, with all that is left of the budget as slots for experts."""
        layouts = self._layouts
        cached = self._expert_slots
        if cached:
            assert device_memory is not None
            left = device_memory - self.bytes_of(choice)
            cached = min(cached + left // self._expert_bytes, self._experts)
        found = joined(
            layouts.total(choice),
            layouts.kept(choice),
            layouts.streamed(choice),
            self._slots,
            self._workspace_beside(choice),
            layouts.packing,
            self._mixture,
            cached,
        )
        return replace(found, passing=self._passing, passing_bytes=self.passing_bytes)

    def bytes_of(self, choice: Choice) -> int:
        """Bytes of the device that a choice takes."""
        total, workspace = self._layouts.total(choice), self._workspace_beside(choice)
        staging = max(self._expert_staging, total.staging)
        nbytes = total.resident + self._slots * total.slot + staging + workspace
        nbytes += self._expert_slots * self._expert_bytes + PAGE * (self._bias_bytes > 0)
        nbytes += self.passing_bytes
        if nbytes < self.least:
            self.least, self.least_workspace = nbytes, workspace
        return nbytes

    def _workspace_beside(self, choice: Choice) -> int:
        """Bytes left free beside the units."""
        tiled = self._expert_slots or self._layouts.total(choice).layers_tiled
        return self._tiled_workspace if tiled else self._workspace

    def best(self, device_memory: int) -> Choice | None:
        """The first choice that fits."""
        for outer in (self._head, ()):
            for level in range(self.levels, -1, -1):
                choice = self._choice(outer, level)
                if self.bytes_of(choice) <= device_memory:
                    return self._fill_up(choice, device_memory)
        return self._head_in_tiles(device_memory) or self._largest_in_tiles(device_memory)

    def _head_in_tiles(self, device_memory: int) -> Choice | None:
        """Layers as when the head stays; the head in tiles that take about a layer's slot."""
        whole = self._layouts.units(self._choice(()))[-1].slot_bytes
        for level in range(self.levels, -1, -1):
            layer = self._layouts.total(self._choice(self._head, level)).slot
            choice = self._choice((), level, max(layer, -(-whole // _HEAD_TILES)))
            if self.bytes_of(choice) <= device_memory:
                return self._fill_up(choice, device_memory)
        return None

    def _largest_in_tiles(self, device_memory: int) -> Choice | None:
        """Nothing but vectors stays: the largest units in tiles, the fewest units, then tiles."""
        units = self._layouts.units(self._choice(()))
        slots = sorted({unit.slot_bytes for unit in units} - {0})[::-1]
        for size, below in zip(slots, [*slots[1:], PAGE], strict=True):
            if self.bytes_of(self._choice((), 0, below)) <= device_memory:
                sizes = range(below, size + 1, PAGE)
                return self._most(sizes, lambda n: self._choice((), 0, n), device_memory)
        return None

    def _fill_up(self, choice: Choice, device_memory: int) -> Choice:
        """The choice with one more piece of as many layers as fit."""
        layers = range(max(len(self._layouts.checkpoint.layers), 1))
        return self._most(layers, lambda n: replace(choice, extra=n), device_memory)

    def _most(self, numbers: range, choice: Callable[[int], Choice], device_memory: int) -> Choice:
        """The choice of the last number that fits; the first one does."""
        fit = bisect_right(numbers, device_memory, key=lambda n: self.bytes_of(choice(n)))
        return choice(numbers[max(fit, 1) - 1])

    def _choice(self, outer: tuple[str, ...], level: int = 0, tile: int | None = None) -> Choice:
        return Choice(outer, level, tile_bytes=tile, one_by_one=self._one_by_one)

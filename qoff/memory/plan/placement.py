"""plan_residency: how much stays on the device, in which pieces the rest streams, and from where.

What streams of a layer is the beginning of its file, which is one read; every layer streams about
as much, because then every slot is small and the disk never waits for a run of resident layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from qoff.checkpoint import Checkpoint
from qoff.errors import BudgetError
from qoff.memory.arena import PAGE

from .residency import Residency, residency_of, rows_image, streamed_image, streamed_images
from .spread import spread_evenly
from .units import EMBEDDING, HEAD, has_own_head, placed_together, unit_files, unit_weights

_LOAD_BYTES = 64 << 20  # at most, of a staging buffer when all weights are resident
_HEAD_TILES = 8  # beside layers that stream whole, about as many tiles of a head, or fewer


def plan_residency(
    checkpoint: Checkpoint,
    device_memory: int | None,
    slots: int = 2,
    workspace: int = 0,
    packing: str = "rows16",
    host_memory: int | None = None,
    host_staging: int = 0,
) -> Residency:
    """Keep as much as fits into `device_memory` bytes (None: everything), stream the rest.

    First the head, whose slot would be the largest; then the ends of all layers alike, a tensor at
    a time, the experts of a layer together; then one tensor more of as many layers as possible. An
    untied embedding stays only when everything does. `workspace` bytes are left free for
    computations. Where two whole units do not fit, first the head streams in tiles, then the
    largest units, in as few tiles as possible.

    Up to `host_memory` bytes (None: as many as buffers need) hold the sources of streaming units,
    evenly spread among those on disk, and `host_staging` buffers between disk and device (0: reads
    go straight to the device). Raises BudgetError with the bytes there and the least bytes any plan
    takes.
    """
    planner = _Planner(checkpoint, slots, workspace, packing)
    everything = planner.keep(f for file in unit_files(checkpoint).values() for f in file.weights)
    plan = everything
    if device_memory is not None and everything.device_bytes > device_memory:
        found = planner.best(device_memory)
        if found is None:
            raise BudgetError(
                f"device memory: the weights of {checkpoint.path} want "
                f"{everything.device_bytes:,} bytes, {device_memory:,} are there, and streaming "
                f"takes at least {min(planner.least, everything.device_bytes):,} "
                f"({slots} slots, {workspace:,} bytes of working space); raise the budget to that"
            )
        plan = found
    return place_in_host(checkpoint, plan, host_memory, host_staging)


def place_in_host(
    checkpoint: Checkpoint, plan: Residency, host_memory: int | None, host_staging: int = 0
) -> Residency:
    """The plan with `host_staging` buffers and as many sources in host memory as fit beside them.

    Rows of an untied embedding come from host memory when there is room besides all that streams.
    Raises BudgetError when the buffers do not fit.
    """
    buffer = plan.slot_bytes or min(plan.resident_bytes, _LOAD_BYTES)
    staging = host_staging * buffer
    if host_memory is None:
        return replace(plan, host_staging=host_staging, host_staging_bytes=staging)
    if staging > host_memory:
        raise BudgetError(
            f"host memory: {host_staging} buffers between disk and device want {staging:,} bytes, "
            f"{host_memory:,} are there; raise the budget to that"
        )
    left = host_memory - staging
    images = streamed_images(checkpoint, plan) if left else {}
    nbytes = {unit: image.nbytes for unit, image in images.items()}
    chosen = spread_evenly(nbytes, left)
    used = sum(nbytes[unit] for unit in chosen)
    if len(chosen) == len(nbytes) and has_own_head(checkpoint) and EMBEDDING not in plan.resident:
        rows = rows_image(checkpoint).nbytes
        if used + rows <= left:
            chosen, used = chosen | {EMBEDDING}, used + rows
    return replace(
        plan,
        host=chosen,
        host_weight_bytes=used,
        host_staging=host_staging,
        host_staging_bytes=staging,
    )


class _Planner:
    """Candidates of `plan_residency`; `least` is what the smallest tried so far takes."""

    def __init__(self, checkpoint: Checkpoint, slots: int, workspace: int, packing: str) -> None:
        self._checkpoint = checkpoint
        self._slots, self._workspace, self._packing = slots, workspace, packing
        self._layers = [placed_together(file.weights) for file in checkpoint.layers]
        self._head = unit_weights(checkpoint, HEAD)
        self._levels = max(map(len, self._layers), default=0)
        self.least = 1 << 62

    def keep(self, names: Iterable[str], tile: int | None = None) -> Residency:
        plan = residency_of(
            self._checkpoint, names, self._slots, self._workspace, self._packing, tile
        )
        self.least = min(self.least, plan.device_bytes)
        return plan

    def best(self, device_memory: int) -> Residency | None:
        """The first candidate that fits."""
        for head in (True, False):
            for level in range(self._levels, -1, -1):
                plan = self._even(head, level, 0)
                if plan.device_bytes <= device_memory:
                    return self._fill_up(plan, head, level, device_memory)
        return self._head_in_tiles(device_memory) or self._largest_in_tiles(device_memory)

    def _head_in_tiles(self, device_memory: int) -> Residency | None:
        """Layers as when the head stays; the head in tiles that take about a layer's slot."""
        head = streamed_image(self._checkpoint, HEAD, frozenset(), self._packing)
        whole = head.nbytes if head is not None else 0
        for level in range(self._levels, -1, -1):
            layer = self._even(True, level, 0).slot_bytes
            tile = max(layer, -(-whole // _HEAD_TILES))
            plan = self._even(False, level, 0, tile)
            if plan.device_bytes <= device_memory:
                return self._fill_up(plan, False, level, device_memory, tile)
        return None

    def _largest_in_tiles(self, device_memory: int) -> Residency | None:
        """Nothing but vectors stays: the largest units in tiles, the fewest units, then tiles."""
        files = unit_files(self._checkpoint)
        images = (streamed_image(self._checkpoint, u, frozenset(), self._packing) for u in files)
        sizes = sorted({image.nbytes for image in images if image is not None}, reverse=True)
        for size, below in zip(sizes, [*sizes[1:], PAGE], strict=True):
            plan = self.keep([], below)
            if plan.device_bytes <= device_memory:
                return self._enlarge(plan, below, size, device_memory)
        return None

    def _enlarge(self, plan: Residency, fits: int, too_large: int, device_memory: int) -> Residency:
        """The plan with the largest tiles that fit, by bisection."""
        while too_large - fits > PAGE:
            middle = (fits + too_large) // 2
            candidate = self.keep([], middle)
            if candidate.device_bytes <= device_memory:
                fits, plan = middle, candidate
            else:
                too_large = middle
        return plan

    def _even(self, head: bool, level: int, extra: int, tile: int | None = None) -> Residency:
        """The last `level` pieces of every layer stay, and one more of `extra` layers."""
        count = len(self._layers)
        more = {i * count // extra for i in range(extra)}
        names = list(self._head) if head else []
        for i, weights in enumerate(self._layers):
            kept = min(level + (i in more), len(weights))
            names += (name for piece in weights[len(weights) - kept :] for name in piece)
        return self.keep(names, tile)

    def _fill_up(
        self, plan: Residency, head: bool, level: int, device_memory: int, tile: int | None = None
    ) -> Residency:
        """The most layers with one more weight that fit, by bisection."""
        fits, too_many = 0, len(self._layers)
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            candidate = self._even(head, level, middle, tile)
            if candidate.device_bytes <= device_memory:
                fits, plan = middle, candidate
            else:
                too_many = middle
        return plan

"""WeightStore: the weights of a checkpoint under a memory budget, unit by unit."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError, OpError

from .image import Image, Weight
from .load import check_file, load_resident
from .residency import Residency, resident_images, streamed_image
from .rows import read_rows, rows_of
from .slots import SlotRing
from .transfers import ThreadTransfers, Transfers
from .units import EMBEDDING, HEAD, LM_HEAD, Unit, local_names, unit_files, unit_weights

Weights = Mapping[str, Weight]

_ROWS = 256  # gathered together: what is read around them is not in proportion to the prompt


@dataclass(frozen=True)
class StoreStats:
    """What a store has done since it was opened."""

    bytes_read: int  # from disk, loading included
    disk_busy_s: float  # seconds in which at least one read was in flight
    wait_s: float  # seconds that acquire() blocked, all callers together
    arena_peak: int  # bytes of the device arena that were ever in use


class WeightStore:
    """Serves the weights of each unit (a layer's number, or "head") from the device.

    Resident weights are loaded here; the others stream through the residency's slots, read ahead
    in a cyclic order (default 0 .. L-1, "head"). `transfers` is closed with the store. With
    `verify` every file is compared with its checksum once: here, or when its unit first streams.
    `poison` fills slots that hold nothing with NaN. Raises BudgetError, DiskReadError and
    ChecksumError. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        residency: Residency,
        *,
        packing: str = "cpu16",
        transfers: Transfers | None = None,
        poison: bool = False,
        verify: bool = True,
    ) -> None:
        if packing != residency.packing:
            raise ArgumentError(f"packing {packing}, but the residency is for {residency.packing}")
        self.checkpoint = checkpoint
        self.residency = residency
        self._transfers = transfers if transfers is not None else ThreadTransfers()
        self._views: dict[tuple[Unit, int], Weights] = {}  # by unit and slot
        self._complete: dict[Unit, Weights] = {}  # units of which nothing streams
        self._closed = False
        self._lock = threading.Lock()  # between close() and views being made
        try:
            self.arena = self._transfers.open(residency)
            self._open(verify, poison)
        except BaseException:
            self._transfers.close()
            raise

    def acquire(self, unit: Unit) -> Weights:
        """The weights of a unit by the names inside the layer, valid until `release`.

        Waits if they are still being read. A tied embedding is also under "lm_head". The same
        objects come back for the same slot. Raises DiskReadError, ChecksumError, ArgumentError for
        an unknown unit or a closed store, RuntimeError when all slots are held.
        """
        complete = self._complete.get(unit)
        if complete is not None:
            return complete
        self._check(unit)
        slot = self._ring.acquire(unit)
        views = self._views.get((unit, slot))
        if views is not None:
            return views
        with self._lock:
            self._check(unit)
            views = self._named(unit, self._streamed[unit].views(self._slots[slot]))
            return self._views.setdefault((unit, slot), views)

    def release(self, unit: Unit) -> None:
        """Give a unit back, once for each `acquire`; its slot is then read into at once."""
        if self._closed or unit in self._complete:
            return
        self._check(unit)
        self._ring.release(unit)

    @contextmanager
    def use(self, unit: Unit) -> Iterator[Weights]:
        """Acquire a unit for the length of a `with` block."""
        weights = self.acquire(unit)
        try:
            yield weights
        finally:
            self.release(unit)

    def set_order(self, order: Sequence[Unit]) -> None:
        """Read ahead in another cyclic order; units may occur several times, or not at all.

        Raises ArgumentError for an unknown unit.
        """
        for unit in order:
            self._check(unit)
        self._ring.set_order([unit for unit in order if unit in self._streamed])

    def gather_rows(self, name: str, ids: Tensor) -> Tensor:
        """Rows `ids`, int64 [T], of the weight `name`, [N, K], as float32 [T, K].

        From memory if it is resident, else just these rows are read from disk. Raises OpError for
        rows that are not there, DiskReadError.
        """
        if self._closed:
            raise ArgumentError("the weight store is closed")
        entry = self.checkpoint.outer.weights[name]
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < entry.shape[0]:
            raise OpError(
                f"{name} has rows 0 to {entry.shape[0] - 1}, "
                f"wanted {int(ids.min())} to {int(ids.max())}"
            )
        if not ids.numel():
            return torch.empty(0, entry.shape[1])
        rows = torch.empty(len(ids), entry.shape[1])
        for some, out in zip(ids.split(_ROWS), rows.split(_ROWS), strict=True):
            if name in self._resident:
                out.copy_(rows_of(self._resident[name], some))
            else:
                out.copy_(read_rows(self._transfers.reader, self.checkpoint.outer, entry, some))
        return rows

    @property
    def stats(self) -> StoreStats:
        """Counters since the start."""
        disk = self._transfers.reader.stats
        return StoreStats(disk.bytes, disk.busy_s, self._ring.wait_s, self.arena.peak)

    @property
    def units(self) -> tuple[Unit, ...]:
        """All units in the default order: 0 .. L-1, "head"."""
        return tuple(unit_files(self.checkpoint))

    def close(self) -> None:
        """Stop reading, join all threads, close all files, let go of all memory. May be repeated.

        Who waits in `acquire` gets DiskReadError or ArgumentError. Memory lives on where tensors
        of it are kept.
        """
        if self._closed:
            return
        self._closed = True
        self._ring.close()
        self._transfers.close()
        with self._lock:
            for views in (self._complete, self._views, self._resident):
                views.clear()
            self._slots.clear()
        self.arena.close()

    def __enter__(self) -> WeightStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, verify: bool, poison: bool) -> None:
        checkpoint, plan = self.checkpoint, self.residency
        files = unit_files(checkpoint)
        images = {
            unit: resident_images(file, plan.resident & set(file.weights), plan.packing)
            for unit, file in files.items()
        }
        streamed = {
            unit: streamed_image(checkpoint, unit, plan.resident, plan.packing) for unit in files
        }
        self._streamed = {unit: image for unit, image in streamed.items() if image is not None}
        unverified = set[Unit]()
        for unit, file in files.items() if verify else ():
            if _holds_file(self._streamed.get(unit)):
                unverified.add(unit)
            elif not (len(images[unit]) == 1 and _holds_file(images[unit][0])):
                check_file(self._transfers.reader, file)
        every = [image for parts in images.values() for image in parts]
        self._resident = load_resident(every, self.arena, self._transfers, verify)
        self._slots = [self.arena.alloc(plan.slot_bytes, f"slot {i}") for i in range(plan.slots)]
        for unit in files:
            if unit not in self._streamed:
                self._complete[unit] = self._named(unit, {})
        order = list(self._streamed)
        self._ring = SlotRing(
            self._streamed, self._slots, self._transfers, order, unverified, poison
        )

    def _named(self, unit: Unit, streamed: Mapping[str, Weight]) -> Weights:
        """All weights of a unit by local name, resident ones and those of a slot."""
        local = local_names(unit, unit_files(self.checkpoint)[unit].weights)
        named = {
            local[name]: streamed[name] if name in streamed else self._resident[name]
            for name in unit_weights(self.checkpoint, unit)
        }
        if unit == HEAD and LM_HEAD not in named and EMBEDDING in named:
            named[LM_HEAD] = named[EMBEDDING]
        return named

    def _check(self, unit: Unit) -> None:
        if self._closed:
            raise ArgumentError("the weight store is closed")
        if unit not in self._streamed and unit not in self._complete:
            raise ArgumentError(
                f"no unit {unit!r}; there are 0 to {len(self.units) - 2} and {HEAD!r}"
            )


def _holds_file(image: Image | None) -> bool:
    return image is not None and image.data_at is not None

"""WeightStore: the weights of a checkpoint under a memory budget, unit by unit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from qoff.checkpoint import Checkpoint, KnownFiles
from qoff.errors import ArgumentError
from qoff.process import Opener

from .experts import ExpertCache, ExpertStats, ExpertWave, StreamedExperts
from .experts.moves import ExpertMoves
from .experts.queued_moves import QueuedMoves
from .instrumentation import PLAIN, Instrumentation
from .io.thread_transfers import ThreadTransfers
from .io.transfers import Transfers, UnitRead
from .load import FileChecks, load
from .plan import (
    EMBEDDING,
    HEAD,
    LM_HEAD,
    ChosenExperts,
    Expert,
    Image,
    Residency,
    TiledMatrix,
    Unit,
    Weight,
    host_images,
    is_expert,
    local_names,
    resident_images,
    row_tables,
    streamed_images,
    tiled_matrices,
    unit_files,
    unit_weights,
)
from .rows import Rows, tables_in_host
from .slots import SlotRing
from .sweep import Sweep

EXPERTS = "mlp.experts"  # among a layer's weights: those that come one by one
Weights = Mapping[str, Weight | TiledMatrix | StreamedExperts | ExpertWave]

_NOTHING: Mapping[Path, Callable[[], Mapping[str, Tensor]]] = MappingProxyType({})


@dataclass(frozen=True)
class StoreStats:
    """What a store has done since it was opened."""

    bytes_read: int  # from disk, loading included
    bytes_copied: int  # from host memory to the device
    disk_busy_s: float  # seconds in which at least one read was in flight
    wait_s: float  # seconds that acquire() blocked, all callers together
    arena_peak: int  # bytes of the device arena that were ever in use
    experts: ExpertStats  # that came one by one


class WeightStore:
    """Serves the weights of each unit (a layer's number, "head", or a `Tile`) from the device.

    Resident weights, and those whose source is in host memory, are loaded here; what is not
    resident streams through the residency's slots, read ahead in the order of a pass, but for what
    a CPU computes with where it lies in host memory. `transfers`
    is closed with the store. With `verify` every file is compared with its checksum once: here, or
    when its unit first streams from disk. A file that is read later and was changed since is
    compared again. in_memory: files that are not there, whose units are in host memory: what gives
    their weights, once. Raises BudgetError, DiskReadError and ChecksumError.
    Close it, or use it as a context manager.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        residency: Residency,
        *,
        transfers: Transfers | None = None,
        verify: bool = True,
        instrumentation: Instrumentation = PLAIN,
        in_memory: Mapping[Path, Callable[[], Mapping[str, Tensor]]] = _NOTHING,
    ) -> None:
        self.checkpoint, self._in_memory = checkpoint, in_memory
        self.residency = residency
        self._transfers = transfers if transfers is not None else ThreadTransfers()
        self.experts: ExpertCache | None = None  # where they come one by one
        self._waves: dict[ChosenExperts, ExpertWave] = {}  # that are held
        self._views: dict[tuple[Unit, int], Weights] = {}  # by unit and slot
        self._complete: dict[Unit, Weights] = {}  # units of which nothing streams
        self._closed = False
        on_gpu = self._transfers.device.type == "cuda"
        self._opener = Opener("this model", on_gpu)
        self._lock = threading.Lock()  # between close() and views being made
        try:
            arenas = self._transfers.open(residency, instrumentation)
            self.arena, self.host_arena = arenas["device"], arenas["host"]
            self._open(verify, instrumentation)
        except BaseException:
            self._transfers.close()
            raise

    def acquire(self, unit: Unit) -> Weights:
        """The weights of a unit by the names inside the layer, valid until `release`.

        Waits if they are still being read. Of a tiled unit the resident weights come, at once, and
        a `TiledMatrix` for each of the others, whose tiles are units of their own; a tile has one
        weight. Where experts come one by one, `EXPERTS` is `StreamedExperts`; for `ChosenExperts`
        it is a wave of some of them, and who wants the others asks again for these. A tied
        embedding is also under "lm_head". The same objects come back for the same slot. What does
        not come through a slot stays valid after `release`, and is there in a forked process, too.
        Raises DiskReadError, ChecksumError, ArgumentError for an unknown unit, a closed store or a
        unit that streams in a forked process, RuntimeError when all slots are held.
        """
        complete = self._complete.get(unit)
        if complete is not None:
            return complete
        self._check(unit)
        if isinstance(unit, ChosenExperts):
            assert self.experts is not None
            self._waves[unit] = wave = self.experts.acquire(unit)
            return {EXPERTS: wave}
        return self._in_slot(unit, self._ring.acquire(unit))

    def release(self, unit: Unit) -> None:
        """Give a unit back, once for each `acquire`; its slot is then read into at once."""
        if self._closed or unit in self._complete:
            return
        self._check(unit)
        if isinstance(unit, ChosenExperts):
            assert self.experts is not None
            self.experts.release(self._waves.pop(unit))
        else:
            self._ring.release(unit)

    def follow(self, order: Sequence[Unit]) -> None:
        """Read ahead in this order from now on, again and again; every streamed unit is in it."""
        self._check(order[0])
        self._ring.follow([unit for unit in order if unit in self._streamed])

    def sweep(self, times: int = 1) -> Sweep | None:
        """Begin to use all units in the order of a pass, by jobs that wait; a context manager.

        times: passes, one after another. None, and nothing has begun, where experts come one by
        one, or what streams is not what is read next, and from files only. Until its end no unit
        can be acquired. Raises as `acquire`.
        """
        self._check(HEAD)
        if self.experts or not self._transfers.sweeps:
            return None
        units = [*self._streamed] * times
        begun = self._ring.sweep(units)
        if begun is None:
            return None
        words, slots = begun
        try:
            weights = list(map(self._in_slot, units, slots))
        except BaseException:
            self._ring.swept(done=False)
            raise
        return Sweep(self._complete, units, weights, slots, words, self._ring)

    @contextmanager
    def use(self, unit: Unit) -> Iterator[Weights]:
        """Acquire a unit for the length of a `with` block."""
        weights = self.acquire(unit)
        try:
            yield weights
        finally:
            self.release(unit)

    def gather_rows(self, name: str, ids: Tensor, scale: float = 1.0, rows_each: int = 1) -> Tensor:
        """Rows `ids`, int64 [T], of the weight `name`, [N, K], times `scale`, as float32 [T, K].

        rows_each: so many rows from ids * rows_each on, [T * rows_each, K]; see `embedding`.
        From memory, of the device or the host; rows that are in neither are read from disk, just
        these. The result is on the device. Raises OpError for rows that are not there, unless the
        ids are on a GPU, which is not waited for; DiskReadError.
        """
        if self._closed:
            raise ArgumentError("the weight store is closed")
        if name not in self._resident:
            self._opener.check()
        return self._rows.gather(name, ids, scale, rows_each)

    @property
    def is_here(self) -> bool:
        """Whether this process opened it, and was not forked from that."""
        return self._opener.is_this

    def check_process(self) -> None:
        """Raise ArgumentError where nothing can be computed: on a GPU, in a forked process."""
        if self._transfers.device.type == "cuda":
            self._opener.check()

    def holds(self, name: str) -> bool:
        """Whether all of a weight is on the device."""
        return name in self._resident

    def has(self, x: Tensor) -> bool:
        """Whether a tensor lies in the memory of slots, where other weights come next."""
        if not self._slots or x.layout is not torch.strided:
            return False
        return x.untyped_storage().data_ptr() == self._slots[0].untyped_storage().data_ptr()

    @property
    def all_resident(self) -> bool:
        """Whether no weight ever moves: all units, and the rows of `gather_rows`."""
        tables = {EMBEDDING, *row_tables(self.checkpoint.outer)}
        return not self._streamed and not self.experts and self._resident.keys() >= tables

    @property
    def complete(self) -> bool:
        """Whether no weights of whole units move, experts aside."""
        return not self._streamed

    @property
    def stats(self) -> StoreStats:
        """Counters since the start. Raises ArgumentError in a forked process, if units stream."""
        if self._streamed or self.experts:
            self._opener.check()
        nbytes, busy_s = self._transfers.reader.delivered
        return StoreStats(
            nbytes,
            self._transfers.copied_bytes,
            busy_s,
            self._ring.wait_s + (self.experts.wait_s if self.experts else 0),
            self.arena.used,
            self.experts.stats if self.experts else ExpertStats(),
        )

    def close(self) -> None:
        """Stop reading, join all threads, close all files, let go of all memory. May be repeated.

        Who waits in `acquire` gets DiskReadError or ArgumentError. Memory lives on where tensors
        of it are kept. In a forked process, whose parent all of this belongs to, it does nothing.
        """
        if self._closed or not self._opener.is_this:
            return
        self._closed = True
        with ExitStack() as all_of_it:  # whatever of it fails
            all_of_it.callback(self._forget)
            all_of_it.callback(self._transfers.close)
            if self.experts:
                self.experts.close()
            self._ring.close()

    def _forget(self) -> None:
        with self._lock:
            for views in (self._complete, self._views, self._resident, self._sources):
                views.clear()
            self._slots.clear()
            self._rows.in_host.clear()

    def __enter__(self) -> WeightStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self, verify: bool, instrumentation: Instrumentation) -> None:
        checkpoint, plan = self.checkpoint, self.residency
        files = unit_files(checkpoint)
        kept = resident_images(checkpoint, plan)
        self._streamed = streamed_images(checkpoint, plan)
        sources = host_images(checkpoint, plan, self._streamed)
        self._checks = FileChecks(self._transfers.reader, KnownFiles(checkpoint.path))
        later = _with_experts(checkpoint, plan)
        for unit, file in files.items():
            if not verify or any(map(_holds_file, (*kept[unit], sources.get(unit)))):
                self._checks.accept(file, self._checks.stamp(file))  # or compared while it is read
            elif unit not in later and not _holds_file(self._streamed.get(unit)):
                self._checks.check(file)
        # First, where all of them lie in huge pages.
        self._slots = [self.arena.alloc(plan.slot_bytes, f"slot {i}") for i in range(plan.slots)]
        every = [image for parts in kept.values() for image in parts]
        read_unit = partial(self._transfers.read_unit, verify=verify, after=None)
        self._resident: dict[str, Weight] = {}
        for image, memory in zip(every, load(every, self.arena, read_unit), strict=True):
            self._resident |= image.views(memory)
        load_host = partial(self._load_host, verify=verify)
        loaded = load(sources.values(), self.host_arena, load_host)
        self._sources = dict(zip(sources, loaded, strict=True))
        in_host = tables_in_host(checkpoint.outer, sources, self._sources)
        self._rows = Rows(checkpoint.outer, self._resident, in_host, self._transfers, self._checks)
        self._tiled = tiled_matrices(checkpoint, plan)
        there: dict[Unit, Mapping[str, Weight]] = {}
        if self._transfers.in_place(instrumentation):
            units = [unit for unit in self._streamed if unit in sources]
            there = {u: self._streamed.pop(u).views(self._sources[u]) for u in units}
        if plan.expert_slots:
            self.experts = ExpertCache(
                checkpoint,
                plan,
                self.arena,
                self.host_arena,
                self._sources,
                self._transfers,
                self._checks,
                instrumentation.expert_moves or self._moves_of_experts(),
                instrumentation.repack,
            )
        served: list[Unit] = [*files, *there]
        for one in served:
            if one not in self._streamed:
                self._complete[one] = self._named(one, there.get(one, {}))
        slots = self._slots if self._streamed else []
        self._ring = SlotRing(self._streamed, self._sources, slots, self._transfers, self._checks)

    def _moves_of_experts(self) -> Callable[..., ExpertMoves]:
        transfers = self._transfers
        return QueuedMoves if transfers.sweeps and transfers.reader.queues else ExpertMoves

    def _load_host(self, image: Image, memory: Tensor, verify: bool) -> UnitRead:
        """Start filling host memory with an image, of a file or of what was in memory before."""
        take = self._in_memory.get(image.file.path)
        if take is None:
            return self._transfers.load_host(image, memory, verify)
        weights = take()
        for name, place in image.views(memory).items():
            assert isinstance(place, Tensor)
            place.copy_(weights[name])
        return UnitRead(self._transfers, image, memory)

    def _named(self, unit: Unit, streamed: Mapping[str, Weight]) -> Weights:
        """All weights of a unit by local name: resident ones, those of a slot, tiled matrices."""
        if not isinstance(unit, int | str):
            return streamed
        file = unit_files(self.checkpoint)[unit]
        local = local_names(unit, file.weights)
        named: dict[str, Weight | TiledMatrix | StreamedExperts | ExpertWave] = {
            local[name]: streamed[name] if name in streamed else self._resident[name]
            for name in unit_weights(unit, file)
            if name in streamed or name in self._resident
        }
        named.update(self._tiled.get(unit, {}))
        if self.experts and isinstance(unit, int) and self.experts.counts[unit]:
            named[EXPERTS] = self._streamed_experts(unit)
        if unit == HEAD and LM_HEAD not in named and EMBEDDING in named:
            named[LM_HEAD] = named[EMBEDDING]
        return named

    def _in_slot(self, unit: Unit, slot: int) -> Weights:
        """The weights of a unit that is in a slot, the same objects each time."""
        views = self._views.get((unit, slot))
        if views is not None:
            return views
        with self._lock:
            self._check(unit)
            views = self._named(unit, self._streamed[unit].views(self._slots[slot]))
            return self._views.setdefault((unit, slot), views)

    def _streamed_experts(self, layer: int) -> StreamedExperts:
        """What stands for a layer's experts, with what the next ones can be guessed by."""
        assert self.experts is not None
        counts = self.experts.counts
        following = next((i for i in range(layer + 1, len(counts)) if counts[i]), None)
        guessing: dict[str, Weight] = {}
        if following is not None:
            names = local_names(following, self.checkpoint.layers[following].weights)
            guessing = {
                local: self._resident[name]
                for name, local in names.items()
                if name in self._resident
            }
        return StreamedExperts(counts[layer], following, guessing, self.experts.on_cpu)

    def _check(self, unit: Unit) -> None:
        self._opener.check()
        if self._closed:
            raise ArgumentError("the weight store is closed")
        if self.experts and isinstance(unit, ChosenExperts):
            return
        if unit not in self._streamed and unit not in self._complete:
            raise ArgumentError(
                f"no unit {unit!r}; there are 0 to {len(self.checkpoint.layers) - 1} and {HEAD!r}"
            )


def _with_experts(checkpoint: Checkpoint, plan: Residency) -> set[Unit]:
    """Layers whose files are checked when the first of their experts comes from there."""
    if not plan.expert_slots:
        return set()
    in_host = {unit.layer for unit in plan.host | plan.cpu_experts if isinstance(unit, Expert)}
    layers = enumerate(checkpoint.layers)
    return {i for i, file in layers if any(map(is_expert, file.weights)) and i not in in_host}


def _holds_file(image: Image | None) -> bool:
    return image is not None and image.data_at is not None

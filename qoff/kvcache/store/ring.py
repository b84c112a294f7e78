"""A few slots that the blocks of a layer are brought to before attention reads them.

Which blocks a pass brings where is the same in every layer, so it is found once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from qoff.errors import DiskReadError
from qoff.kvcache.layers import LayerView
from qoff.memory.instrumentation import Instrumentation
from qoff.memory.io.disk import ReadRequest

if TYPE_CHECKING:
    from qoff.kernels.cpu.jit.slots import Slots


@dataclass(frozen=True)
class Run:
    """Blocks of a tier, and places that they are brought to, in the same distances."""

    at: int  # the first place
    local: int  # the first block's number in its tier
    count: int


@dataclass(frozen=True)
class CopyPlan:
    """How blocks come to `count` places from 0 on.

    places: of each block. on_disk: numbers there of those that are. Runs may have others between.
    """

    count: int
    places: tuple[int, ...]
    on_disk: tuple[int, ...]
    from_disk: tuple[Run, ...]
    from_host: tuple[Run, ...]


def runs(pairs: Iterable[tuple[int, int]]) -> tuple[Run, ...]:
    """Pairs of place and number, places ascending, as runs in which both go up alike."""
    found: list[Run] = []
    for at, local in pairs:
        last = found[-1] if found else None
        if last is not None and at - last.at == local - last.local:
            found[-1] = Run(last.at, last.local, at - last.at + 1)
        else:
            found.append(Run(at, local, 1))
    return tuple(found)


@dataclass(eq=False)
class Fetch:
    """What is on its way into a slot, or there."""

    slot: int
    memory: Tensor
    futures: Sequence[Future[None]]
    used: bool = False
    dropped: bool = False


class BlockRing:
    """Slots that blocks are fetched into; from one thread.

    slots: uint8 memory of each. alive: whether the threads that fill them are there. At least one
    slot is free whenever a fetch that nobody uses can be dropped.
    """

    def __init__(
        self,
        slots: Sequence[Tensor],
        alive: Callable[[], bool],
        instrumentation: Instrumentation,
    ) -> None:
        self._free = list(range(len(slots)))
        self.slots = slots
        self._alive = alive
        self._poison, self._clock = instrumentation.poison, instrumentation.clock
        self._ahead: list[Fetch] = []  # fetched, not in use; oldest first
        self.wait_s = 0.0  # that `use` waited, and jobs in sweeps
        self._words: Slots | None = None  # of the slots, in sweeps
        self._unsettled: list[ReadRequest] = []  # of a sweep that was given up
        for memory in slots:
            self._wipe(memory)

    def start(self, fill: Callable[[Tensor], Sequence[Future[None]]], must: bool) -> Fetch | None:
        """Start a fetch; None when no slot is free, unless it must: another one is dropped then."""
        self._settle_sweep()
        if not self._free:
            if not must:
                return None
            if not self._ahead:
                raise RuntimeError("all slots of the KV ring are in use")
            self.drop(self._ahead[-1])
        slot = self._free[-1]
        fetch = Fetch(slot, self.slots[slot], fill(self.slots[slot]))
        self._free.pop()
        self._ahead.append(fetch)
        return fetch

    def use(self, fetch: Fetch) -> Tensor:
        """Wait until a fetch has arrived; its memory, until `drop`. Raises what went wrong."""
        self._ahead.remove(fetch)
        start = self._clock.now()
        try:
            self._settle(fetch)
        finally:
            self.wait_s += self._clock.now() - start
        for future in fetch.futures:
            future.result()
        fetch.used = True
        return fetch.memory

    def drop(self, fetch: Fetch) -> None:
        """Give the slot of a fetch back."""
        if fetch.dropped:
            return
        self._settle(fetch)
        if fetch in self._ahead:
            self._ahead.remove(fetch)
        fetch.dropped = True
        self._wipe(fetch.memory)
        self._free.append(fetch.slot)

    @property
    def idle(self) -> bool:
        """Whether all slots are free."""
        return len(self._free) == len(self.slots)

    def begin_sweep(self) -> Slots:
        """The words of the slots, all empty, by which jobs use them until `end_sweep`.

        All have to be free.
        """
        from qoff.kernels.cpu.jit.slots import Slots  # compiled when it is imported

        assert self.idle
        self._settle_sweep()
        if self._words is None or self._words.failed:
            addresses = [memory.data_ptr() for memory in self.slots]
            self._words = Slots(addresses, self.slots[0].nbytes, self._poison)
        return self._words

    def end_sweep(self, reads: ReadRequest | None, done: bool) -> None:
        """Jobs use the slots no more. Not done: what is read is dropped."""
        assert self._words is not None
        words = self._words
        self.wait_s += words.waited_s()
        if done:
            return
        self._words = None  # the next ones are empty again
        if reads is not None:
            self._unsettled.append(reads)
            reads.abandon()
            words.fail(DiskReadError("the sweep has ended"))  # whoever waits for a slot looks up
        self._settle_sweep()
        for memory in self.slots:
            self._wipe(memory)

    def _settle_sweep(self) -> None:
        """Return when nothing is written by a sweep any more."""
        if self._unsettled:
            self._join(self._unsettled)
            self._unsettled.clear()

    def _settle(self, fetch: Fetch) -> None:
        """Return when nothing is written to a slot any more."""
        self._join(fetch.futures)

    def _join(self, moves: Sequence[Future[None]]) -> None:
        lost = "KV cache: the threads that move blocks died"
        self._clock.join(moves, self._alive, lost)

    def _wipe(self, memory: Tensor) -> None:
        if self._poison:
            if memory.device.type == "cpu":
                memory.numpy().fill(0xFF)  # which is no work of torch's in a recording
            else:
                memory.fill_(0xFF)


class LayerFetches(LayerView[Tensor]):
    """The blocks of one forward pass, which come to slots of a ring layer by layer.

    bring: starts to bring those of a layer into a slot.
    """

    def __init__(
        self, ring: BlockRing, bring: Callable[[int, Tensor], Sequence[Future[None]]]
    ) -> None:
        self._ring, self._bring = ring, bring
        self._fetches: dict[int, Fetch] = {}

    def prefetch(self, layer: int, must: bool = False) -> None:
        fetch = self._fetches.get(layer)
        if fetch is None or fetch.dropped:
            fetch = self._ring.start(lambda slot: self._bring(layer, slot), must)
            if fetch is not None:
                self._fetches[layer] = fetch

    def open(self, layer: int) -> Tensor:
        """Wait for the blocks of a layer; their slot, valid until `close`. May be repeated."""
        fetch = self.take(layer)
        return fetch.memory if fetch.used else self._ring.use(fetch)

    def take(self, layer: int) -> Fetch:
        """What comes to a layer's slot, started now if it was not."""
        self.prefetch(layer, must=True)
        return self._fetches[layer]

    def add(self, layer: int, bring: Callable[[Tensor], Sequence[Future[None]]]) -> None:
        """Have more brought to the slot of a layer, and wait until all has arrived."""
        fetch = self.take(layer)
        fetch.futures = [*fetch.futures, *bring(fetch.memory)]
        self._ring.use(fetch)

    def close(self, layer: int) -> None:
        fetch = self._fetches.pop(layer, None)
        if fetch is not None:
            self._ring.drop(fetch)

    def abandon(self) -> None:
        for layer in list(self._fetches):
            self.close(layer)

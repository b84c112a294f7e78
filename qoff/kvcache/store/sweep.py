"""Blocks that come to the slots of a ring by jobs, layer after layer, with no Python in between.

What is on disk is read as soon as the slot is given back, by threads that run compiled code; what
is in host memory is copied by a job, when its layer is opened.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from qoff.kvcache.layers import LayerView
from qoff.memory.io.copies import Copies
from qoff.memory.io.disk import ReadRequest
from qoff.memory.io.spill import SlotFill, SpillFile

from .ring import BlockRing


@dataclass(frozen=True)
class Bringing:
    """How the blocks of a layer come to a slot.

    reads: parts of the spill file, and where they go in the slot. copied: rows of the slot and of
    host memory, and pairs of them (`copy_rows`); None where no block is there.
    """

    reads: Sequence[tuple[int, Tensor]]
    copied: tuple[Tensor, Tensor, Tensor] | None


@dataclass(frozen=True)
class _Coming:
    number: int  # of the slot
    bringing: Bringing


class BlockSweep:
    """One use of a ring's slots by the jobs of a round; the context of it.

    Layers are opened in the order of `add`, each closed before the next. key: what a recording of
    it knows beside the addresses of caches. Raises what went wrong in writing blocks or reading.
    """

    def __init__(self, ring: BlockRing, copies: Copies, spill: SpillFile | None) -> None:
        self.ring, self._copies, self._spill = ring, copies, spill
        self.words = ring.begin_sweep()
        self._used = [self.words.used(slot) for slot in range(len(ring.slots))]
        self._fills: list[SlotFill] = []
        self._key: list[Hashable] = [self.words.words(0)]
        self._added = 0
        self._request: ReadRequest | None = None

    @property
    def key(self) -> Hashable:
        return tuple(self._key)

    def next_slot(self) -> Tensor:
        """The memory that the next `add` brings blocks to."""
        return self.ring.slots[self._added % len(self._used)]

    def add(self, bringing: Bringing) -> _Coming:
        """Have blocks come to the next slot."""
        turn, number = divmod(self._added, len(self._used))
        self._added += 1
        if bringing.reads:
            fill = bringing.reads, self.words.words(number), self._used[number] + turn
            self._fills.append(fill)
        table = 0 if bringing.copied is None else bringing.copied[2].data_ptr()
        self._key.append((bool(bringing.reads), table))
        return _Coming(number, bringing)

    def start(self) -> None:
        """Start to read: nothing is added any more."""
        if self._fills:
            assert self._spill is not None
            self._request = self._spill.read_list(self._fills, self.words.fail)

    def open(self, coming: _Coming) -> Tensor:
        """Have jobs wait for blocks and copy some; the slot, until `close`."""
        if coming.bringing.reads:
            self.words.wait(coming.number)
        else:
            self.words.fill(coming.number)
        if coming.bringing.copied is not None:
            self._copies.job(*coming.bringing.copied)
        return self.ring.slots[coming.number]

    def close(self, coming: _Coming) -> None:
        """Give the slot back, by a job."""
        self.words.give_back(coming.number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.ring.end_sweep(self._request, done=error is None)


class SweptBlocks(LayerView[Tensor]):
    """The blocks of one pass in a sweep: those of a layer are in its slot while it is open."""

    def __init__(self, sweep: BlockSweep) -> None:
        self._sweep = sweep
        self._coming = defaultdict[int, deque[_Coming]](deque)
        self._open: dict[int, _Coming] = {}

    def add(self, layer: int, bringing: Bringing) -> None:
        """Have blocks come for the next time that a layer is opened."""
        self._coming[layer].append(self._sweep.add(bringing))

    def open(self, layer: int) -> Tensor:
        self._open[layer] = coming = self._coming[layer].popleft()
        return self._sweep.open(coming)

    def close(self, layer: int) -> None:
        coming = self._open.pop(layer, None)
        if coming is not None:
            self._sweep.close(coming)

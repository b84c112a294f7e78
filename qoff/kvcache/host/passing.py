"""Keys and values of the layer at work alone, of sequences that are read in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qoff.kernels.cpu.packed_attention.places import Moves
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.ragged import Ragged
from qoff.kvcache.base import CachePass

from .recent import RecentWorkspace


class PassingCache:
    """What the attention of one pass needs, and no pass after it.

    shapes: per layer, each of which is opened once. before: a cache whose sequences the new ones
    begin with, in the same round of the block schedule, where its pass comes directly before; of
    sequence i that of slot `begins[i]`. What it has of a layer is copied when the layer is opened.
    workspace: other caches may use it in passes that do not come between. Keys of an index, which
    are opened before a layer's K and V, have one of their own.
    """

    ended: CachePass | None = None  # never one: no step of decoding

    def __init__(
        self,
        shapes: Sequence[HeadShape],
        workspace: RecentWorkspace,
        before: PassingCache | None = None,
        begins: Sequence[int] = (),
    ) -> None:
        self.shapes, self._workspace = tuple(shapes), workspace
        self._before, self._begins = before, begins
        self._of_index = RecentWorkspace()
        self._opened = dict[bool, LayerCache]()  # the last one, and the last index

    def begin(self, ragged: Ragged) -> CachePass:
        """The only pass. Each sequence has as many tokens before as it takes of `before`."""
        return _PassingPass(self, ragged)

    @staticmethod
    def bytes_for(shapes: Sequence[HeadShape], sequences: int, tokens: int) -> int:
        """Bytes of a workspace for this many sequences of up to `tokens` tokens."""
        floats = dict[bool, int]()
        for one in shapes:
            taken = RecentWorkspace.floats_for(one, sequences, tokens)
            floats[one.indexes] = max(taken, floats.get(one.indexes, 0))
        return 4 * sum(floats.values())

    def open(self, layer: int, ragged: Ragged) -> LayerCache:
        """Keys and values of a layer, those before the new tokens in their places."""
        room, shape = (ragged.sequences, ragged.longest + 1), self.shapes[layer]
        workspace = self._of_index if shape.indexes else self._workspace
        keys, values = workspace.take(shape, *room)
        if self._before is not None:
            from qoff.kernels.cpu.packed_attention.pack import move_tokens

            there = self._before._opened[shape.indexes]
            moves = [(self._begins[s.slot], 0, s.past, s.slot, 0) for s in ragged.spans]
            rows = np.array(moves, np.int64)
            move_tokens((there.keys, there.values), (keys, values), Moves(rows))
        opened = LayerCache(keys, values, ragged.positions, ragged.longest)
        self._opened[shape.indexes] = opened
        return opened


class _PassingPass(CachePass):
    def __init__(self, cache: PassingCache, ragged: Ragged) -> None:
        self._cache, self.ragged = cache, ragged

    def open(self, layer: int) -> LayerCache:
        return self._cache.open(layer, self.ragged)

    def end(self) -> None:
        """Nothing is remembered."""

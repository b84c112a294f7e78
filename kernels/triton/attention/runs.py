"""How decode attention is cut into runs of blocks and of the recent window, one program each."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from qoff.kernels.triton.launch.sizes import cdiv

from .decode_tiles import RING_TOKENS

_RECENT_PARTS = 4
_ROUNDS = 2  # of programs that a processor holds at once, at most
# On an H200 starting a program took as long as two blocks, and 30 to 40 parts more to join as long
# as one. That was before blocks were copied ahead: a block may take less since.
_START = 2.0
_JOINED = 40


class Split(NamedTuple):
    """How the blocks of sequences are cut into runs."""

    tiles: int  # programs for a run of all KV heads of a sequence
    sequences: int
    processors: int
    resident: int  # programs that a processor holds at once
    most_blocks: int  # that a query can see
    ring: int  # tokens

    def of(self, blocks: int) -> tuple[int, int]:
        """Parts, the ring among them, and blocks of a run, for so many of the longest sequence."""
        blocks = min(blocks, self.most_blocks)
        run = blocks_per_run(self, blocks)
        return self.recent[0] + cdiv(blocks, run), run

    @property
    def recent(self) -> tuple[int, int]:
        """Parts of the recent window, and tokens of each: a multiple of a tile's."""
        parts = most_recent_parts(self.tiles * self.sequences, self.processors)
        run = cdiv(cdiv(self.ring, parts), RING_TOKENS.value) * RING_TOKENS.value
        return cdiv(self.ring, run), run

    @property
    def most_parts(self) -> int:
        """Of sequences of any length."""
        return self.recent[0] + self.most_runs(self.most_blocks)

    def most_runs(self, blocks: int) -> int:
        """Runs of so many blocks, at most: two rounds of programs."""
        programs = max(1, self.tiles * self.sequences)
        most = cdiv(_ROUNDS * self.processors * self.resident, programs)
        return min(most, blocks)


@cache
def blocks_per_run(split: Split, blocks: int) -> int:
    """How many blocks a program attends to, for so many of the longest sequence.

    All programs of a round, which fill the processors once, begin together, and a round takes as
    long as a run. A last round of a few programs is as long as the others. The run is the one that
    takes the least time, half of the weight on sequences that are all as long as the longest, half
    on a single long one among short ones.
    """
    slots = split.processors * split.resident
    runs, best, least = split.most_runs(blocks), 1, math.inf
    while runs:
        run = cdiv(blocks, runs)
        runs = cdiv(blocks, run)
        parts = split.recent[0] + runs
        rounds = sum(cdiv(split.tiles * n * parts, slots) for n in (1, max(1, split.sequences)))
        time = rounds / 2 * (_START + run) + parts / _JOINED
        if time < least:
            best, least = run, time
        runs -= 1
    return best


def most_recent_parts(tiles: int, processors: int) -> int:
    """Into how many parts the recent window is cut, at most: each takes a program microseconds."""
    return min(_RECENT_PARTS, max(1, processors // max(1, tiles)))

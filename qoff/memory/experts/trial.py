"""Whether the guesses of routers are read ahead: by what passes take with and without them."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

_BLOCK = 8  # passes in a row, before the other way is tried
_BLOCKS = 4  # of both ways together, after which the better one is kept
_KEPT = 512  # passes, before both are tried again


class Mark(NamedTuple):
    """A moment: seconds, experts that were missing so far when they were asked for, and guesses."""

    now: float
    missing: int
    guesses: int


class GuessTrial:
    """Tries passes with and without reading guesses, and keeps to what takes less time.

    A wrong guess takes the disk from what is wanted, a right one has it read what would be wanted
    later while it has nothing else to do. Which is more depends on how often guesses are right, how
    fast the disk is, and how long a layer computes. Compared is the time of passes beside reading
    what they miss at the disk's rate. reads: whether the pass under way reads guesses.
    """

    def __init__(self) -> None:
        self.reads = True
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._left = _BLOCK * _BLOCKS  # passes of the trial, or else for which its result is kept
        self._trying = True
        self._began: Mark | None = None  # before the first pass
        self._arrived: Mark | None = None

    def begin(self, mark: Mark, expert_s: float) -> None:
        """A pass begins; the one before is noted if it had guesses. expert_s: to read an expert."""
        start, end = self._began, self._arrived
        self._began = self._arrived = mark
        if start is not None and end is not None and end.guesses > start.guesses:
            self._note(end.now - start.now - expert_s * (end.missing - start.missing))

    def arrived(self, mark: Mark) -> None:
        """All is there that the pass has asked for."""
        self._arrived = mark

    def _note(self, seconds: float) -> None:
        self._left -= 1
        if self._trying:
            self._times[self.reads].append(seconds)
            if self._left % _BLOCK == 0:
                self.reads = not self.reads
        if self._left:
            return
        self._trying = not self._trying
        if self._trying:
            self._left = _BLOCK * _BLOCKS
            self._times = {True: [], False: []}
        else:
            self._left = _KEPT
            self.reads = median(self._times[True]) <= median(self._times[False])

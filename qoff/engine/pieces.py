"""How many tokens of prompts a batch reads in a round."""

from __future__ import annotations

_WORTH = 1.5  # times as long, at most, a round may take that reads twice as many
_TWICE = 2  # the last rounds of a size, the shorter of which says what it takes
_DOUBT = 1.002  # by which other sizes are taken to be faster after each round, until they are tried
_FULL = 0.9  # of what a round may read: it tells what so many tokens take


class PromptPieces:
    """The size of prompts' pieces: all of `most` tokens, or fewer while answers are generated.

    Beside answers, a batch reads `beside` tokens in a round; or twice, four times, ... as many, up
    to `most`, while each doubling makes a round at most half as long again. So prompts are read in
    small pieces where arithmetic is what takes time, and in large ones where rounds wait for
    weights, however few tokens they read.
    """

    def __init__(self, most: int, beside: int | None = None) -> None:
        self._most = most
        self._least = most if beside is None else min(beside, most)
        self._rounds: dict[int, list[float]] = {}  # seconds beside answers, by tokens of a piece

    def tokens(self, answers: bool) -> int:
        """Tokens that a batch reads in the next round. answers: whether any is generated in it."""
        if not answers:
            return self._most
        size = self._least
        while size < self._most and self._known(size):  # else that is tried first
            more = min(2 * size, self._most)
            if self._known(more) and self._seconds(more) > _WORTH * self._seconds(size):
                break
            size = more
        return size

    def note(self, size: int, read: int, batches: int, seconds: float) -> None:
        """A round with answers, in which so many batches read prompts of `size` tokens at most.

        read: tokens that they did.
        """
        if not batches or read < _FULL * batches * size:
            return
        for other, known in self._rounds.items():
            if other != size:
                known[:] = [one / _DOUBT for one in known]
        self._rounds[size] = [*self._rounds.get(size, ()), seconds][-_TWICE:]

    def _known(self, size: int) -> bool:
        return len(self._rounds.get(size, ())) == _TWICE

    def _seconds(self, size: int) -> float:
        return min(self._rounds[size])

"""Speculative decoding: tokens that may come next, found in what a sequence has so far.

A pass over proposed tokens costs one sweep of the weights, as one token does, and each token that
is what the model chooses anyway saves a sweep. Prompt lookup: Saxena, github.com/apoorvumang/
prompt-lookup-decoding (2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seconds
from weakref import WeakKeyDictionary

import numpy as np

from .request import Sequence

_LONGEST = 4  # newest tokens that are looked for, at most
_SHORTEST = 2  # and at least
_EARLIER = 0.95  # what a draft counts, in relation to the next one
_UNKNOWN = 0.1  # drafts that are supposed before there are any, all accepted
_DOUBT = 0.9  # of the tokens a second without drafts, where most are accepted: forecasts may err
_PAUSE = 8  # tokens without a draft, the first time that none is worth its pass
_LONGEST_PAUSE = 64  # after more and more drafts that were for nothing


class Acceptance:
    """How many tokens of the drafts of an answer were what the model chose, and what follows."""

    def __init__(self) -> None:
        self._tried = list[float]()  # drafts that had a token at a place, later ones counting more
        self._right = list[float]()  # those of which it and all before it were accepted
        self._again = 0  # tokens of the answer from which on there is a draft again
        self._pause = _PAUSE  # how many are without one, if none is worth it
        self._due = False  # whether the next draft is made to see if it is worth it now

    def note(self, drafted: int, accepted: int) -> None:
        """Of a draft the first tokens were accepted, the next one not, if there was one."""
        more = [0.0] * (drafted - len(self._tried))
        self._tried = [_EARLIER * x + (i < drafted) for i, x in enumerate([*self._tried, *more])]
        self._right = [_EARLIER * x + (i < accepted) for i, x in enumerate([*self._right, *more])]
        self._due = False
        if accepted:
            self._again, self._pause = 0, _PAUSE

    def length(self, seconds: Seconds[float], answered: int = 0) -> int:
        """How many tokens to draft: those that give the most tokens a second.

        0, and so for some tokens, if a pass without one gives more: a tenth more, if most drafts
        are accepted. Then one token is drafted to see; while all are rejected, pauses grow.

        seconds: of a pass in which each sequence has no drafted token, or one, or more. answered:
        tokens that the answer has.
        """
        if answered < self._again:
            return 0
        if self._due:
            return 1
        best, most, tokens, likely = 1, 0.0, 1.0, 1.0
        for place, longer in enumerate(seconds[1:]):
            known = place < len(self._tried)
            tried, right = (self._tried[place], self._right[place]) if known else (0.0, 0.0)
            likely = min(likely, (right + _UNKNOWN) / (tried + _UNKNOWN))
            tokens += likely
            if tokens > most * longer:
                best, most = place + 1, tokens / longer
        unpaused = self._pause == _PAUSE  # a few rejected drafts say little at first
        mostly = 2 * (sum(self._right[:1]) + unpaused) >= sum(self._tried[:1])
        if most * seconds[0] >= (_DOUBT if mostly else 1):
            return best
        older = _EARLIER**self._pause  # than as many drafts
        self._tried, self._right = ([older * x for x in of] for of in (self._tried, self._right))
        self._again, self._due = answered + self._pause, True
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return 0


class PromptLookup:
    """Proposes what followed the newest tokens where they came before in prompt or answer."""

    def __init__(self) -> None:
        # Room for the whole answer, and how much of it is there.
        self._tokens = WeakKeyDictionary[Sequence, tuple[np.ndarray, int]]()

    def propose(self, wanted: Mapping[int, tuple[Sequence, int]]) -> dict[int, list[int]]:
        """Tokens that may follow, by slot; up to so many of each sequence."""
        return {slot: continued(self._known(one), most) for slot, (one, most) in wanted.items()}

    def _known(self, sequence: Sequence) -> np.ndarray:
        """The tokens of prompt and answer, int32."""
        read, done = len(sequence.prompt), len(sequence.answer)
        tokens, known = self._tokens.get(sequence, (None, 0))
        if tokens is None:
            tokens = np.empty(read + sequence.max_tokens, np.int32)
            tokens[:read] = sequence.prompt
        known = min(known, done)  # it may have begun again
        tokens[read + known : read + done] = sequence.answer[known:]
        self._tokens[sequence] = tokens, done
        return tokens[: read + done]


def continued(tokens: np.ndarray, most: int) -> list[int]:
    """What followed the last tokens, up to `most`, where most of them came before.

    The newest such place from which that many follow, else the oldest. tokens: int32 [n].
    """
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    matched = 1
    while matched < _LONGEST and len(ends):
        before = ends[ends >= matched]
        before = before[tokens[before - matched] == tokens[-1 - matched]]
        if not len(before):
            break
        ends, matched = before, matched + 1
    if matched < _SHORTEST or not len(ends):
        return []
    far = ends[ends + most < len(tokens)]
    first = (far[-1] if len(far) else ends[0]) + 1
    return tokens[first : first + most].tolist()

"""Who waits for a place in a batch, who has one, and whose each sequence is.

Nothing here locks: `Rounds` does, or computes a round meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from .batch import BatchSlots
from .calls import Call
from .prefixes import common_blocks
from .request import Completion, Sequence


class Places:
    """The batches of a plan, the sequences in them, and those that wait.

    share_prefixes: prompts that begin alike share blocks. finish: the answer of a sequence, if it
    is done.
    """

    def __init__(
        self,
        batches: list[BatchSlots],
        share_prefixes: bool,
        finish: Callable[[Sequence], Completion | None],
    ) -> None:
        self.batches, self._share_prefixes, self._finish = batches, share_prefixes, finish
        self.calls: dict[Sequence, Call] = {}
        self._waiting: deque[list[Sequence]] = deque()  # answers of one prompt together

    @property
    def waiting(self) -> int:
        """Sequences that wait for a place."""
        return sum(map(len, self._waiting))

    def submit(self, groups: Iterable[list[Sequence]], call: Call) -> None:
        """Queue sequences of a call, those of a prompt together."""
        for group in groups:
            self._waiting.append(group)
            self.calls |= dict.fromkeys(group, call)
            call.left += len(group)

    def drop(self, call: Call) -> None:
        """Forget the sequences of a call."""
        mine = {one for one, its in self.calls.items() if its is call}
        self._waiting = deque(group for group in self._waiting if group[0] not in mine)
        for batch in self.batches:
            for sequence in batch.sequences():
                if sequence in mine:
                    batch.remove(sequence)
        for sequence in mine:
            del self.calls[sequence]

    def admit(self, most: int | None) -> None:
        """Fill free places of the first `most` batches, or of all.

        All answers of a prompt go into the same batch.
        """
        for batch in sorted(self.batches[:most], key=lambda batch: -batch.free):
            while self._waiting and batch.free >= len(self._waiting[0]):
                for sequence in self._waiting.popleft():
                    reads = sequence.waits_for is None and sequence.pooled is None
                    if self._share_prefixes and reads and not sequence.scores_prompt:
                        sequence.begins_like = self._alike(sequence)
                    batch.add(sequence)

    def admitted(self) -> list[Sequence]:
        """Those that are in a batch, or were on their way there or out of it."""
        waiting = {one for group in self._waiting for one in group}
        return [one for one in self.calls if one not in waiting]

    def begin_again(self) -> None:
        """Take all sequences out of the batches, to be read from the start."""
        for batch in self.batches:
            for sequence in batch.sequences():
                batch.remove(sequence)
        groups: dict[Sequence, list[Sequence]] = {}
        for sequence in self.admitted():
            done = {(one.index, one.sample) for one in self.calls[sequence].done}
            if (sequence.index, sequence.sample) in done:
                del self.calls[sequence]
                continue
            sequence.begin_again()
            groups.setdefault(sequence.waits_for or sequence, []).append(sequence)
        self._waiting.extendleft(reversed(groups.values()))

    def finish_done(self) -> None:
        """Take the answers that are done out of their batches."""
        for batch in self.batches:
            batch.index()
            for sequence in batch.sequences():
                answer = self._finish(sequence)
                call = self.calls[sequence]
                if answer is not None:
                    batch.remove(sequence)
                call.grew(sequence, answer)
                if answer is not None:
                    del self.calls[sequence]

    def _alike(self, sequence: Sequence) -> Sequence | None:
        """The sequence that begins with most of the blocks that this one begins with."""
        others = [
            other
            for batch in self.batches
            for other in batch.sequences()
            if other.adapter == sequence.adapter
        ]
        same = [common_blocks(sequence.prompt[:-1], other.prompt) for other in others]
        best = max(range(len(others)), key=same.__getitem__, default=None)
        return None if best is None or not same[best] else others[best]

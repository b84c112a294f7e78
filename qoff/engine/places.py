"""Who waits for a place in a batch, who has one, and whose each sequence is.

Nothing here locks: `Rounds` does, or computes a round meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from time import perf_counter

from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.plan.reopen import Remaining

from .batch import BatchSlots
from .calls import Call
from .prefixes import common_blocks
from .request import Completion, Sequence

_LOOKED_AT = 64  # prompts that wait, whose lengths stand for all


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
        self._asked = self._given = 0  # tokens of answers that are done: at most, and as they are

    @property
    def waiting(self) -> int:
        """Sequences that wait for a place."""
        return sum(map(len, self._waiting))

    @property
    def running(self) -> bool:
        """Whether a sequence has a place."""
        return any(batch.sequences() for batch in self.batches)

    def remaining(self) -> Remaining:
        """What is left to compute, as answers have been so far in relation to their `max_tokens`.

        Lengths are those of the first that wait, of those that run where none does.
        """
        running = [one for batch in self.batches for one in batch.sequences()]
        first = [one for group in islice(self._waiting, _LOOKED_AT) for one in group]
        share = self._given / self._asked if self._given else 1.0
        some = first or running
        follows = max((call.follows for call in {*self.calls.values()}), default=0.0)
        return Remaining(
            [max(1.0, share * one.max_tokens - len(one.answer)) for one in running],
            self.waiting,
            follows,
            sum(len(one.prompt) for one in some) / max(1, len(some)),
            share * sum(one.max_tokens for one in some) / max(1, len(some)),
            self._read_again(first, running) if self._share_prefixes else 0,
        )

    def _read_again(self, waiting: list[Sequence], running: list[Sequence]) -> int:
        """Tokens that those which wait share with others that run, each counted once."""
        found = set[tuple[int, ...]]()
        for one in waiting:
            same = max((common_blocks(one.prompt, other.prompt) for other in running), default=0)
            found.add(one.prompt[: same * BLOCK_TOKENS])
        return sum(map(len, found))

    def open_with(self, batches: list[BatchSlots]) -> None:
        """Go on with other batches, in which no sequence has a place yet."""
        self.batches = batches
        groups, self._waiting = self._waiting, deque[list[Sequence]]()
        for group in groups:
            self._queue(group)

    def _queue(self, group: list[Sequence]) -> None:
        """Have a group wait; more answers than a batch has slots for read their prompt apart."""
        size = self.batches[0].cache.sequences if self.batches else len(group)
        for i in range(0, len(group), size):
            first, *others = group[i : i + size]
            first.waits_for = None
            for other in others:
                other.waits_for = first
            self._waiting.append([first, *others])

    def submit(self, groups: Iterable[list[Sequence]], call: Call) -> None:
        """Queue sequences of a call, those of a prompt together."""
        for group in groups:
            self._queue(group)
            for one in group:
                one.background = call.background
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
                        sequence.may_share = True
                        sequence.begins_like = self._alike(sequence)
                        if batch.saves_states:
                            self._have_states_kept(sequence)
                    batch.add(sequence)
                    sequence.placed = sequence.placed or perf_counter()

    def admitted(self) -> list[Sequence]:
        """Those that are in a batch, or were on their way there or out of it."""
        waiting = {one for group in self._waiting for one in group}
        return [one for one in self.calls if one not in waiting]

    def begin_again(self) -> None:
        """Take all sequences out of the batches, to be read from the start."""
        self.forget_prefixes()
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

    def forget_prefixes(self) -> None:
        """What blocks have may be wrong: nothing begins with those that there are."""
        for batch in self.batches:
            batch.forget_prefixes()

    def finish_done(self) -> None:
        """Take the answers that are done out of their batches."""
        for batch in self.batches:
            batch.index()
            for sequence in batch.sequences():
                answer = self._finish(sequence)
                call = self.calls[sequence]
                if answer is not None:
                    self._asked += sequence.max_tokens
                    self._given += len(answer.token_ids)
                    batch.remove(sequence)
                call.grew(sequence, answer)
                if answer is not None:
                    del self.calls[sequence]

    def _have_states_kept(self, sequence: Sequence) -> None:
        """Have the prompt that begins alike keep states where this one goes on by itself.

        If that has been read past it, there is nothing to wait for.
        """
        other = sequence.begins_like
        if other is None:
            return
        sequence.begins_like = other = other.waits_for or other  # who reads for it
        same = BLOCK_TOKENS * common_blocks(sequence.prompt[:-1], other.prompt)
        if other.read < same:
            other.saved_at.add(same)
        else:
            sequence.begins_like = None

    def _alike(self, sequence: Sequence) -> Sequence | None:
        """The sequence that begins with most of the blocks that this one begins with.

        A background one is none for others, which do not wait for it.
        """
        others = [
            other
            for batch in self.batches
            for other in batch.sequences()
            if other.adapter == sequence.adapter
            if sequence.background or not other.background
        ]
        same = [common_blocks(sequence.prompt[:-1], other.prompt) for other in others]
        best = max(range(len(others)), key=same.__getitem__, default=None)
        return None if best is None or not same[best] else others[best]

"""Drafts of a model's own layer for multi-token prediction (`models.families.mtp`).

The layer is given what the model's passes leave of each token, and keeps K and V of its own. A
drafted token beyond the first comes of what the layer itself has left of the one before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qoff.kernels.layout.ragged import Ragged, Span
from qoff.kvcache.slots import SlotCache
from qoff.models.forward_pass import ForwardPass

from .executor import Executor
from .request import Sequence

MOST_WAITING = 8  # tokens of a sequence, before they are read without a draft


@dataclass(eq=False)
class _Known:
    """What is known of a sequence in a slot: the layer reads token after token from `first` on."""

    sequence: Sequence
    first: int  # the first token whose hidden states were there
    waiting: Tensor  # hidden states of tokens that are not yet read, [n, hidden_size]
    read: int = 0  # tokens whose hidden states, and what followed them, are in the cache
    drafted: int = 0  # what is in the cache behind them: of drafts

    def due(self) -> int:
        """How many tokens wait that are the sequence's, and whose next one is known."""
        known = len(self.sequence.prompt) + len(self.sequence.answer)
        return max(0, min(len(self.waiting), known - 1 - self.first - self.read))

    def following(self, count: int) -> list[int]:
        """The tokens that follow the first ones that wait."""
        start, prompt = self.first + self.read + 1, self.sequence.prompt
        answer = self.sequence.answer[max(0, start - len(prompt)) :]
        return [*prompt[start : start + count], *answer][:count]


class MtpBatch:
    """Drafts for the slots of a batch. executor: of the layer, as a model."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._cache: SlotCache = executor.new_cache()
        self._known: dict[int, _Known] = {}  # by slot

    def note(self, slot: int, sequence: Sequence, start: int, hidden: Tensor) -> None:
        """Take what the model left of a sequence's tokens from `start` on, [n, hidden_size].

        It takes the place of what was noted of the same tokens, as of a draft that was rejected.
        Where there is a gap before, the layer attends to nothing before it.
        """
        one = self._known.get(slot)
        kept = -1
        if one is not None and one.sequence is sequence:
            kept = start - one.first - one.read
        if one is None or not 0 <= kept <= len(one.waiting):
            self._cache.reset(slot, len(sequence.prompt) + sequence.max_tokens)
            self._known[slot] = _Known(sequence, start, hidden)
            return
        one.waiting = torch.cat((one.waiting[:kept], hidden)) if kept else hidden

    def read_waiting(self) -> None:
        """Read what waits where it is much: hidden states of prompts, or long without drafts."""
        self._settle()
        due = {slot: one.due() for slot, one in self._known.items()}
        work = {slot: count for slot, count in due.items() if count > MOST_WAITING}
        while work:
            work = self._read(work, ends=False)[0]

    def propose(self, wanted: Mapping[int, tuple[Sequence, int]]) -> dict[int, list[int]]:
        """Tokens that may follow, by slot; up to so many of each sequence."""
        self._settle()
        known = {slot: self._known.get(slot) for slot in wanted}
        work = {
            slot: one.due()
            for slot, one in known.items()
            if one is not None and one.sequence is wanted[slot][0] and one.due()
        }
        drafts: dict[int, list[int]] = {slot: [] for slot in wanted}
        hidden = dict[int, Tensor]()
        while work:
            work, found = self._read(work, ends=True)
            for slot, (token, states) in found.items():
                drafts[slot].append(token)
                hidden[slot] = states
        while hidden:
            # All that is drafted has to be forgotten again without unpacking anything.
            more = {
                slot: ([drafts[slot][-1]], states)
                for slot, states in hidden.items()
                if len(drafts[slot]) < wanted[slot][1] and self._cache.room(slot) > 1
            }
            hidden = {}
            for slot, (token, states) in self._pass(more, more).items() if more else ():
                drafts[slot].append(token)
                hidden[slot] = states
                self._known[slot].drafted += 1
        return drafts

    def _settle(self) -> None:
        """Forget what was drafted, and sequences that have ended."""
        for slot in [slot for slot, one in self._known.items() if one.sequence.ended]:
            del self._known[slot]
            self._cache.reset(slot)
        wrong = [0] * self._cache.sequences
        for slot, one in self._known.items():
            wrong[slot] = one.drafted
        if not any(wrong):
            return
        for slot, count in enumerate(wrong):
            alone = [count if at == slot else 0 for at in range(len(wrong))]
            if count and not self._cache.can_forget(alone):  # a window has moved on
                self._cache.reset(slot)
                del self._known[slot]
                wrong[slot] = 0
        if any(wrong):
            self._cache.forget_each(wrong)
        for one in self._known.values():
            one.drafted = 0

    def _read(
        self, work: Mapping[int, int], ends: bool
    ) -> tuple[dict[int, int], dict[int, tuple[int, Tensor]]]:
        """Read so many tokens that wait, as many as go into a pass.

        Returns what is left to read; if `ends`, of slots of which nothing is, what `_pass` does.
        """
        room, left, some = self._executor.plan.pass_tokens, dict[int, int](), dict[int, int]()
        for slot, count in sorted(work.items()):
            some[slot] = min(count, room)
            room -= some[slot]
            if some[slot] < count:
                left[slot] = count - some[slot]
        given = {
            slot: (self._known[slot].following(count), self._known[slot].waiting[:count])
            for slot, count in some.items()
            if count
        }
        found = self._pass(given, [slot for slot in given if ends and slot not in left])
        for slot, (tokens, _) in given.items():
            one = self._known[slot]
            one.read += len(tokens)
            one.waiting = one.waiting[len(tokens) :].clone()
        return left, found

    def _pass(
        self, given: Mapping[int, tuple[list[int], Tensor]], wanted: Collection[int]
    ) -> dict[int, tuple[int, Tensor]]:
        """A pass over tokens and hidden states by slot.

        Returns of the wanted slots the likeliest next token, and what the layer leaves of the last.
        """
        spans, tokens = list[Span](), list[int]()
        for slot, (some, _) in sorted(given.items()):
            spans.append(Span(slot, len(tokens), len(some), self._cache.lengths[slot]))
            tokens += some
        ends = [span for span in spans if span.slot in wanted]
        last = torch.tensor([span.start + span.count - 1 for span in ends], dtype=torch.int64)
        run = ForwardPass(torch.tensor(tokens), Ragged(tuple(spans)), self._cache, last)
        run.workspace = self._executor.workspace
        run.previous = torch.cat([given[span.slot][1] for span in spans])
        run.wants_final = bool(ends)
        try:
            logits = self._executor.runtime.forward(run)
            chosen = logits.argmax(1).tolist() if ends else []
        except BaseException:  # what the cache has is not known
            run.abandon()
            self._known.clear()
            for slot in range(self._cache.sequences):
                self._cache.reset(slot)
            raise
        if run.final is None:
            return {}
        states = run.final[last.to(run.final.device)].split(1)
        found = zip(ends, chosen, states, strict=True)
        return {span.slot: (token, row) for span, token, row in found}

"""A batch: slots of one KV cache with the sequences in them, and the passes they need."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qoff.kernels.layout.ragged import Ragged, Span
from qoff.kvcache.slots import SlotCache, SlotSubset
from qoff.models.forward_pass import ForwardPass

from .drafts import PromptLookup
from .pooling import PassPooling
from .prefixes import PrefixIndex
from .request import Sequence
from .sampling import LogitsRow, Sampler


class Continuation(NamedTuple):
    """What the next tokens of a sequence come from: each row if the draft before it holds."""

    rows: list[LogitsRow]
    draft: list[int]  # one fewer


class BatchSlots:
    """`cache.sequences` slots, some of them with a sequence.

    sampler: chooses tokens; slot i is its place `first_place` + i. draft_tokens: of each answer, at
    most.
    """

    def __init__(
        self,
        cache: SlotCache,
        sampler: Sampler,
        first_place: int = 0,
        prefixes: PrefixIndex | None = None,
        draft_tokens: int = 0,
    ) -> None:
        self.cache = cache
        self._draft_tokens, self._lookup = draft_tokens, PromptLookup()
        self._sampler, self._first_place = sampler, first_place
        self._prefixes = prefixes
        self._slots: dict[int, Sequence] = {}
        self._indexed: object = None  # what `index` depends on, as it was then

    @property
    def free(self) -> int:
        """Empty slots."""
        return self.cache.sequences - len(self._slots)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into an empty slot."""
        slot = min(set(range(self.cache.sequences)) - self._slots.keys())
        self._sampler.begin(self._first_place + slot, sequence)
        self._slots[slot] = sequence
        self.cache.reset(slot, len(sequence.prompt) + sequence.max_tokens)

    def remove(self, sequence: Sequence) -> None:
        """Empty a sequence's slot; its blocks are free at once."""
        slot = self._slot_of(sequence)
        sequence.ended = True
        blocks = self.cache.blocks[slot]
        del self._slots[slot]
        self.cache.reset(slot)
        if self._prefixes is not None:
            self._prefixes.drop(blocks)

    def sequences(self) -> list[Sequence]:
        """Those in the slots."""
        return [sequence for _, sequence in sorted(self._slots.items())]

    def _slot_of(self, sequence: Sequence) -> int:
        return next(slot for slot, one in self._slots.items() if one is sequence)

    def _with_forks(self, slot: int) -> list[int]:
        """A slot and those of the sequences that wait for it to read their prompt.

        They go on from there, with its blocks.
        """
        sequence, same = self._slots[slot], [slot]
        for at, other in sorted(self._slots.items()):
            if other.waits_for is sequence:
                self.cache.fork(slot, at)
                other.read, other.waits_for = sequence.read, None
                same.append(at)
        return same

    def _reads(self, slot: int, sequence: Sequence) -> bool:
        """Whether a sequence has some of its prompt to read now."""
        if sequence.decoding or sequence.waits_for is not None:
            return False
        before = sequence.begins_like
        if before is None:
            return True
        if not before.decoding and not before.ended:
            return False
        sequence.begins_like = None
        if self._prefixes is not None:
            blocks = self._prefixes.find(sequence.prompt, self.cache.expected[slot])
            self.cache.adopt(slot, blocks)
            sequence.read = self.cache.lengths[slot]
        return True

    def index(self) -> None:
        """Make the packed blocks of prompts known to others."""
        if self._prefixes is None:
            return
        blocks = [len(self.cache.blocks[slot]) for slot in self._slots]
        now = (self._prefixes.dropped, *self._slots.values(), *blocks)
        if now != self._indexed:
            self._indexed = now
            for slot, sequence in sorted(self._slots.items()):
                self._prefixes.add(sequence.prompt, self.cache.blocks[slot])

    def decode(self) -> ForwardPass | None:
        """A pass with the newest token of each sequence whose prompt is read, and its draft."""
        spans, tokens = list[Span](), list[int]()
        for slot, one in sorted(self._slots.items()):
            if one.answer:
                newest = [one.answer[-1], *self._draft_of(slot, one)]
                spans.append(Span(slot, len(tokens), len(newest), self.cache.lengths[slot]))
                tokens += newest
        if not spans:
            return None
        rows = torch.arange(len(tokens))
        return ForwardPass(torch.tensor(tokens), Ragged(tuple(spans)), self.cache, rows)

    def _draft_of(self, slot: int, sequence: Sequence) -> list[int]:
        """Tokens that may follow: so few that all can be forgotten again."""
        if not self._draft_tokens:
            return []
        return self._lookup.propose(sequence, min(self._draft_tokens, self.cache.room(slot) - 1))

    def forget_rejected(self) -> None:
        """Have the cache remember of each sequence what is its own."""
        wrong = [0] * self.cache.sequences
        for slot, one in self._slots.items():
            if one.answer:
                wrong[slot] = self.cache.lengths[slot] - len(one.prompt) - len(one.answer) + 1
        if any(wrong):
            self.cache.forget_each(wrong)

    def places(self, run: ForwardPass) -> list[tuple[int, Sequence]]:
        """The places and sequences of the rows of `decode`."""
        slots = [span.slot for span in run.ragged.spans]
        return [(self._first_place + slot, self._slots[slot]) for slot in slots]

    def read(self, most: int) -> ForwardPass | None:
        """A pass with pieces of prompts: together at most `most` tokens, as if all were as long."""
        waiting = [(i, one) for i, one in sorted(self._slots.items()) if self._reads(i, one)]
        # Of one kind: those that are pooled want hidden states, the others logits.
        pools = bool(waiting) and waiting[0][1].pooled is not None
        waiting = [(i, one) for i, one in waiting if (one.pooled is not None) == pools]
        chosen: list[tuple[int, Sequence, int]] = []
        longest = 0
        for i, s in waiting:
            count = min(len(s.prompt) - s.read, most)
            if (len(chosen) + 1) * max(longest, count) > most:
                continue
            if chosen and self.cache.equal_prompts and count != longest:
                continue
            longest = max(longest, count)
            chosen.append((i, s, count))
        if not chosen:
            return None
        cache = self.cache.subset([i for i, _, _ in chosen])
        ragged = Ragged.of([count for _, _, count in chosen], [s.read for _, s, _ in chosen])
        tokens = torch.tensor([t for _, s, n in chosen for t in s.prompt[s.read : s.read + n]])
        done = [s.read + n == len(s.prompt) and not pools for _, s, n in chosen]
        run = ForwardPass(tokens, ragged, cache, ragged.last_rows[torch.tensor(done)])
        if pools:
            spans = [(span.start, span.count) for span in ragged.spans]
            run.states = PassPooling(spans, [s.pooled for _, s, _ in chosen if s.pooled])
        return run

    def take(self, run: ForwardPass, logits: Tensor) -> tuple[int, list[Continuation]]:
        """Note what a pass has read of prompts; how many tokens, and what next ones come from."""
        read, rows, found = 0, iter(logits), list[Continuation]()
        tokens = run.tokens.tolist()
        subset = run.cache.slots if isinstance(run.cache, SlotSubset) else None
        for span in run.ragged.spans:
            slot = span.slot if subset is None else subset[span.slot]
            sequence = self._slots[slot]
            if subset is None:
                place = self._first_place + slot
                mine = [LogitsRow(place, sequence, next(rows)) for _ in range(span.count)]
                found.append(Continuation(mine, tokens[span.start + 1 : span.start + span.count]))
                continue
            read += span.count
            sequence.read += span.count
            if sequence.decoding and sequence.pooled is None:
                row = next(rows)
                for at in self._with_forks(slot):
                    mine = [LogitsRow(self._first_place + at, self._slots[at], row)]
                    found.append(Continuation(mine, []))
        return read, found

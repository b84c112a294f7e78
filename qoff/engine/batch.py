"""A batch: slots of one KV cache with the sequences in them, and the passes they need."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qoff.kernels.layout.ragged import Ragged, Span
from qoff.kvcache.slots import SlotCache, SlotSubset
from qoff.models.forward_pass import NOT_FINITE, ForwardPass

from .prefixes import PrefixIndex
from .request import Sequence
from .sampling import Sampler


class BatchSlots:
    """`cache.sequences` slots, some of them with a sequence and what chooses its tokens."""

    def __init__(self, cache: SlotCache, prefixes: PrefixIndex | None = None) -> None:
        self.cache = cache
        self._prefixes = prefixes
        self._slots: dict[int, Sequence] = {}
        self._samplers: dict[Sequence, Sampler] = {}

    @property
    def free(self) -> int:
        """Empty slots."""
        return self.cache.sequences - len(self._slots)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into an empty slot."""
        slot = min(set(range(self.cache.sequences)) - self._slots.keys())
        self._samplers[sequence] = Sampler(sequence)
        self._slots[slot] = sequence
        self.cache.reset(slot, len(sequence.prompt) + sequence.max_tokens)

    def remove(self, sequence: Sequence) -> None:
        """Empty a sequence's slot; its blocks are free at once."""
        slot = self._slot_of(sequence)
        sequence.ended = True
        blocks = self.cache.blocks[slot]
        del self._slots[slot], self._samplers[sequence]
        self.cache.reset(slot)
        if self._prefixes is not None:
            self._prefixes.drop(blocks)

    def sequences(self) -> list[Sequence]:
        """Those in the slots."""
        return [sequence for _, sequence in sorted(self._slots.items())]

    def _slot_of(self, sequence: Sequence) -> int:
        return next(slot for slot, one in self._slots.items() if one is sequence)

    def _extend(self, sequence: Sequence, logits: Tensor) -> int:
        """Draw the next token from float32 logits [vocab_size], also for those that wait for it.

        Sequences that wait for another one to read their prompt go on from there, with its blocks.
        Returns how many tokens were drawn.
        """
        same = [sequence]
        for slot, other in sorted(self._slots.items()):
            if other.waits_for is sequence:
                self.cache.fork(self._slot_of(sequence), slot)
                other.read, other.waits_for = sequence.read, None
                same.append(other)
        finite = math.isfinite(logits.amax())  # NaN if one is
        for one in same:
            if finite:
                one.answer.append(self._samplers[one].draw(logits))
            else:
                one.error = NOT_FINITE
        return len(same) if finite else 0

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
        if self._prefixes is not None:
            for slot, sequence in sorted(self._slots.items()):
                self._prefixes.add(sequence.prompt, self.cache.blocks[slot])

    def decode(self) -> ForwardPass | None:
        """A pass with the newest token of each sequence whose prompt is read."""
        chosen = [(slot, one) for slot, one in sorted(self._slots.items()) if one.answer]
        if not chosen:
            return None
        spans = tuple(Span(i, row, 1, self.cache.lengths[i]) for row, (i, _) in enumerate(chosen))
        tokens = torch.tensor([one.answer[-1] for _, one in chosen])
        ragged = Ragged(spans)
        return ForwardPass(tokens, ragged, self.cache, ragged.last_rows)

    def read(self, most: int) -> ForwardPass | None:
        """A pass with pieces of prompts: together at most `most` tokens, as if all were as long."""
        waiting = [(i, one) for i, one in sorted(self._slots.items()) if self._reads(i, one)]
        chosen: list[tuple[int, Sequence, int]] = []
        longest = 0
        for i, s in waiting:
            count = min(len(s.prompt) - s.read, most)
            if (len(chosen) + 1) * max(longest, count) > most:
                continue
            longest = max(longest, count)
            chosen.append((i, s, count))
        if not chosen:
            return None
        cache = self.cache.subset([i for i, _, _ in chosen])
        ragged = Ragged.of([count for _, _, count in chosen], [s.read for _, s, _ in chosen])
        tokens = torch.tensor([t for _, s, n in chosen for t in s.prompt[s.read : s.read + n]])
        done = [s.read + n == len(s.prompt) for _, s, n in chosen]
        return ForwardPass(tokens, ragged, cache, ragged.last_rows[torch.tensor(done)])

    def take(self, run: ForwardPass, logits: Tensor) -> tuple[int, int]:
        """Note what a pass has read of prompts, and draw a token for each row of its logits.

        Returns how many tokens were read and drawn.
        """
        read = drawn = 0
        rows = iter(logits.cpu())
        subset = run.cache.slots if isinstance(run.cache, SlotSubset) else None
        for span in run.ragged.spans:
            sequence = self._slots[span.slot if subset is None else subset[span.slot]]
            if subset is not None:
                read += span.count
                sequence.read += span.count
            if sequence.decoding:
                drawn += self._extend(sequence, next(rows))
        return read, drawn

"""A batch: slots of one KV cache with the sequences in them, and the passes they need."""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kernels.layout.ragged import Ragged, Span
from qoff.kvcache.saved_states import SavedStates
from qoff.kvcache.slots import SlotCache, SlotSubset
from qoff.kvcache.stateful import StatefulCache, StatefulDeviceCache
from qoff.kvcache.states import StateCache
from qoff.models.adapters import Adapters
from qoff.models.forward_pass import ForwardPass
from qoff.plan.drafting import PassSeconds

from .draft_model import DraftBatch
from .drafts import Acceptance, PromptLookup
from .mtp_drafts import MOST_WAITING, MtpBatch
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

    sampler: chooses tokens; slot i is its place `first_place` + i. saved_states: of models that
    have states, where prompts share what they begin with. draft_tokens: of each answer, at
    most, and fewer where fewer are accepted. pass_seconds: by sequences, see `plan.drafting`.
    """

    def __init__(
        self,
        cache: SlotCache,
        sampler: Sampler,
        first_place: int = 0,
        prefixes: PrefixIndex | None = None,
        saved_states: SavedStates | None = None,
        draft_tokens: int = 0,
        adapters: Adapters | None = None,
        drafts: DraftBatch | MtpBatch | None = None,
        pass_seconds: PassSeconds | None = None,
    ) -> None:
        self.cache, self._adapters = cache, adapters
        self._draft_tokens = draft_tokens
        self._proposer: DraftBatch | MtpBatch | PromptLookup = drafts or PromptLookup()
        self._mtp = drafts if isinstance(drafts, MtpBatch) else None
        self._pass_seconds = pass_seconds
        self._accepted: dict[int, Acceptance] = {}  # in each slot
        self._drafted: dict[int, int] = {}  # tokens of the pass under way
        self._sampler, self._first_place = sampler, first_place
        self._prefixes, self._saved_states = prefixes, saved_states
        self._slots: dict[int, Sequence] = {}
        self._emptied = list(range(cache.sequences))  # all slots, those emptied last at the end
        self._indexed: object = None  # what `index` depends on, as it was then
        self._scored = False  # the last pass with prompts scored one

    @property
    def free(self) -> int:
        """Empty slots."""
        return self.cache.sequences - len(self._slots)

    @property
    def saves_states(self) -> bool:
        """Whether prompts that begin alike need states behind what they share."""
        return self._saved_states is not None

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into an empty slot."""
        # With shared prefixes what the last sequence of a slot has left is of use.
        order = range(self.cache.sequences) if self._prefixes is None else self._emptied
        slot = next(slot for slot in order if slot not in self._slots)
        self._sampler.begin(self._first_place + slot, sequence)
        self._slots[slot], self._accepted[slot] = sequence, Acceptance()
        self.cache.reset(slot, len(sequence.prompt) + sequence.max_tokens)

    def remove(self, sequence: Sequence) -> None:
        """Empty a sequence's slot; its blocks are free at once."""
        slot = self._slot_of(sequence)
        sequence.ended = True
        del self._slots[slot]
        self._emptied = [*(one for one in self._emptied if one != slot), slot]
        self.cache.reset(slot)

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
                other.prompt_logprobs = list(sequence.prompt_logprobs)
                same.append(at)
        return same

    def _reads(self, slot: int, sequence: Sequence) -> bool:
        """Whether a sequence has some of its prompt to read now."""
        if sequence.decoding or sequence.waits_for is not None:
            return False
        before = sequence.begins_like
        if before is not None and not before.decoding and not before.ended:
            return False
        sequence.begins_like = None
        if self._prefixes is not None and sequence.may_share:
            sequence.may_share = False
            prompt, expected = sequence.prompt, self.cache.expected[slot]
            blocks = self._prefixes.find(prompt, expected, sequence.adapter)
            if self._saved_states is not None:
                blocks = self._with_states(slot, sequence, blocks, self._saved_states)
            self.cache.adopt(slot, blocks)
            sequence.read = self.cache.lengths[slot]
            self._prefixes.queried += len(prompt)
            self._prefixes.shared += sequence.read
        return True

    def _with_states(
        self, slot: int, sequence: Sequence, blocks: list[int], saved: SavedStates
    ) -> list[int]:
        """The first of the blocks, behind which states are kept, which the sequence has then.

        Those behind all of them are to be saved, as somebody else began so, too, and those behind
        the blocks that will be packed when the prompt is read.
        """
        cache, prompt = self.cache, sequence.prompt
        found = saved.load(prompt, sequence.adapter, len(blocks), self._states, slot)
        packed = cache.blocks_of(len(prompt), cache.window, cache.sinks)
        sequence.saved_at |= {BLOCK_TOKENS * count for count in (len(blocks), packed)}
        return blocks[:found]

    def _save_states(self, slot: int, sequence: Sequence) -> None:
        """Keep the states of a sequence that has read so much of its prompt, if they are wanted."""
        saved = self._saved_states
        if saved is None or sequence.read not in sequence.saved_at:
            return
        saved.save(sequence.prompt[: sequence.read], sequence.adapter, self._states, slot)

    @property
    def _states(self) -> StateCache:
        """Those of all slots, where the cache has any."""
        assert isinstance(self.cache, StatefulCache | StatefulDeviceCache)
        return self.cache.states

    def index(self) -> None:
        """Make the packed blocks of sequences known to others, and to those that come later."""
        if self._prefixes is None:
            return
        blocks = [len(self.cache.blocks[slot]) for slot in self._slots]
        now = (*self._slots.values(), *blocks)
        if now != self._indexed:
            self._indexed = now
            for slot, one in sorted(self._slots.items()):
                tokens = [*one.prompt, *one.answer]
                self._prefixes.add(tokens, self.cache.blocks[slot], one.adapter)

    def forget_prefixes(self) -> None:
        """See `Places.forget_prefixes`."""
        self._indexed = None
        if self._prefixes is not None:
            self._prefixes.clear()
        if self._saved_states is not None:
            self._saved_states.clear()

    def decode(self) -> ForwardPass | None:
        """A pass with the newest token of each sequence whose prompt is read, and its draft."""
        spans, tokens, adapters = list[Span](), list[int](), list[int]()
        drafts = self._drafts()
        for slot, one in sorted(self._slots.items()):
            if one.answer:
                newest = [one.answer[-1], *drafts.get(slot, ())]
                spans.append(Span(slot, len(tokens), len(newest), self.cache.lengths[slot]))
                tokens += newest
                adapters += [one.adapter] * len(newest)
        if not spans:
            return None
        rows = torch.arange(len(tokens))
        run = ForwardPass(torch.tensor(tokens), Ragged(tuple(spans)), self.cache, rows)
        run.wants_final = self._mtp is not None
        return self._adapted(run, adapters)

    def _adapted(self, run: ForwardPass, adapters: list[int]) -> ForwardPass:
        """A pass whose rows have these adapters."""
        if self._adapters is not None:
            run.adapters = self._adapters.rows(adapters)
        return run

    def _drafts(self) -> dict[int, list[int]]:
        """Tokens that may follow in each slot: so few that all can be forgotten again."""
        given, wanted = dict[int, list[int]](), dict[int, tuple[Sequence, int]]()
        self._drafted = {}
        if not self._draft_tokens:
            return given
        decoding = sum(bool(one.answer) for one in self._slots.values())
        for slot, one in self._slots.items():
            done = len(one.answer)
            most = min(self._draft_tokens, self.cache.room(slot) - 1, one.max_tokens - done - 1)
            if done and most > 0:
                if one.given:
                    given[slot] = list(one.given[done : done + most])
                else:
                    assert self._pass_seconds is not None
                    seconds = self._pass_seconds(decoding)[: most + 1]
                    if length := self._accepted[slot].length(seconds, done):
                        wanted[slot] = one, length
        found = self._proposer.propose(wanted) if wanted else {}
        self._drafted = {slot: len(draft) for slot, draft in found.items()}
        return given | found

    def forget_rejected(self) -> None:
        """Have the cache remember of each sequence what is its own."""
        wrong = [0] * self.cache.sequences
        for slot, one in self._slots.items():
            if one.answer:
                wrong[slot] = self.cache.lengths[slot] - len(one.prompt) - len(one.answer) + 1
        for slot, count in self._drafted.items():
            if count and slot in self._slots:
                self._accepted[slot].note(count, count - wrong[slot])
        self._drafted = {}
        if any(wrong):
            self.cache.forget_each(wrong)

    def places(self, run: ForwardPass) -> list[tuple[int, Sequence]]:
        """The places and sequences of the rows of `decode`."""
        slots = [span.slot for span in run.ragged.spans]
        return [(self._first_place + slot, self._slots[slot]) for slot in slots]

    def read(self, most: int) -> ForwardPass | None:
        """A pass with pieces of prompts, at most `most` tokens, those of background calls last.

        The longest piece, as often as there are pieces, may be `cache.padding` times as many.
        Those that are scored need a row of logits for each token, and leave little room: of
        two passes, one is for others first.
        """
        waiting = [(i, one) for i, one in list(self._slots.items()) if self._reads(i, one)]
        # Else the oldest first.
        waiting.sort(key=lambda at: (at[1].background, self._scored and at[1].scores_prompt))
        # Of one kind: those that are pooled want hidden states, the others logits.
        pools = bool(waiting) and waiting[0][1].pooled is not None
        waiting = [(i, one) for i, one in waiting if (one.pooled is not None) == pools]
        chosen: list[tuple[int, Sequence, int]] = []
        tokens_read = longest = 0
        decoding = sum(bool(one.answer) for one in self._slots.values())
        room = (1 + self._draft_tokens) * (self.cache.sequences - decoding)  # rows of logits
        for i, s in waiting:
            end = min((at for at in s.saved_at if at > s.read), default=len(s.prompt))
            count = min(end - s.read, most)
            if s.scores_prompt:
                count = min(count, room)
            padded = (len(chosen) + 1) * max(longest, count)
            if room < 1 or tokens_read + count > most or padded > self.cache.padding * most:
                continue
            if chosen and self.cache.equal_prompts and count != longest:
                continue
            tokens_read, longest = tokens_read + count, max(longest, count)
            room -= count if s.scores_prompt else 1
            chosen.append((i, s, count))
        if not chosen:
            return None
        self._scored = any(s.scores_prompt for _, s, _ in chosen)
        chosen.sort(key=itemgetter(0))
        cache = self.cache.subset([i for i, _, _ in chosen])
        ragged = Ragged.of([count for _, _, count in chosen], [s.read for _, s, _ in chosen])
        tokens = torch.tensor([t for _, s, n in chosen for t in s.prompt[s.read : s.read + n]])
        rows = list[int]()
        for (_, s, n), span in zip(chosen, ragged.spans, strict=True):
            done = s.read + n == len(s.prompt) and not pools
            wanted = n if s.scores_prompt else int(done)
            rows += range(span.start + n - wanted, span.start + n)
        run = ForwardPass(tokens, ragged, cache, torch.tensor(rows, dtype=torch.int64))
        if pools:
            spans = [(span.start, span.count) for span in ragged.spans]
            run.states = PassPooling(spans, [s.pooled for _, s, _ in chosen if s.pooled])
        run.wants_final = self._mtp is not None and not pools
        return self._adapted(run, [s.adapter for _, s, n in chosen for _ in range(n)])

    def take(self, run: ForwardPass, logits: Tensor) -> tuple[int, list[Continuation]]:
        """Note what a pass has read of prompts; how many tokens, and what next ones come from."""
        read, used, found = 0, 0, list[Continuation]()
        tokens = run.tokens.tolist()
        subset = run.cache.slots if isinstance(run.cache, SlotSubset) else None
        for span in run.ragged.spans:
            slot = span.slot if subset is None else subset[span.slot]
            sequence = self._slots[slot]
            if self._mtp is not None and run.final is not None:
                hidden = run.final[span.start : span.start + span.count]
                # Decode steps leave theirs where the next one does; the rest of many is read now.
                if subset is None or span.count <= 1 + MOST_WAITING:
                    hidden = hidden.clone()
                self._mtp.note(slot, sequence, span.past, hidden)
            if subset is None:
                place = self._first_place + slot
                rows = logits[used : used + span.count]
                used += span.count
                mine = [LogitsRow(place, sequence, row) for row in rows]
                found.append(Continuation(mine, tokens[span.start + 1 : span.start + span.count]))
                continue
            read += span.count
            first, sequence.read = sequence.read, sequence.read + span.count
            self._save_states(slot, sequence)
            done = sequence.decoding and sequence.pooled is None
            count = span.count if sequence.scores_prompt else int(done)
            rows, used = logits[used : used + count], used + count
            if sequence.scores_prompt:
                self._sampler.score_prompt(sequence, rows, first)
            if done:
                for at in self._with_forks(slot):
                    mine = [LogitsRow(self._first_place + at, self._slots[at], rows[-1])]
                    found.append(Continuation(mine, []))
        if self._mtp is not None:
            run.final = None
            self._mtp.read_waiting()
        return read, found

"""Drafts of a small model that is in memory beside the large one.

Leviathan et al., arXiv 2211.17192; here the large model's choice alone counts, so tokens are those
that come without drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError, BudgetError
from qoff.hf.tokenizer import has_tokenizer, load_tokenizer
from qoff.kernels.layout.ragged import Ragged, Span
from qoff.kvcache.slots import SlotCache
from qoff.kvcache.store.placement import DEVICE, KVPlacement
from qoff.models.forward_pass import ForwardPass
from qoff.models.modules.decoder import is_modules
from qoff.models.mtp import mtp_checkpoint
from qoff.models.spec import DecoderSpec
from qoff.plan import MTP, Plan
from qoff.units import format_size

from .executor import Executor
from .mtp_drafts import MOST_WAITING, MtpBatch
from .request import Sequence

_PIECE = 256  # tokens of prompts that a layer for multi-token prediction reads in a pass


class Drafter(ABC):
    """What drafts, beside the model that it drafts for, with KV caches like its own."""

    executor: Executor
    nbytes: int  # that it takes on the device
    host_nbytes = 0  # and in host memory beside one

    @abstractmethod
    def bytes_for(self, plan: Plan) -> int:
        """What it takes on the device, beside the model with a plan of that."""

    @abstractmethod
    def new_batch(self, vocab_size: int) -> DraftBatch | MtpBatch:
        """For a batch of the model, whose tokens are so many."""


class DraftModel(Drafter):
    """A resident model.

    plan: the large model's; kind: of the executor of both. Raises ArgumentError for one with
    another tokenizer or that runs through transformers' modules, BudgetError where it does not fit,
    and what `Executor` does.
    """

    def __init__(
        self,
        path: Path,
        plan: Plan,
        own: ExitStack,
        tokenizer: Any,
        kind: Callable[..., Executor],
        **options: Any,
    ) -> None:
        checkpoint = Checkpoint.open(path)
        if is_modules(checkpoint):
            raise ArgumentError(
                f"draft_model {path}: needs an architecture that qoff computes itself"
            )
        if DecoderSpec.from_config(checkpoint.config).recurrent is not None:
            raise ArgumentError(
                f"draft_model {path}: has recurrent states, which cannot go back to before tokens "
                "that are rejected; use a model whose layers all attend"
            )
        _check_tokenizer(path, tokenizer)
        try:
            self.executor = kind(checkpoint, _small(plan), own, **options)
        except BudgetError as error:
            raise BudgetError(f"draft_model {path}: {error}") from error
        residency = self.executor.runtime.residency
        self._weights = residency.device_weight_bytes
        self.nbytes = self._weights + self.executor.memory.total(DEVICE)
        if residency.streamed:
            raise BudgetError(
                f"draft_model {path}: does not fit in memory as a whole, which it needs to, beside "
                f"its KV cache; the budget is {format_size(plan.device_memory or 0)}"
            )

    def bytes_for(self, plan: Plan) -> int:
        return self._weights + self.executor.memory_of(_small(plan)).total(DEVICE)

    def new_batch(self, vocab_size: int) -> DraftBatch:
        return DraftBatch(self.executor, vocab_size)


class MtpDrafter(Drafter):
    """The model's own layer for multi-token prediction.

    Of the plan's memory it has what it needs at least, and of what is left beside the model's least
    the part that its weights are of all; where that is too little for them they stream, as the
    model's do. Raises ArgumentError for a checkpoint without such a layer, and what `Executor`
    does. more: options of the model's executor alone.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        own: ExitStack,
        kind: Callable[..., Executor],
        more: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        layer = mtp_checkpoint(checkpoint)
        if layer is None:
            raise ArgumentError(
                f"draft_model {MTP!r}: {checkpoint.path} has no layer for multi-token prediction; "
                "convert the original model again if that has one, or use a small model's path"
            )
        own_bytes, others = (
            sum(file.nbytes for file in each.files) for each in (layer, checkpoint)
        )
        self._part = own_bytes / (own_bytes + others)
        hidden_size = DecoderSpec.from_config(layer.config).hidden_size
        self._row_bytes = hidden_size * options["dtype"].itemsize
        small = self._small(plan)
        if plan.device_memory is not None:
            least = _least(kind, layer, small, **options)
            taken = least + self._hidden_bytes(plan)
            taken += _least(kind, checkpoint, plan, **options, **more)
            part = int(self._part * max(0, plan.device_memory - taken))
            small = replace(small, device_memory=least + part)
        self.executor = kind(layer, small, own, **options)
        residency = self.executor.runtime.residency
        self._weights, self.host_nbytes = residency.device_weight_bytes, residency.host_bytes
        self._in_parts = residency.in_parts
        self.nbytes = self.bytes_for(plan)

    def _small(self, plan: Plan) -> Plan:
        """The plan of the layer, which reads prompts in smaller pieces."""
        host = plan.host_memory
        return replace(
            _small(plan),
            prefill_tokens=min(plan.prefill_tokens, _PIECE),
            host_memory=None if host is None else int(self._part * host),
        )

    def bytes_for(self, plan: Plan) -> int:
        memory = self.executor.memory_of(self._small(plan), tiled=self._in_parts)
        return self._weights + memory.total(DEVICE) + self._hidden_bytes(plan)

    def _hidden_bytes(self, plan: Plan) -> int:
        """Hidden states that passes leave, those that wait, and those that the layer is given."""
        waiting = plan.batches * plan.batch_size * (MOST_WAITING + 1 + plan.draft_tokens)
        tokens = sum(plan.tokens_of_passes) + waiting + self._small(plan).pass_tokens
        return tokens * self._row_bytes

    def new_batch(self, vocab_size: int) -> MtpBatch:
        return MtpBatch(self.executor)


def _least(
    kind: Callable[..., Executor], checkpoint: Checkpoint, plan: Plan, **options: Any
) -> int:
    """The least bytes of the device with which a checkpoint can be computed by a plan."""
    try:
        with ExitStack() as own:
            kind(checkpoint, replace(plan, device_memory=0), own, **options)
    except BudgetError as error:
        if error.least is None:
            raise
        return error.least
    raise AssertionError("it is computed without memory")


def _small(plan: Plan) -> Plan:
    """The draft model's plan beside the large one's."""
    return replace(
        plan,
        draft_model=None,
        draft_tokens=0,
        forgets=plan.draft_tokens,
        share_prefixes=False,
        kv=replace(plan.kv, layers={}),  # that are the large model's
        kv_placement=KVPlacement(),
        activations="device",
        host_memory=None,
    )


def _check_tokenizer(path: Path, tokenizer: Any) -> None:
    """Raise ArgumentError for a checkpoint whose tokens mean something else."""
    if tokenizer is None or not has_tokenizer(path):
        raise ArgumentError(f"draft_model {path}: both models need a tokenizer, to be compared")
    if load_tokenizer(path, False).get_vocab() != tokenizer.get_vocab():
        raise ArgumentError(
            f"draft_model {path}: has another tokenizer than the model; use one of its family"
        )


class DraftBatch:
    """What the draft model has read of the sequences in the slots of a batch."""

    def __init__(self, executor: Executor, vocab_size: int) -> None:
        self._executor = executor
        self._vocab_size = min(vocab_size, executor.limits.vocab_size)  # tables may be padded
        self._limit = executor.limits.position_limit
        self._cache: SlotCache = executor.new_cache()
        self._read: dict[int, tuple[Sequence, list[int]]] = {}  # by slot, with tokens

    def propose(self, wanted: Mapping[int, tuple[Sequence, int]]) -> dict[int, list[int]]:
        """What the model would answer, by slot; up to so many tokens of each sequence."""
        wanted = {slot: one for slot, one in wanted.items() if self._takes(*one)}
        self._settle({slot: sequence for slot, (sequence, _) in wanted.items()})
        drafts: dict[int, list[int]] = {slot: [] for slot in wanted}
        pending = {}
        for slot, (sequence, _) in wanted.items():
            tokens = [*sequence.prompt, *sequence.answer]
            pending[slot] = tokens[len(self._read[slot][1]) :]
        while pending:
            chosen = self._pass(pending)
            following: dict[int, list[int]] = {}
            for slot, left in pending.items():
                if left:  # of a long prompt
                    following[slot] = left
                    continue
                drafts[slot].append(chosen[slot])
                # All that is drafted has to be forgotten again without unpacking anything.
                if len(drafts[slot]) < wanted[slot][1] and self._cache.room(slot) > 1:
                    following[slot] = [chosen[slot]]
            pending = following
        return drafts

    def _takes(self, sequence: Sequence, most: int) -> bool:
        """Whether this model can go on with a sequence."""
        length, limit = len(sequence.prompt) + len(sequence.answer) + most, self._limit
        fits = limit is None or length <= limit
        return fits and max(*sequence.prompt, *sequence.answer) < self._vocab_size

    def _settle(self, sequences: Mapping[int, Sequence]) -> None:
        """Forget other sequences that were in these slots, and drafts that were rejected."""
        none = [0] * self._cache.sequences
        wrong = list(none)
        for slot, sequence in sequences.items():
            known, read = self._read.get(slot, (None, []))
            most = len(sequence.prompt) + sequence.max_tokens
            if known is not sequence:
                self._cache.reset(slot, most)
                read = []
            del read[self._cache.lengths[slot] :]  # where this was interrupted
            tokens = [*sequence.prompt, *sequence.answer[:-1]]
            same = len(read)
            if read != tokens[:same]:
                pairs = enumerate(zip(read, tokens, strict=False))
                same = next((i for i, (a, b) in pairs if a != b), len(tokens))
            extra = len(read) - same
            if extra and not self._cache.can_forget([*none[:slot], extra, *none[slot + 1 :]]):
                self._cache.reset(slot, most)  # a window has moved on: an answer begins again
                same = extra = 0
            wrong[slot] = extra
            del read[same:]
            self._read[slot] = sequence, read
        if any(wrong):
            self._cache.forget_each(wrong)

    def _pass(self, pending: dict[int, list[int]]) -> dict[int, int]:
        """Read of what is pending as much as a pass may, and take it away; what may follow."""
        plan, executor = self._executor.plan, self._executor
        spans, tokens = list[Span](), list[int]()
        for slot in sorted(pending):
            some = pending[slot][: plan.pass_tokens - len(tokens)]
            if some:
                spans.append(Span(slot, len(tokens), len(some), self._cache.lengths[slot]))
                tokens += some
        last = torch.tensor([span.start + span.count - 1 for span in spans])
        run = ForwardPass(torch.tensor(tokens), Ragged(tuple(spans)), self._cache, last)
        run.workspace = executor.workspace
        try:
            logits = executor.runtime.forward(run)
            found = logits[:, : self._vocab_size].argmax(1).tolist()
            for span in spans:
                self._read[span.slot][1].extend(pending[span.slot][: span.count])
                del pending[span.slot][: span.count]
        except BaseException:  # what the cache has is not known: all is read again
            self._read.clear()
            run.abandon()
            for slot in range(self._cache.sequences):
                self._cache.reset(slot)
            raise
        return {span.slot: token for span, token in zip(spans, found, strict=True)}

"""`qoff.LLM`: prompts in, answers out as they are done, within the memory of a plan."""

from __future__ import annotations

import tempfile
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

import torch
from transformers import GenerationConfig

from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError, QoffError, UnsupportedModelError
from qoff.hf.load import find_checkpoint, has_tokenizer, load_tokenizer
from qoff.hf.torch_threads import one_torch_thread
from qoff.kernels.heads import HeadShape
from qoff.kvcache import PackedCache
from qoff.kvcache.placement import DEVICE, DISK, HOST
from qoff.kvcache.recent import Scratch as KVScratch
from qoff.kvcache.tiered import TieredBlocks
from qoff.memory import HEAD, ThreadTransfers, plan_residency
from qoff.memory.activations import ActivationStore
from qoff.memory.arena import Arena
from qoff.memory.copies import Copies
from qoff.memory.disk import DiskReader
from qoff.memory.link import Link
from qoff.memory.spill import SpillFile
from qoff.memory.timeline import Timeline
from qoff.models.batch import Activations, Batch, Kept, Scratch
from qoff.models.decoder import head_shapes
from qoff.models.modules.decoder import is_modules
from qoff.models.runtime import Runtime
from qoff.models.spec import DecoderSpec
from qoff.plan import Memory, Plan

from .batch import BatchSlots, Work
from .prefixes import PrefixIndex, common_blocks
from .request import FinishReason, Result, SamplingParams, Sequence
from .sampling import Sampler
from .schedule import Pass, Schedule

Prompt = str | list[int]


@dataclass(frozen=True)
class RoundStats:
    """One round: tokens, seconds, how long the computation waited for what, bytes moved."""

    read: int  # tokens of prompts
    generated: int
    seconds: float
    weights_wait_s: float
    kv_wait_s: float
    activations_wait_s: float
    disk_bytes: float  # read
    host_bytes: float  # between host and device, both ways
    spilled_bytes: float  # written to disk


@dataclass(frozen=True)
class Links:
    """Simulated links, for what is moved between disk, host and device."""

    disk: Link | None = None
    host: Link | None = None

    def reader(self) -> DiskReader:
        """A reader behind the disk's link."""
        return DiskReader() if self.disk is None else DiskReader(preadv=self.disk.preadv)


class LLM:
    """A checkpoint that answers many prompts at once, as a plan says.

    path: as for `qoff.load`. trace: a Chrome trace of every move and computation is written there
    on close. links: slower ones than there are, to try a plan for another machine. Raises
    BudgetError, with the bytes wanted by tier and purpose, before anything is loaded, ArgumentError
    for a plan that does not go with the model, and the errors of `qoff.load`. Close it, or use it
    as a context manager.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        plan: Plan | None = None,
        *,
        trace: str | PathLike[str] | None = None,
        links: Links | None = None,
        poison: bool = False,
    ) -> None:
        self.plan = plan = plan or Plan()
        self._trace = None if trace is None else Path(trace)
        self.timeline = None if trace is None else Timeline()
        checkpoint = find_checkpoint(path)
        self.tokenizer = load_tokenizer(checkpoint) if has_tokenizer(checkpoint) else None
        self.rounds: list[RoundStats] = []
        self._resources = _Resources()
        weakref.finalize(self, self._resources.close)
        try:
            self._open(checkpoint, links or Links(), poison)
        except BaseException:
            self.close()
            raise

    def _open(self, checkpoint: Path, links: Links, poison: bool) -> None:
        plan, own = self.plan, self._resources
        opened = Checkpoint.open(checkpoint)
        if is_modules(opened):
            raise UnsupportedModelError(
                f"{checkpoint}: runs through transformers' modules; qoff.LLM runs what qoff has a "
                "decoder for. Use qoff.load"
            )
        spec = DecoderSpec.from_config(opened.config)
        shapes = head_shapes(spec)
        transfers = own.add(ThreadTransfers(links.reader(), links.host))
        self.memory = memory = self._plan_memory(opened, shapes)
        host = memory.left(HOST, plan.host_memory)
        self.runtime = own.add(
            Runtime(
                checkpoint,
                device_memory=memory.left(DEVICE, plan.device_memory),
                slots=plan.slots,
                activation_bits=plan.activation_bits,
                kv=plan.kv,
                poison=poison,
                host_memory=None if plan.host_memory is None else host,
                transfers=transfers,
                timeline=self.timeline,
            )
        )
        self._reader = own.add(links.reader())
        self._copies = own.add(Copies(self.timeline, links.host))
        blocks = memory.blocks.tier_bytes()
        hidden = {t: memory.purposes[t]["hidden states"] for t in (DEVICE, HOST, DISK)}
        parked = plan.activations != "device"
        self.arenas = arenas = {
            tier: own.add(Arena(tier, blocks[tier] + (hidden[tier] if parked else 0)))
            for tier in (DEVICE, HOST)
        }
        spilled = blocks[DISK] + hidden[DISK]
        self._spill = None
        if spilled:
            folder = plan.spill_folder or Path(tempfile.gettempdir())
            self._spill = own.add(SpillFile(folder, spilled, self._reader, timeline=self.timeline))
        forms = plan.kv.packed_forms([shape.head_dim for shape in shapes])
        self.blocks = TieredBlocks(
            forms,
            [shape.kv_heads for shape in shapes],
            memory.blocks,
            plan.kv_placement,
            arenas,
            self._copies,
            self._spill,
            poison=poison,
        )
        self._activations = None
        tokens = max(plan.prefill_tokens, plan.batch_size)
        if parked:
            self._activations = ActivationStore(
                plan.activations,
                2 * plan.batches,
                tokens,
                spec.hidden_size,
                arenas,
                self._copies,
                self._spill,
                blocks[DISK],
            )
        self._scratch = Scratch.of(spec, tokens)
        self._kv_scratch = KVScratch()
        self._shapes, self._forms = shapes, forms
        self._schedule = Schedule(
            self.runtime.decoder, self.runtime.store, plan.order, self.timeline
        )
        self._eos = _eos_tokens(self.runtime.checkpoint)

    def _plan_memory(self, checkpoint: Checkpoint, shapes: Seq[HeadShape]) -> Memory:
        """What the plan takes beside the weights; more where layers have to stream in tiles."""
        plan, spec = self.plan, DecoderSpec.from_config(checkpoint.config)
        memory = Memory.of(plan, spec, shapes)
        left = memory.left(DEVICE, plan.device_memory)
        if plan_residency(checkpoint, left, plan.slots).tiled - {HEAD}:
            return Memory.of(plan, spec, shapes, tiled=True)
        return memory

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] = SamplingParams(),  # noqa: B008
    ) -> Iterator[Result]:
        """Answer prompts, texts or token ids; results come as they are done.

        params: for all prompts, or one for each. A prompt that cannot be answered (no tokens, too
        long for the plan's context) gives a result with an error; the others go on. At round
        boundaries the places of sequences that are done go to prompts that wait. Raises
        DiskReadError, ChecksumError and DiskWriteError; what was done before has been yielded.
        """
        waiting: deque[Sequence] = deque()
        for sequences in self._requests(list(prompts), params):
            if isinstance(sequences, Result):
                yield sequences
            else:
                waiting += sequences
        prefixes = PrefixIndex(self.blocks) if self.plan.share_prefixes else None
        batches = [BatchSlots(self._new_cache(), prefixes) for _ in range(self.plan.batches)]
        samplers: dict[Sequence, Sampler] = {}
        try:
            while waiting or any(batch.busy for batch in batches):
                self._admit(waiting, batches, samplers)
                with torch.inference_mode(), one_torch_thread():
                    done = self._round(batches, samplers)
                yield from done
        finally:
            for batch in batches:
                batch.clear()

    def memory_by_tier(self) -> dict[str, dict[str, int]]:
        """Bytes by tier and purpose, weights included."""
        residency = self.runtime.residency
        weights = {DEVICE: residency.device_bytes, HOST: residency.host_bytes}
        return {
            tier: {"weights": weights.get(tier, 0), **purposes}
            for tier, purposes in self.memory.purposes.items()
        }

    def close(self) -> None:
        """Write the trace, stop all threads, give memory and disk space back; idempotent."""
        if self._trace is not None and self.timeline is not None:
            self.timeline.write(self._trace)
            self._trace = None
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _new_cache(self) -> PackedCache:
        quant = self.plan.kv
        return PackedCache(
            self._shapes,
            self._forms,
            self.plan.batch_size,
            window=quant.window,
            sinks=quant.sinks,
            attention_top=quant.attention_top,
            store=self.blocks,
            scratch=self._kv_scratch,
        )

    def _requests(
        self, prompts: list[Prompt], params: SamplingParams | Iterable[SamplingParams]
    ) -> Iterator[list[Sequence] | Result]:
        """The sequences of each prompt, or what is wrong with it."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ArgumentError(f"{len(prompts)} prompts, but parameters for {len(each)}")
        for index, (prompt, wanted) in enumerate(zip(prompts, each, strict=True)):
            try:
                tokens = self._tokens(prompt)
                self._check(tokens, wanted)
            except QoffError as error:
                yield Result(index, 0, "", (), "error", 0, str(error))
                continue
            first = Sequence(index, 0, tokens, wanted)
            others = [
                Sequence(index, i, tokens, wanted, waits_for=first) for i in range(1, wanted.n)
            ]
            yield [first, *others]

    def _tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ArgumentError("the checkpoint has no tokenizer; give prompts as token ids")
            return list(self.tokenizer(prompt)["input_ids"])
        return [int(token) for token in prompt]

    def _check(self, tokens: list[int], params: SamplingParams) -> None:
        if not tokens:
            raise ArgumentError("the prompt has no tokens")
        vocab = self.runtime.spec.vocab_size
        if not 0 <= min(tokens) <= max(tokens) < vocab:
            raise ArgumentError(f"the prompt has token {max(tokens)}; there are 0 to {vocab - 1}")
        total = len(tokens) + params.max_tokens
        if total > self.plan.context:
            raise ArgumentError(
                f"a prompt of {len(tokens)} tokens and {params.max_tokens} new ones are more than "
                f"the plan's context of {self.plan.context}"
            )
        if params.n > self.plan.batch_size:
            raise ArgumentError(
                f"{params.n} answers of a prompt are more than a batch of {self.plan.batch_size}"
            )

    def _admit(
        self, waiting: deque[Sequence], batches: list[BatchSlots], samplers: dict[Sequence, Sampler]
    ) -> None:
        """Fill free places; all answers of a prompt go into the same batch."""
        for batch in sorted(batches, key=lambda batch: -batch.free):
            while waiting and batch.free >= waiting[0].params.n - waiting[0].sample:
                for _ in range(waiting[0].params.n):
                    sequence = waiting.popleft()
                    if self.plan.share_prefixes and sequence.waits_for is None:
                        sequence.begins_like = _alike(sequence, batches)
                    batch.add(sequence)
                    samplers[sequence] = Sampler(sequence.params, sequence.index, sequence.sample)

    def _round(self, batches: list[BatchSlots], samplers: dict[Sequence, Sampler]) -> list[Result]:
        """One pass of every batch: a token more of each sequence, or more of its prompt."""
        start, before = time.perf_counter(), self._counters()
        works: list[tuple[BatchSlots, Work]] = []
        for batch in batches:
            for work in (batch.decode(), batch.read(self.plan.prefill_tokens)):
                if work is not None:
                    works.append((batch, work))
        passes = [self._pass(i, work) for i, (_, work) in enumerate(works)]
        done: list[Result] = []
        generated = 0
        for (batch, work), logits in zip(works, self._schedule.round(passes), strict=True):
            for sequence, count in work.reads:
                sequence.read += count
            for sequence, row in zip(work.wanted, logits, strict=True):
                generated += batch.extend(sequence, row, samplers)
        for batch in batches:
            batch.index()
            for sequence in batch.sequences():
                result = self._result(sequence)
                if result is not None:
                    batch.remove(sequence)
                    del samplers[sequence]
                    done.append(result)
        spent = [after - was for after, was in zip(self._counters(), before, strict=True)]
        read = sum(count for _, work in works for _, count in work.reads)
        seconds = time.perf_counter() - start
        self.rounds.append(RoundStats(read, generated, seconds, *spent))
        return done

    def _pass(self, number: int, work: Work) -> Pass:
        activations: Activations = Kept()
        if self._activations is not None:
            activations = self._activations.batch(number)
        scratch = self._scratch
        batch = Batch(work.tokens, work.ragged, work.cache, work.logit_rows, activations, scratch)
        return Pass(f"pass {number}", batch)

    def _result(self, sequence: Sequence) -> Result | None:
        """What a sequence has come to, if it has."""
        answer, params = sequence.answer, sequence.params
        if not answer:
            return None
        reason: FinishReason | None = None
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos)}
        kept = answer
        text = None
        if answer[-1] in ends:
            reason, kept = "stop", answer[:-1]
        elif params.stops:
            # A character takes four tokens at most.
            recent = self._text(answer[-(4 * max(map(len, params.stops)) + 8) :])
            if any(stop in recent for stop in params.stops):
                text = self._text(answer)
                cuts = [at for stop in params.stops if (at := text.find(stop)) >= 0]
                if cuts:
                    reason, text = "stop", text[: min(cuts)]
        if reason is None and len(answer) >= params.max_tokens:
            reason = "length"
        if reason is None:
            return None
        return Result(
            sequence.index,
            sequence.sample,
            self._text(kept) if text is None else text,
            tuple(kept),
            reason,
            len(sequence.prompt),
        )

    def _text(self, tokens: list[int]) -> str:
        """Empty where there is no tokenizer."""
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _counters(self) -> tuple[float, ...]:
        """Seconds and bytes since the start, in the order of `RoundStats`."""
        weights, activations = self.runtime.store.stats, self._activations
        return (
            weights.wait_s,
            self.blocks.ring.wait_s,
            0.0 if activations is None else activations.wait_s,
            weights.bytes_read + self._reader.stats.bytes,
            weights.bytes_copied + self._copies.bytes,
            0 if self._spill is None else self._spill.written,
        )


def _alike(sequence: Sequence, batches: list[BatchSlots]) -> Sequence | None:
    """The sequence that begins with most of the blocks that this one begins with."""
    others = [other for batch in batches for other in batch.sequences()]
    same = [common_blocks(sequence.prompt[:-1], other.prompt) for other in others]
    best = max(range(len(others)), key=same.__getitem__, default=None)
    return None if best is None or not same[best] else others[best]


class _Closes(Protocol):
    def close(self) -> None: ...


_T = TypeVar("_T", bound=_Closes)


class _Resources:
    """What has to be closed, last opened first."""

    def __init__(self) -> None:
        self._all: list[_Closes] = []

    def add(self, one: _T) -> _T:
        self._all.append(one)
        return one

    def close(self) -> None:
        while self._all:
            self._all.pop().close()


def _eos_tokens(checkpoint: Checkpoint) -> set[int]:
    """Tokens that end an answer."""
    found = checkpoint.config.get("eos_token_id")
    if (checkpoint.path / "generation_config.json").exists():
        found = GenerationConfig.from_pretrained(checkpoint.path).eos_token_id
    if found is None:
        return set()
    return {found} if isinstance(found, int) else set(found)

"""`qoff.LLM`: prompts in, answers out as they are done, within the memory of a plan."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from types import TracebackType
from typing import Self

import torch

from qoff.errors import ArgumentError, QoffError
from qoff.hf.load import find_checkpoint, has_tokenizer, load_tokenizer
from qoff.hf.torch_threads import one_torch_thread
from qoff.kvcache.device.blocks import DeviceBlocks
from qoff.kvcache.store.tiered import TieredBlocks
from qoff.memory.arena import Arena
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.memory.io.timeline import Timeline, checked_path
from qoff.models.forward_pass import ForwardPass
from qoff.models.runtime import Runtime, device_of
from qoff.plan import Memory, Plan

from .answers import Answers, Prompt
from .batch import BatchSlots
from .executor import CpuExecutor, Executor
from .prefixes import PrefixIndex, common_blocks
from .request import Result, SamplingParams, Sequence
from .resources import Resources
from .sampling import Sampler, sampler_of
from .schedule import Schedule


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


class LLM:
    """A checkpoint that answers many prompts at once, as a plan says.

    path: as for `qoff.load`. device: "cpu", or a GPU like "cuda"; there hidden states and recent K
    and V are of `dtype`, float16 or bfloat16 (on a CPU of float32). trace: a Chrome trace of every
    move and computation is written there on close. trust_remote_code: as for `qoff.load`. Raises
    BudgetError, with the bytes wanted by tier and purpose, before anything is loaded, ArgumentError
    for a plan that does not go with the model or the device, and the errors of `qoff.load`. Close
    it, or use it as a context manager.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        plan: Plan | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float16,
        trace: str | PathLike[str] | None = None,
        trust_remote_code: bool = False,
        _instrumentation: Instrumentation = PLAIN,
    ) -> None:
        self.plan = plan = plan or Plan()
        self._trace = None if trace is None else checked_path(trace)
        if trace is not None:
            _instrumentation = replace(_instrumentation, timeline=Timeline())
        self.timeline = _instrumentation.timeline
        where = device_of(device)
        ops = _instrumentation.ops_for(where, plan.activation_bits)
        on_gpu = ops.CACHE == "device"
        checkpoint = find_checkpoint(path, for_cpu=not on_gpu, trust_remote_code=trust_remote_code)
        self.tokenizer = None
        if has_tokenizer(checkpoint):
            self.tokenizer = load_tokenizer(checkpoint, trust_remote_code)
        self.rounds: list[RoundStats] = []
        self._resources = Resources()
        weakref.finalize(self, self._resources.close)
        try:
            self._machine = _machine(on_gpu)(
                checkpoint,
                plan,
                self._resources,
                device=where,
                dtype=dtype if on_gpu else torch.float32,
                packing=ops.PACKING,
                instrumentation=_instrumentation,
            )
        except BaseException:
            self.close()
            raise
        runtime = self._machine.runtime
        self._answers = Answers(runtime.checkpoint, self.tokenizer)
        self._schedule = Schedule(runtime.decoder, runtime.store, plan.schedule, _instrumentation)

    @property
    def runtime(self) -> Runtime:
        """The weights, and the decoder on them."""
        return self._machine.runtime

    @property
    def memory(self) -> Memory:
        """What the plan takes beside the weights."""
        return self._machine.memory

    @property
    def arenas(self) -> Mapping[str, Arena]:
        """The memory of packed KV blocks and parked hidden states, by tier."""
        return self._machine.arenas

    @property
    def blocks(self) -> TieredBlocks | DeviceBlocks:
        """The packed KV blocks of all sequences."""
        return self._machine.blocks

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] = SamplingParams(),  # noqa: B008
        continuations: Iterable[list[int]] | None = None,
    ) -> Iterator[Result]:
        """Answer prompts, texts or token ids; results come as they are done.

        params: for all prompts, or one for each. A prompt that cannot be answered (no tokens, too
        long for the plan's context) gives a result with an error; the others go on. At round
        boundaries the places of sequences that are done go to prompts that wait. continuations:
        token ids, a list for each prompt, which are decoded like an answer beside its answers; a
        result of the reason "given" has their log-probabilities, its `sample` being n. It takes a
        place in the batch. Raises DiskReadError, ChecksumError and DiskWriteError; what was done
        before has been yielded.
        """
        waiting: deque[Sequence] = deque()
        for sequences in self._requests(list(prompts), params, continuations):
            if isinstance(sequences, Result):
                yield sequences
            else:
                waiting += sequences
        prefixes = PrefixIndex(self.blocks) if self.plan.share_prefixes else None
        batches = [
            BatchSlots(self._machine.new_cache(), prefixes) for _ in range(self.plan.batches)
        ]
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
        return self._machine.memory_by_tier()

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

    def _requests(
        self,
        prompts: list[Prompt],
        params: SamplingParams | Iterable[SamplingParams],
        continuations: Iterable[list[int]] | None,
    ) -> Iterator[list[Sequence] | Result]:
        """The sequences of each prompt, or what is wrong with it."""
        given = [None] * len(prompts) if continuations is None else list(continuations)
        if len(given) != len(prompts):
            raise ArgumentError(f"{len(prompts)} prompts, but continuations for {len(given)}")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ArgumentError(f"{len(prompts)} prompts, but parameters for {len(each)}")
        for index, (prompt, wanted, after) in enumerate(zip(prompts, each, given, strict=True)):
            if after is not None:
                wanted = replace(wanted, n=wanted.n + 1)
            try:
                tokens = self._answers.tokens(prompt)
                self._check(tokens, wanted)
                if after is not None:
                    self._check(after, wanted, len(tokens))
            except QoffError as error:
                yield Result(index, 0, "", (), "error", 0, str(error))
                continue
            first = Sequence(index, 0, tokens, wanted)
            others = [
                Sequence(index, i, tokens, wanted, waits_for=first) for i in range(1, wanted.n)
            ]
            if after is not None:
                last = others[-1]
                last.given, last.params = tuple(after), replace(wanted, max_tokens=len(after))
            yield [first, *others]

    def _check(self, tokens: list[int], params: SamplingParams, before: int = 0) -> None:
        """Refuse a prompt, or a continuation of one of `before` tokens."""
        what = "continuation" if before else "prompt"
        if not tokens:
            raise ArgumentError(f"the {what} has no tokens")
        if params.stops and self.tokenizer is None:
            raise ArgumentError(
                "the checkpoint has no tokenizer, so no text can end an answer; use stop_token_ids"
            )
        vocab = self.runtime.spec.vocab_size
        if not 0 <= min(tokens) <= max(tokens) < vocab:
            raise ArgumentError(f"the {what} has token {max(tokens)}; there are 0 to {vocab - 1}")
        new = len(tokens) if before else params.max_tokens
        read = before or len(tokens)
        total = read + new
        if total > self.plan.context:
            raise ArgumentError(
                f"a prompt of {read} tokens and {new} new ones are more than "
                f"the plan's context of {self.plan.context}"
            )
        self.runtime.spec.check_positions(total)
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
                    samplers[sequence] = sampler_of(sequence)

    def _round(self, batches: list[BatchSlots], samplers: dict[Sequence, Sampler]) -> list[Result]:
        """One pass of every batch: a token more of each sequence, or more of its prompt."""
        start, before = time.perf_counter(), self._machine.counters()
        passes: list[tuple[BatchSlots, ForwardPass]] = []
        for batch in batches:
            for run in (batch.decode(), batch.read(self.plan.prefill_tokens)):
                if run is not None:
                    self._place(run, len(passes))
                    passes.append((batch, run))
        done: list[Result] = []
        read = generated = 0
        found = self._schedule.round([run for _, run in passes])
        for (batch, run), logits in zip(passes, found, strict=True):
            tokens, drawn = batch.take(run, logits, samplers)
            read, generated = read + tokens, generated + drawn
        for batch in batches:
            batch.index()
            for sequence in batch.sequences():
                result = self._answers.result(sequence)
                if result is not None:
                    batch.remove(sequence)
                    del samplers[sequence]
                    done.append(result)
        spent = [after - was for after, was in zip(self._machine.counters(), before, strict=True)]
        seconds = time.perf_counter() - start
        self.rounds.append(RoundStats(read, generated, seconds, *spent))
        return done

    def _place(self, run: ForwardPass, number: int) -> None:
        """Say where a pass of a round has its values."""
        run.name, run.workspace = f"pass {number}", self._machine.workspace
        if self._machine.activations is not None:
            run.activations = self._machine.activations.batch(number)


def _machine(on_gpu: bool) -> type[Executor]:
    """The kind that opens a plan; that for a GPU needs Triton."""
    if not on_gpu:
        return CpuExecutor
    from .gpu_executor import GpuExecutor

    return GpuExecutor


def _alike(sequence: Sequence, batches: list[BatchSlots]) -> Sequence | None:
    """The sequence that begins with most of the blocks that this one begins with."""
    others = [other for batch in batches for other in batch.sequences()]
    same = [common_blocks(sequence.prompt[:-1], other.prompt) for other in others]
    best = max(range(len(others)), key=same.__getitem__, default=None)
    return None if best is None or not same[best] else others[best]

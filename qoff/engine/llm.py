"""`qoff.LLM`: prompts in, answers out, within the memory of a plan."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, NoReturn, Self

import torch
from tqdm.auto import tqdm

from qoff.budgets import check_host_bound, give_back, memory_bounds, resolve_dtype
from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError, QoffError
from qoff.hf.checkpoints import find_checkpoint
from qoff.hf.device import device_for
from qoff.hf.tokenizer import has_tokenizer, load_tokenizer
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.memory.io.timeline import Timeline, checked_path
from qoff.models.modules.decoder import is_modules
from qoff.models.spec import DecoderSpec
from qoff.plan import Plan
from qoff.plan.default import default_bounds, default_plan, plan_within_limit
from qoff.process import before_exit, only_here
from qoff.quant import QuantConfig
from qoff.schema import shown
from qoff.system_memory import left_by_limits, refusals

from .adapting import adapter_of
from .admission import Admission
from .answers import completion, default_params, end_tokens
from .arguments import bounded, check_adapters, executor_of, given_plan
from .calls import Call, Vectors
from .grammar import Grammars
from .opened import Source
from .pooling import Embedding, PoolingParams, complete
from .prompts import Prompt, PromptReader, conversations, prompt_list
from .request import Completion, SamplingParams, Sequence
from .rounds import Rounds
from .watched import Watched


class LLM(Watched):
    """A model that answers many prompts at once, as a plan says.

    path, quant, cache_dir, revision, trust_remote_code: as for `qoff.load`. plan: a `Plan`, or a
    file that `qoff plan --save` wrote; None, without bounds: `Plan()` if it fits the memory that
    is free, else what the planner chooses. device: "cpu", a GPU
    like "cuda", or "auto": a GPU if there is one. dtype: of hidden states and recent K and V on a
    GPU; "auto": the type in the model's config. A CPU computes in float32. device_memory,
    host_memory: the plan's bounds, where it has none; max_memory: the same as Accelerate writes
    them, {0: "12GiB", "cpu": "32GiB"}. adapters: folders of LoRA adapters that PEFT saved, by the
    name that prompts ask for them by; they stay on the device, those of what streams to a GPU in
    host memory. trace: a Chrome trace of every move and computation is written there on close.
    Raises BudgetError, with the bytes wanted by tier and purpose, before its weights are loaded (a
    draft model is loaded first), ArgumentError for two different bounds and for what the model or
    the device cannot do, and the errors of `qoff.load`. Close it, or use it as a context manager.
    Threads may share it: their sequences go through the same rounds, and each gets its own answers.
    """

    @refusals()
    def __init__(
        self,
        path: str | PathLike[str],
        plan: Plan | str | PathLike[str] | None = None,
        *,
        device: torch.device | str = "auto",
        dtype: torch.dtype | str = "auto",
        quant: QuantConfig | None = None,
        cache_dir: str | PathLike[str] | None = None,
        revision: str | None = None,
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
        max_memory: Mapping[int | str, int | str] | None = None,
        adapters: Mapping[str, str | PathLike[str]] | None = None,
        trust_remote_code: bool = False,
        trace: str | PathLike[str] | None = None,
        _instrumentation: Instrumentation = PLAIN,
        _plain: Plan | None = None,  # in place of `Plan()`, where nothing is given and it fits
        _bind: bool = False,  # to what is free, where the plan has no bounds and does not fit
        _grammars: bool = False,  # anybody may ask for one, so they take their memory before a plan
        _share: float = 1.0,  # of main memory that is free, where other processes have the rest
    ) -> None:
        if not isinstance(path, str | PathLike):
            raise ArgumentError(f"path is {shown(path)}; give a folder or a hub id")
        where = device_for(device)
        device_bytes, host_bytes = memory_bounds(device_memory, host_memory, max_memory, where)
        plan = given_plan(plan)
        check_adapters(adapters)
        chosen = plan is None and device_bytes is None and host_bytes is None
        plan = bounded(plan or _plain or Plan(), device_memory=device_bytes, host_memory=host_bytes)
        self._trace = None if trace is None else checked_path(trace)
        if trace is not None:
            _instrumentation = replace(_instrumentation, timeline=Timeline())
        self.timeline = _instrumentation.timeline
        ops = _instrumentation.ops_for(where, plan.activation_bits)
        on_gpu = ops.CACHE == "device"
        if not (on_gpu or plan.offloads):
            check_host_bound(plan.device_memory, plan.host_memory, where)
        found = find_checkpoint(
            path,
            quant=quant,
            cache_dir=cache_dir,
            revision=revision,
            device=where,
            for_cpu=not on_gpu,
            trust_remote_code=trust_remote_code,
        )
        checkpoint = Checkpoint.open(found)
        hidden = torch.float16  # for a GPU's ops in tests
        if not on_gpu or where.type != "cpu":
            hidden = resolve_dtype(dtype, checkpoint.config, where)
        self.tokenizer = None
        if has_tokenizer(found):
            self.tokenizer = load_tokenizer(found, trust_remote_code)
        self._reader = PromptReader(self.tokenizer)
        ends = end_tokens(checkpoint)
        grammars = Grammars(self._reader, ends)
        if left_by_limits() is not None:
            self._reader.warm()
            if _grammars:
                grammars.warm()
        if chosen:  # of what is free beside the tokenizer
            plan = default_plan(checkpoint, where, hidden, _share, _plain, trust_remote_code)
        elif _bind and plan.device_memory is None:
            device_bytes, host_bytes = default_bounds(checkpoint, where, _share)
            plan = replace(plan, device_memory=device_bytes, host_memory=host_bytes)
        plan = plan_within_limit(plan, checkpoint, where, _share)
        kind, more = executor_of(checkpoint, on_gpu, trust_remote_code)
        source = Source(
            kind,
            checkpoint,
            self.tokenizer,
            where,
            hidden,
            ops.PACKING,
            _instrumentation,
            adapters,
            cache_dir,
            more,
        )
        self._device, self._resources = where, ExitStack()
        self._resources.callback(source.close)
        weakref.finalize(self, only_here(self._resources.close))
        opened = source.open(plan)
        self._defaults: SamplingParams | None = None
        self.checkpoint = checkpoint
        executor = opened.executor
        loaded = executor.adapters
        self.adapters = () if loaded is None else loaded.names
        self.adapter_folders = {} if loaded is None else loaded.folders
        self._admission = Admission(
            plan,
            executor.limits,
            self._reader,
            grammars,
            ends,
            executor.whole_prompts,
            self.adapters,
        )
        finish = partial(completion, tokenizer=self.tokenizer)
        self._rounds = Rounds(opened, source.open, finish, adapter_of(opened))
        before_exit(self._rounds.let_exit)
        self.rounds = self._rounds.history

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        adapter: str | Iterable[str | None] | None = None,
        use_tqdm: bool = False,
    ) -> list[Completion]:
        """Answer prompts; returns the answers in the order of the prompts, n for each.

        The arguments, and what goes wrong, are those of `stream`. use_tqdm: show a progress bar.
        """
        prompts = prompt_list(prompts)
        found: Iterable[Completion] = self.stream(prompts, sampling_params, adapter=adapter)
        if use_tqdm:
            each = 1 if sampling_params is None else getattr(sampling_params, "n", None)
            total = None if each is None else each * len(prompts)  # n of a list are not counted
            found = tqdm(found, desc="answers", total=total, dynamic_ncols=True)
        return sorted(found, key=lambda one: (one.index, one.sample))

    def chat(
        self,
        messages: list[Any],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        adapter: str | Iterable[str | None] | None = None,
        use_tqdm: bool = False,
        **template: Any,
    ) -> list[Completion]:
        """Answer a conversation, a list like [{"role": "user", "content": text}], or many of them.

        template: options of the tokenizer's `apply_chat_template`, such as `tools`. Raises
        ArgumentError where the model has no chat template and none is given as `chat_template`, for
        what are no messages, and what `stream` does.
        """
        self._reader.check_chat(template.get("chat_template"))
        chats = conversations(messages, template)
        return self.generate(chats, sampling_params, adapter=adapter, use_tqdm=use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json says; where it says nothing, the defaults."""
        if self._defaults is None:
            self._defaults = default_params(self.checkpoint)
        return self._defaults

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        continuations: Iterable[list[int]] | None = None,
        *,
        adapter: str | Iterable[str | None] | None = None,
    ) -> Iterator[Completion]:
        """Answer prompts; answers come as they are done.

        prompts: one or many; each is a text, token ids, {"prompt": text} or {"prompt_token_ids":
        ids}. sampling_params: for all, or one for each; None: `get_default_sampling_params`.
        An answer ends at the latest where the plan's context does, with the reason "length". A
        prompt that cannot be answered (no tokens, another type, no room for an answer) gives a
        completion with an error; the others go on. At round boundaries the places of sequences that
        are done go to prompts that wait. continuations: token ids, a list for each prompt, which
        are decoded like an answer beside its answers; a completion of the reason "given" has their
        log-probabilities, its `sample` being n. It takes a place in the batch. adapter: the name of
        one of the LLM's adapters, for all prompts, or one, or None, for each. Raises DiskReadError,
        ChecksumError and DiskWriteError; what was done before has been yielded.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        groups: list[list[Sequence]] = []
        for found in self._admission.requests(prompt_list(prompts), params, continuations, adapter):
            if isinstance(found, Completion):
                yield found
            else:
                groups.append(found)
        yield from self._rounds.answers(groups)

    def embed(
        self, prompts: Prompt | Iterable[Prompt], pooling_params: PoolingParams | None = None
    ) -> list[Embedding]:
        """The vectors of prompts, in their order: hidden states after the final norm, pooled.

        Prompts take places in batches as others do. Raises ArgumentError for a prompt that cannot
        be read, for more dimensions than the model has, and for an architecture that runs through
        transformers' modules; FormatError for a pooling of the model's that is none of ours.
        """
        found = Vectors()
        groups = self._pooled(prompt_list(prompts), pooling_params or PoolingParams())
        for answer in self._rounds.answers(groups, found):
            if answer.error:
                raise ArgumentError(f"prompt {answer.index}: {answer.error}")
        return [
            Embedding(one.index, one.text, one.prompt, tuple(found.vectors[one.index]))
            for (one,) in groups
        ]

    def _pooled(self, prompts: list[Prompt], params: PoolingParams) -> list[list[Sequence]]:
        if is_modules(self.checkpoint):
            raise ArgumentError(
                "this architecture runs through transformers' modules, which qoff does not pool; "
                "embeddings are those of its own decoder"
            )
        size = DecoderSpec.from_config(self.checkpoint.config).hidden_size
        return self._admission.pooled(prompts, complete(params, self.checkpoint, size), size)

    def submit(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | PoolingParams,
        call: Call,
        adapter: str | None = None,
    ) -> list[int]:
        """Have prompts answered by the rounds of threads in `work`, and return at once.

        `call` hears of each sequence after each round. Returns how many tokens each prompt has.
        Raises ArgumentError where one cannot be answered; then none is.
        """
        found = prompt_list(prompts)
        if isinstance(params, PoolingParams):
            if adapter is not None:
                raise ArgumentError("hidden states of an adapter are not pooled; leave it out")
            groups = self._pooled(found, params)
        else:
            groups = self._admission.groups(found, params, adapter)
        self._rounds.submit(groups, call)
        return [len(group[0].prompt) for group in groups]

    def cancel(self, call: Call) -> None:
        """Give the places of a call's sequences to others from the next round on; never waits."""
        self._rounds.leave(call)

    def work(self, stopped: Callable[[], bool]) -> None:
        """Compute rounds for what is submitted until `stopped`, which `wake` has looked at."""
        self._rounds.work(stopped)

    def wake(self) -> None:
        """Have threads in `work` look whether they are stopped."""
        self._rounds.wake()

    def encode(self, prompt: Prompt, most: int | None = None) -> tuple[int, ...]:
        """The token ids of a prompt. Raises ArgumentError for what is none.

        most: tokens; a text that is much longer is refused, without reading all of it.
        """
        return self._reader.read(prompt, most)[1]

    @property
    def device(self) -> torch.device:
        """What computes."""
        return self._device

    def close(self) -> None:
        """Write the trace, stop all threads, give memory and disk space back; idempotent.

        From another thread: after the round that is computed. Callers that wait for answers get an
        ArgumentError. In a forked process it does nothing.
        """
        if not self._rounds.opener.is_this:
            return
        self._rounds.close()
        self._reader.close()
        trace, self._trace = self._trace, None
        with self._resources:  # closed whatever the trace does
            if trace is not None and self.timeline is not None:
                self.timeline.write(trace)
        if self._device.type == "cuda":
            gc.collect()  # what was open refers to itself
            give_back(self._device)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled or copied: threads, open files and buffers have no copy."""
        raise QoffError(
            "a qoff.LLM cannot be pickled or copied; give other processes its path, "
            f"{self.checkpoint.path}, and open one in each"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

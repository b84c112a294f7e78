"""A model opened with a plan: all that the plan takes, which is given back as a whole."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError, ClosedError, QoffError
from qoff.hf.checkpoints import find_checkpoint
from qoff.kvcache.saved_states import SavedStates
from qoff.memory.instrumentation import Instrumentation
from qoff.models.modules.configs import is_native
from qoff.models.modules.decoder import is_modules
from qoff.plan import MTP, Plan
from qoff.plan.adapt import RunningPlan
from qoff.plan.drafting import PassSeconds, pass_seconds
from qoff.plan.pieces import prompt_tokens
from qoff.system_memory import refusals

from .batch import BatchSlots
from .draft_model import Drafter, DraftModel, MtpDrafter
from .executor import CpuExecutor, Executor
from .prefixes import PrefixIndex
from .rates import running_plan
from .sampling import Sampler
from .schedule import Schedule

logger = logging.getLogger(__name__)


class Opened:
    """What a plan has taken: weights, caches of its batches, what moves and what drafts.

    close: gives it back. seconds: opening took. prompt_tokens: that a batch reads in a pass; by
    default what the plan says.
    """

    def __init__(
        self,
        executor: Executor,
        schedule: Schedule,
        close: Callable[[], None],
        drafts: Drafter | None = None,
        seconds: float = 0.0,
        prompt_tokens: int | None = None,
    ) -> None:
        self.executor, self.schedule, self.drafts = executor, schedule, drafts
        self.plan = plan = executor.plan
        self.close, self.seconds = close, seconds
        vocab = executor.limits.vocab_size
        running = cache(lambda: running_plan(executor))
        self.prompt_tokens = prompt_tokens or _prompt_tokens(executor, running)
        self._prefixes = PrefixIndex(executor.blocks) if plan.share_prefixes else None
        places = plan.batches * plan.batch_size
        self._saved_states = None
        if plan.share_prefixes and executor.state_shapes:
            self._saved_states = SavedStates(executor.state_shapes, plan.saved_states)
        self.sampler = Sampler(vocab, places, plan.context, executor.device)
        pass_s: PassSeconds | None = None
        if plan.draft_tokens:
            small = None if drafts is None else running_plan(drafts.executor)
            pass_s = pass_seconds(running(), small)
        self.batches = [
            BatchSlots(
                executor.new_cache(),
                self.sampler,
                first,
                self._prefixes,
                self._saved_states,
                plan.draft_tokens,
                executor.adapters,
                None if drafts is None else drafts.new_batch(vocab),
                pass_s,
            )
            for first in range(0, places, plan.batch_size)
        ]

    @property
    def looked_up(self) -> tuple[int, int]:
        """Tokens of prompts that were looked up among what was read before, and those found."""
        prefixes = self._prefixes
        return (0, 0) if prefixes is None else (prefixes.queried, prefixes.shared)

    def beside(self, plan: Plan) -> int:
        """Bytes that adapters and the draft model would take on the device with another plan."""
        drafts = 0 if self.drafts is None else self.drafts.bytes_for(plan)
        return drafts + self.executor.adapter_bytes(plan)


@dataclass
class Source:
    """A model, and where it is computed; opened with one plan at a time.

    kind: of executor. tokenizer: of the model, if it has one. draft_cache: where a draft model from
    the Hub is kept. more: options of the executor.
    """

    kind: Callable[..., Executor]
    checkpoint: Checkpoint
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    packing: str
    instrumentation: Instrumentation
    adapters: Mapping[str, str | PathLike[str]] | None = None
    draft_cache: str | PathLike[str] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    _own: ExitStack = field(default_factory=ExitStack)
    _draft: Path | None = None  # once it was found
    _prompt_tokens: int | None = None  # of the first plan: others cut prompts as it did

    def open(self, plan: Plan) -> Opened:
        """Take what a plan says; nothing else may be open. Raises as `Executor` and `DraftModel`.

        What was taken is given back where it fails.
        """
        hooks = self.instrumentation
        start = hooks.clock.now()
        how: dict[str, Any] = {
            "device": self.device,
            "dtype": self.dtype,
            "packing": self.packing,
            "instrumentation": hooks,
        }
        more, drafts = {"adapters": self.adapters, **self.more}, None
        try:
            if plan.draft_model is not None:
                drafts = self._drafts(plan, more, **how)
                more["draft_bytes"] = drafts.nbytes
                more["draft_host_bytes"] = drafts.host_nbytes
            executor = self.kind(self.checkpoint, plan, self._own, **how, **more)
            runtime = executor.runtime
            schedule = Schedule(
                runtime.decoder, runtime.store, plan.schedule, hooks, runtime.scratch
            )
            seconds = hooks.clock.now() - start
            cut = self._prompt_tokens
            opened = Opened(executor, schedule, self.close, drafts, seconds, cut)
            self._prompt_tokens = opened.prompt_tokens
            return opened
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give back what is open; may be repeated."""
        self._own.close()

    def _drafts(self, plan: Plan, more: Mapping[str, Any], **how: Any) -> Drafter:
        if is_modules(self.checkpoint):
            raise ArgumentError(
                "draft_model needs an architecture that qoff computes itself; leave it out"
            )
        assert plan.draft_model is not None
        if plan.draft_model == MTP:
            return MtpDrafter(self.checkpoint, plan, self._own, self.kind, more, **how)
        if self._draft is None:
            where, on_cpu = self.draft_cache, self.kind is CpuExecutor
            self._draft = find_checkpoint(
                plan.draft_model, cache_dir=where, device=self.device, for_cpu=on_cpu
            )
        return DraftModel(self._draft, plan, self._own, self.tokenizer, self.kind, **how)


def _prompt_tokens(executor: Executor, running: Callable[[], RunningPlan]) -> int:
    """How many tokens of prompts a batch reads in a pass."""
    plan = executor.plan
    if plan.least_prefill_tokens is None or executor.whole_prompts:
        return plan.prefill_tokens
    if not is_native(executor.runtime.checkpoint.config):  # nothing can be said of its rounds
        return min(plan.least_prefill_tokens, plan.prefill_tokens)
    return prompt_tokens(running())


class Current:
    """The plan that is open, and how another one takes its place: never are both open.

    plan, memory, residency: of the last one that was. All but these are for the thread that
    computes rounds.
    """

    def __init__(self, opened: Opened, open_plan: Callable[[Plan], Opened]) -> None:
        self._open_plan = open_plan
        self._wanted: list[Plan] = []  # in this order, until `settle`
        self._opened: Opened | None
        self._ended = False
        self._take(opened)

    @property
    def opened(self) -> Opened:
        """What is open. Raises ArgumentError while another plan is on its way, and at the end."""
        opened = self._opened
        if self._ended:
            raise ClosedError("this LLM is closed")
        if opened is None:
            raise ArgumentError("this LLM is being opened with another plan; try again")
        return opened

    @property
    def closed(self) -> bool:
        """Whether nothing is open, since a change of the plan was interrupted, or is under way."""
        return self._opened is None and not self._ended

    @property
    def changing(self) -> bool:
        """Whether another plan is wanted, and is not yet computed with."""
        return bool(self._wanted)

    def settle(self) -> None:
        """Be computed with: nothing else is wanted any more."""
        self._wanted = []

    def want(self, plan: Plan) -> None:
        """Have `reopen` open this plan, or the one that is open now where that fails."""
        self._wanted = [plan, self.plan]

    def reopen(self) -> None:
        """Close what is open and open what is wanted; an interrupted call is to be made again.

        Nobody else may hold anything of what is open. Raises QoffError where nothing can be opened.
        """
        self._close()
        while True:
            plan = self._wanted[0]
            gc.collect()  # memory is given back when nothing holds a piece of it
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            try:
                with refusals():
                    opened = self._open_plan(plan)
            except Exception as error:
                reason = f"{error}"
            else:
                break
            self._wanted.remove(plan)
            if not self._wanted:
                raise QoffError(f"the model cannot be opened again with its plan: {reason}")
            logger.warning("another plan cannot be opened, so the old one is again: %s", reason)
        self._take(opened)
        logger.warning(
            "opened anew in %.3g s with %d x %d sequences",
            opened.seconds,
            opened.plan.batches,
            opened.plan.batch_size,
        )

    def end(self) -> None:
        """Hold nothing of what is open, which others close."""
        self._opened, self._ended = None, True

    def _take(self, opened: Opened) -> None:
        self._opened = opened
        self.plan, self.memory = opened.plan, opened.executor.memory
        self.residency = opened.executor.runtime.residency

    def _close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

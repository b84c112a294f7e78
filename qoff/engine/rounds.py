"""Rounds over all sequences of an `LLM`: those of all callers, in whatever threads they are.

There is no thread of its own: of the callers that wait for answers, one computes the next round for
all of them. A caller that goes away takes its sequences with it between two rounds.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from qoff.budgets import device_guard
from qoff.errors import ArgumentError, ClosedError
from qoff.hf.torch_threads import one_torch_thread
from qoff.interrupts import check as check_interrupts
from qoff.kernels.sampling import DRAWS_AHEAD
from qoff.models.forward_pass import ForwardPass
from qoff.plan import Plan
from qoff.process import Opener
from qoff.system_memory import refusals

from .adapting import Adapter
from .batch import BatchSlots, Continuation
from .calls import Call
from .draft_model import DraftModel
from .executor import Executor
from .places import Places
from .prefixes import PrefixIndex
from .request import Completion, Sequence
from .round_stats import Counts, RoundStats
from .sampling import Sampler
from .schedule import Schedule

logger = logging.getLogger(__name__)
_TOGETHER = 64  # steps of a round, at most
_KEPT = 4096  # rounds whose numbers are kept, at least


class Rounds:
    """Admits sequences into the batches of a plan, and computes until they have their answers.

    finish: the answer of a sequence, if it is done. adapter: watches the rounds. drafts: what
    drafts answers, if the plan has such a model.
    """

    def __init__(
        self,
        plan: Plan,
        executor: Executor,
        schedule: Schedule,
        finish: Callable[[Sequence], Completion | None],
        adapter: Adapter | None = None,
        drafts: DraftModel | None = None,
    ) -> None:
        self._plan, self._executor, self._schedule = plan, executor, schedule
        self._adapter = adapter
        self.history: list[RoundStats] = []  # of the newest thousands
        self.began: float | None = None  # the round that is computed, by `time.perf_counter`
        self._count = 0
        self.opener = Opener("this LLM")
        self._closed = False
        # Held to look at what follows, not during a round. Reentrant: a generator may be
        # collected, and leave, at any time.
        self._changed = threading.Condition(threading.RLock())
        self._worker: int | None = None  # the thread that computes a round, if one does
        self._gone: deque[Call] = deque()
        self._sweeping = False
        prefixes = PrefixIndex(executor.blocks) if plan.share_prefixes else None
        places = plan.batches * plan.batch_size
        self._sampler = Sampler(executor.limits.vocab_size, places, plan.context, executor.device)
        batches = [
            BatchSlots(
                executor.new_cache(),
                self._sampler,
                first,
                prefixes,
                plan.draft_tokens,
                executor.adapters,
                None if drafts is None else drafts.new_batch(executor.limits.vocab_size),
            )
            for first in range(0, places, plan.batch_size)
        ]
        self._places = Places(batches, plan.share_prefixes, finish)

    def answers(
        self, groups: Iterable[list[Sequence]], call: Call | None = None
    ) -> Iterator[Completion]:
        """The answers of sequences, those of a prompt together, as they are done.

        Raises ArgumentError once closed or in another process, and what fails in a round.
        """
        call = call or Call()
        self.submit(groups, call)
        try:
            while call.left:
                while not call.done:
                    self._turn(lambda: call.done or call.error)
                    if call.error is not None and not call.done:
                        raise call.error
                while call.done:
                    call.left -= 1
                    yield call.done.popleft()
        finally:
            self.leave(call)

    def submit(self, groups: Iterable[list[Sequence]], call: Call) -> None:
        """Queue sequences, those of a prompt together, for rounds of any thread.

        Raises ArgumentError once closed or in another process.
        """
        self._check()  # before the lock, which another thread of a forked process may have held
        with self._changed:
            self._places.submit(groups, call)
            self._changed.notify_all()

    def work(self, stopped: Callable[[], bool]) -> None:
        """Compute rounds for whoever has submitted sequences, until `stopped`; see `wake`.

        Raises ArgumentError once closed, and what fails in a round in which nothing was computed.
        """
        while not stopped():
            self._turn(stopped)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a place."""
        with self._changed:
            return self._places.waiting

    def wake(self) -> None:
        """Have threads in `work` look whether they are stopped."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Wait for the round that is computed; every caller then gets an ArgumentError."""
        with self._changed:
            if self._worker == threading.get_ident():
                raise ArgumentError("an LLM cannot be closed in the middle of its round")
            self._closed = True
            self._changed.wait_for(lambda: self._worker is None)
            self._places.batches = []  # with their caches
            self._changed.notify_all()

    def _check(self) -> None:
        self.opener.check()
        if self._worker == threading.get_ident():
            raise ArgumentError("an LLM cannot be called in the middle of its own round")
        if self._closed:
            raise ClosedError("this LLM is closed")

    def _turn(self, ready: Callable[[], object]) -> None:
        """Compute a round as soon as no other thread does and there is something; or be `ready`."""
        me = threading.get_ident()
        self._check()
        try:
            with self._changed:
                self._changed.wait_for(
                    lambda: ready() or self._closed or (self._worker is None and self._places.calls)
                )
                if ready():
                    return
                self._check()
                self._worker = me
            self._round()
        finally:
            with self._changed:
                if self._worker == me:
                    try:
                        self._sweep()
                    finally:
                        self._worker = self.began = None
                        self._changed.notify_all()

    def leave(self, call: Call) -> None:
        """Drop what is left of a call: now, or when the round that is computed is over."""
        self._gone.append(call)
        # Never waits: this may be called by the garbage collector, in any thread.
        if self._changed.acquire(blocking=False):
            try:
                if self._worker is None:
                    self._sweep()
            finally:
                self._changed.release()

    def _sweep(self) -> None:
        """Drop the sequences of callers that are gone."""
        if self._sweeping:  # this thread, interrupted by the garbage collector
            return
        self._sweeping = True
        try:
            while self._gone:
                self._places.drop(self._gone.popleft())
        finally:
            self._sweeping = False

    def _round(self) -> None:
        """One pass of every batch: a token more of each sequence, or more of its prompt.

        Where a CPU can do several steps together, several tokens more.

        An error is for all callers that have a sequence in a batch. Where this thread is
        interrupted, the sequences of the others begin again.
        """
        check_interrupts()
        places = self._places
        most = None if self._adapter is None else self._adapter.knobs.batches
        try:
            with device_guard(self._executor.device):
                with self._changed:
                    self._sweep()
                    places.admit(most)
                    if not places.calls:
                        return
                with torch.inference_mode(), one_torch_thread(), refusals():
                    self._passes()
        except Exception as error:
            with self._changed:
                calls = {places.calls[one] for one in places.admitted()}
                for call in calls:
                    call.failed(error)
                    places.drop(call)
            if not calls:
                raise
        except BaseException:
            with self._changed:
                places.begin_again()
            raise

    def _passes(self) -> None:
        clock = self._executor.instrumentation.clock
        self.began = start = clock.now()
        before = self._executor.counters()
        passes: list[tuple[BatchSlots, ForwardPass]] = []
        batches = self._places.batches
        reads = len(batches) if self._adapter is None else self._adapter.knobs.reads
        first = self._count % len(batches) if reads < len(batches) else 0
        for batch in (*batches[first:], *batches[:first]):
            decode = batch.decode()
            read = batch.read(self._plan.prefill_tokens) if reads else None
            reads -= read is not None
            for run in (decode, read):
                if run is None:
                    continue
                run.name, run.workspace = f"pass {len(passes)}", self._executor.workspace
                if self._executor.activations is not None:
                    run.activations = self._executor.activations.batch(len(passes))
                passes.append((batch, run))
        alone = len(passes) == 1 and passes[0][1].ragged.is_decode
        generated = self._steps(*passes[0]) if alone else None
        if generated is not None:
            tokens = Counts(0, generated, 0, 0)
        else:
            if alone:
                passes[0][1].logit_rows = None  # no other pass will use their memory
            tokens = self._step(passes)
        spent = [after - was for after, was in zip(self._executor.counters(), before, strict=True)]
        ended = clock.now()
        stats = RoundStats(self._count, *tokens, ended - start, ended, *spent)
        self.history.append(stats)
        self._count += 1
        self._observe([run for _, run in passes], stats, generated is not None)
        if len(self.history) >= 2 * _KEPT:
            del self.history[:_KEPT]

    def _observe(self, passes: list[ForwardPass], stats: RoundStats, several: bool) -> None:
        """Let the adapter see a round; no answer is lost to what goes wrong there."""
        if self._adapter is None:
            return
        try:
            self._adapter.observe(passes, stats, several, len(self._places.calls))
        except Exception:
            logger.exception("the plan stays as it is from now on (adapt): rounds cannot be judged")
            self._adapter = None

    def _step(self, passes: list[tuple[BatchSlots, ForwardPass]]) -> Counts:
        """Do each pass once."""
        read, continued = 0, list[Continuation]()
        found = self._schedule.round([run for _, run in passes])
        for (batch, run), logits in zip(passes, found, strict=True):
            tokens, more = batch.take(run, logits)
            read, continued = read + tokens, continued + more
        if any(run.states is not None for _, run in passes):
            self._places.finish_done()
        return self._continue(continued, read)

    def _continue(self, found: list[Continuation], read: int) -> Counts:
        """Choose tokens, after a drafted one that is accepted the one that follows, too."""
        generated, drafted, accepted = 0, sum(len(draft) for _, draft in found), 0
        while found:
            generated += self._sampler.draw([rows[0] for rows, _ in found])
            self._places.finish_done()
            found = [
                Continuation(rows[1:], draft[1:])
                for rows, draft in found
                if draft and not rows[0].sequence.ended
                if rows[0].sequence.answer[-1] == draft[0]
            ]
            accepted += len(found)
        for batch in self._places.batches:
            batch.forget_rejected()
        return Counts(read, generated, drafted, accepted)

    def _steps(self, batch: BatchSlots, run: ForwardPass) -> int | None:
        """Do several steps of the only pass: how many tokens were generated; None where it cannot.

        Sequences are independent: those that go on take no notice of one whose text ends it.
        """
        if run.cache.ended is None:
            return None
        rows = batch.places(run)
        choice = self._sampler.choice(rows)
        if choice is None:
            return None
        most, noise = min(one.max_tokens - len(one.answer) for _, one in rows), None
        if choice.shapes is not None:
            most, noise = min(most, DRAWS_AHEAD), partial(self._sampler.noise, rows)
        steps = self._schedule.steps(run, choice, min(most, _TOGETHER), noise)
        if not steps:
            return None
        generated = 0
        for tokens in steps:
            for (place, sequence), token in zip(rows, tokens, strict=True):
                if not sequence.ended:
                    self._sampler.chose(place, sequence, token)
                    generated += token >= 0
            self._places.finish_done()
        return generated

"""Rounds over all sequences of an `LLM`: those of all callers, in whatever threads they are.

There is no thread of its own: of the callers that wait for answers, one computes the next round for
all of them. A caller that goes away takes its sequences with it between two rounds.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch

from qoff.budgets import device_guard
from qoff.errors import ArgumentError, ClosedError
from qoff.interrupts import check as check_interrupts
from qoff.interrupts import whole
from qoff.kernels.torch_threads import one_torch_thread
from qoff.plan import Plan
from qoff.plan.reopen import Remaining
from qoff.process import Opener
from qoff.system_memory import gpu_failed, refusals

from .adapting import Adapter
from .calls import Call
from .opened import Current, Opened
from .passes import compute
from .places import Places
from .request import Completion, Sequence
from .round_stats import RoundStats
from .schedule import Schedule

logger = logging.getLogger(__name__)
_EXIT_S = 60.0  # that the interpreter's exit waits for a round at most
_KEPT = 4096  # rounds whose numbers are kept, at least


class Rounds:
    """Admits sequences into the batches of a plan, and computes until they have their answers.

    opened: what they run on; open_plan: opens another plan when that is closed. finish: the answer
    of a sequence, if it is done. adapter: watches the rounds.
    """

    def __init__(
        self,
        opened: Opened,
        open_plan: Callable[[Plan], Opened],
        finish: Callable[[Sequence], Completion | None],
        adapter: Adapter | None = None,
    ) -> None:
        self._adapter = adapter
        self.history: list[RoundStats] = []  # of the newest thousands
        self.began: float | None = None  # the round that is computed, by `time.perf_counter`
        self._count = 0
        self.opener = Opener("this LLM", opened.executor.device.type == "cuda")
        self._closed, self._why = False, ""
        self._exits = False  # the interpreter
        # Held to look at what follows, not during a round. Reentrant: a generator may be
        # collected, and leave, at any time.
        self._changed = threading.Condition(threading.RLock())
        self._worker: int | None = None  # the thread that computes a round, if one does
        self._gone: deque[Call] = deque()
        self._sweeping = False
        self.current = Current(opened, open_plan)
        self._places = Places(opened.batches, opened.plan.share_prefixes, finish)

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
            self._changed.wait_for(lambda: self._worker is None, _EXIT_S)
            self._places.batches.clear()  # with their caches
            self._adapter = None
            self.current.end()
            self._changed.notify_all()

    def let_exit(self) -> None:
        """Wait for the round that is computed, a while; daemon threads begin no other, and wait.

        What they compute with is closed when the interpreter exits, and they end with it.
        """
        with self._changed:
            self._exits = True
            self._changed.wait_for(lambda: self._worker is None)

    @property
    def _schedule(self) -> Schedule:
        return self.current.opened.schedule

    def _check(self) -> None:
        self.opener.check()
        if self._worker == threading.get_ident():
            raise ArgumentError("an LLM cannot be called in the middle of its own round")
        if self._closed:
            raise ClosedError(f"this LLM is closed{self._why}")

    def _turn(self, ready: Callable[[], object]) -> None:
        """Compute a round as soon as no other thread does and there is something; or be `ready`."""
        me = threading.get_ident()
        self._check()
        try:
            with self._changed:
                self._changed.wait_for(
                    lambda: ready() or self._closed or (self._is_free() and self._places.calls)
                )
                if ready():
                    return
                self._check()
                self._worker = me
            self._round()
        finally:
            with whole(), self._changed:
                if self._worker == me:
                    try:
                        self._sweep()
                    finally:
                        self._worker = self.began = None
                        self._changed.notify_all()

    def _is_free(self) -> bool:
        """Whether this thread may compute a round."""
        ends = self._exits and threading.current_thread().daemon
        return self._worker is None and not ends

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
        """A round, and before or after it a change of the plan.

        An error is for all callers that have a sequence in a batch; one of CUDA, but for memory, is
        for all callers, and closes this. Where this thread is interrupted, the sequences of the
        others begin again.
        """
        check_interrupts()
        self._settle()
        places, adapter = self._places, self._adapter
        most = None if adapter is None else adapter.knobs.batches
        if adapter is not None and adapter.drains:
            most = 0
        try:
            with device_guard(self.current.opened.executor.device):
                with self._changed:
                    self._sweep()
                    places.admit(most)
                    if not places.calls or (most == 0 and not places.running):
                        return
                with torch.inference_mode(), one_torch_thread(), refusals():
                    self._compute()
        except Exception as error:
            if gpu_failed(error):
                self._end(error)
                raise
            with self._changed:
                places.forget_prefixes()
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
        self._settle()

    def _settle(self) -> None:
        """Open another plan, if one is wanted, there is work for it, and no sequence has a place.

        Where no plan can be opened any more, all callers get the error, and this is closed.
        """
        adapter = self._adapter
        with self._changed:
            self._sweep()
            if self._places.running:
                return
            if not self.current.changing:
                if adapter is None or not adapter.drains:
                    return
                plan = adapter.still(self._places.remaining())
                if plan is None:
                    return
                self.current.want(plan)
            self._places.batches = []
            self._changed.notify_all()  # whoever has all answers waits no longer
        if adapter is not None:
            adapter.let_go()
        try:
            self.current.reopen()
        except Exception as error:
            self._end(error)
            raise
        with self._changed:
            self._places.open_with(self.current.opened.batches)
        self._watched(lambda one: one.follow(self.current.opened))
        self.current.settle()

    def _end(self, error: Exception) -> None:
        """All callers get an error, and this is closed."""
        with self._changed:
            self._closed, self._why = True, f": {error}"
            calls = {*self._places.calls.values()}
            for call in calls:  # all, whatever is the matter with what they hold
                call.failed(error)
            for call in calls:
                self._places.drop(call)

    def _compute(self) -> None:
        opened, adapter = self.current.opened, self._adapter
        clock = opened.executor.instrumentation.clock
        self.began = clock.now()
        reads = len(opened.batches) if adapter is None else adapter.knobs.reads
        done = compute(opened, self._places, self._count, reads)
        self.history.append(done.stats)
        self._count += 1
        self._watched(lambda one: one.observe(done, self._remaining))
        if len(self.history) >= 2 * _KEPT:
            del self.history[:_KEPT]

    def _remaining(self) -> Remaining:
        with self._changed:
            return self._places.remaining()

    def _watched(self, call: Callable[[Adapter], object]) -> None:
        """Tell the adapter something; no answer is lost to what goes wrong there."""
        if self._adapter is None:
            return
        try:
            call(self._adapter)
        except Exception:
            logger.exception("the plan stays as it is from now on (adapt): rounds cannot be judged")
            self._adapter = None

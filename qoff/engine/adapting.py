"""Rounds that are off what is expected of them: rates are fitted again, and what can move does."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from qoff.kvcache.slots import SlotSubset
from qoff.models.forward_pass import ForwardPass
from qoff.models.modules.configs import is_native
from qoff.plan import Plan
from qoff.plan.adapt import OFF, Knobs, Load, Observed, RunningPlan
from qoff.plan.profile import MachineProfile
from qoff.plan.reopen import Better, Remaining, better_plan

from .executor import Moved
from .opened import Opened
from .passes import Round
from .rates import running_plan

logger = logging.getLogger(__name__)
_ROUNDS = 10  # one after another that are off what is expected
_LOOK_S = 10.0  # between two looks at whether another plan pays by now
_SEARCH_S = 60.0  # between two searches for another plan
_KEPT_S = 600.0  # between two changes of the plan
_LEAST_S = 5.0  # that a change saves
_WORTH = 1.2  # times as fast, to name another plan or change to it
_OTHER = 2.0  # times as many sequences, or as few, as another plan was searched for


class Adapter:
    """Watches rounds, and sets `knobs` between them.

    wanted: the plan to be opened in place of the one that is, if one is. No token depends on these,
    but where prompts share prefixes or have log-probabilities.
    """

    knobs: Knobs
    wanted: Plan | None

    def __init__(self, running: RunningPlan, opened: Opened) -> None:
        self._opened: Opened | None
        self._better: Better | None
        self._off: int  # rounds one after another; below 0: they were shorter
        self._before: dict[str, Moved]
        self._window: deque[Observed] = deque(maxlen=_ROUNDS)
        self._searched = self._changed = self._looked = float("-inf")
        self._fitted = False  # rates are others than when the LLM was opened
        self._open_ended = False  # nobody knew how much would follow when a plan was wanted
        self._places = running.plan.batches * running.plan.batch_size  # of the first plan
        self._watch(running, opened)

    @property
    def drains(self) -> bool:
        """Whether no sequence may take a place, as another plan is to be opened."""
        return self.wanted is not None

    def observe(self, done: Round, remaining: Callable[[], Remaining]) -> None:
        """Take note of a round. remaining: what is left then."""
        assert self._opened is not None
        links, stats = self._opened.executor.links(), done.stats
        load = _load(done.passes)
        before, self._before = self._before, links
        if not load.sequences and not load.reads:
            return
        steps = max(1.0, stats.generated / load.sequences) if done.several else 1.0
        seconds = stats.seconds / steps
        waits = stats.weights_wait_s + stats.kv_wait_s + stats.activations_wait_s
        moved = {
            name: (
                (now.nbytes - before[name].nbytes) / steps,
                min(seconds, (now.seconds - before[name].seconds) / steps),
            )
            for name, now in links.items()
        }
        self._window.append(Observed(load, seconds, seconds - waits / steps, moved))
        said = self._running.seconds(load, self.knobs.schedule)
        if seconds > OFF * said:
            self._off = max(0, self._off) + 1
        elif said > OFF * seconds:
            self._off = min(0, self._off) - 1
        else:
            self._off = 0
        if abs(self._off) >= _ROUNDS:
            self._adapt(said, remaining(), stats.ended)
        elif self._fitted and not self.drains and stats.ended - self._looked >= _LOOK_S:
            self._look(remaining(), stats.ended)

    def still(self, left: Remaining) -> Plan | None:
        """The plan that is wanted, now that no sequence has a place: None where it does not pay.

        left: without requests where there are none at present.
        """
        better, opened = self._better, self._opened
        if self.wanted is None or better is None or opened is None:
            return None
        if self._open_ended:
            left = replace(left, follows=math.inf)
        elif not left.there:
            return None  # until somebody comes, if so
        if better.saved(left) <= better.cost(left, self._running, self.knobs, opened.seconds):
            self.wanted = self._better = None
            logger.warning("the plan stays as it is: too little is left to do for another one")
        return self.wanted

    def let_go(self) -> None:
        """Hold nothing of what was open."""
        self._opened = None

    def follow(self, opened: Opened) -> None:
        """Watch the rounds of a plan that has taken the place of another one."""
        was, executor = self._running, opened.executor
        self._changed = executor.instrumentation.clock.now()
        running = RunningPlan(
            was.sizes,
            opened.plan,
            executor.memory,
            executor.runtime.residency,
            was.machine,
            was.dtype,
            was.beside,
        )
        self._watch(running, opened)

    def _watch(self, running: RunningPlan, opened: Opened) -> None:
        plan = running.plan
        self._running = running
        self._opened = opened
        self.knobs = Knobs(plan.schedule, plan.batches, plan.batches)
        self.wanted = self._better = None
        self._searched_for = 0  # sequences
        self._window.clear()
        self._off = 0
        self._before = opened.executor.links()

    def _adapt(self, said: float, left: Remaining, now: float) -> None:
        running, was = self._running, self.knobs
        assert self._opened is not None
        took = median(one.seconds for one in self._window)
        why = running.refit(self._window, was.schedule)
        decoding = [one.load for one in self._window if one.load.sequences]
        load = decoding[-1] if decoding else self._window[-1].load
        self.knobs = running.best(was, load, max(1, left.there))
        self._opened.schedule.kind = self.knobs.schedule
        self._off, self._fitted = 0, True
        self._window.clear()
        what = _changes(was, self.knobs) or "nothing to change at once"
        line = (
            f"rounds take {took:.3g} s, {said:.3g} were expected "
            f"({', '.join(why) or 'no rate has changed'}): {what}"
        )
        if self.wanted is not None:  # for other rates than these
            self.wanted, self._searched = None, float("-inf")
        self._better, self._searched_for = None, 0
        line += self._considered(left, now)
        changed = self.knobs != was or self._better is not None
        logger.log(logging.WARNING if changed else logging.INFO, "%s", line)

    def _look(self, left: Remaining, now: float) -> None:
        """Decide the same while rounds are as expected, with other work than before."""
        line = self._considered(left, now)
        if self.drains:
            logger.warning("rounds are as expected by now%s", line)

    def _considered(self, left: Remaining, now: float) -> str:
        """Decide whether another plan is opened; in words, where there is one to be named."""
        self._looked, running = now, self._running
        assert self._opened is not None
        known = self._searched_for
        other = not known or not known / _OTHER <= left.there <= known * _OTHER
        if other and left.there and now - self._searched >= _SEARCH_S:
            self._searched, self._searched_for = now, left.there
            few = left.open_ended and left.there < self._places  # for now: more may come
            places = self._places if few else 1
            better = better_plan(running, self.knobs, left, self._opened.beside, places)
            self._better = better if better is not None and better.gain >= _WORTH else None
        better = self._better
        if better is None:
            return ""
        plan = better.plan
        line = (
            f"; opened anew with {plan.batches} x {plan.batch_size} sequences, "
            f"{plan.kv_placement.device_fraction:.0%} of the KV cache on the device, "
            f"schedule {plan.schedule!r}, it would be {better.gain:.1f} times as fast"
        )
        if running.plan.adapt == "rounds":
            return line
        saved = better.saved(left)
        cost = better.cost(left, running, self.knobs, self._opened.seconds)
        line += f", which saves {saved:.3g} s of what is left and takes {cost:.3g} s"
        if saved < cost + _LEAST_S:
            return line
        if now - self._changed < _KEPT_S:
            return f"{line}; not within {_KEPT_S / 60:.0f} minutes of the last time"
        self.wanted, self._open_ended = plan, left.open_ended
        return f"{line}: as soon as the running sequences are done"


def adapter_of(opened: Opened, machine: MachineProfile | None = None) -> Adapter | None:
    """What watches the rounds of a plan; None where nothing moves, or nobody wants it.

    machine: by default what was measured of this one; without that, rates that most machines reach,
    until ten rounds have been.
    """
    executor = opened.executor
    if not opened.plan.adapt or not is_native(executor.runtime.checkpoint.config):
        return None
    running = running_plan(executor, machine)
    return Adapter(running, opened) if running.offloads else None


def _changes(was: Knobs, now: Knobs) -> str:
    """What is different, in words."""
    return ", ".join(
        f"{name} {getattr(now, field)}, not {getattr(was, field)}"
        for field, name in (
            ("schedule", "schedule"),
            ("batches", "batches that take sequences"),
            ("reads", "batches that read prompts in a round"),
        )
        if getattr(now, field) != getattr(was, field)
    )


def _load(passes: Sequence[ForwardPass]) -> Load:
    """What the passes of a round compute."""
    reading = [one.ragged for one in passes if isinstance(one.cache, SlotSubset)]
    decoding = [one.ragged for one in passes if not isinstance(one.cache, SlotSubset)]
    past = [span.past for ragged in decoding for span in ragged.spans]
    rows = sum(ragged.tokens for ragged in decoding)
    return Load(
        len(past),
        len(decoding),
        sum(past) // max(1, len(past)),
        len(reading),
        sum(ragged.tokens for ragged in reading) // max(1, len(reading)),
        round(rows / len(past)) - 1 if past else 0,
    )

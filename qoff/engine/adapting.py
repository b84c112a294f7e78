"""Rounds that are off what is expected of them: rates are fitted again, and what can move does."""

from __future__ import annotations

import logging
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from qoff.kvcache.slots import SlotSubset
from qoff.models.forward_pass import ForwardPass
from qoff.models.modules.configs import is_native
from qoff.plan.adapt import OFF, Knobs, Load, Observed, RunningPlan
from qoff.plan.machine import assumed_profile, kept_profile
from qoff.plan.profile import MachineProfile
from qoff.plan.sizes import ModelSizes

from .executor import Executor
from .round_stats import RoundStats
from .schedule import Schedule

logger = logging.getLogger(__name__)
_ROUNDS = 10  # one after another that are off what is expected
_SEARCH_S = 60.0  # between two searches for another plan
_WORTH = 1.2  # times as fast, to name a plan that the LLM would have to be opened with


class Adapter:
    """Watches rounds, and sets `knobs` between them.

    No token depends on these, but where prompts share prefixes or have log-probabilities.
    """

    def __init__(self, running: RunningPlan, executor: Executor, schedule: Schedule) -> None:
        plan = running.plan
        self.knobs = Knobs(plan.schedule, plan.batches, plan.batches)
        self._running, self._executor, self._schedule = running, executor, schedule
        self._window: deque[Observed] = deque(maxlen=_ROUNDS)
        self._off = 0  # rounds one after another; below 0: they were shorter
        self._before = executor.links()
        self._searched = float("-inf")

    def observe(
        self, passes: Sequence[ForwardPass], stats: RoundStats, several: bool, wanted: int
    ) -> None:
        """Take note of a round.

        several: it had as many steps as each sequence has new tokens. wanted: sequences that are
        there, those that wait included.
        """
        links = self._executor.links()
        load = _load(passes)
        before, self._before = self._before, links
        if not load.sequences and not load.reads:
            return
        steps = max(1.0, stats.generated / load.sequences) if several else 1.0
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
            self._adapt(said, wanted, stats.ended)

    def _adapt(self, said: float, wanted: int, now: float) -> None:
        running, was = self._running, self.knobs
        took = median(one.seconds for one in self._window)
        why = running.refit(self._window, was.schedule)
        decoding = [one.load for one in self._window if one.load.sequences]
        load = decoding[-1] if decoding else self._window[-1].load
        self.knobs = running.best(was, load, max(1, wanted))
        self._schedule.kind = self.knobs.schedule
        self._off = 0
        self._window.clear()
        what = _changes(was, self.knobs) or "nothing to change at once"
        line = (
            f"rounds take {took:.3g} s, {said:.3g} were expected "
            f"({', '.join(why) or 'no rate has changed'}): {what}"
        )
        if now - self._searched >= _SEARCH_S:
            self._searched = now
            better = running.reopened(self.knobs, load, max(1, wanted))
            if better is not None and better[1] >= _WORTH:
                plan, gain = better
                line += (
                    f"; opened anew with {plan.batches} x {plan.batch_size} sequences, "
                    f"{plan.kv_placement.device_fraction:.0%} of the KV cache on the device, "
                    f"schedule {plan.schedule!r}, it would be {gain:.1f} times as fast"
                )
        changed = self.knobs != was or "opened anew" in line
        logger.log(logging.WARNING if changed else logging.INFO, "%s", line)


def adapter_of(
    executor: Executor, schedule: Schedule, machine: MachineProfile | None = None
) -> Adapter | None:
    """What watches the rounds of an executor; None where nothing moves, or nobody wants it.

    machine: by default what was measured of this one; without that, rates that most machines reach,
    until ten rounds have been.
    """
    plan, runtime = executor.plan, executor.runtime
    checkpoint = runtime.checkpoint
    if not plan.adapt or not is_native(checkpoint.config):
        return None
    if machine is None:
        folder = plan.spill_folder or Path(tempfile.gettempdir())
        kept = kept_profile(executor.device, checkpoint.path, folder)
        machine = kept or assumed_profile(executor.device, folder)
    sizes = ModelSizes.of_checkpoint(checkpoint)
    running = RunningPlan(sizes, plan, executor.memory, runtime.residency, machine, executor.dtype)
    return Adapter(running, executor, schedule) if running.offloads else None


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
    return Load(
        len(past),
        len(decoding),
        sum(past) // max(1, len(past)),
        len(reading),
        sum(ragged.tokens for ragged in reading) // max(1, len(reading)),
    )

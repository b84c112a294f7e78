"""Steps of decoding that follow a recorded one: its list of jobs again, without asking for weights.

The next step of the same sequences is the same list, until one of them completes a block. What is
different is in memory, which jobs between two steps count up; they choose the tokens, too, so that
the pool's threads do several steps before they return to Python.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeAlias
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor

from qoff.errors import OpError
from qoff.interrupts import HEARD_S
from qoff.kernels.layout.distribution import Choice
from qoff.kernels.layout.ending import Ending
from qoff.kvcache import CachePass
from qoff.kvcache.slots import SlotSubset
from qoff.models.forward_pass import ForwardPass, ResidentActivations
from qoff.models.spec import DecoderSpec

from .graph_steps import StepsAhead
from .graphs import Recording, Replays

# Of a number of steps, float64 [steps, R, noise_size]: what their tokens are drawn by.
Noise: TypeAlias = Callable[[int], Tensor]


@dataclass(frozen=True)
class _Pass:
    """A recorded pass over all weights, and what its recording has the addresses of."""

    recording: ReferenceType[Recording]
    keep: object
    positions: int  # as far as its rotary tables go


class Following:
    """Steps that follow the last pass on a cache, if that is a recorded one.

    ending: what makes logits of what recordings leave.
    """

    def __init__(self, spec: DecoderSpec, replays: Replays, ending: Ending) -> None:
        self._spec, self._replays, self._ending = spec, replays, ending
        self._passes = WeakKeyDictionary[CachePass, _Pass]()  # caches may outlive weights
        self._step_s = 0, math.inf  # what a step of so many rows took last

    def note(self, run: ForwardPass, key: Hashable, keep: object) -> None:
        """A pass is done whose recording, if it is one, has this key."""
        cached, recording = run.cached, self._replays.find(key, run.tokens)
        counters = [] if cached is None else cached.counters()
        if cached is None or recording is None or not counters:
            return
        if recording.steps is None:
            recording.steps = self._replays.steps_after(recording, counters, self._ending)
        tables = [len(table[0]) for table in run.rotary if table is not None]
        keep = keep, run.workspace, run.rotary, run.positions, run.chosen
        self._passes[cached] = _Pass(ref(recording), keep, min(tables, default=sys.maxsize))

    def logits(self, run: ForwardPass) -> Tensor | None:
        """Do a step: what its recording leaves, [R, vocab_size]; None, and nothing is done, if it
        cannot.

        Raises OpError for tokens that are not there.
        """
        following = self._next(run)
        if following is None:
            return None
        steps, cached, _ = following
        self._go_on(run, steps, cached)
        if not steps.step():
            cached.advance(0)
            return None
        self._done(run, cached, 1)
        return steps.logits

    def tokens(
        self, run: ForwardPass, choice: Choice, most: int, noise: Noise | None = None
    ) -> list[list[int]]:
        """Do up to `most` steps, each with the tokens that were chosen before it.

        Those chosen after each, one of each row; none, and nothing is done, if it cannot. It is as
        many steps as take `HEARD_S`; noise: of so many. The rest is as for `Steps.tokens`.
        Raises OpError for tokens that are not there.
        """
        following, rows = self._next(run), len(run.tokens)
        if following is None or not following[0].chooses(choice):
            return []
        steps, cached, ahead = following
        of, seconds = self._step_s
        in_time = max(1, int(HEARD_S / seconds)) if of == rows else 1
        if steps.overshoots and not cached.takes_back:
            in_time = 1
        count = min(most, ahead, in_time)
        drawn_by = None if noise is None else noise(count)
        start = time.perf_counter()
        self._go_on(run, steps, cached)
        found = steps.tokens(choice, count, drawn_by)
        if found:
            self._step_s = rows, (time.perf_counter() - start) / len(found)
            self._done(run, cached, len(found))
        else:
            cached.advance(0)
        return found

    def _next(self, run: ForwardPass) -> tuple[StepsAhead, CachePass, int] | None:
        """What follows the last pass, and how often."""
        cache, cached = run.cache, run.cache.ended
        last = None if cached is None else self._passes.get(cached)
        recording = None if last is None else last.recording()
        steps = None if recording is None else recording.steps
        if cached is None or last is None or steps is None or isinstance(cache, SlotSubset):
            return None
        longest, limit = run.ragged.longest, self._spec.position_limit
        ahead = min(cached.steps_ahead(run.ragged), last.positions - longest)
        if ahead < 1 or not isinstance(run.activations, ResidentActivations):
            return None
        self._spec.check_positions(longest + 1)
        check_ids(run.tokens, self._spec.vocab_size)
        return steps, cached, ahead if limit is None else min(ahead, limit - longest)

    def _go_on(self, run: ForwardPass, steps: StepsAhead, cached: CachePass) -> None:
        """Steps are about to be computed: until they are done, the cache forgets what ended."""
        assert not isinstance(run.cache, SlotSubset)
        run.cache.ended = None
        steps.put(run.tokens)
        cached.going_on()

    def _done(self, run: ForwardPass, cached: CachePass, count: int) -> None:
        self._replays.replayed += count
        cached.advance(count)
        assert not isinstance(run.cache, SlotSubset)
        run.cache.ended = cached


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """Raise OpError for tokens there are not; those on a GPU are not waited for."""
    if ids.is_cuda or not len(ids):
        return
    numbers = ids.tolist()
    low, high = min(numbers), max(numbers)
    if not 0 <= low <= high < vocab_size:
        raise OpError(f"tokens are 0 to {vocab_size - 1}, not {low} to {high}")

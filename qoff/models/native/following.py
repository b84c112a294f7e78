"""Steps of decoding that follow a recorded one: its list of jobs again, without asking for weights.

The next step of the same sequences is the same list, until one of them completes a block. What is
different is in memory, which jobs between two steps count up; they choose the tokens, too, so that
the pool's threads do several steps before they return to Python.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.distribution import Choice
from qoff.kernels.ops import WorkReplay
from qoff.kvcache import CachePass
from qoff.memory import Weights
from qoff.models.forward_pass import ForwardPass, LayerWorkspace, ResidentActivations
from qoff.models.spec import DecoderSpec

from .graphs import Replays

if TYPE_CHECKING:
    from qoff.kernels.cpu.steps import Counting

TOGETHER_S = 0.025  # that steps take before tokens are seen and signals are heard


@dataclass(frozen=True)
class Recorded:
    """What a recorded pass over all weights is told; `key` stands for it."""

    key: Hashable
    weights: Sequence[Weights]
    workspace: LayerWorkspace | None
    rotary: Sequence[tuple[Tensor, Tensor] | None]
    positions: Tensor | None


@dataclass(frozen=True)
class _Next:
    """How the steps after a recorded pass are done."""

    cached: CachePass
    counting: Counting
    x: Tensor  # where their tokens are put, int64 [R]
    logits: Tensor  # float32 [R, vocab_size]
    replay: WorkReplay
    most: int  # steps


class Following:
    """Steps that follow the last pass on a cache, if that is a recorded one."""

    def __init__(self, spec: DecoderSpec, replays: Replays) -> None:
        self._spec, self._replays = spec, replays
        # Caches may outlive weights.
        self._recorded: WeakKeyDictionary[CachePass, tuple[Recorded, Counting]] = (
            WeakKeyDictionary()
        )
        self._step_s = 0, math.inf  # what a step of so many rows took last

    def note(self, cached: CachePass, recorded: Recorded) -> None:
        """A pass is computed that may be recorded, and followed."""
        if numbers := cached.counters():
            from qoff.kernels.cpu.steps import Counting  # compiled when it is imported

            self._recorded[cached] = recorded, Counting(numbers)

    def logits(self, run: ForwardPass) -> Tensor | None:
        """Do a step: its logits, float32 [R, vocab_size]; None, and nothing is done, if it cannot.

        Raises OpError for tokens that are not there.
        """
        step = self._next(run)
        if step is None:
            return None
        from qoff.kernels.cpu.steps import next_step

        if not next_step(step.replay, step.counting):
            return None
        self._done(run, step, 1)
        return step.logits

    def tokens(self, run: ForwardPass, choice: Choice, most: int) -> list[list[int]]:
        """Do up to `most` steps, each with the tokens that were chosen before it.

        Those chosen after each, one of each row; none, and nothing is done, if it cannot. It is as
        many steps as take `TOGETHER_S`. A token that ends an answer is in the last one, as is -1,
        where logits are not finite. Raises OpError for tokens that are not there.
        """
        step, rows = self._next(run), len(run.tokens)
        if step is None:
            return []
        from qoff.kernels.cpu.steps import next_tokens

        of, seconds = self._step_s
        in_time = max(1, int(TOGETHER_S / seconds)) if of == rows else 1
        most = min(most, step.most, in_time)
        start = time.perf_counter()
        found = next_tokens(step.replay, step.counting, step.x, step.logits, choice, most)
        if found:
            self._step_s = rows, (time.perf_counter() - start) / len(found)
            self._done(run, step, len(found))
        return found

    def _next(self, run: ForwardPass) -> _Next | None:
        """What follows the last pass; the cache forgets that pass until the steps are done."""
        cached = run.cache.ended
        noted = None if cached is None else self._recorded.get(cached)
        if cached is None or noted is None or not isinstance(run.activations, ResidentActivations):
            return None
        recorded, counting = noted
        place = self._replays.find(recorded.key, run.tokens)
        longest, limit = run.ragged.longest, self._spec.position_limit
        rows = [len(table[0]) for table in recorded.rotary if table is not None]
        most = min([cached.steps_ahead(run.ragged), *(n - longest for n in rows)])
        if place is None or most < 1:
            return None
        self._spec.check_positions(longest + 1)
        check_ids(run.tokens, self._spec.vocab_size)
        run.cache.ended = None
        place[0].copy_(run.tokens)
        most = most if limit is None else min(most, limit - longest)
        return _Next(cached, counting, *place, most)

    def _done(self, run: ForwardPass, step: _Next, count: int) -> None:
        self._replays.replayed += count
        step.cached.advance(count)
        run.cache.ended = step.cached


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """Raise OpError for tokens there are not; those on a GPU are not waited for."""
    if ids.is_cuda or not len(ids):
        return
    numbers = ids.tolist()
    low, high = min(numbers), max(numbers)
    if not 0 <= low <= high < vocab_size:
        raise OpError(f"tokens are 0 to {vocab_size - 1}, not {low} to {high}")

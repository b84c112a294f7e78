"""Rounds of a plan in virtual time, in the middle of its workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import torch

from qoff.engine.executor import Executor
from qoff.engine.schedule import Schedule
from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kernels.layout.ragged import Ragged
from qoff.kvcache import DeviceCache
from qoff.kvcache.slots import SlotCache
from qoff.memory.io.virtual import VirtualClock
from qoff.models.forward_pass import ForwardPass
from qoff.plan import Plan
from qoff.plan.certify import Certified, Forecast
from qoff.plan.profile import MachineProfile
from qoff.plan.sizes import ModelSizes
from qoff.plan.workload import Workload

from .executor import open_simulated
from .machine import VirtualMachine

_WARM, _MEASURED = 1, 2  # rounds


@dataclass(frozen=True)
class SimulatedRound:
    """A round: seconds, those that processors computed, and bytes by link."""

    seconds: float
    computed_s: float
    bytes: Mapping[str, float]


class Simulation:
    """A plan opened in virtual time. Close it, or use it as a context manager.

    Raises as `Executor` does.
    """

    def __init__(self, sizes: ModelSizes, plan: Plan, profile: MachineProfile) -> None:
        self.plan = plan
        self.clock = VirtualClock()
        self.machine = VirtualMachine(profile, self.clock)
        self._own = ExitStack()
        try:
            self.executor: Executor = open_simulated(
                sizes.checkpoint, plan, self.machine, self._own
            )
            runtime, hooks = self.executor.runtime, self.executor.instrumentation
            self.schedule = Schedule(runtime.decoder, runtime.store, plan.schedule, hooks)
            self._caches = [self.executor.new_cache() for _ in range(plan.batches)]
        except BaseException:
            self._own.close()
            raise

    def decode(self, sequences: int, tokens: int, expected: int) -> SimulatedRound:
        """A round in which so many sequences get a token; they have `tokens` on average.

        expected: tokens that each will have. Blocks are completed in turn, as if sequences had
        begun at different times.
        """
        each = _shared_out(sequences, len(self._caches))
        for cache, count in zip(self._caches, each, strict=True):
            for slot in range(count):
                shift = slot * BLOCK_TOKENS // max(1, count) - BLOCK_TOKENS // 2
                _remember(cache, slot, max(1, tokens + shift), expected)

        def passes() -> list[ForwardPass]:
            return [
                _pass(cache, None, [1] * count)
                for cache, count in zip(self._caches, each, strict=True)
                if count
            ]

        return self._measured(lambda number: passes())

    def prefill(self, passes: int, pieces: int, tokens: int, past: int) -> SimulatedRound:
        """A round in which so many batches read `pieces` pieces of prompts, of `tokens` each.

        past: tokens of each prompt that were read before.
        """

        def begun(number: int) -> list[ForwardPass]:
            slots = list(range(pieces))
            for cache in self._caches[:passes]:
                for slot in slots:
                    _remember(cache, slot, past, past + tokens)
            return [_pass(cache, slots, [tokens] * pieces) for cache in self._caches[:passes]]

        return self._measured(begun)

    def _measured(self, passes: object) -> SimulatedRound:
        assert callable(passes)
        for number in range(_WARM):
            self.round(passes(number))
        start, computed = self.clock.now(), self.machine.computed_s
        before = dict(self.machine.bytes)
        for number in range(_MEASURED):
            self.round(passes(_WARM + number))
        moved = {
            link: (now - before[link]) / _MEASURED for link, now in self.machine.bytes.items()
        }
        return SimulatedRound(
            (self.clock.now() - start) / _MEASURED,
            (self.machine.computed_s - computed) / _MEASURED,
            moved,
        )

    def round(self, passes: Sequence[ForwardPass]) -> None:
        """Do each pass once."""
        for number, run in enumerate(passes):
            run.name, run.workspace = f"pass {number}", self.executor.workspace
            if self.executor.activations is not None:
                run.activations = self.executor.activations.batch(number)
        with torch.inference_mode():
            self.schedule.round(passes)

    def close(self) -> None:
        """Let go of everything; may be repeated."""
        self._caches.clear()
        self._own.close()

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def simulated(
    found: Certified, sizes: ModelSizes, machine: MachineProfile, workload: Workload
) -> Certified:
    """The same plan with the seconds of its rounds in virtual time."""
    places = found.plan.batch_size * found.plan.batches
    alike = found.decode.tokens / max(1.0, found.decode.rounds)
    active = max(1, min(places, round(alike)))
    prompt, answer = workload.prompt.mean, workload.answer.mean
    passes = min(found.plan.batches, max(1, round(active / found.plan.batch_size)))
    tokens = min(found.plan.prefill_tokens, int(prompt))
    pieces = max(1, min(found.plan.batch_size, found.plan.prefill_tokens // tokens))
    past = int(prompt - tokens) // 2
    with Simulation(sizes, found.plan, machine) as run:
        decode = run.decode(active, int(prompt + answer / 2), int(prompt + answer))
    with Simulation(sizes, found.plan, machine) as run:
        prefill = run.prefill(passes, pieces, tokens, past)
    read = passes * pieces * tokens
    rounds = found.prefill.tokens * (1 - workload.shared) / read
    return replace(
        found,
        prefill=_timed(found.prefill, prefill, rounds),
        decode=_timed(found.decode, decode, found.decode.rounds),
    )


def _timed(phase: Forecast, one: SimulatedRound, rounds: float) -> Forecast:
    return replace(phase, seconds=one.seconds, rounds=rounds)


def _shared_out(count: int, among: int) -> list[int]:
    return [int(n) for n in np.diff(np.linspace(0, count, among + 1).round())]


def _remember(cache: SlotCache, slot: int, tokens: int, expected: int) -> None:
    """Let a slot have a sequence of so many tokens, whatever it had."""
    cache.reset(slot, expected)
    count = cache.blocks_of(tokens, cache.window, cache.sinks)
    owner = cache.first_owner + slot
    blocks = cache.store.allocate(range(count), cache.expected[slot], owner)
    if isinstance(cache, DeviceCache):  # whose tables are told
        cache.adopt(slot, blocks)
        cache.store.release(blocks)
    else:
        cache.blocks[slot] = blocks
    cache.lengths[slot] = tokens


def _pass(cache: SlotCache, slots: Sequence[int] | None, counts: Sequence[int]) -> ForwardPass:
    """New tokens of the first sequences, or of those in some slots."""
    numbers = range(len(counts)) if slots is None else slots
    ragged = Ragged.of(counts, [cache.lengths[slot] for slot in numbers])
    tokens = torch.zeros(sum(counts), dtype=torch.int64)
    return ForwardPass(
        tokens, ragged, cache if slots is None else cache.subset(slots), ragged.last_rows
    )

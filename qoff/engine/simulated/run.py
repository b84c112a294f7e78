"""Rounds of a plan in virtual time, in the middle of its workload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from qoff.engine.executor import Executor
from qoff.engine.schedule import Schedule
from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kernels.layout.ragged import Ragged
from qoff.kvcache import DeviceCache, PackedCache
from qoff.kvcache.slots import SlotCache
from qoff.memory.arena import PAGE, round_up
from qoff.memory.io.virtual import VirtualClock
from qoff.models.forward_pass import ForwardPass
from qoff.plan import Plan
from qoff.plan.calls import as_used
from qoff.plan.certify import Certified
from qoff.plan.native_sizes import NativeSizes
from qoff.plan.profile import MachineProfile
from qoff.plan.workload import Workload
from qoff.process import uncollected

from .executor import open_simulated
from .experts import Router, warm
from .machine import OnMachine, VirtualMachine

_CHUNKS = 8  # reads of a layer, where it is not small


@dataclass(frozen=True)
class SimulatedRound:
    """A round: seconds, those that processors computed, and bytes by link."""

    seconds: float
    computed_s: float
    bytes: Mapping[str, float]


class Driver:
    """Rounds of a plan's passes on an executor, with sequences as long as one says.

    A simulation computes them in virtual time; a test, with real weights, beside it.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor, runtime = executor, executor.runtime
        hooks, plan = executor.instrumentation, executor.plan
        self._schedule = Schedule(runtime.decoder, runtime.store, plan.schedule, hooks)
        self._caches = [executor.new_cache() for _ in range(plan.batches)]

    def begin(self, sequences: int, tokens: int, expected: int) -> None:
        """Have so many sequences, of `tokens` tokens on average, that will have `expected`.

        They complete blocks in turn, as if they had begun at different times.
        """
        each = np.diff(np.linspace(0, sequences, len(self._caches) + 1).round()).astype(int)
        for cache, count in zip(self._caches, each, strict=True):
            for slot in range(cache.sequences):
                shift = int((slot + 0.5) * BLOCK_TOKENS / max(1, count)) - BLOCK_TOKENS // 2
                held = max(1, tokens + shift) if slot < count else 0
                _remember(cache, slot, held, expected)

    def decode(self) -> None:
        """A round in which each sequence gets a token."""
        passes = []
        for cache in self._caches:
            counts = [1 for length in cache.lengths if length]
            if counts:
                passes.append(_pass(cache, None, counts))
        self._round(passes, reads=False)

    def read(self, passes: int, pieces: int, tokens: int, past: int) -> None:
        """A round in which so many batches read `pieces` pieces of prompts, of `tokens` each.

        past: tokens of each prompt that were read before.
        """
        slots = list(range(pieces))
        for cache in self._caches[:passes]:
            for slot in slots:
                _remember(cache, slot, past, past + tokens)
        self._round(
            [_pass(cache, slots, [tokens] * pieces) for cache in self._caches[:passes]], True
        )

    def _round(self, passes: Sequence[ForwardPass], reads: bool) -> None:
        for number, run in enumerate(passes):
            run.name, run.workspace = f"pass {number}", self.executor.workspace
            if self.executor.activations is not None:
                run.activations = self.executor.activations.of_pass(2 * number + reads)
        with torch.inference_mode():
            self._schedule.round(passes)


class Simulation(OnMachine):
    """A plan opened in virtual time.

    router: says what tokens choose of a mixture. Raises as `Executor` does.
    """

    def __init__(
        self,
        sizes: NativeSizes,
        plan: Plan,
        profile: MachineProfile,
        router: Router | None = None,
    ) -> None:
        largest = max(file.nbytes for file in sizes.checkpoint.layers)
        chunk = max(1 << 20, round_up(largest // _CHUNKS, PAGE))
        used = as_used(profile, sizes, plan.activations)
        super().__init__(VirtualMachine(used, VirtualClock(), chunk))
        try:
            self.executor = open_simulated(sizes.checkpoint, plan, self.machine, self._own, router)
            self.driver = Driver(self.executor)
            self.machine.loading = False
        except BaseException:
            self.close()
            raise

    def measured(self, one_round: Callable[[], None]) -> SimulatedRound:
        """What a round takes, when one like it was before."""
        one_round()
        machine = self.machine
        start, computed, before = machine.clock.now(), machine.computed_s, dict(machine.bytes)
        one_round()
        moved = {link: float(now - before[link]) for link, now in machine.bytes.items()}
        return SimulatedRound(machine.clock.now() - start, machine.computed_s - computed, moved)

    def warm(self, router: Router, sequences: int) -> None:
        """Let so many sequences have decoded before, as far as experts are concerned."""
        self.machine.loading = True
        warm(self.executor.runtime.store, router, sequences)
        self.machine.loading = False


def simulated(
    found: Certified, sizes: NativeSizes, machine: MachineProfile, workload: Workload
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
    experts = sizes.spec.experts
    router = None if experts is None else Router(experts, workload.routes)
    # What looks for garbage would go through all of a model's entries.
    with uncollected(), Simulation(sizes, found.plan, machine, router) as run:
        driver = run.driver
        if router is not None:
            run.warm(router, active)
        prefill = run.measured(lambda: driver.read(passes, pieces, tokens, past))
        if router is not None:
            run.warm(router, active)
        driver.begin(active, int(prompt + answer / 2), int(prompt + answer))
        decode = run.measured(driver.decode)
    read = passes * pieces * tokens
    rounds = found.prefill.tokens * (1 - workload.shared) / read
    return replace(
        found,
        prefill=replace(found.prefill, seconds=prefill.seconds, rounds=rounds),
        decode=replace(found.decode, seconds=decode.seconds),
    )


@torch.inference_mode()  # as passes are, in which tables may have grown
def _remember(cache: SlotCache, slot: int, tokens: int, expected: int) -> None:
    """Let a slot have a sequence of so many tokens, whatever it had; 0: none."""
    cache.reset(slot, expected)
    assert isinstance(cache, PackedCache | DeviceCache)
    count = cache.blocks_of(tokens, cache.window, cache.sinks)
    for group in cache.groups:
        group.add(slot, group.make(slot, count, tokens, cache.expected[slot]))
    cache.lengths[slot] = tokens
    if isinstance(cache, DeviceCache):
        cache.tell_tables(slot)


def _pass(cache: SlotCache, slots: Sequence[int] | None, counts: Sequence[int]) -> ForwardPass:
    """New tokens of the first sequences, or of those in some slots."""
    numbers = range(len(counts)) if slots is None else slots
    ragged = Ragged.of(counts, [cache.lengths[slot] for slot in numbers])
    tokens = torch.zeros(sum(counts), dtype=torch.int64)
    return ForwardPass(
        tokens, ragged, cache if slots is None else cache.subset(slots), ragged.last_rows
    )

"""ExpertCache: the experts of all layers that tokens chose, in slots of one size.

A pass asks for the experts that its tokens chose of a layer. What is not there is read, all of it
at once as far as there are slots, and comes back in waves: what is there, then what has come, until
the pass has had them all. Slots that nobody needs take guesses of the next layer's experts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError
from qoff.kernels.layout.qexperts import QExperts
from qoff.kernels.repack import repack_experts
from qoff.memory.arena import Arena
from qoff.memory.io.transfers import Transfers
from qoff.memory.load import FileChecks
from qoff.memory.plan import ChosenExperts, Residency, Unit
from qoff.memory.plan.experts import expert_units, layer_experts

from .host import HostSlots
from .moves import ExpertMoves, MakeMoves
from .on_cpu import CpuExperts
from .passing import PassingExperts
from .policy import Keys, NextUse, Policy
from .state import AGE, FEW, LEAST_ACCURACY, NEARLY_ALL, CacheState
from .stats import ExpertStats
from .trial import GuessTrial, Mark
from .wave import ExpertWave, bias_memory


class ExpertCache:
    """The experts of a checkpoint in the slots that a residency has for them.

    Those of `sources` are copied from host memory, the others read from disk, and their files
    checked once unless `checks` knows them. What leaves the device may stay in slots in host memory
    (`HostSlots`), and comes from there again. Those `on_cpu` have no slots here: where they are
    asked for, they pass through the device (`PassingExperts`). For one pass, or round of passes, at
    a time. record: lists the layer and the experts of every request for others. repack: as
    `kernels.repack.repack_experts`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        residency: Residency,
        arena: Arena,
        host_arena: Arena,
        sources: Mapping[Unit, Tensor],
        transfers: Transfers,
        checks: FileChecks,
        make_moves: MakeMoves = ExpertMoves,
        repack: Callable[[QExperts, QExperts], None] = repack_experts,
    ) -> None:
        self._layers = layer_experts(checkpoint, residency.packing)
        self.counts = [some.count for some in self._layers]
        count, size = residency.expert_slots, residency.expert_bytes
        in_host = residency.host_expert_slots
        self._memory = arena.alloc(count * size, "slots for experts").view(count, size)
        self._bias = arena.alloc(count * residency.expert_bias_bytes, "biases of experts")
        self.policy: Policy = NextUse(self.counts)
        self._host = HostSlots(in_host, self.policy)
        self.record: list[tuple[int, tuple[int, ...]]] | None = None
        self.wait_s = 0.0  # that `acquire` waited
        experts = expert_units(self._layers)
        self._clock, self._reader = transfers.clock, transfers.reader
        self.trial = GuessTrial()
        self.wanted = 0  # experts that passes asked for
        self._sure = False  # nearly all of the next layer are guessed, so most are right
        self._surely = 0  # guesses so far of which that was so
        self.moves = make_moves(
            self._layers,
            experts,
            self._memory,
            host_arena.alloc(in_host * size, "slots for experts").view(in_host, size),
            sources,
            transfers,
            checks,
        )
        sizes = [some.nbytes if some.count else 0 for some in self._layers]
        self.now = CacheState(count, self.counts, sizes)
        self._stays = np.array([one in sources for one in experts], dtype=bool)  # in host memory
        self.on_cpu: CpuExperts | None = None
        self._comes = np.ones(len(experts), dtype=bool)
        if residency.cpu_experts:
            self._comes = np.array([one not in residency.cpu_experts for one in experts])
            self.on_cpu = CpuExperts(checkpoint, residency, host_arena, transfers)
        self.passing: PassingExperts | None = None
        if residency.passing and self.on_cpu is not None:
            self.passing = PassingExperts(
                self._layers, self.on_cpu, residency, arena, transfers, repack
            )
        self._matrices: dict[int, tuple[QExperts, QExperts, tuple[Tensor, Tensor]]] = {}
        self._lock = threading.Lock()
        self.closed = False
        self.jobs: Any = None  # `jobs.ExpertJobs`, once somebody asked for them

    @property
    def stats(self) -> ExpertStats:
        computed = self.on_cpu.pairs if self.on_cpu else 0
        passed, nbytes = 0, self.now.counted["bytes"]
        if self.passing is not None:
            passed, nbytes = self.passing.passed, nbytes + self.passing.nbytes
        counted = {**self.now.counted, "bytes": nbytes}
        return ExpertStats(saved=self._host.saved, on_cpu=computed, passed=passed, **counted)

    def acquire(self, chosen: ChosenExperts) -> ExpertWave:
        """Some of the experts, one at least of any, that stay where they are until `release`.

        Waits if none is there. Raises what went wrong in reading them, ArgumentError when closed.
        """
        chosen, passing = self._apart(chosen)
        if passing:
            with self._lock:
                wave = self._pass(chosen, passing)
            if wave is not None:
                return wave
        numbers, found = self.bring(chosen)
        table = np.full(self.counts[chosen.layer], -1)
        table[numbers] = found
        matrices = self.of_layer(chosen.layer)
        return ExpertWave(tuple(numbers.tolist()), torch.from_numpy(table), *matrices)

    def bring(self, chosen: ChosenExperts) -> tuple[Keys, Keys]:
        """As `acquire`: the numbers of experts, and their slots."""
        first = int(self.policy.first[chosen.layer])
        wanted = first + np.array(chosen.numbers, dtype=np.int64)
        with self._lock:
            if self.closed:
                raise ArgumentError("the weight store is closed")
            self._note(chosen, wanted)
            self._start(wanted)
            start = self._clock.now()
            try:
                found = self._arrived(wanted)
            finally:
                self.wait_s += self._clock.now() - start
            self.trial.arrived(self.mark)
            self.now.fixed[found] = True
        numbers = self.now.keys[found] - first
        self.now.waiting = (chosen.layer, frozenset(chosen.numbers).difference(numbers.tolist()))
        return numbers, found

    def release(self, wave: ExpertWave) -> None:
        """Give a wave back; guesses that had no room are then read into what is free."""
        with self._lock:
            if self.closed:
                return
            if wave.passing:
                assert self.passing is not None
                self.passing.release()
                return
            table = wave.table.numpy()
            self.now.fixed[table[table >= 0]] = False
            if self.now.unread and not self.now.waiting[1]:  # nothing is left to wait for
                self._start(self.now.slots[:0])

    def close(self) -> None:
        """Forget everything; the transfers then stop what is under way."""
        self.closed = True
        self._matrices.clear()
        self.now.free.clear()
        if self.passing:
            self.passing.close()
        if self.on_cpu:
            self.on_cpu.close()

    def _apart(self, chosen: ChosenExperts) -> tuple[ChosenExperts, list[int]]:
        """What comes to slots, and the CPU's experts, which pass through the device."""
        if self.on_cpu is None or chosen.layer not in self.on_cpu.layers:
            return chosen, []
        on_cpu = self.on_cpu.layers[chosen.layer].table >= 0
        passing = [number for number in chosen.numbers if on_cpu[number]]
        own = tuple(number for number in chosen.numbers if not on_cpu[number])
        return replace(chosen, numbers=own), passing

    def _pass(self, own: ChosenExperts, numbers: list[int]) -> ExpertWave | None:
        """A group of the CPU's experts; None where others are there, which are computed first."""
        if self.closed:
            raise ArgumentError("the weight store is closed")
        assert self.passing is not None
        self.passing.ask(own.layer, numbers)
        if own.numbers:
            wanted = int(self.policy.first[own.layer]) + np.array(own.numbers, dtype=np.int64)
            self._note(own, wanted)
            self._start(wanted)
            self.now.waiting = (own.layer, frozenset(own.numbers))
            slots = self.now.slots[wanted]
            slots = slots[slots >= 0]
            if (self.now.came[slots] | self.moves.done(slots)).any():
                return None
        start = self._clock.now()
        try:
            return self.passing.next(own.layer, numbers)
        finally:
            self.wait_s += self._clock.now() - start

    def _note(self, chosen: ChosenExperts, wanted: Keys) -> None:
        """Count a request that is not for what is left of the last one."""
        layer, left = self.now.waiting
        asks_on = bool(left) or not chosen.numbers  # a pass may ask for none, as others compute
        if layer == chosen.layer and asks_on and left.issuperset(chosen.numbers):
            return
        chosen_now = np.zeros(len(self.now.slots), dtype=bool)  # by key
        chosen_now[wanted] = True
        self._judge_guesses(chosen_now)
        self._drop_guesses(chosen_now)
        if chosen.layer <= layer:
            self.begin_pass()
        self.wanted += len(wanted)
        self.policy.use(chosen.layer, wanted)
        if self.record is not None:
            self.record.append((chosen.layer, chosen.numbers))
        guesses = self._guesses(chosen)
        self.now.guesses = guesses[self._comes[guesses]]
        self.now.doubtful = self._missing(self.now.guesses)
        self._count(guesses=len(self.now.doubtful))
        self._sure = len(guesses) > 0 and self._nearly_all(self._layer_of(guesses), len(guesses))
        self._surely += len(self.now.doubtful) * self._sure

    def begin_pass(self) -> None:
        """Decide whether a pass reads the guesses of routers."""
        nbytes, seconds = self._reader.delivered
        each = float(self.now.nbytes.max()) * seconds / nbytes if nbytes else 0.0
        self.trial.begin(self.mark, each)

    @property
    def mark(self) -> Mark:
        """Where the passes are."""
        counted = self.now.counted
        guesses = counted["guesses"] - self._surely
        return Mark(self._clock.now(), self.wanted - counted["hits"], guesses)

    def _guesses(self, chosen: ChosenExperts) -> Keys:
        """What the next layer may want, the likeliest first."""
        first = self.policy.first
        if chosen.guesses:
            return np.array([int(first[one.layer]) + one.number for one in chosen.guesses])
        if not self._nearly_all(chosen.layer, len(chosen.numbers)):
            return self.now.guesses[:0]
        layers = [*range(chosen.layer + 1, len(self.counts)), *range(chosen.layer)]
        layer = next((layer for layer in layers if self.counts[layer]), None)
        return self.now.guesses[:0] if layer is None else np.arange(*first[layer : layer + 2])

    def _nearly_all(self, layer: int, count: int) -> bool:
        """Whether so many are most of the experts that may come of a layer."""
        return count >= NEARLY_ALL * int(self._comes[slice(*self.policy.first[layer:][:2])].sum())

    def _layer_of(self, keys: Keys) -> int:
        return int(self.policy.layer[keys[0]])

    def _drop_guesses(self, wanted: NDArray[np.bool_]) -> None:
        """Do not read the guesses that are known to be wrong and wait for their turn."""
        slots = self.now.slots[self.now.guesses]
        slots = slots[slots >= 0]
        slots = slots[~self.now.came[slots]]
        slots = slots[~wanted[self.now.keys[slots]]]
        slots = slots[self.moves.waits(slots)]
        if not len(slots):
            return
        for slot in slots.tolist():
            self.moves.abandon(slot)
        nbytes, guessed = (
            int(self.now.nbytes[self.now.keys[slots]].sum()),
            int(self.now.guessed[slots].sum()),
        )
        self._leave(slots)
        self._count(guessed=-guessed, wrong=-guessed, misses=guessed - len(slots), bytes=-nbytes)

    def _judge_guesses(self, wanted: NDArray[np.bool_]) -> None:
        """Compare the guesses of the layer before with what the router chose."""
        if not len(self.now.doubtful):
            return
        right = int(wanted[self.now.doubtful].sum())
        self.now.accuracy += AGE * (right / len(self.now.doubtful) - self.now.accuracy)
        self._count(right=right)
        self.now.doubtful = self.now.doubtful[:0]

    def _count(self, **more: int) -> None:
        for name, count in more.items():
            self.now.counted[name] += count

    def _missing(self, keys: Keys) -> Keys:
        """Those of experts that are neither here nor on their way."""
        return keys[self.now.slots[keys] < 0]

    def _start(self, wanted: Keys) -> None:
        """Start to read what is wanted and not under way, and guesses, as far as there is room."""
        if self.now.given_up >= 0:  # by a `_give_up` that was interrupted
            self._leave(np.array([self.now.given_up]))
        coming = self.now.slots[wanted]
        coming = coming[coming >= 0]
        coming = coming[~self.now.came[coming]]
        if len(coming):
            self.moves.hurry(coming)
        missing, guesses = self._missing(wanted), self.now.guesses[:0]
        if self.now.accuracy >= LEAST_ACCURACY and (self._sure or self.trial.reads):
            guesses = self._missing(self.now.guesses)
        count = len(missing) + len(guesses)
        self.now.unread = False
        if not count:
            return
        self._make_room(count, np.concatenate([wanted, self.now.guesses]))
        if len(self.now.free) < len(missing):
            self._make_room(len(missing), wanted)
            guesses = guesses[:0]
            if len(missing) == len(wanted) and not self.now.free:
                self._give_up()
        self.now.unread = len(self.now.free) < count
        self._read(np.concatenate([missing, guesses]), len(missing))

    def _make_room(self, count: int, kept: Keys) -> None:
        """Have `count` slots free, as far as nobody needs what is in them."""
        count -= len(self.now.free)
        if count <= 0:
            return
        self._unfix()
        may = (self.now.keys >= 0) & ~self.now.fixed
        held = self.now.slots[kept]
        may[held[held >= 0]] = False
        slots = np.flatnonzero(may)
        if len(slots):
            self._leave(slots[self.policy.leaving(self.now.keys[slots], min(count, len(slots)))])

    def _unfix(self) -> None:
        """Let leave what has been read, also where the pass that asked for it does so no more."""
        reading = self.now.reading
        came = self.now.came[reading]
        done = came | self.moves.done(reading)
        self.now.fixed[reading[done & ~came]] = False  # else waves that have it hold it
        self.now.reading = reading[~done]

    def _leave(self, slots: Keys) -> None:
        came, keys = self.now.came[slots], self.now.keys[slots]
        if not came.all():
            self.moves.settle(slots[~came])
        if self._host.count:
            kept = np.flatnonzero(came & ~self._stays[keys])
            leaving = slots[kept].tolist()
            # This waits, and may end early: nothing has left until all are saved.
            self._host.keep(keys[kept], lambda place, host: self.moves.save(leaving[place], host))
            self._host.put_back(keys, self.now.hosts[slots])
        self._count(wrong=int((self.now.guessed[slots] & ~came).sum()))
        self.now.slots[keys] = -1
        self.now.keys[slots] = self.now.hosts[slots] = -1
        self.now.reading = self.now.reading[self.now.keys[self.now.reading] >= 0]
        self.now.fixed[slots] = False
        if self.now.given_up in slots:
            self.now.given_up = -1
        self.moves.recycle(slots)
        self.now.free += slots.tolist()

    def _give_up(self) -> None:
        """Drop the newest read: nothing under way is wanted, and it is in the way."""
        self.now.given_up = int(self.now.reading[-1])  # of guesses the least likely one
        self.moves.abandon(self.now.given_up)
        self._leave(np.array([self.now.given_up]))

    def _read(self, keys: Keys, wanted: int) -> None:
        """Start to read experts into the slots that are free, as many as there are.

        wanted: the first so many; the others are guesses.
        """
        keys = keys[: len(self.now.free)]
        if not len(keys):
            return
        guesses = np.arange(len(keys)) >= wanted
        slots, hosts = np.array(self.now.free[: len(keys)]), self._host.take(keys)
        del self.now.free[: len(keys)]
        try:
            self.moves.start(slots, keys, hosts, wanted)
        finally:
            begun = self.moves.begun(slots)  # all of them, but for errors
            if not begun.all():
                self._host.put_back(keys[~begun], hosts[~begun])
                self.now.free[:0] = slots[~begun].tolist()
                slots, keys, hosts = slots[begun], keys[begun], hosts[begun]
                guesses = guesses[begun]
            self.now.slots[keys], self.now.keys[slots], self.now.hosts[slots] = slots, keys, hosts
            self.now.guessed[slots], self.now.came[slots] = guesses, False
            self.now.fixed[slots] = True  # until it has come
            self.now.reading = np.concatenate([self.now.reading, slots])
            guessed = int(guesses.sum())
            self._count(
                bytes=int(self.now.nbytes[keys].sum()),
                from_host=int((hosts >= 0).sum()),
                guessed=guessed,
                misses=len(keys) - guessed,
            )

    def _arrived(self, wanted: Keys) -> Keys:
        """Those that are there, or else at least half of those under way: few waves, and even.

        Reads end about in the order of their calls, so it is the first half that is waited for. A
        few experts come all at once.
        """
        slots = self.now.slots[wanted]
        slots = slots[slots >= 0]
        came = self.now.came[slots]
        there, coming = slots[came], slots[~came]
        if len(slots) == len(wanted) <= FEW:
            self.moves.settle(coming)
        elif not len(there):
            self.moves.settle(coming[: -(-len(coming) // 2)])
        coming = coming[self.moves.done(coming)]
        try:
            self.moves.finish(coming)
        except BaseException:
            self._leave(coming)
            raise
        self._count(hits=len(there))
        self.now.came[coming] = True
        self._host.free(self.now.hosts[coming])
        self.now.hosts[coming] = -1
        return np.concatenate([there, coming])

    def of_layer(self, layer: int) -> tuple[QExperts, QExperts, tuple[Tensor, Tensor]]:
        """The matrices of a layer's experts, in all slots, and memory for their biases."""
        if layer not in self._matrices:
            both = self._layers[layer].in_slots(self._memory)
            self._matrices[layer] = (*both, bias_memory(self._bias, *both))
        return self._matrices[layer]

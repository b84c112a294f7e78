"""ExpertCache: the experts of all layers that tokens chose, in slots of one size.

A pass asks for the experts that its tokens chose of a layer. What is not there is read, all of it
at once as far as there are slots, and comes back in waves: what is there, then what has come, until
the pass has had them all. Slots that nobody needs take guesses of the next layer's experts.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError
from qoff.kernels.layout.qexperts import QExperts
from qoff.kernels.layout.qtensor import QTensor
from qoff.memory.arena import Arena
from qoff.memory.io.disk import Stamp
from qoff.memory.io.transfers import Mark, Transfers, UnitRead
from qoff.memory.load import FileChecks
from qoff.memory.plan import ChosenExperts, Expert, Residency, Unit, Weight, view
from qoff.memory.plan.experts import layer_experts

from .host import HostSlots
from .policy import Keys, NextUse, Policy

_AGE = 0.05  # the weight of the newest guesses in their accuracy
_LEAST_ACCURACY = 0.5  # of late: with less, guesses would take more of the disk than they save


@dataclass(frozen=True)
class ExpertStats:
    """What a cache of experts has done since it was opened."""

    hits: int = 0  # experts that were there when a pass asked for them
    misses: int = 0  # that came because a pass had asked for them
    from_host: int = 0  # that came from the slots in host memory, asked for or guessed
    saved: int = 0  # that left the device for these
    guesses: int = 0  # that were not there when the layer before guessed them
    right: int = 0  # of these, that the router then chose
    guessed: int = 0  # that came before a pass asked for them
    wrong: int = 0  # that were read, and left before any pass asked for them
    bytes: int = 0  # of all that came to the device

    @property
    def accuracy(self) -> float:
        """The part of the guesses that were right; 0 without any."""
        return self.right / max(self.guesses, 1)


@dataclass(frozen=True)
class StreamedExperts:
    """Stands among a layer's weights for its experts, which come as tokens choose them."""

    count: int
    following: int | None  # the next layer with any
    guessing: Mapping[str, Weight]  # its resident weights by local name, to guess with


@dataclass(frozen=True, eq=False)
class ExpertWave:
    """Some experts of a layer, until they are released."""

    numbers: tuple[int, ...]
    table: Tensor  # int64 [experts]: the slot of each of them, -1 for the others
    gate_up: QExperts  # of all slots
    down: QExperts
    biases: tuple[Tensor, Tensor]  # memory for theirs, float32 [slots, rows]; or [0, rows]


@dataclass(eq=False)
class _Held:
    """An expert in its slot, or on its way there."""

    expert: Expert
    slot: int
    read: UnitRead
    stamp: Stamp | None  # of its file, before it was read
    from_disk: bool
    guess: bool
    came: bool = False  # it was asked for, and has come
    host: int | None = None  # the slot in host memory that it is being copied from


class ExpertCache:
    """The experts of a checkpoint in the slots that a residency has for them.

    Those of `sources` are copied from host memory, the others read from disk, and their files
    checked once unless `checks` knows them. What leaves the device may stay in slots in host memory
    (`HostSlots`), and comes from there again. For one pass, or round of passes, at a time. record:
    lists the layer and the experts of every request.
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
    ) -> None:
        self._layers = layer_experts(checkpoint, residency.packing)
        self.counts = [some.count for some in self._layers]
        self._sources, self._transfers, self._checks = sources, transfers, checks
        count, size = residency.expert_slots, residency.expert_bytes
        self._memory = arena.alloc(count * size, "slots for experts").view(count, size)
        self._bias = arena.alloc(count * residency.expert_bias_bytes, "biases of experts")
        self.policy: Policy = NextUse(self.counts)
        in_host = residency.host_expert_slots
        kept = host_arena.alloc(in_host * size, "slots for experts").view(in_host, size)
        self._host = HostSlots(kept, self.policy, transfers)
        self.record: list[tuple[int, tuple[int, ...]]] | None = None
        self.wait_s = 0.0  # that `acquire` waited
        self._stats = ExpertStats()
        self._held: dict[Expert, _Held] = {}
        self._keys: Keys = np.full(count, -1)  # by slot: of its expert
        self._fixed = np.zeros(count, dtype=bool)  # slots whose experts cannot leave
        self._free: list[tuple[int, Mark]] = [
            (slot, transfers.recycle(self._memory[slot])) for slot in range(count)
        ]
        self._waiting: tuple[int, frozenset[int]] = (-1, frozenset())  # layer, and what is left
        self._guesses: tuple[Expert, ...] = ()
        self._doubtful: frozenset[Expert] = frozenset()  # guesses that were not there
        self._accuracy = 1.0  # of late, of these
        self._reading: list[_Held] = []  # whose slots are fixed until they have come
        self._matrices: dict[int, tuple[QExperts, QExperts]] = {}
        self._lock = threading.Lock()
        self._closed = False

    @property
    def stats(self) -> ExpertStats:
        return replace(self._stats, saved=self._host.saved)

    def acquire(self, chosen: ChosenExperts) -> ExpertWave:
        """Some of the experts, one at least, that stay where they are until `release`.

        Waits if none is there. Raises what went wrong in reading them, ArgumentError when closed.
        """
        with self._lock:
            if self._closed:
                raise ArgumentError("the weight store is closed")
            self._note(chosen)
            wanted = [Expert(chosen.layer, number) for number in chosen.numbers]
            self._start(wanted)
            self._note_guesses(chosen)
            self._start_guesses(wanted)
            start = self._transfers.clock.now()
            try:
                found = self._arrived(wanted)
            finally:
                self.wait_s += self._transfers.clock.now() - start
            for held in found:
                self._fixed[held.slot] = True
        numbers = tuple(held.expert.number for held in found)
        self._waiting = (chosen.layer, frozenset(chosen.numbers) - frozenset(numbers))
        table = torch.full((self.counts[chosen.layer],), -1)
        table[list(numbers)] = torch.tensor([held.slot for held in found])
        gate_up, down = self._of_layer(chosen.layer)
        return ExpertWave(numbers, table, gate_up, down, self._biases(gate_up, down))

    def release(self, wave: ExpertWave) -> None:
        """Give a wave back; guesses are then read into what is free."""
        with self._lock:
            if self._closed:
                return
            self._fixed[wave.table[wave.table >= 0].numpy()] = False
            if not self._waiting[1]:  # nothing is left to wait for
                self._start_guesses([])

    def close(self) -> None:
        """Forget everything; the transfers then stop what is under way."""
        self._closed = True
        self._held.clear()
        self._matrices.clear()
        self._free.clear()

    def _note(self, chosen: ChosenExperts) -> None:
        """Count a request that is not for what is left of the last one."""
        layer, left = self._waiting
        if layer == chosen.layer and left and left.issuperset(chosen.numbers):
            return
        self._judge_guesses(chosen)
        first = int(self.policy.first[chosen.layer])
        self.policy.use(chosen.layer, first + np.array(chosen.numbers))
        if self.record is not None:
            self.record.append((chosen.layer, chosen.numbers))

    def _note_guesses(self, chosen: ChosenExperts) -> None:
        """Take guesses, once a layer; they are followed as long as most of late were right."""
        if chosen.guesses == self._guesses:
            return
        self._guesses = chosen.guesses
        self._doubtful = frozenset(one for one in chosen.guesses if one not in self._held)
        self._stats = replace(self._stats, guesses=self._stats.guesses + len(self._doubtful))

    def _judge_guesses(self, chosen: ChosenExperts) -> None:
        """Compare the guesses of the layer before with what the router chose."""
        if not self._doubtful:
            return
        right = sum(
            one.layer == chosen.layer and one.number in chosen.numbers for one in self._doubtful
        )
        share = right / len(self._doubtful)
        self._accuracy += _AGE * (share - self._accuracy)
        self._stats = replace(self._stats, right=self._stats.right + right)
        self._doubtful = frozenset()

    def _start(self, wanted: list[Expert]) -> None:
        """Start to read what is wanted and not under way, as far as there is room."""
        for held in [self._held[expert] for expert in wanted if expert in self._held]:
            if held.read.abandoned:  # by a `_give_up` that was interrupted
                self._leave(held.slot)
        missing = [expert for expert in wanted if expert not in self._held]
        self._make_room(len(missing), wanted)
        if missing and not self._free and not any(expert in self._held for expert in wanted):
            self._give_up()
        for expert in missing[: len(self._free)]:
            self._read(expert, guess=False)

    def _start_guesses(self, wanted: list[Expert]) -> None:
        if self._accuracy < _LEAST_ACCURACY or any(one not in self._held for one in wanted):
            return
        missing = [expert for expert in self._guesses if expert not in self._held]
        self._make_room(len(missing), [*wanted, *self._guesses])
        for expert in missing[: len(self._free)]:
            self._read(expert, guess=True)

    def _make_room(self, count: int, kept: list[Expert]) -> None:
        """Have `count` slots free, as far as nobody needs what is in them."""
        count -= len(self._free)
        if count <= 0:
            return
        self._unfix()
        may = (self._keys >= 0) & ~self._fixed
        for expert in kept:
            held = self._held.get(expert)
            if held is not None:
                may[held.slot] = False
        slots = np.flatnonzero(may)
        if not len(slots):
            return
        for place in self.policy.leaving(self._keys[slots], min(count, len(slots))):
            self._leave(int(slots[place]))

    def _unfix(self) -> None:
        """Let leave what has been read, also where the pass that asked for it does so no more."""
        for held in self._reading.copy():
            if held.came or all(future.done() for future in held.read.futures):
                self._reading.remove(held)
                if not held.came:  # else waves that have it hold it
                    self._fixed[held.slot] = False

    def _leave(self, slot: int) -> None:
        key = int(self._keys[slot])
        layer = int(self.policy.layer[key])
        held = self._held[Expert(layer, key - int(self.policy.first[layer]))]
        held.read.settle()
        del self._held[held.expert]
        if held.guess and not held.came:
            self._stats = replace(self._stats, wrong=self._stats.wrong + 1)
        if held in self._reading:
            self._reading.remove(held)
        if held.host is not None:
            self._host.put_back(key, held.host)
        elif held.came and held.expert not in self._sources:
            self._host.keep(key, held.read.memory)
        self._keys[slot], self._fixed[slot] = -1, False
        self._free.append((slot, self._transfers.recycle(self._memory[slot])))

    def _give_up(self) -> None:
        """Drop the newest read: nothing under way is wanted, and it is in the way."""
        held = self._reading[-1]  # of guesses the least likely one
        held.read.abandon()
        self._leave(held.slot)

    def _read(self, expert: Expert, guess: bool) -> None:
        image = self._layers[expert.layer].image(expert.number)
        key = int(self.policy.first[expert.layer]) + expert.number
        slot, mark = self._free[0]
        memory, stamp = self._memory[slot][: image.nbytes], None
        source = self._sources.get(expert)
        host = self._host.take(key) if source is None else None
        if host is not None:
            source = self._host.memory(host)[: image.nbytes]
        try:
            if source is not None:
                read = self._transfers.copy_unit(image, source, memory, mark)
            else:
                stamp = self._checks.stamp(image.file)
                read = self._transfers.read_unit(image, memory, False, mark)
        except BaseException:
            if host is not None:
                self._host.put_back(key, host)
            raise
        del self._free[0]
        self._held[expert] = held = _Held(
            expert, slot, read, stamp, source is None, guess, host=host
        )
        self._reading.append(held)
        self._keys[slot] = key
        self._fixed[slot] = True  # until it has come
        done = replace(self._stats, bytes=self._stats.bytes + image.nbytes)
        done = replace(done, from_host=done.from_host + (host is not None))
        self._stats = replace(done, guessed=done.guessed + guess, misses=done.misses + (not guess))

    def _arrived(self, wanted: list[Expert]) -> list[_Held]:
        """Those that are there, or else at least half of those under way: few waves, and even.

        Reads end about in the order of their calls, so it is the first half that is waited for.
        """
        under_way = [self._held[expert] for expert in wanted if expert in self._held]
        found = [held for held in under_way if held.came]
        if not found:
            for held in under_way[: -(-len(under_way) // 2)]:
                held.read.settle()
        for held in under_way:
            if held.came or not all(f.done() for f in held.read.futures):
                continue
            try:
                held.read.wait()
                if held.from_disk:
                    self._checks.passed(held.read.image, held.stamp)
            except BaseException:
                self._leave(held.slot)
                raise
            found.append(held)
        hits = sum(held.came for held in found)
        self._stats = replace(self._stats, hits=self._stats.hits + hits)
        for held in found:
            held.came = True
            if held.host is not None:
                self._host.free(held.host)
                held.host = None
        return found

    def _of_layer(self, layer: int) -> tuple[QExperts, QExperts]:
        """The matrices of a layer's experts, in all slots."""
        if layer not in self._matrices:
            placed, (count, size) = self._layers[layer].placed, self._memory.shape
            both: list[QExperts] = []
            for name in ("gate_up_proj", "down_proj"):
                first = view(placed[name], self._memory[0])
                assert isinstance(first, QTensor)
                both.append(QExperts.repeated(first, count, size))
            self._matrices[layer] = (both[0], both[1])
        return self._matrices[layer]

    def _biases(self, gate_up: QExperts, down: QExperts) -> tuple[Tensor, Tensor]:
        rows = (gate_up.shape[0], down.shape[0])
        count = gate_up.count if self._bias.numel() else 0
        memory = self._bias.view(torch.float32)[: count * sum(rows)]
        first, second = memory.split([count * n for n in rows])
        return first.view(count, rows[0]), second.view(count, rows[1])

"""How long rounds take: docs/cost-model.md has every symbol with its unit.

Work is linear in where the bytes are: so many of weights and of KV cache on each tier. All of it is
computed for many plans at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from qoff.errors import ArgumentError
from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kvcache import KVQuant
from qoff.kvcache.store.placement import DEVICE
from qoff.memory.plan.experts import passing_together

from .calls import as_used, copied_by_jobs, on_links, pass_s
from .kv_blocks import KVBlocks
from .mixture import Array, Mixture, Moves
from .on_cpu import HostExperts, OnCpu
from .parked import Parked
from .phase import PLACED, RESOURCES, Choices, Phase
from .profile import MachineProfile
from .sizes import Sizes
from .workload import Workload

_COPIES = 3  # of caches that are not packed: new tokens are joined to them, and read, and written
_READ, _WRITE, _IN, _OUT, _CPU, _GPU, _MEMORY, _HIDDEN = range(len(RESOURCES))


class _Work(NamedTuple):
    """What a round of plans does, an element of each array a plan."""

    rounds: Array
    passes: Array
    rows: Array  # of a pass
    last_rows: Array  # of those that go on behind the last layer's attention
    seconds: Array  # of the device without attention to packed blocks
    experts: Array  # seconds of them
    head: Array  # seconds of them
    starts: Array  # seconds of them that passes take beside their ops
    queries: Array  # of a KV head
    past: Array  # packed tokens of each sequence
    blocks: Array  # that are attended to
    new: Array  # blocks that are made
    made: Array  # tokens of a sequence that these are made of
    runs: Array  # of blocks of a layer that are read from disk
    hidden: Array  # bytes of all hidden states


@dataclass(frozen=True)
class CostModel:
    """What rounds of a model cost on a machine.

    activation_bytes: of a number of the hidden states. activation_bits: that matmuls round to.
    frees: whether blocks behind the windows of their layers are free, see `Plan.frees`. On a GPU
    what such layers keep is there. cpu_tokens: as `Plan.cpu_expert_tokens`, of plans whose experts
    the CPU beside a GPU computes.
    """

    sizes: Sizes
    machine: MachineProfile
    workload: Workload
    kv: KVQuant
    activation_bytes: int
    activation_bits: int = 16
    frees: bool = True
    cpu_tokens: int | None = None

    @cached_property
    def units(self) -> int:
        """What weights stream as: the layers and the head."""
        return self.sizes.num_layers + 1

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a pass computes with."""
        return sum(self.sizes.layer_bytes) + self.sizes.head_bytes

    @cached_property
    def kv_blocks(self) -> KVBlocks:
        """Where those of a sequence are, and their bytes."""
        return KVBlocks(self.sizes, self.kv, self.workload, self.frees, self.machine.on_gpu)

    def active(self, c: Choices) -> Array:
        """Sequences of a round of decoding, on average."""
        work = self.workload
        slots = np.minimum(c.batch_size * c.batches, work.at_once)
        # Slots are filled again as sequences end; the last ones end one by one.
        tokens = work.at_once * work.answer.mean
        rounds = tokens / slots + (work.answer.most - work.answer.mean)
        found: Array = tokens / rounds
        return found

    def decode(self, c: Choices, drafted: int = 0) -> Phase:
        """Rounds in which each sequence gets a token, and those of `drafted` that are accepted."""
        work, each_has = self.workload, 1 + drafted
        active = self.active(c)
        gained = work.tokens_of_pass(drafted)
        rounds = work.at_once * work.answer.mean / (active * gained)
        passes = np.maximum(1.0, np.minimum(c.batches, active))
        rows = np.maximum(1.0, active / passes) * each_has
        sizes, device, kv = self.sizes, self.machine.device, self.kv_blocks
        own = rows / each_has if sizes.alone else None
        seconds, experts, head, starts = self._passes(rows, rows, passes, c, own)
        blocks = active * kv.mean * self.kv.attention_top
        past = kv.mean * self.kv.attention_top * BLOCK_TOKENS
        queries = np.asarray(each_has * sizes.queries)
        recent = self.kv.window + self.kv.sinks + BLOCK_TOKENS / 2
        attending = zip(sizes.shapes, sizes.readers, strict=True)
        unpacked = sum(n * s.kv_heads * s.cached_width for s, n in attending) * recent
        unpacked_s = device.unpacked_s(queries, np.asarray(recent))
        seconds = seconds + active * unpacked * self.activation_bytes * unpacked_s
        seconds = seconds + self._states(active, active)
        length = int(work.prompt.mean + work.answer.mean / 2)
        copied = _COPIES * sizes.unpacked_bytes(length, self.machine.on_gpu)
        seconds = seconds + active * copied / device.bytes_per_s
        if self.kv.attention_top < 1 and self.machine.on_gpu:
            seconds = seconds + kv.choosing_s(self.machine, active * kv.mean, passes)
        new = active * gained / BLOCK_TOKENS  # blocks of a round
        hidden = active * each_has * sizes.hidden_width * self.activation_bytes
        made = np.ones_like(active)
        past_ = np.full_like(active, past)
        runs, unused = passes, np.zeros_like(active)
        if not any(group.reach for group in kv.groups) and self.kv.attention_top == 1:
            runs = passes if kv.unused is not None else np.maximum(passes, active)
            unused = np.maximum(0.0, active - passes) * (kv.unused or 0.0)
        done = _Work(
            rounds, passes, rows, rows, seconds, experts, head, starts, queries, past_, blocks, new,
            made, runs, hidden,
        )  # fmt: skip
        found = self._phase(c, done)
        if self.kv.attention_top < 1:
            return found
        bytes_ = np.zeros((len(c), 4, 1))
        bytes_[:, _READ, 0] = unused * kv.each_bytes(kv.seen(past_), on_disk=True, read=True)
        between = on_links(self.machine, bytes_, np.zeros_like(bytes_))[:, :, 0]
        return replace(found, oldest=kv.oldest, between=between)

    def prefill(self, c: Choices) -> Phase:
        """Rounds in which batches read pieces of prompts."""
        work, sizes = self.workload, self.sizes
        tokens = work.at_once * work.prompt.mean * (1 - work.shared)
        passes = np.maximum(1.0, np.minimum(c.batches, tokens / c.prefill_tokens))
        piece = np.minimum(c.prefill_tokens, tokens / passes)
        rounds = tokens / (piece * passes)
        read = piece * passes
        device = self.machine.device
        prompts = np.maximum(1.0, piece / work.prompt.mean)
        ends = np.minimum(prompts, c.batch_size)
        alone = prompts if sizes.alone else None
        seconds, experts, head, starts = self._passes(piece, ends, passes, c, alone)
        own = np.minimum(piece, work.prompt.mean)
        attending = zip(sizes.shapes, sizes.readers, strict=True)
        for shape, readers in attending:
            part = 1.0 if shape.indexes else self.kv_blocks.chosen(own / 2)
            width = readers * shape.heads * shape.cached_width / 2
            seconds = seconds + device.prompt_s(own) * width * read * own / 2 * part
        seconds = seconds + self._states(read, passes * prompts)
        length = int(work.prompt.mean)
        floats = sizes.unpacked_bytes(length, self.machine.on_gpu) / self.activation_bytes
        width = floats / length / 2  # of keys, and of values, of a token in all layers
        seconds = seconds + device.prompt_s(own) * width * read * own / 2
        # Later pieces of a prompt attend to its packed tokens; each query group reads them.
        past = np.maximum(0.0, work.prompt.mean * (1 + work.shared) - own) / 2 / BLOCK_TOKENS
        blocks = passes * np.maximum(1.0, piece / np.maximum(own, 1)) * past
        queries = own * sizes.queries
        new = read * self.kv_blocks.count_of(work.prompt.mean) / work.prompt.mean
        hidden = read * sizes.hidden_width * self.activation_bytes
        past = past * BLOCK_TOKENS
        done = _Work(
            rounds, passes, piece, ends, seconds, experts, head, starts, queries, past, blocks, new,
            own, passes, hidden,
        )  # fmt: skip
        return self._phase(c, done)

    def _phase(self, c: Choices, work: _Work) -> Phase:
        """The work of a round of plans."""
        rounds, passes, blocks = work.rounds, work.passes, work.blocks
        queries, past, kv = work.queries, work.past, self.kv_blocks
        machine, on_gpu, on_cpu = self.machine, self.machine.on_gpu, self._on_cpu(c, work)
        bytes_, asked, moves, attended = self._moved(c, work, on_cpu)
        unit = self.weight_bytes / self.units
        by_jobs = copied_by_jobs(machine, self.sizes)
        last = work.hidden * np.minimum(1.0, work.last_rows / work.rows)
        parked = Parked.of(c, machine, by_jobs, work.hidden, last, passes, self.units, unit)
        for way in (_IN, _OUT):
            bytes_[:, way, 0] += parked.copied
            asked[:, way, 0] += parked.moves
        for way in (_READ, _WRITE):
            bytes_[:, way, 0] += parked.spilled
        spilled = c.activations == 2
        listed = on_links(as_used(machine, self.sizes), bytes_, asked)
        busy = np.where(spilled[:, None, None], on_links(machine, bytes_, asked), listed)
        by_request = machine.disk_read.cpu_s_per_request + machine.disk_write.cpu_s_per_request
        busy[:, _CPU, 0] += np.where(spilled, parked.moves * by_request / machine.cores, 0.0)
        busy[:, _HIDDEN, 0] = parked.in_a_row
        busy[:, _HIDDEN, 2] = parked.behind
        compute = _GPU if on_gpu else _CPU
        attention = kv.attention_s(machine.device, queries, past) * blocks
        busy[:, compute, 0] += work.seconds + attention
        if on_gpu:
            # What is not on the device is attended on the CPU, or moved and attended there.
            alone = np.asarray(self.sizes.queries)  # of prompts', what is far comes to the device
            there = kv.attention_s(machine.host, alone, past, far=True) * blocks
            attention = kv.attention_s(machine.device, queries, past, far=True) * blocks
            busy[:, _MEMORY] = bytes_.sum(1)
            for part in (3, 4):
                busy[:, _GPU, part] -= np.where(c.attends_on_cpu, attention, 0.0)
                busy[:, _CPU, part] += np.where(c.attends_on_cpu, there, 0.0)
                busy[:, _MEMORY, part] += np.where(c.attends_on_cpu, attended, 0.0)
            if on_cpu is not None:
                on_cpu.compute(c, busy)
            busy[:, _MEMORY] /= machine.host.bytes_per_s
        base, each = busy[:, :, 0], busy[:, :, 1:]
        starts, head = work.starts, work.head
        return Phase(rounds, base, each, self.units, passes, moves, starts, head, c.cpu_experts)

    def _moved(
        self, c: Choices, work: _Work, on_cpu: OnCpu | None
    ) -> tuple[Array, Array, Moves, Array]:
        """Bytes and requests of each link in a round, [plans, links, 1 + PLACED], hidden states
        aside: what is always so, then where all of a part is placed.

        Beside: what of weights that are away comes, and bytes of KV blocks that are attended to.
        """
        passes, new, past, kv = work.passes, work.new, work.past, self.kv_blocks
        on_gpu = self.machine.on_gpu
        times = np.where(c.block, 1.0, passes)
        moves, pieces = Moves.all_of(len(c)), float(self.units)
        if self.mixture is not None:  # experts come one by one
            moves = self.mixture.moves(work.rows * passes / times, work.last_rows * passes / times)
            pieces = max(pieces, self.weight_bytes / self.sizes.expert_bytes)
        weights = self.weight_bytes * times
        requests = pieces * times
        seen, kept = kv.seen(past), kv.seen(work.made)
        away = [not kv.stays(group) for group in kv.groups]
        if not self.frees or (on_gpu and kv.groups[0].reach):
            seen, kept = ([np.ones_like(part) for part in parts] for parts in (seen, kept))
        seen, kept = (
            [part * there for part, there in zip(parts, away, strict=True)]
            for parts in (seen, kept)
        )
        attended = work.blocks * kv.each_bytes(seen, read=True)
        on_disk = work.blocks * kv.each_bytes(seen, on_disk=True, read=True)
        new_packed, new_on_disk = kv.each_bytes(kept), kv.each_bytes(kept, on_disk=True)
        pairs = zip(kv.groups, away, strict=True)
        layers = sum(len(group.layers) for group, there in pairs if there)
        bytes_ = np.zeros((len(c), 4, 1 + len(PLACED)))  # of each link: base, then each part
        asked = np.zeros((len(c), 4, 1 + len(PLACED)))
        bytes_[:, _READ, 2], asked[:, _READ, 2] = weights, requests
        bytes_[:, _READ, 4], asked[:, _READ, 4] = on_disk, work.runs * layers
        bytes_[:, _WRITE, 4] = new * new_on_disk
        asked[:, _WRITE, 4] = new * layers / 8
        if on_gpu or self.mixture is not None:  # else a CPU computes with them where they lie
            bytes_[:, _IN, 1], asked[:, _IN, 1] = weights, requests
        moved = np.where(c.attends_on_cpu, 0.0, attended)
        brought = np.where(c.attends_on_cpu, 0.0, passes * layers)
        bytes_[:, _IN, 3], asked[:, _IN, 3] = moved, brought
        if on_gpu:  # what is read from disk passes through host memory, and new blocks come there
            bytes_[:, _IN, 2], asked[:, _IN, 2] = weights, requests
            if on_cpu is not None:
                on_cpu.cross(c, bytes_, asked)
            bytes_[:, _IN, 4], asked[:, _IN, 4] = moved, brought
            bytes_[:, _OUT, 3] = bytes_[:, _OUT, 4] = new * new_packed
            asked[:, _OUT, 3] = asked[:, _OUT, 4] = passes
        return bytes_, asked, moves, attended

    @cached_property
    def mixture(self) -> Mixture | None:
        """The experts, where the model has any. Raises ArgumentError for routes of others."""
        experts, routes = self.sizes.experts, self.workload.routes
        if experts is None:
            if routes is not None:
                raise ArgumentError("there are routes of experts, and the model has none")
            return None
        held = self.sizes.expert_bytes * experts.count * sum(experts.layers)
        return Mixture(experts, held / self.weight_bytes, routes)

    def _passes(
        self, rows: Array, head_rows: Array, passes: Array, c: Choices, alone: Array | None = None
    ) -> tuple[Array, Array, Array, Array]:
        """Seconds of a round's passes in matrices, in calling the ops, and between them.

        In the block schedule, those behind the first find what fits in the cache. alone: sequences
        of a pass, where each is computed by itself. Returned beside: the seconds of them that
        experts take, and the head, and those that passes take beside ops.
        """
        if alone is not None:
            rows, head_rows, passes = rows / alone, head_rows / alone, passes * alone
        device, sizes = self.machine.device, self.sizes
        calls = sizes.calls_s(self.machine)
        between = pass_s(self.machine, passes, self.units, c.activations == 2)
        seconds = passes * (calls + between)
        largest = max(sizes.layer_bytes)
        parts: list[tuple[int, Array | int, int, Array]] = [  # bits, weights, of a layer, rows
            (sizes.layer_bits, sizes.layer_columns - sizes.last_columns, largest, rows),
            (sizes.layer_bits, sizes.last_columns, largest, head_rows),
            (sizes.head_bits, sizes.head_columns, sizes.head_bytes, head_rows),
        ]
        experts = np.zeros_like(seconds)
        if self.mixture is not None:
            # Those that come one by one compute for all passes of a round at once.
            streams = self.weight_bytes > self.machine.usable[DEVICE]
            joined = c.block & (streams and sizes.native)
            times = np.where(joined, 1.0, passes)
            asked = rows * passes, head_rows * passes
            experts = self.mixture.seconds(
                device, sizes.expert_columns, sizes.layer_bits, asked, times, self.activation_bits
            )
            seconds = seconds + experts
        for bits, columns, nbytes, m in parts:
            first = device.matmul_s(bits, m, self.activation_bits)
            near = (
                device.near_s(bits, m, self.activation_bits)
                if nbytes <= device.cache_bytes
                else first
            )
            again = np.where(c.block | (alone is not None), near, first)
            last = columns * (first + (passes - 1) * again)
            seconds = seconds + last
        return seconds, experts, last, passes * between

    def _on_cpu(self, c: Choices, work: _Work) -> OnCpu | None:
        """The experts of a mixture as the CPU beside a GPU would compute them."""
        if not self.machine.on_gpu or self._host_experts is None:
            return None
        together, which = np.unique(np.where(c.block, c.batches, 1.0), return_inverse=True)
        tokens = np.array([self.cpu_expert_tokens(int(passes)) for passes in together])[which]
        rows = work.rows, work.last_rows, work.passes
        return OnCpu(self._host_experts, tokens, *rows, work.experts)

    def cpu_expert_tokens(self, passes: int) -> int:
        """Of a pass whose experts the CPU beside a GPU computes, at most: as told, or as is faster.

        passes: as for `HostExperts.faster_on_cpu`. 0 without a mixture.
        """
        if self.cpu_tokens is not None:
            return self.cpu_tokens
        if passes not in self._faster_on_cpu:
            experts = self._host_experts
            self._faster_on_cpu[passes] = 0 if experts is None else experts.faster_on_cpu(passes)
        return self._faster_on_cpu[passes]

    @cached_property
    def _faster_on_cpu(self) -> dict[int, int]:
        return {}

    @cached_property
    def _host_experts(self) -> HostExperts | None:
        if self.mixture is None:
            return None
        sizes = self.sizes
        layouts = sizes.layouts("split32")
        layers = layouts.on_cpu.experts
        repacked = sum(one.count * one.matrix_bytes for one in (*layers, *layouts.experts))
        return HostExperts(
            self.mixture,
            self.machine,
            sizes.expert_width,
            sizes.expert_columns,
            self.sizes.layer_bits,
            self.mixture.share * self.weight_bytes,
            repacked,
            sizes.expert_bytes * passing_together(layers),
            self.activation_bytes,
        )

    def _states(self, rows: Array, sequences: Array) -> Array | float:
        """Seconds of recurrent layers, of so many new tokens."""
        device, shapes = self.machine.device, self.sizes.state_shapes
        return len(shapes) * device.states_s(shapes[0], rows, sequences) if shapes else 0.0

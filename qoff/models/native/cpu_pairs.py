"""CpuPairs: tokens' experts that stay in host memory, computed by the CPU beside the device.

The inputs of a pass go to host memory, and what its pairs of a token and an expert give comes back
to their places in `Choice.weighted`, so that a token's sum does not depend on who computed what.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qoff.budgets import CPU
from qoff.kernels.cpu.moe.scratch import ExpertSizes
from qoff.kernels.layout.packing import GROUP_SIZES
from qoff.kernels.layout.qexperts import ExpertsMlp
from qoff.kernels.ops import Ops, ops_for
from qoff.kernels.processor import pool_threads
from qoff.kernels.upload import on_device
from qoff.memory.experts.on_cpu import AHEAD, CpuExperts
from qoff.models.forward_pass import WAVE_PAIRS
from qoff.models.spec import DecoderSpec
from qoff.models.spec_parts import ExpertsSpec

from .choices import Choice, Pairs

_NUMBERS = 48  # bytes of a pair: its place, its expert, its weight, and copies of these


@dataclass(frozen=True, eq=False)
class _Inputs:
    """What a choice gives the CPU, in host memory."""

    x: Tensor  # [M, W]
    weights: Tensor  # [M, T]
    arrived: torch.cuda.Event | None  # when they are there; None: now


class CpuPairs:
    """The pairs of a layer, of all passes of a round that wait, at most `WAVE_PAIRS` at a time.

    A pair gets the same whichever others are computed with it. For one thread.
    """

    def __init__(self, layer: int, spec: ExpertsSpec, on_cpu: CpuExperts) -> None:
        self._on_cpu, self._top_k = on_cpu, spec.top_k
        self._layer = of_layer = on_cpu.layers[layer]
        self._mlp = spec.mlp(layer, of_layer.gate_up, of_layer.down, *of_layer.biases)
        self._mine = of_layer.table >= 0
        self._numbers = frozenset(self._mine.nonzero()[:, 0].tolist())
        self._ops = ops_for(CPU)
        self._inputs: dict[Choice, _Inputs] = {}
        self._waiting: deque[Pairs] = deque()
        self._running: deque[tuple[Future[Tensor], list[Pairs]]] = deque()
        self._copied: deque[torch.cuda.Event] = deque()  # of the newest results

    def has(self, number: int) -> bool:
        """Whether the CPU computes an expert."""
        return number in self._numbers

    def add(self, choices: Sequence[Choice]) -> None:
        """Begin to compute what choices want of the CPU."""
        for choice in choices:
            choice.on_cpu = self._mine
            places = self._layer.table[choice.ids].flatten()
            which = (places >= 0).nonzero()[:, 0]
            if not len(which):
                continue
            exact = torch.promote_types(choice.x.dtype, torch.float32)
            if choice.weighted is None:
                shape = (*choice.ids.shape, choice.x.shape[1])
                choice.weighted = choice.x.new_empty(shape, dtype=exact)
            x, weights = _to_host(choice.x), _to_host(choice.weights)
            self._inputs[choice] = _Inputs(x, weights, _marked(choice.x))
            self._waiting.append(Pairs(choice, which, places[which]))
        self.take()
        self._start()

    def take(self) -> None:
        """Take what is done to its places, and go on with what waits."""
        while self._running and self._running[0][0].done():
            self._take()

    def finish(self, choices: Sequence[Choice]) -> None:
        """Return when all that choices want is at its places. Raises what went wrong."""
        while any(self._wants(choice) for choice in choices):
            self._take()
        for choice in choices:
            self._inputs.pop(choice, None)

    def abandon(self) -> None:
        """Begin no more, and wait for what is under way."""
        self._waiting.clear()
        self._on_cpu.clock.wait([future for future, _ in self._running])
        self._running.clear()

    def _wants(self, choice: Choice) -> bool:
        """Whether pairs of it are not yet at their places."""
        parts = [*self._waiting, *(pairs for _, some in self._running for pairs in some)]
        return any(pairs.choice is choice for pairs in parts)

    def _start(self) -> None:
        """Give the thread as much as it may have."""
        while self._waiting and len(self._running) < AHEAD:
            while len(self._copied) >= AHEAD:  # else these could take any amount of memory
                self._copied.popleft().synchronize()
            some = self._next()
            x = some[0].choice.x
            rows = sum(len(pairs.places) for pairs in some)
            out = torch.empty(rows, x.shape[1], pin_memory=x.is_cuda)
            inputs = [self._inputs[pairs.choice] for pairs in some]
            call = partial(_compute, self._ops, self._mlp, self._top_k, some, inputs, out)
            self._running.append((self._on_cpu.submit(call), some))

    def _next(self) -> list[Pairs]:
        """The first pairs that wait, of whatever passes."""
        some, left = list[Pairs](), WAVE_PAIRS
        while self._waiting and left:
            choice, places, slots = self._waiting.popleft()
            if len(places) > left:
                self._waiting.appendleft(Pairs(choice, places[left:], slots[left:]))
            some.append(Pairs(choice, places[:left], slots[:left]))
            left -= len(some[-1].places)
        return some

    def _take(self) -> None:
        """Wait for the oldest batch, and have its results copied to their places."""
        found, some = self._on_cpu.join(self._running[0][0]), self._running[0][1]
        self._running.popleft()
        sizes = [len(pairs.places) for pairs in some]
        self._on_cpu.pairs += sum(sizes)
        for (choice, places, _), rows in zip(some, found.split(sizes), strict=True):
            weighted = choice.weighted
            assert weighted is not None
            there = on_device(places, weighted.device)
            rows = rows.to(weighted.device, non_blocking=True)
            weighted.flatten(0, 1).index_copy_(0, there, rows)
        copied = _marked(some[0].choice.x)
        if copied is not None:
            self._copied.append(copied)
        self._start()


def _compute(
    ops: Ops,
    mlp: ExpertsMlp,
    top_k: int,
    some: Sequence[Pairs],
    inputs: Sequence[_Inputs],
    out: Tensor,
) -> Tensor:
    """What pairs give, float32 [pairs, W], one after another: in the thread."""
    for one in inputs:
        if one.arrived is not None:
            one.arrived.synchronize()
    x = torch.empty(out.shape)
    sizes = [len(pairs.places) for pairs in some]
    for pairs, one, rows in zip(some, inputs, x.split(sizes), strict=True):
        rows.copy_(one.x[pairs.places // top_k])
    weights = [one.weights.flatten()[p.places] for p, one in zip(some, inputs, strict=True)]
    slots = torch.cat([pairs.slots for pairs in some])[:, None]
    return ops.experts(x, slots, torch.cat(weights)[:, None], mlp, out=out)


def _to_host(x: Tensor) -> Tensor:
    """A copy in host memory, on a GPU when what was launched before is done."""
    found = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return found.copy_(x, non_blocking=True)


def _marked(x: Tensor) -> torch.cuda.Event | None:
    """The point that work on a GPU has come to; None where x is in host memory."""
    if not x.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def cpu_pairs_bytes(spec: DecoderSpec, tokens: Sequence[int], dtype: torch.dtype) -> int:
    """The most bytes of host memory that this takes, with the CPU's scratch.

    tokens: the most of each pass of a round. torch pins memory in powers of two.
    """
    assert spec.experts is not None
    width, inner, top_k = spec.expert_width, spec.experts.intermediate_size, spec.experts.top_k
    inputs = sum(
        _power_of_two(count * width * dtype.itemsize) + _power_of_two(4 * count * top_k)
        for count in tokens
    )
    pairs = sum(tokens) * top_k
    rows = min(pairs, WAVE_PAIRS)
    results = 2 * AHEAD * _power_of_two(4 * rows * width)
    groups = (min(GROUP_SIZES), min(GROUP_SIZES))
    sizes = ExpertSizes(width, inner, width, groups)
    scratch = sizes.nbytes(pool_threads(), rows, 1, spec.experts.count)
    numbers = _NUMBERS * (pairs + AHEAD * rows)
    return inputs + results + numbers + rows * width * (4 + dtype.itemsize) + scratch


def _power_of_two(nbytes: int) -> int:
    return 1 << max(nbytes - 1, 0).bit_length()

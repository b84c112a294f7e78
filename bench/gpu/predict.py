"""Which configurations are worth timing: a model of a launch, from what its code shows.

A kernel on packed data brings bytes from memory. It is slowed by programs that do not fill the last
round of processors, by too few bytes on their way at a time (Little's law), and by instructions: a
processor starts so many in the time in which its share of the memory's bytes arrives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench import ptx, ttgir
from bench.gpu.tune import TIMED, Search
from bench.gpu_limits import WARP, blocks_per_sm
from bench.offline import resource_usage
from bench.variants.variant import Launch, recording
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.linear.scratch import ScratchConfig

_ON_THE_WAY = 32 << 10  # bytes, for one processor: 3.3 TB/s of 132 processors times 0.8 us, rounded
_BYTES_A_CLOCK = 15  # of memory, for one processor: 3.3 TB/s of 132 processors at 1.7 GHz
_ISSUED = 4 * WARP  # instructions of threads that a processor starts a clock
_WARPS = 8  # that keep it starting them
_COMPILING_S = 30.0  # for a search, of what the stage before has not compiled
_SMALL = ("add_splits_kernel", "merge_kernel")
_BESIDE = 0.1  # what a launch that only adds up results counts, in launches


@dataclass(frozen=True)
class Figures:
    """What a compiled kernel shows. Bytes of shared memory and on the way are of a program."""

    warps: int
    registers: int  # of a thread
    spilled: int  # bytes of a thread
    shared: int
    in_flight: int
    bytes_per_instruction: float  # that a thread loads in inner loops


def cost(figures: Figures, programs: int, gpu: Gpu) -> float:
    """Time of a launch over that of its bytes at the memory's full rate; infinite if it cannot run.

    For comparing launches that do the same work.
    """
    fits = blocks_per_sm(gpu.capability, figures.warps, figures.registers, figures.shared)
    if not fits:
        return math.inf
    each = math.ceil(programs / gpu.processors)
    uneven = each * gpu.processors / programs
    at_once = min(fits, each)
    waiting = max(1.0, _ON_THE_WAY / max(1, at_once * figures.in_flight))
    instructions = _BYTES_A_CLOCK / max(figures.bytes_per_instruction, 1e-3) / _ISSUED
    issuing = instructions * max(1.0, _WARPS / (at_once * figures.warps))
    return uneven * max(waiting, issuing) * (1 + figures.spilled / 64)


def promising(search: Search, *, device: torch.device, end: float) -> list[Any]:
    """The candidates of a search that the model expects most of, at most `TIMED`.

    One that does not compile, or was not compiled by `end` or half a minute, is not among them.
    """
    if len(search.candidates) <= TIMED:
        return list(search.candidates)
    if (expected := search.expected) is not None:
        return sorted(search.candidates, key=lambda c: expected(c, device))[:TIMED]
    end = min(end, time.monotonic() + _COMPILING_S)
    gpu, (major, minor) = Gpu.of(device), torch.cuda.get_device_capability(device)
    exact = 10 * major + minor
    launches: list[Launch] = []
    costs: list[float] = []
    with recording(gpu, exact, launches.append):
        make = search.build(torch.device("meta"))
        for config in search.candidates:
            launches.clear()
            try:
                make(config)()
                if isinstance(config, ScratchConfig):  # cuBLAS does the work, which is timed
                    costs.append(0.0)
                    continue
                costs.append(_cost(launches, gpu, exact, end))
            except Exception:  # it does not launch or compile
                costs.append(math.inf)
    order = sorted(range(len(costs)), key=costs.__getitem__)
    return [search.candidates[i] for i in order[:TIMED] if costs[i] < math.inf]


def _cost(launches: Sequence[Launch], gpu: Gpu, exact: int, end: float) -> float:
    total = 0.0
    for launch in launches:
        if len(launches) > 1 and launch.kernel.__name__ in _SMALL:
            total += _BESIDE
        elif time.monotonic() > end:
            return math.inf
        else:
            total += cost(figures_of(launch, exact), launch.programs, gpu)
    return total


_known: dict[str, Figures] = {}  # by source and options: many searches launch the same code


def figures_of(launch: Launch, exact: int) -> Figures:
    """What the code of a launch shows; from Triton's cache where it was compiled before."""
    key = f"{exact} {launch.key}"
    if key not in _known:
        compiled = launch.compiled(exact)
        code, tiles = ptx.read(compiled.asm["ptx"]), ttgir.read(compiled.asm["ttgir"])
        registers, spilled = resource_usage(compiled.asm["cubin"])
        warps = launch.options["num_warps"]
        in_flight = max(tiles.buffer_bytes, WARP * warps * code.bytes_before_use)
        shared = compiled.metadata.shared
        rate = code.loop_bytes / max(1, code.loop_instructions)
        _known[key] = Figures(warps, registers, spilled, shared, in_flight, rate)
    return _known[key]

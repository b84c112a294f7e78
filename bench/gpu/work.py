"""What children do on the GPU: checks, timings, the GPU's limits, tuning. They report by events.

{"begin": item} before, and after it "check", "result", "failed", "skipped" or "tuned". An error
that the GPU does not forget (an illegal address) ends the process with `GPU_LOST`.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from bench.gpu import ceilings
from bench.gpu.case import Call, Check, PreparedCase, TimedCase, relative_rms
from bench.gpu.child import Emit
from bench.gpu.report import CaseResult
from bench.gpu.timer import CALLS, Timer

GPU_LOST = 3  # exit status
_PEER_ERROR = 0.05  # relative RMS; one that rounds to bfloat16 is at 0.01
_CASE_S = 0.6  # of sampling, at most
_LONG_S = 2e-3  # a call as long as this needs no others in its graph
_MEMORY_SHARE = 0.85  # of the free memory that a case may fill


def describe(emit: Emit, device: torch.device) -> None:
    """What GPU this is, and that it computes."""
    from qoff.kernels.triton.launch.gpu import Gpu

    gpu = Gpu.of(device)
    found: dict[str, Any] = {"name": device.type, "processors": gpu.processors}
    found |= {"exact": gpu.capability, "capability": gpu.capability}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["name"] = properties.name
        found["exact"] = 10 * properties.major + properties.minor
        found["memory"] = properties.total_memory
        found["cuda"] = torch.version.cuda
    if torch.ones(1000, device=device).sum().item() != 1000:
        raise RuntimeError("the GPU does not add up")
    emit({"gpu": found})


def check(
    emit: Emit, checks: Iterable[Check], done: Collection[str], end: float = float("inf")
) -> None:
    """Run every check that is not done until `end`, wrong ones too, in memory full of NaN.

    end: on the clock `time.monotonic`; the checks that it leaves out are reported as "late".
    """
    with torch.inference_mode(), _poisoned_memory():
        for one in checks:
            if one.name in done:
                continue
            if time.monotonic() > end:
                emit({"late": one.name})
                continue
            emit({"begin": one.name})
            error, raised = float("inf"), ""
            try:
                error = one.error()
            except Exception as caught:  # reported beside the other checks
                raised = one_line(caught)
            if error != error:
                error = float("inf")
            emit({"check": [one.op, one.name, error, one.bound, raised]})
            if raised:
                _require_gpu()


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """What torch.empty returns holds NaN, so that an element nobody wrote shows."""
    deterministic: Any = torch.utils.deterministic
    fill = deterministic.fill_uninitialized_memory
    before = torch.get_deterministic_debug_mode()
    # `use_deterministic_algorithms` would import torch's compiler, 1.2 s in each child.
    torch.set_deterministic_debug_mode("warn")
    deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what has no deterministic algorithm
            yield
    finally:
        torch.set_deterministic_debug_mode(before)
        deterministic.fill_uninitialized_memory = fill


def measure_ceilings(emit: Emit, device: torch.device, timer: Timer, **sizes: int) -> None:
    """The GPU's limits."""
    with torch.inference_mode():
        emit({"ceilings": asdict(ceilings.measure(timer, device, **sizes))})


def time_cases(
    emit: Emit,
    cases: Iterable[TimedCase],
    done: Collection[str],
    device: torch.device,
    timer: Timer,
    end: float,
    with_peers: bool = True,
) -> None:
    """Time every case that is not done and fits memory, beside its peers, until `end`.

    end: as for `check`. with_peers: False if one of them may have cost a process.
    """
    for case in cases:
        if case.key in done:
            continue
        if time.monotonic() > end:
            emit({"late": case.key})
        elif case.footprint > _free_memory(device):
            emit({"skipped": f"{case.key} for lack of memory", "item": case.key})
        else:
            emit({"begin": case.key})
            try:
                with torch.inference_mode():
                    emit({"result": asdict(time_case(case, device, timer, with_peers))})
            except Exception as caught:  # the other cases are still worth their time
                emit({"failed": f"{case.key}: {one_line(caught)}", "item": case.key})
                _require_gpu()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def time_case(
    case: TimedCase, device: torch.device, timer: Timer, with_peers: bool = True
) -> CaseResult:
    """Build a case as often as a graph has calls, and time it and all its peers in turn.

    Each peer runs once first, to see whether it works.
    """
    first = case.build(device)
    ours = first.call()
    prepared = [first]
    fit = int(min(CALLS, _free_memory(device) / max(1, case.footprint)))
    start = time.perf_counter()
    first.call()
    _synchronize(device)
    long = time.perf_counter() - start > _LONG_S
    while not long and len(prepared) < fit:
        prepared.append(case.build(device))
    calls: dict[str, list[Call]] = {"": [one.call for one in prepared]}
    missing = {}
    for name in first.peers:
        if not with_peers:
            missing[name] = "left out after a process was lost"
            continue
        try:
            calls[name] = _peer(name, prepared, ours)
            _synchronize(device)
        except Exception as caught:  # a peer that is not there, or does not take these operands
            missing[name] = one_line(caught)
            _require_gpu()
    del ours
    timings = timer.measure(calls, _CASE_S)
    return CaseResult.of(case, timings.pop(""), timings, missing, first.chain)


def _peer(name: str, prepared: list[PreparedCase], ours: object) -> list[Call]:
    """The calls of a peer, one for each set of operands."""
    call = prepared[0].peers[name]()
    result = call()
    if prepared[0].comparable:
        error = relative_rms(result, ours)  # type: ignore[arg-type]
        if not error <= _PEER_ERROR:
            raise ValueError(f"its result is {error:.2g} off ours: not the same computation")
    return [call, *(one.peers[name]() for one in prepared[1:])]


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _require_gpu() -> None:
    """End the process if the error that was just caught is one that the GPU does not forget."""
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except Exception as caught:
        print("the GPU was lost:", one_line(caught), flush=True)
        sys.exit(GPU_LOST)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free_memory(device: torch.device) -> float:
    if device.type != "cuda":
        return float("inf")
    return float(torch.cuda.mem_get_info(device)[0]) * _MEMORY_SHARE

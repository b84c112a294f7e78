"""Every Triton op on one GPU: right, then how fast, beside its peers and the GPU's own limits.

Measures read bandwidth and cuBLAS first, then compares every op with its reference on fresh random
inputs, then times it over the shapes of real models, L2 flushed, the peers in turn. Prints tables,
the last of them against the project's targets, and writes bench/results/<gpu>-<date>.json. Takes
less than ten minutes; what did not fit is named. Exits with 1 if an op is wrong or a case fails.
After an error that the GPU only forgets with the process, such as an illegal address, the other ops
go on in a new process, which writes a file of its own.

A plain Python with torch and triton is enough, with the repository on its path.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from bench import gpu_ceilings
from bench.cuda_timer import CudaTimer, Timer
from bench.gpu_case import Call, Case, Check, relative_rms
from bench.gpu_report import CaseResult, GpuReport

# The ops, and what part of the time for timing each may take.
SHARES = {
    "w4_linear": 0.40,
    "decode_attention": 0.20,
    "prefill_attention": 0.12,
    "kv_append": 0.06,
    "merge": 0.05,
    "quantize": 0.03,
    "dequantize": 0.03,
    "rms_norm": 0.04,
    "gated_silu": 0.03,
    "rope": 0.04,
}
OPS = tuple(SHARES)
_BUDGET_S = 540.0
_QUICK_BUDGET_S = 120.0
_CHECKS_SHARE = 0.45  # most of it is compiling
_PEER_ERROR = 0.05  # relative RMS; one that rounds to bfloat16 is at 0.01
_CASE_S = 0.6  # of sampling, at most
_MEMORY_SHARE = 0.85  # of the free memory that a case may fill

_LEFT_S = 30.0  # that a new process is worth

Clock = Callable[[], float]


class GpuLostError(Exception):
    """No call of this process to the GPU works any more; `op` was running."""

    def __init__(self, op: str, why: str) -> None:
        super().__init__(f"the GPU was lost to {op}: {why}")
        self.op = op


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    if not torch.cuda.is_available():
        print("bench.gpu needs a CUDA device that torch can use; there is none", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    if args.tune:
        from bench.tune import tune

        print("wrote", tune(device, CudaTimer(device), args.op or OPS, args.seconds))
        return 0
    ops, end, left = args.op or list(OPS), time.monotonic() + args.seconds, []
    report = new_report(device, {"quick": args.quick, "ops": ops})
    try:
        with torch.inference_mode():
            run(report, device, CudaTimer(device), ops, args.quick, args.seconds)
    except GpuLostError as lost:
        report.failed.append(str(lost))
        left = [op for op in ops if op != lost.op]
    except Exception as caught:  # what was found until then is written
        report.failed.append(_one_line(caught))
    path = report.write(args.out)
    print(report.text())
    print("wrote", path, flush=True)
    if left and end - time.monotonic() > _LEFT_S:
        _start_anew(left, args.quick, path, end - time.monotonic())
    return 1 if report.wrong or report.failed else 0


def _start_anew(ops: Sequence[str], quick: bool, path: Path, seconds: float) -> None:
    """Replace this process, and so free its memory on the GPU, by the bench of `ops`, then fail.

    The file of that bench stands beside `path`.
    """
    out = path.resolve().with_stem(f"{path.stem}-anew")
    command = [sys.executable, "-m", "bench.gpu", "--out", str(out), "--seconds", f"{seconds:.0f}"]
    command += ["--quick"] * quick + [word for op in ops for word in ("--op", op)]
    os.chdir(Path(__file__).resolve().parents[1])
    os.execvp("sh", ["sh", "-c", f"{shlex.join(command)}; exit 1"])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases, two minutes")
    parser.add_argument("--out", type=Path, help="JSON file; default in bench/results")
    parser.add_argument("--op", action="append", choices=OPS, help="only this op; repeatable")
    parser.add_argument(
        "--tune", action="store_true", help="search configurations, write kernels/tuned/<gpu>.json"
    )
    parser.add_argument("--seconds", type=float, help="how long to take, at most")
    args = parser.parse_args(argv)
    if args.seconds is None:
        args.seconds = _QUICK_BUDGET_S if args.quick else _BUDGET_S
    return args


def new_report(device: torch.device, settings: dict[str, Any]) -> GpuReport:
    """An empty report of the device."""
    if device.type != "cuda":
        return GpuReport(settings, 0, device.type)
    major, minor = torch.cuda.get_device_capability(device)
    return GpuReport(settings, 10 * major + minor, torch.cuda.get_device_name(device))


def run(
    report: GpuReport,
    device: torch.device,
    timer: Timer,
    ops: Sequence[str],
    quick: bool,
    seconds: float,
    clock: Clock = time.monotonic,
) -> None:
    """Measure the limits, check all ops, then time those that are right, in about `seconds`."""
    end = clock() + seconds
    report.ceilings = gpu_ceilings.measure(timer, device)
    check_all(report, in_turn(ops, device), clock, clock() + _CHECKS_SHARE * (end - clock()))
    wrong = {op for op, *_, error, bound, raised in report.checks if raised or not error <= bound}
    right = [op for op in ops if op not in wrong]
    report.skipped += [f"{op} is wrong and was not timed" for op in ops if op in wrong]
    for i, op in enumerate(right):
        rest = sum(SHARES[name] for name in right[i:])
        until = clock() + (end - clock()) * SHARES[op] / rest
        time_all(report, _module(op).cases(quick), device, timer, clock, until)


def _module(op: str) -> Any:
    return importlib.import_module(f"bench.{op}")


def in_turn(ops: Sequence[str], device: torch.device) -> Iterator[Check]:
    """The checks of all ops, one of each at a time: a run that ends early has seen every op."""
    for row in zip_longest(*(_module(op).checks(device, False) for op in ops)):
        yield from (check for check in row if check is not None)


def check_all(
    report: GpuReport, checks: Iterable[Check], clock: Clock = time.monotonic, end: float = 1e18
) -> None:
    """Run every check until `end`, wrong ones too, with fresh memory full of NaN."""
    late: dict[str, int] = {}
    with _poisoned_memory():
        for check in checks:
            if clock() > end:
                late[check.op] = late.get(check.op, 0) + 1
                continue
            error, raised = float("inf"), ""
            try:
                error = check.error()
            except Exception as caught:  # reported beside the other checks
                raised = _one_line(caught)
            report.checks.append((check.op, check.name, error, check.bound, raised))
            if raised:
                _require_gpu(check.op)
    report.skipped += [f"{count} checks of {op} for lack of time" for op, count in late.items()]


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """What torch.empty returns holds NaN, so that an element nobody wrote shows."""
    deterministic: Any = torch.utils.deterministic
    fill = deterministic.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what has no deterministic algorithm
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        deterministic.fill_uninitialized_memory = fill


def time_all(
    report: GpuReport,
    cases: Iterable[Case],
    device: torch.device,
    timer: Timer,
    clock: Clock = time.monotonic,
    end: float = 1e18,
) -> None:
    """Time every case that fits memory, beside its peers, until `end`."""
    late: dict[str, list[str]] = {}
    for case in cases:
        if clock() > end:
            late.setdefault(case.op, []).append(f"{case.model} {case.name}")
        elif case.footprint > _free_memory(device):
            report.skipped.append(f"{case.op} {case.model} {case.name} for lack of memory")
        else:
            try:
                report.results.append(time_case(case, device, timer))
            except Exception as caught:  # the other cases are still worth their time
                text = f"{case.op} {case.model} {case.name}: {_one_line(caught)}"
                report.failed.append(text)
                _require_gpu(case.op)
            _release(device)
    for op, names in late.items():
        text = f"{len(names)} cases of {op} for lack of time, from {names[0]} to {names[-1]}"
        report.skipped.append(text)


def time_case(case: Case, device: torch.device, timer: Timer) -> CaseResult:
    """Build a case, run each peer once to see whether it works, and time all of them in turn."""
    work = case.build(device)
    calls: dict[str, Call] = {"": work.call}
    missing = {}
    ours = work.call()
    for name, make in work.peers.items():
        try:
            call = make()
            result = call()
            if work.comparable:
                _require_same(result, ours)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            calls[name] = call
        except Exception as caught:  # a peer that is not there, or does not take these operands
            missing[name] = _one_line(caught)
    timings = timer.measure(calls, _CASE_S)
    return CaseResult.of(case, timings.pop(""), timings, missing)


def _require_same(result: Any, ours: Any) -> None:
    error = relative_rms(result, ours)
    if not error <= _PEER_ERROR:
        raise ValueError(f"its result is {error:.2g} off ours: not the same computation")


def _require_gpu(op: str) -> None:
    """Raise GpuLostError if the error that was just caught is one that the GPU does not forget."""
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except Exception as caught:
        raise GpuLostError(op, _one_line(caught)) from caught


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _free_memory(device: torch.device) -> float:
    if device.type != "cuda":
        return float("inf")
    return float(torch.cuda.mem_get_info(device)[0]) * _MEMORY_SHARE


def _release(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())

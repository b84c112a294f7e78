"""Compiling, on all cores, every kernel that checks, timings or searches of some ops launch.

    python -m bench.gpu.compiling --exact 90 --capability 90 --processors 132 --op rope

The launchers run on meta tensors, and instead of launching, what Triton would compile is collected:
with the same types, constants and alignments, so the launches find it in Triton's cache. No GPU is
used. Each kernel is compiled in a process of its own, which is killed if it hangs. Prints a JSON
line for each.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from bench.gpu import child, ops, tune
from bench.gpu.case import TimedCase
from bench.gpu.child import Ended, Event, Job
from bench.gpu.model_shapes import shapes
from bench.variants.variant import Launch, recording
from qoff.kernels.triton.launch.gpu import Gpu

LIMIT_S = 90.0  # of one kernel
WORK = ("checks", "cases", "searches")


class CompileRequest(NamedTuple):
    """A launch of an op, whose kernel is to be compiled."""

    op: str
    launch: Launch

    @property
    def kernel(self) -> str:
        name: str = self.launch.kernel.__name__
        return name


def collect(
    op_names: Sequence[str], work: Sequence[str], gpu: Gpu, exact: int, quick: bool, tiny: bool
) -> list[CompileRequest]:
    """What the ops launch, each once. exact: compute capability that code is made for."""
    found: dict[str, CompileRequest] = {}
    now = ""

    def keep(launch: Launch) -> None:
        found.setdefault(launch.key, CompileRequest(now, launch))

    with recording(gpu, exact, keep):
        for now in op_names:
            for call in _launching(now, work, quick, tiny, gpu.capability):
                try:
                    call()
                except Exception:  # of a reference that needs numbers; the op was launched before
                    continue
    return list(found.values())


def _launching(
    op: str, work: Sequence[str], quick: bool, tiny: bool, capability: int
) -> Iterator[Callable[[], object]]:
    """Calls that launch what the work on an op launches, on meta tensors."""
    meta, module, models = torch.device("meta"), ops.module(op), shapes(quick)
    if "checks" in work:
        yield from (check.error for check in module.checks(meta, tiny))
    if "cases" in work:
        yield from (_case_call(case, meta) for case in module.cases(quick, models))
    if "searches" in work:
        for search in tune.searches(op, models, capability):
            make = search.build(meta)
            yield from (make(config) for config in (None, *search.candidates))


def _case_call(case: TimedCase, device: torch.device) -> Callable[[], object]:
    return lambda: case.build(device).call()


def compile_all(
    requests: Sequence[CompileRequest],
    exact: int,
    jobs: int,
    emit: Callable[[Event], None],
    limit_s: float = LIMIT_S,
) -> None:
    """Compile all, `jobs` at a time; an event "compiled" for each, with its error if it has one."""
    by_name: dict[str, CompileRequest] = {}
    rows: dict[str, Event] = {}
    for request in requests:
        by_name[f"{len(by_name)} {request.kernel}"] = request

    def on_event(job: Job, event: Event) -> None:
        rows[job.name] = event

    def on_end(ended: Ended) -> list[Job]:
        request = by_name[ended.job.name]
        row: Event = {"op": request.op, "kernel": request.kernel, "error": ended.lost}
        row |= {"warps": request.launch.options["num_warps"], "seconds": ended.seconds}
        if ended.lost:
            row["error"] = f"{ended.lost}: {' '.join(ended.tail.split())[-300:]}"
        emit({"compiled": row | rows.get(ended.job.name, {})})
        return []

    work = [
        Job(name, lambda emit, r=request: _compile(r, exact, emit), limit_s, limit_s)  # type: ignore[misc]
        for name, request in by_name.items()
    ]
    child.run(work, jobs, on_event, on_end)


def _compile(request: CompileRequest, exact: int, emit: Callable[[Event], None]) -> None:
    from bench.offline import resource_usage

    try:
        compiled = request.launch.compiled(exact)
        registers, spilled = resource_usage(compiled.asm["cubin"])
    except Exception as error:
        emit({"error": " ".join(f"{type(error).__name__}: {error}".split())[-400:]})
        return
    shared = compiled.metadata.shared
    emit({"registers": registers, "spilled": spilled, "shared": shared})


def main(argv: Sequence[str] | None = None) -> None:
    """Compile, and print what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--exact", type=int, required=True, help="compute capability times ten")
    parser.add_argument("--capability", type=int, required=True, help="whose configurations fit")
    parser.add_argument("--processors", type=int, required=True)
    parser.add_argument("--op", action="append", choices=ops.OPS)
    parser.add_argument("--work", action="append", choices=WORK)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="checks of small shapes")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.exit(2, "TRITON_INTERPRET is set: Triton compiles nothing in this process\n")
    gpu = Gpu(args.capability, args.processors)
    work = args.work or WORK[:2]
    requests = collect(args.op or ops.OPS, work, gpu, args.exact, args.quick, args.tiny)

    def emit(event: Event) -> None:
        print(json.dumps(event), flush=True)

    emit({"kernels": len(requests)})
    compile_all(requests, args.exact, args.jobs, emit)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # forks of many threads
    main()

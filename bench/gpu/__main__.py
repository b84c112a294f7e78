"""Every Triton op on one GPU, in one command: right, then how fast, beside peers and limits.

    python -m bench.gpu --out DIR

Compiles all kernels on all cores, compares every op with its reference, runs `pytest -m gpu`,
measures what this GPU can do at most, times the ops over the shapes of real models and searches
configurations, in this order, until the time is over. Every op runs in a process of its own: a
hang, an abort or an illegal address costs what was running. DIR is up to date at any time, see
bench/device.md. Exits with 1 if an op is wrong or anything failed, with 2 without a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from bench.gpu.arguments import parsed, parser_of

_MINUTES = 9.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit status."""
    args = _arguments(argv)
    if args.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # forks of many threads
    from bench.gpu import campaign, rehearsal
    from bench.gpu.ops import OPS
    from bench.gpu.report import GpuReport
    from bench.gpu.stages import STAGES, Settings
    from qoff.errors import ArgumentError

    unknown = {*(args.op or ())} - {*OPS} | {*(args.stage or ())} - {*STAGES}
    if unknown:
        print(
            f"unknown: {', '.join(sorted(unknown))}; ops: {OPS}; stages: {STAGES}", file=sys.stderr
        )
        return 2
    settings = Settings(
        ops=tuple(args.op or (rehearsal.OPS if args.rehearse else OPS)),
        stages=("device", *(args.stage or STAGES[1:])),
        quick=args.quick,
        rehearse=args.rehearse,
        jobs=args.jobs or os.cpu_count() or 1,
    )
    folder = args.out or args.resume
    report = GpuReport({"quick": args.quick, "ops": settings.ops, "rehearsal": args.rehearse})
    if args.resume:
        report = GpuReport.read((args.resume / campaign.JSON).read_text())
    folder.mkdir(parents=True, exist_ok=True)
    try:
        campaign.Campaign(settings, report, folder.resolve(), 60 * args.minutes).run()
    except ArgumentError as error:
        print(error, file=sys.stderr)
        return 2
    print(report.text())
    print("wrote", folder, flush=True)
    return 1 if report.wrong or report.failed or report.tests.get("status") else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("bench.gpu", __doc__, _MINUTES)
    parser.add_argument("--quick", action="store_true", help="fewer cases to time")
    parser.add_argument("--op", action="append", help="only this op; repeatable")
    parser.add_argument("--stage", action="append", help="only this stage; repeatable")
    parser.add_argument("--jobs", type=int, help="kernels compiled at once; default: all cores")
    parser.add_argument(
        "--rehearse", action="store_true", help="no GPU: tiny shapes, interpreted, three faults"
    )
    return parsed(parser, argv)


if __name__ == "__main__":
    sys.exit(main())

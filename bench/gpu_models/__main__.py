"""Whole models on one GPU, in one command: tokens per second, links, idle time, memory, peers.

    python -m bench.gpu_models --out DIR [--flexgen flexgen-0.1.8-py3-none-any.whl]

Writes random weights of Llama-8B, OPT-30B, OPT-6.7B and Mixtral-8x7B as packed checkpoints, one
after the other, and runs plans within 16 GB, 8 GB and everything, beside transformers, accelerate
and FlexGen, until the time is over. Each row runs in a process of its own with a time limit. DIR
is up to date at any time, see bench/device.md. Exits with 1 if a row failed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.arguments import parsed, parser_of

_MINUTES = 9.0
_SHARED = ("qoff.kernels.cpu.ops", "transformers.models.llama.modeling_llama", "accelerate.hooks")


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit status."""
    args = _arguments(argv)
    if args.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # forks of many threads
    import torch

    from bench.gpu_models import campaign, rows
    from bench.gpu_models.ours import Place
    from bench.gpu_models.report import ModelReport
    from qoff.errors import ArgumentError

    models, wanted = rows.MODELS, rows.ROWS
    if args.rehearse:
        models, wanted = rows.rehearsed()
        for name in _SHARED:  # once, and not in each child
            importlib.import_module(name)
    only = args.only or [""]
    wanted = tuple(row for row in wanted if any(part in row.key for part in only))
    if not wanted:
        print(f"no row has {' or '.join(only)} in its name:", file=sys.stderr)
        print(*(row.key for row in rows.ROWS), sep="\n", file=sys.stderr)
        return 2
    report = ModelReport({"rehearsal": args.rehearse})
    if args.resume:
        report = ModelReport.read((args.resume / campaign.JSON).read_text())
    folder = args.out or args.resume
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu" if args.rehearse else "cuda")
    with tempfile.TemporaryDirectory(prefix="qoff-gpu-models-", dir=args.folder) as written:
        place = Place(Path(written), device, models, args.flexgen)
        try:
            run = campaign.ModelCampaign(report, folder.resolve(), place, 60 * args.minutes)
            run.run(wanted)
        except ArgumentError as error:
            print(error, file=sys.stderr)
            return 2
    print(report.text())
    print("wrote", folder, flush=True)
    return 1 if report.failed else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("bench.gpu_models", __doc__, _MINUTES)
    parser.add_argument("--only", action="append", help="rows with this in their names; repeatable")
    parser.add_argument("--folder", type=Path, help="where models are written; up to 26 GB at once")
    parser.add_argument("--flexgen", type=Path, help="wheel or folder of the package flexgen")
    parser.add_argument("--rehearse", action="store_true", help="no GPU: tiny models, on the CPU")
    return parsed(parser, argv)


if __name__ == "__main__":
    sys.exit(main())

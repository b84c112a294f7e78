"""`qoff convert` of the demo's float model with its defaults: the whole command, from its start.

    python -m bench.conversion
    python -m bench.conversion --layers 4 --limit 16GiB    # of a random model of Llama 3 8B's shape

Compiled kernels are in the cache after a first run, which --warm makes and leaves out. With a
limit, it runs in a memory control group (v1, as root).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path

import torch

from bench.control_group import control_group
from bench.demo import fetch_float
from bench.harness import Bar, Report, arguments
from bench.random_model import LLAMA_8B
from bench.train_steps import random_model
from qoff.units import parse_size

BAR = 60  # seconds on two cores


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    args = arguments(
        __doc__, argv, model=(Path, None, "a float model; default: the demo's"),
        layers=(int, 0, "of a random model of Llama 3 8B's shape, instead"),
        limit=(str, "", "of its memory, like 16GiB"),
        options=(str, "", "more options of the command, with spaces between"),
        warm=(bool, False, "convert once before"),
    )  # fmt: skip
    options, limit = args.options.split(), parse_size(args.limit) if args.limit else None
    if args.model and args.layers:
        raise SystemExit("conversion: --model and --layers are two models")
    with ExitStack() as undo:
        source = args.model or fetch_float()
        if args.layers:
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
            source = folder / f"Llama-3-8B-{args.layers}-layers"
            # What this process once had would count as memory of those that it starts.
            with ProcessPoolExecutor(1, get_context("spawn")) as other:
                other.submit(random_llama, source, args.layers).result()
        report = Report(
            "conversion",
            {"model": source.name, "options": options, "limit": limit},
            "qoff convert, the whole command",
            ("model", "s", "GB at most", "KL", "+-"),
            unit="s",
        )
        if args.warm:
            converted(source, options, limit)
        seconds, most, found = converted(source, options, limit)
    kl, error = found.get("kl", float("nan")), found.get("kl_error", float("nan"))
    report.rows.append(
        (source.name, f"{seconds:.1f}", f"{most / 1e9:.2f}", f"{kl:.4f}", f"{error:.4f}")
    )
    report.measured = {"seconds": seconds, "bytes": most, **found}
    if args.model is None and not args.layers:
        report.bars.append(Bar(f"{BAR} s over those of the demo", 1, BAR / seconds))
    report.publish(args.out)


def random_llama(folder: Path, layers: int) -> None:
    """Write a model of Llama 3 8B's shape in bfloat16, with the demo's tokenizer."""
    random_model({**LLAMA_8B, "num_hidden_layers": layers}, torch.bfloat16).save_pretrained(folder)
    for path in fetch_float().glob("*token*"):
        shutil.copy(path, folder)


def converted(
    source: Path, options: Sequence[str], limit: int | None
) -> tuple[float, int, dict[str, float]]:
    """Seconds of the command, its bytes of memory at the peak, and what it says about its loss."""
    with ExitStack() as undo:
        folder = undo.enter_context(tempfile.TemporaryDirectory())
        group = None if limit is None else undo.enter_context(control_group(limit))
        out, start = Path(folder, "out"), time.perf_counter()
        command: list[str | Path] = [
            sys.executable,
            "-m",
            "qoff",
            "convert",
            source,
            out,
            "--json",
            *options,
        ]
        join = None if group is None else group.join
        with subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=join) as process:
            assert process.stdout is not None
            said = process.stdout.read()
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - start
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    found = {name: x for name, x in json.loads(said).items() if name.startswith("kl")}
    return seconds, used.ru_maxrss * 1024, found


if __name__ == "__main__":
    main()

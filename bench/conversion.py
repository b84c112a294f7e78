"""`qoff convert` of the demo's float model with its defaults: the whole command, from its start.

    python -m bench.conversion

Compiled kernels are in the cache after a first run, which --warm makes and leaves out.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.demo import fetch_float
from bench.harness import Bar, Report, arguments

BAR = 60  # seconds on two cores


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    args = arguments(
        __doc__, argv, model=(Path, None, "a float model; default: the demo's"),
        options=(str, "", "more options of the command, with spaces between"),
        warm=(bool, False, "convert once before"),
    )  # fmt: skip
    source, options = args.model or fetch_float(), args.options.split()
    report = Report(
        "conversion",
        {"model": source.name, "options": options},
        "qoff convert, the whole command",
        ("model", "s", "GB at most", "KL", "+-"),
        unit="s",
    )
    if args.warm:
        converted(source, options)
    seconds, found = converted(source, options)
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    kl, error = found.get("kl", float("nan")), found.get("kl_error", float("nan"))
    report.rows.append(
        (source.name, f"{seconds:.1f}", f"{most / 1e9:.2f}", f"{kl:.4f}", f"{error:.4f}")
    )
    report.measured = {"seconds": seconds, "bytes": most, **found}
    if args.model is None:
        report.bars.append(Bar(f"{BAR} s over those of the demo", 1, BAR / seconds))
    report.publish(args.out)


def converted(source: Path, options: Sequence[str]) -> tuple[float, dict[str, float]]:
    """Seconds of the command, and what it says about its loss."""
    with tempfile.TemporaryDirectory() as folder:
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
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        seconds = time.perf_counter() - start
    found = json.loads(done.stdout)
    return seconds, {name: x for name, x in found.items() if name.startswith("kl")}


if __name__ == "__main__":
    main()

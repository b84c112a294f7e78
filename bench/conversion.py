"""`qoff convert` of the demo's float model with its defaults: the whole command, from its start.

    python -m bench.conversion

Compiled kernels are in the cache after a first run, which --warm makes and leaves out.
"""

from __future__ import annotations

import json
import os
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
    seconds, most, found = converted(source, options)
    kl, error = found.get("kl", float("nan")), found.get("kl_error", float("nan"))
    report.rows.append(
        (source.name, f"{seconds:.1f}", f"{most / 1e9:.2f}", f"{kl:.4f}", f"{error:.4f}")
    )
    report.measured = {"seconds": seconds, "bytes": most, **found}
    if args.model is None:
        report.bars.append(Bar(f"{BAR} s over those of the demo", 1, BAR / seconds))
    report.publish(args.out)


def converted(source: Path, options: Sequence[str]) -> tuple[float, int, dict[str, float]]:
    """Seconds of the command, its bytes of memory at the peak, and what it says about its loss."""
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
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
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

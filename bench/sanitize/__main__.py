"""The CPU kernels under AddressSanitizer or ThreadSanitizer, in whatever runs them.

    python -m bench.sanitize --address          # the tests of all ops, over their shapes
    python -m bench.sanitize --threads          # 8 threads with requests on one LLM
    python -m bench.sanitize --threads bench.random_plans --plans 20

The kernels are compiled with the calls of LLVM's sanitizers at each load, store and atomic
operation (`instrument`), and run with libasan or libtsan in front (Debian: libasan8, libtsan2).
What is guarded is every allocation of torch and numpy, and where a job's arguments are; not the
parts of an arena or a workspace. Python, torch and numba themselves are not looked at, nor is what
numba's loop vectorizer would make of a kernel. The status is 1 if something is reported, else the
module's.
"""

from __future__ import annotations

import argparse
import bisect
import ctypes
import ctypes.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from qoff.kernels.cpu.jit.compiled import stamp
from qoff.settings import cache_directory

from .instrument import Sanitizer

_TESTS = (
    "w4_linear", "attention", "pack_blocks", "packed_attention", "packed_select", "experts",
    "embedding", "cpu_sampling", "optim", "pool", "recorder", "rotated", "simd",
)  # fmt: skip
_DEFAULTS = {
    Sanitizer.ADDRESS: [
        "pytest", "-q", "-p", "no:cacheprovider", "--timeout=3600",
        *(f"tests/kernels/test_{x}.py" for x in _TESTS),
    ],
    Sanitizer.THREAD: ["bench.stress", "--unshared", "--threads", "8"],
}  # fmt: skip
_OPTIONS = {
    # Only what the kernels do is looked at: torch's own threads are not compiled for it.
    Sanitizer.ADDRESS: "detect_leaks=0:halt_on_error=0:allocator_may_return_null=1",
    Sanitizer.THREAD: "ignore_noninstrumented_modules=1:report_signal_unsafe=0:history_size=4",
}
_NO_RANDOM_ADDRESSES = 0x0040000  # ADDR_NO_RANDOMIZE: libtsan wants memory where it knows it
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def run(sanitizer: Sanitizer, command: Sequence[str], cache: Path) -> tuple[int, str]:
    """Run a module and its arguments: its status, and what was reported."""
    library = ctypes.util.find_library(sanitizer.value)
    if library is None:
        raise SystemExit(f"no lib{sanitizer.value}: install it (Debian: libasan8, libtsan2)")
    with tempfile.TemporaryDirectory() as folder:
        places, log = Path(folder, "functions"), Path(folder, "report")
        places.touch()
        name = f"{sanitizer.value.upper()}_OPTIONS"
        environment = {
            **os.environ,
            # The second, so that libasan finds how exceptions of C++ are thrown, which torch does.
            "LD_PRELOAD": f"{library} {ctypes.util.find_library('stdc++')}",
            name: f"{_OPTIONS[sanitizer]}:exitcode=0:log_path={log}",
            "NUMBA_CACHE_DIR": str(cache),
            "NUMBA_LOOP_VECTORIZE": "0",  # of our vectors only, not into scattered accesses
            "PYTHONMALLOC": "malloc",  # so that arguments of jobs are guarded too
        }
        personality = ctypes.CDLL(None).personality
        inside = [sys.executable, "-m", f"{__package__}.inside", sanitizer.value, str(places), "-m"]
        status = subprocess.run(
            [*inside, *command],
            env=environment,
            preexec_fn=partial(personality, _NO_RANDOM_ADDRESSES),
        ).returncode
        text = "".join(path.read_text() for path in sorted(log.parent.glob(f"{log.name}.*")))
        return status, _named(text, places.read_text())


def _named(report: str, places: str) -> str:
    """The report with names of compiled functions behind the addresses in them."""
    lines = [line.split(" ", 1) for line in places.splitlines()]
    known = sorted((int(address), name) for address, name in lines)
    starts = [address for address, _ in known]

    def name(found: re.Match[str]) -> str:
        at = bisect.bisect(starts, int(found[0], 16)) - 1
        distance = int(found[0], 16) - starts[at] if at >= 0 else -1
        return f"{found[0]} {known[at][1]}+{distance}" if 0 <= distance < 1 << 17 else found[0]

    return _ADDRESS.sub(name, report)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    for option, sanitizer in (("address", Sanitizer.ADDRESS), ("threads", Sanitizer.THREAD)):
        which.add_argument(f"--{option}", dest="which", action="store_const", const=sanitizer)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a module and its arguments")
    given = parser.parse_args(argv)
    cache = cache_directory() / "sanitize" / stamp(Path(__file__).parent)[:16] / given.which.value
    cache.mkdir(parents=True, exist_ok=True)
    status, report = run(given.which, given.command or _DEFAULTS[given.which], cache)
    print(report, end="")
    print(f"{report.count('SUMMARY:')} reports")
    raise SystemExit(status or bool(report))


if __name__ == "__main__":
    main()

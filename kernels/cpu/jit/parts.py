"""All kernels compiled in a process for each processor: what one alone takes minutes for."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from qoff.system_memory import free_memory

# Modules of kernels/cpu whose import compiles something, the parts that take longest first. What
# one module calls of another by its symbol is compiled with it, so these are in one part.
PARTS = (
    ("packed_attention.block", "packed_attention.job", "packed_attention.select_job"),
    (
        "linear.multiply",
        "linear.job",
        "linear.norm_job",
        "linear.low_rank",
        "linear.dequantize",
        "moe.job",
    ),
    ("attention.append", "attention.prefill", "attention.decode", "attention.gate"),
    ("attention.latent", "attention.resize", "indexed.choose_job", "indexed.attend_job"),
    ("jit.read_queue", "jit.reads", "jit.slots", "jit.copies", "sampling.job", "steps"),
    ("optim.job", "optim.rows_job"),
    (
        "recurrent.delta_job",
        "recurrent.short_conv",
        "recurrent.mamba_job",
        "moe.route",
        "expert_cache.jobs",
        "embedding",
    ),
    (
        "streams.mixing",
        "streams.matched",
        "streams.sparse_gate",
        "packed_attention.pack_job",
    ),
)
_MARK = "QOFF_COMPILES_A_PART"  # in the environment of the processes that do
_PROCESS_BYTES = 768 << 20  # that each of them takes, and some to spare
_PROGRAM = """import sys
sys.path[:] = {path!r}
from qoff.kernels.cpu.jit.parts import compile_parts
compile_parts({claims!r})
"""

logger = logging.getLogger(__name__)


def compile_all(cache: Path, processes: int) -> None:
    """Have all kernels compiled and kept, by so many processes or as many as there is memory for.

    What they cannot compile, who needs it does, and says why. cache: a folder of what is compiled;
    while a process compiles for it, others wait.
    """
    free = free_memory()
    if free is not None:
        processes = min(processes, free // _PROCESS_BYTES)
    processes = min(processes, len(PARTS))
    program = sys.executable
    if processes < 2 or _MARK in os.environ or not program or getattr(sys, "frozen", False):
        return
    try:
        with _alone(cache) as first, ExitStack() as stack:
            if not first:
                return
            claims = stack.enter_context(TemporaryDirectory(prefix="qoff-compile-"))
            text = _PROGRAM.format(path=sys.path, claims=claims)
            running = [
                stack.enter_context(_process([program, "-c", text])) for _ in range(processes)
            ]
            ends = [one.wait() for one in running]
            if any(ends):
                logger.debug("processes that compile kernels ended with %s", ends)
    except OSError as error:  # no process, temporary folder or lock: this one compiles alone
        logger.debug("no other process compiles kernels: %s", error)


def compile_parts(claims: str) -> None:
    """Compile each part that no other process has claimed, by a file in this folder."""
    for number, part in enumerate(PARTS):
        try:
            (Path(claims) / str(number)).touch(exist_ok=False)
        except FileExistsError:
            continue
        for module in part:
            importlib.import_module(f"qoff.kernels.cpu.{module}")


@contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is silent, and is not left behind."""
    nowhere = subprocess.DEVNULL
    environment = {**os.environ, _MARK: "1"}
    one = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, env=environment)
    try:
        yield one
    finally:
        one.kill()
        one.wait()


@contextmanager
def _alone(cache: Path) -> Iterator[bool]:
    """Be the only process that compiles for a cache; whether none did when it was asked for."""
    try:
        import fcntl
    except ImportError:  # where there are no such locks, some is compiled twice
        yield True
        return
    with (cache / "compiling").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            first = True
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_EX)
            first = False
        yield first

"""The memory that the machine has, and what the system refuses: one error for all of it."""

from __future__ import annotations

import ctypes
import errno
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, suppress
from fractions import Fraction
from functools import cache
from mmap import PAGESIZE
from pathlib import Path, PurePosixPath
from types import TracebackType

from qoff.errors import BudgetError, QoffError

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_BYTES = re.compile(
    r"(?:tried to allocate|Unable to allocate) (\d+(?:\.\d+)?) ?(bytes|[KMGTPE]iB)?", re.IGNORECASE
)
_GPU = re.compile(r"\bGPU (\d+) has\b")  # in what torch says of memory
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's `mallopt`
_HEAP, _TOP = 32 << 20, 128 << 10  # the largest piece that its heap can have; what it keeps on top
_LARGE = 256 << 10  # bytes of pieces that are to be outside of it
_ON_GPU = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "HIP out of memory",
)
_GPU_FAILED = ("CUDA error: ", "CUDA driver error: ", "Triton Error [CUDA]: ")
_NO_THREAD = "can't start new thread"  # Python's own words
_ON_HOST = ("DefaultCPUAllocator", "Storage size calculation overflowed", "std::bad_alloc")


def machine_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Bytes of main memory that a process can have: RAM and swap, or its cgroup's limit.

    cgroup v2 (`memory.max` of the process's group and those around it) and v1
    (`memory.limit_in_bytes`). None where the system does not say.
    """
    found = [limit for limit, _ in _groups(proc, cgroups)]
    whole = _of_machine(proc)
    return min([*found, int(whole)] if whole < float("inf") else found, default=None)


def free_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS, *, swap: bool = False) -> int | None:
    """Bytes of main memory that this process can still take, without swapping unless `swap`.

    What the system calls available, or what a cgroup's limit leaves. None where the system does not
    say.
    """
    found = [left for _, left in _left_by_groups(proc, cgroups)]
    meminfo = _meminfo(proc)
    if "MemAvailable" in meminfo:
        found.append(meminfo["MemAvailable"] + swap * meminfo.get("SwapFree", 0))
    return min(found, default=None)


def left_by_limits(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Bytes that the limits of this process's cgroups leave: who takes more is killed.

    None where no limit is below the machine's memory.
    """
    whole = _of_machine(proc)
    found = [left for limit, left in _left_by_groups(proc, cgroups) if limit < whole]
    return min(found, default=None)


def address_space() -> int | None:
    """Bytes of address space that this process may have (`ulimit -v`); None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def check_machine(nbytes: int, what: str) -> None:
    """Raise BudgetError where so many bytes of main memory cannot be had, however much is free."""
    there = machine_memory()
    if there is not None and nbytes > there:
        raise BudgetError(
            f"host memory: {what} take {nbytes:,} bytes, and the machine has {there:,}; "
            "use smaller sizes, or less device_memory or host_memory"
        )


def check_free(nbytes: int, what: str, lower: str = "device_memory or host_memory") -> None:
    """Raise BudgetError where so many bytes of main memory are not free, swap included.

    lower: the options that make it less.
    """
    free = free_memory(swap=True)
    if free is not None and nbytes > free:
        raise BudgetError(
            f"host memory: {what} take {nbytes:,} bytes, and {free:,} are free; lower {lower}"
        )


def return_freed() -> None:
    """Give memory that was freed, and that the C library keeps for later, back to the system.

    glibc keeps it below whatever is in use: of the 45 MiB that reading a tokenizer takes, 30. Does
    nothing with other libraries. Milliseconds.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


def keep_large_apart() -> None:
    """Have the C library give memory of 256 KiB and more back to the system once it is freed.

    By itself glibc serves up to 32 MiB from its heap once such a size has been freed: what is freed
    there lies between what stays, and what is aligned does not fit into the place of what was. A
    process then takes tens of MiB more than what is in use. Does nothing with other libraries.
    """
    _set_heap(_LARGE, _TOP)


def keep_freed() -> None:
    """Have the C library serve up to 32 MiB from its heap, and keep what is freed for later.

    The heap gives back what is free at its end beyond 64 MiB; `return_freed` does the rest. Does
    nothing with other libraries.
    """
    _set_heap(_HEAP, 2 * _HEAP)


def _set_heap(largest: int, top: int) -> None:
    with suppress(AttributeError, OSError, TypeError):  # TypeError: Windows has no CDLL(None)
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, largest)
        library.mallopt(_TRIM_THRESHOLD, top)


@cache
def _trim() -> Callable[[int], int] | None:
    with suppress(AttributeError, OSError, TypeError):
        return ctypes.CDLL(None).malloc_trim
    return None


def own_memory() -> int:
    """Bytes that this process has to itself: not pages of files. 0 where the system says none."""
    pages = _text(_PROC / "self/statm").split()
    return PAGESIZE * (int(pages[1]) - int(pages[2])) if pages else 0


class refusals(ContextDecorator):  # noqa: N801 - used as a function, around every pass
    """Turn every failed allocation, on the host or a GPU, into a BudgetError: its tier and bytes.

    It may be one of Python, numpy, numba, torch or mmap. A thread that is refused is a QoffError.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, QoffError) or not isinstance(
            error, (MemoryError, RuntimeError, OSError)
        ):
            return
        if _NO_THREAD in str(error):
            raise QoffError(
                "the system refused a new thread; raise the limit of processes (ulimit -u, the "
                "container's --pids-limit) or of address space (ulimit -v), or lower "
                "OMP_NUM_THREADS"
            ) from error
        tier = refused_tier(error)
        if tier is None:
            return
        text = str(error)
        match = _BYTES.search(text)
        wanted = "memory" if match is None else f"{_size(match):,} bytes"
        there, held = machine_memory(), _held(tier, text)
        of = f", of {there:,} bytes of the machine" if tier == "host" and there else ""
        limit = space_limit() if tier == "host" else None
        has, how = limit or f"the process has {held:,} bytes{of}", "Use"
        if limit is not None:
            how = "Raise that limit, or use"
        raise BudgetError(
            f"{tier} memory: the system refused {wanted}; {has}. {how} less device_memory or "
            "host_memory, smaller batches, or shorter sequences"
        ) from error


def space_limit() -> str | None:
    """What a refusal says of the limit of address space; None where the machine has no more."""
    limit, there = address_space(), machine_memory()
    if limit is None or (there and limit >= there):
        return None
    pages = _text(_PROC / "self/statm").split()
    taken = int(pages[0]) * PAGESIZE if pages else 0
    return f"{taken:,} of {limit:,} bytes of address space (ulimit -v) are taken"


def refused_tier(error: BaseException) -> str | None:
    """The tier ("device", "host") whose memory was refused; None for another error."""
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError" or any(x in text for x in _ON_GPU):
        return "device"
    refused = isinstance(error, MemoryError) or any(x in text for x in _ON_HOST)
    if refused or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "host"
    return None


def gpu_failed(error: BaseException) -> bool:
    """Whether CUDA failed otherwise than for memory; the process can rarely use the GPU again."""
    return refused_tier(error) is None and any(text in str(error) for text in _GPU_FAILED)


def _size(match: re.Match[str]) -> int:
    unit = next(i for i, unit in enumerate(_UNITS) if unit.lower() == (match[2] or "bytes").lower())
    return int(Fraction(match[1]) * 1024**unit)


def _held(tier: str, text: str = "") -> int:
    """Bytes that this process has: of the GPU that an error's text names, else the current one."""
    if tier == "device":
        import torch

        named = _GPU.search(text)
        gpu = None if named is None else int(named[1])
        return torch.cuda.memory_reserved(gpu) if torch.cuda.is_available() else 0
    fields = _text(_PROC / "self/statm").split()
    return int(fields[1]) * PAGESIZE if fields else 0


def _left_by_groups(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Limits, and what they leave: cached files count as free, those in use by half."""
    for limit, group in _groups(proc, cgroups):
        v2 = (group / "memory.current").exists()
        used = _text(group / ("memory.current" if v2 else "memory.usage_in_bytes")).strip()
        stat = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines())
        total = "" if v2 else "total_"
        cached, active = (int(stat.get(f"{total}{x}_file", 0)) for x in ("inactive", "active"))
        if used.isdecimal():
            yield limit, max(0, limit - int(used) + cached + active // 2)


def _of_machine(proc: Path) -> float:
    """Bytes of RAM and swap; infinity where the system does not say."""
    found = _meminfo(proc)
    return found["MemTotal"] + found.get("SwapTotal", 0) if "MemTotal" in found else float("inf")


def _meminfo(proc: Path) -> dict[str, int]:
    """What the system says of main memory, in bytes."""
    lines = (line.split(":", 1) for line in _text(proc / "meminfo").splitlines())
    return {name: 1024 * int(value.split()[0]) for name, value in lines}


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[int, Path]]:
    """Limits of this process's control groups, and of those that they are in; their folders."""
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            root, file = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, file = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        inner = PurePosixPath(name.lstrip("/"))
        for group in (inner, *inner.parents):  # in a container the name may be that outside
            text = _text(root / group / file).strip()
            if text.isdecimal():
                yield int(text), root / group


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

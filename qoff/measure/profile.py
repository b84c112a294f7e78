"""Measuring a `MachineProfile` within 20 seconds: its links, and what `processor` finds."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from qoff.kernels.processor import usable_threads
from qoff.memory import DiskReader
from qoff.memory.arena import map_pages
from qoff.memory.io.spill import SpillFile
from qoff.plan.machine import fingerprint, profile_file, usable_memory
from qoff.plan.profile import IN_FLIGHT, Link, MachineProfile, typical
from qoff.schema import replace_text

from . import processor
from .machine import machine
from .processor import POOL, random_matrix, seconds_of

_LARGE, _SMALL, _TINY = 8 << 20, 1 << 20, 64 << 10  # bytes of a request
_FILE = 256 << 20  # bytes that are written and read, around the page cache
_SHORT = 1024  # rows and columns of a matrix that takes tens of microseconds
_LEAST = 64 << 10  # bytes that files are measured with
_LEAST_ALONE = 8 << 10  # bytes of a request that none is beside
_PART = 4  # requests at a time beside matmuls
_MANY = 128  # small requests
_BESIDE_S = 0.15  # that is computed alone, and beside a link
_TURNS = 3  # in each of which all is measured: others have busy seconds
_WITHIN_S = 17.0  # that they may take; a slow machine has fewer
Submit = Callable[[int, int, int], Future[None]]  # offset, bytes, buffer


def measured_profile(device: torch.device, checkpoint: Path, spill: Path) -> MachineProfile:
    """Measure this machine; the files that are read and written are in these two folders.

    All of it up to three times in turn, and the medians are taken. On a GPU, attention to packed K
    and V is taken to be limited by its memory. Raises QoffError where the disks have no room.
    """
    start, turns = time.perf_counter(), list[MachineProfile]()
    while len(turns) < _TURNS:
        turns.append(_measured(device, checkpoint, spill))
        if (time.perf_counter() - start) * (1 + 1 / len(turns)) > _WITHIN_S:
            break
    return typical(turns)


def _measured(device: torch.device, checkpoint: Path, spill: Path) -> MachineProfile:
    """One turn."""
    on_gpu = device.type == "cuda"
    cpu = processor.of_cpu()
    where = machine()
    files = [f for f in sorted(checkpoint.glob("*.safetensors")) if f.stat().st_size > 4 * _LEAST]
    same = checkpoint.stat().st_dev == spill.stat().st_dev
    write, read = _disk(spill, reads=same and not files)
    if files:
        read = _file_reads(files)
    elif not same:
        _, read = _disk(checkpoint, writes=False)
    to_device, from_device = _copies(device)
    name = torch.cuda.get_device_name(device) if on_gpu else str(where["cpu"])
    return MachineProfile(
        name=name,
        on_gpu=on_gpu,
        cores=usable_threads(),
        device=processor.of_gpu(device) if on_gpu else cpu,
        host=cpu,
        disk_read=read,
        disk_write=write,
        to_device=to_device,
        from_device=from_device,
        usable=usable_memory(device, spill),
        fingerprint=fingerprint(device, checkpoint, spill),
    )


def keep(profile: MachineProfile) -> Path:
    """Write a profile to where `kept_profile` finds it; returns the file."""
    path = profile_file(profile.fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, profile.text())
    return path


def _copies(device: torch.device) -> tuple[Link, Link]:
    """To the device and from it; beside a CPU both are copies by one thread."""
    on_gpu = device.type == "cuda"
    host = torch.ones(POOL, dtype=torch.uint8, pin_memory=on_gpu)
    there = torch.ones(POOL, dtype=torch.uint8, device=device)

    def link(source: Tensor, into: Tensor) -> Link:
        def copy() -> None:
            into.copy_(source, non_blocking=on_gpu)
            if on_gpu:
                torch.cuda.synchronize(device)

        if on_gpu:
            return Link(source.nbytes / seconds_of(copy), 1e-5)

        def part(at: int, nbytes: int, number: int) -> None:
            at %= POOL
            into[at : at + nbytes].copy_(source[at : at + nbytes])

        with ThreadPoolExecutor(1, initializer=lambda: torch.set_num_threads(1)) as pool:
            return _link(lambda at, nbytes, number: pool.submit(part, at, nbytes, number))

    to_device = link(host, there)
    return to_device, link(there, host) if on_gpu else to_device


def _disk(folder: Path, writes: bool = True, reads: bool = True) -> tuple[Link, Link]:
    """Writes and reads of an unnamed file; each alone, and beside matrices that are multiplied.

    What is not wanted is a copy of the other.
    """
    with closing(DiskReader()) as reader, tempfile.TemporaryDirectory(dir=folder) as inside:
        spill = SpillFile(Path(inside), _FILE, reader)
        with closing(spill):
            buffers = [map_pages(_LARGE) for _ in range(IN_FLIGHT)]
            for buffer in buffers:
                buffer.random_(256)

            def write(at: int, nbytes: int, number: int) -> Future[None]:
                return spill.write(at, buffers[number][:nbytes])

            if not writes:
                _run(write, _LARGE, _FILE)  # there is something to read
            small = buffers[0][:_LEAST_ALONE]
            found = []
            if writes:
                link = _link(write)
                alone = _alone(lambda at: spill.write_here(at, small))
                found.append(replace(link, alone_s=alone))
            if reads:
                link = _link(lambda at, n, i: spill.read(at, buffers[i][:n]))
                alone = _alone(lambda at: spill.read_here(at, small))
                found.append(replace(link, alone_s=alone))
    return found[0], found[-1]


def _file_reads(files: Sequence[Path]) -> Link:
    """Reads of files that are there, in turn, as a checkpoint's layers are."""
    size = min(file.stat().st_size for file in files) // _LEAST * _LEAST
    large = min(_LARGE, size)
    with closing(DiskReader()) as reader:
        buffers = [map_pages(large) for _ in range(IN_FLIGHT)]

        def submit(at: int, nbytes: int, number: int) -> Future[None]:
            turn, which = divmod(at // nbytes, len(files))
            first = turn * nbytes % (size - nbytes + 1) // _LEAST * _LEAST
            return reader.submit(files[which], first, buffers[number][:nbytes])

        small = buffers[0][:_LEAST_ALONE]
        alone = _alone(lambda at: reader.read_here(files[0], at % (size - _LEAST), small))
        return replace(_link(submit, large), alone_s=alone)


def _link(submit: Submit, large: int = _LARGE) -> Link:
    """A link's rates beside matmuls, as it is used; what a request adds is measured alone."""
    small = min(_SMALL, large // 4)
    _run(submit, large, _FILE // 8)
    alone = _run(submit, large, _MANY * large // 8) * 8 / _MANY
    short = _run(submit, small, _MANY * small) / _MANY
    (rate, taken), (_, by_tiny) = _beside(submit, (large, _TINY))
    each = max((alone - short) / (large - small), alone / large / 2)  # seconds of a byte
    # Of one core: those of a byte, and of a request of any size.
    of_byte = max(0.0, (taken * large - by_tiny * _TINY) / (large - _TINY))
    of_request = max(0.0, _TINY * (by_tiny - of_byte))
    request_s = max(0.0, alone - large * each)
    return Link(1 / max(each, 1 / rate), request_s, of_byte, of_request)


def _alone(move: Callable[[int], None]) -> float:
    """Seconds of a request of `_LEAST_ALONE` bytes at an offset, each after the other."""
    taken = list[float]()
    for number in range(_MANY):
        start = time.perf_counter()
        move(number * _LEAST)
        taken.append(time.perf_counter() - start)
    return median(taken)


def _beside(submit: Submit, sizes: Sequence[int]) -> list[tuple[float, float]]:
    """Bytes a second beside matmuls, and seconds of one core that each takes from these.

    In requests of each of these sizes. It is more than what the threads that move it use: they
    interrupt others, which the rest then wait for, after each of the short jobs of a model that is
    not large, and share the memory.
    """
    from qoff.kernels.cpu import ops

    matrices = [random_matrix((_SHORT, _SHORT), 4, ops.PACKING) for _ in range(4)]
    x = torch.randn(4, _SHORT)

    def compute() -> tuple[int, float]:
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < _BESIDE_S:
            ops.w4_linear(x, matrices[count % 4])
            count += 1
        return count, time.perf_counter() - start

    ops.w4_linear(x, matrices[0])  # compiles
    count, seconds = compute()
    each, found = seconds / count, list[tuple[float, float]]()
    for size in sizes:
        stop, moved = threading.Event(), [0]

        def pump(size: int = size, stop: threading.Event = stop, moved: list[int] = moved) -> None:
            while not stop.is_set():
                _run(submit, size, _PART * size)
                moved[0] += _PART * size

        mover = threading.Thread(target=pump)
        mover.start()
        try:
            count, seconds = compute()
        finally:
            stop.set()
        begun = moved[0] + _PART * size // 2  # half of what is under way
        mover.join()
        taken = max(0.0, seconds - count * each) * usable_threads() / begun
        found.append((begun / seconds, taken))
    return found


def _run(submit: Submit, size: int, total: int) -> float:
    """Seconds for requests of `size` bytes, a few in flight, until `total` bytes have moved."""
    start = time.perf_counter()
    pending: list[Future[None]] = []
    for number, at in enumerate(range(0, total, size)):
        if len(pending) == IN_FLIGHT:
            pending.pop(0).result()
        pending.append(submit(at, size, number % IN_FLIGHT))
    for one in pending:
        one.result()
    return time.perf_counter() - start

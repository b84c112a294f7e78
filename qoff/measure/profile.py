"""Measuring a `MachineProfile` within 20 seconds: its links, and what `processor` finds."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
from qoff.memory.io.disk import Fill
from qoff.memory.io.spill import SlotFill, SpillFile
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
_PART = 32 << 20  # bytes at a time beside matmuls
_MANY = 128  # small requests
_JOBS = 16  # matmuls, one after the other
_BESIDE_S = 0.15  # that is computed alone, and beside a link
_TURNS = 3  # in each of which all is measured: others have busy seconds
_WITHIN_S = 17.0  # that they may take; a slow machine has fewer
Move = Callable[[int, int], None]  # bytes of a request, and of all of them


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
    write, read = _disk(spill, on_gpu, reads=same and not files)
    if files:
        read = _file_reads(files, on_gpu)
    elif not same:
        _, read = _disk(checkpoint, on_gpu, writes=False)
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

        def part(at: int, nbytes: int) -> None:
            at %= POOL
            into[at : at + nbytes].copy_(source[at : at + nbytes])

        with ThreadPoolExecutor(1, initializer=lambda: torch.set_num_threads(1)) as pool:
            return _link(_Requests(lambda i, at, n: pool.submit(part, at, n)))

    to_device = link(host, there)
    return to_device, link(there, host) if on_gpu else to_device


def _disk(folder: Path, on_gpu: bool, writes: bool = True, reads: bool = True) -> tuple[Link, Link]:
    """Writes and reads of an unnamed file; each alone, and beside matrices that are multiplied.

    What is not wanted is a copy of the other.
    """
    with closing(DiskReader()) as reader, tempfile.TemporaryDirectory(dir=folder) as inside:
        spill = SpillFile(Path(inside), _FILE, reader)
        with closing(spill):
            buffers = _buffers(_LARGE)
            for buffer in buffers:
                buffer.random_(256)
            write = _Requests(lambda i, at, n: spill.write(at, buffers[i][:n]))
            if not writes:
                write(_LARGE, _FILE)  # there is something to read
            small = buffers[0][:_LEAST_ALONE]
            found = []
            if writes:
                alone = _alone(lambda at: spill.write_here(at, small))
                found.append(replace(_link(write), alone_s=alone))
            if reads:
                read = _Requests(lambda i, at, n: spill.read(at, buffers[i][:n]))
                listed = _Listed(lambda fills: spill.read_list(fills, _nobody), buffers)
                alone = _alone(lambda at: spill.read_here(at, small))
                link = _link(read) if on_gpu else _link(listed, read)
                found.append(replace(link, alone_s=alone))
    return found[0], found[-1]


def _file_reads(files: Sequence[Path], on_gpu: bool) -> Link:
    """Reads of files that are there, in turn, as a checkpoint's layers are."""
    size = min(file.stat().st_size for file in files) // _LEAST * _LEAST
    large = min(_LARGE, size)

    def place(at: int, nbytes: int) -> tuple[Path, int]:
        turn, which = divmod(at // nbytes, len(files))
        return files[which], turn * nbytes % (size - nbytes + 1) // _LEAST * _LEAST

    def fill(parts: Sequence[tuple[int, Tensor]], words: int, turn: int) -> Fill:
        ((at, dest),) = parts
        path, first = place(at, dest.nbytes)
        return Fill(path, [(first, dest)], words, turn)

    with closing(DiskReader()) as reader:
        buffers = _buffers(large)
        read = _Requests(lambda i, at, n: reader.submit(*place(at, n), buffers[i][:n]))
        listed = _Listed(
            lambda fills: reader.submit_list([fill(*one) for one in fills], _nobody), buffers
        )
        small = buffers[0][:_LEAST_ALONE]
        alone = _alone(lambda at: reader.read_here(files[0], at % (size - _LEAST), small))
        link = _link(read, large=large) if on_gpu else _link(listed, read, large)
        return replace(link, alone_s=alone)


def _buffers(nbytes: int) -> list[Tensor]:
    return [map_pages(nbytes) for _ in range(IN_FLIGHT)]


def _nobody(_: BaseException) -> None:
    """Nobody else has to hear of it: the request raises it."""


class _Requests:
    """Moves by requests of Python, a few in flight: of a buffer, an offset and so many bytes."""

    def __init__(self, submit: Callable[[int, int, int], Future[None]]) -> None:
        self._submit = submit

    def __call__(self, size: int, total: int) -> None:
        pending: list[Future[None]] = []
        for number, at in enumerate(range(0, total, size)):
            if len(pending) == IN_FLIGHT:
                pending.pop(0).result()
            pending.append(self._submit(number % IN_FLIGHT, at, size))
        for one in pending:
            one.result()


class _Listed:
    """Reads by one list, as the rounds of a CPU read, into buffers that are always free."""

    def __init__(
        self, read_list: Callable[[Sequence[SlotFill]], Future[None]], buffers: Sequence[Tensor]
    ) -> None:
        from qoff.kernels.cpu.jit.slots import Slots  # compiled when it is imported

        self._read_list, self._buffers = read_list, buffers
        self._slots = Slots([one.data_ptr() for one in buffers], 0, spoil=False)

    def __call__(self, size: int, total: int) -> None:
        self._read_list(list(self._fills(size, total))).result()

    def _fills(self, size: int, total: int) -> Iterator[SlotFill]:
        for number, at in enumerate(range(0, total, size)):
            slot = number % len(self._buffers)
            yield [(at, self._buffers[slot][:size])], self._slots.words(slot), 0


def _link(move: Move, asked: Move | None = None, large: int = _LARGE) -> Link:
    """A link's rates beside matmuls, as it is used; what a request adds is measured alone.

    asked: moves what rounds ask for by Python, if that is another way.
    """
    small = min(_SMALL, large // 4)
    move(large, _FILE // 8)
    alone = _seconds(move, large, _MANY * large // 8) * 8 / _MANY
    short = _seconds(move, small, _MANY * small) / _MANY
    rate, taken = _beside(move, large, in_list=True)
    _, by_tiny = _beside(asked or move, _TINY, in_list=False)
    each = max((alone - short) / (large - small), alone / large / 2)  # seconds of a byte
    # Of one core: those of a byte, and of a request of any size.
    of_byte = taken if asked else max(0.0, (taken * large - by_tiny * _TINY) / (large - _TINY))
    of_request = max(0.0, _TINY * (by_tiny - of_byte))
    request_s = max(0.0, alone - large * each)
    return Link(1 / max(each, 1 / rate), request_s, of_byte, of_request)


def _seconds(move: Move, size: int, total: int) -> float:
    start = time.perf_counter()
    move(size, total)
    return time.perf_counter() - start


def _alone(move: Callable[[int], None]) -> float:
    """Seconds of a request of `_LEAST_ALONE` bytes at an offset, each after the other."""
    taken = list[float]()
    for number in range(_MANY):
        start = time.perf_counter()
        move(number * _LEAST)
        taken.append(time.perf_counter() - start)
    return median(taken)


def _beside(move: Move, size: int, in_list: bool) -> tuple[float, float]:
    """Bytes a second beside matmuls, and seconds of one core that each takes from these.

    in_list: the matmuls are jobs of a list, as in rounds; else Python calls them, as where it has
    to ask for what moves. It is more than what the threads that move it use: they interrupt others,
    which the rest then wait for, after each of the short jobs of a model that is not large, and
    share the memory.
    """
    from qoff.kernels.cpu import ops

    matrices = [random_matrix((_SHORT, _SHORT), 4, ops.PACKING) for _ in range(4)]
    x = torch.randn(4, _SHORT)

    def multiply() -> None:
        for number in range(_JOBS):
            ops.w4_linear(x, matrices[number % len(matrices)])

    again = processor.in_list(multiply) if in_list else multiply

    def compute() -> tuple[int, float]:
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < _BESIDE_S:
            again()
            count += 1
        return count, time.perf_counter() - start

    again()  # compiles
    count, seconds = compute()
    each, stop, moved, part = seconds / count, threading.Event(), [0], min(_PART, _MANY * size)

    def pump() -> None:
        while not stop.is_set():
            move(size, part)
            moved[0] += part

    mover = threading.Thread(target=pump)
    mover.start()
    try:
        count, seconds = compute()
    finally:
        stop.set()
    begun = moved[0] + part // 2  # half of what is under way
    mover.join()
    return begun / seconds, max(0.0, seconds - count * each) * usable_threads() / begun

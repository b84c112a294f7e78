"""The links of a machine: disks that are read and written, and copies to and from a device."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from qoff.memory import DiskReader
from qoff.memory.arena import map_pages
from qoff.memory.io.runs import Fill
from qoff.memory.io.spill import SpillFile
from qoff.plan.profile import IN_FLIGHT, Link

from .moves import LARGE, Listed, Requests, link_of
from .processor import POOL, seconds_of

LEAST = 64 << 10  # bytes that files are measured with
_FILE = 256 << 20  # bytes that are written and read, around the page cache
_ALONE, _TIMES = 8 << 10, 128  # bytes of a request that none is beside, and how many of these


def copies(device: torch.device) -> tuple[Link, Link]:
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
            return link_of(Requests(lambda i, at, n: pool.submit(part, at, n)))

    to_device = link(host, there)
    return to_device, link(there, host) if on_gpu else to_device


def disk(folder: Path, on_gpu: bool, writes: bool = True, reads: bool = True) -> tuple[Link, Link]:
    """Writes and reads of an unnamed file; each alone, and beside matrices that are multiplied.

    What is not wanted is a copy of the other.
    """
    with closing(DiskReader()) as reader, tempfile.TemporaryDirectory(dir=folder) as inside:
        spill = SpillFile(Path(inside), _FILE, reader)
        with closing(spill):
            buffers = _buffers(LARGE)
            for buffer in buffers:
                buffer.random_(256)
            write = Requests(lambda i, at, n: spill.write(at, buffers[i][:n]))
            if not writes:
                write(LARGE, _FILE)  # there is something to read
            small = buffers[0][:_ALONE]
            found = []
            if writes:
                link = link_of(write)
                found.append(replace(link, alone_s=_alone(lambda at: spill.write_here(at, small))))
            if reads:
                read = Requests(lambda i, at, n: spill.read(at, buffers[i][:n]))
                listed = Listed(lambda fills: spill.read_list(fills, _nobody), buffers)
                link = link_of(read) if on_gpu else link_of(listed, read)
                found.append(replace(link, alone_s=_alone(lambda at: spill.read_here(at, small))))
    return found[0], found[-1]


def file_reads(files: Sequence[Path], on_gpu: bool) -> Link:
    """Reads of files that are there, in turn, as a checkpoint's layers are."""
    size = min(file.stat().st_size for file in files) // LEAST * LEAST
    large = min(LARGE, size)

    def place(at: int, nbytes: int) -> tuple[Path, int]:
        turn, which = divmod(at // nbytes, len(files))
        return files[which], turn * nbytes % (size - nbytes + 1) // LEAST * LEAST

    def fill(parts: Sequence[tuple[int, Tensor]], words: int, turn: int) -> Fill:
        ((at, dest),) = parts
        path, first = place(at, dest.nbytes)
        return Fill(path, [(first, dest)], words, turn)

    with closing(DiskReader()) as reader:
        buffers = _buffers(large)
        read = Requests(lambda i, at, n: reader.submit(*place(at, n), buffers[i][:n]))
        listed = Listed(
            lambda fills: reader.submit_list([fill(*one) for one in fills], _nobody), buffers
        )
        small = buffers[0][:_ALONE]
        link = link_of(read, large=large) if on_gpu else link_of(listed, read, large)
        alone = _alone(lambda at: reader.read_here(files[0], at % (size - LEAST), small))
        return replace(link, alone_s=alone)


def _buffers(nbytes: int) -> list[Tensor]:
    return [map_pages(nbytes) for _ in range(IN_FLIGHT)]


def _nobody(_: BaseException) -> None:
    """Nobody else has to hear of it: the request raises it."""


def _alone(move: Callable[[int], None]) -> float:
    """Seconds of a request of `_ALONE` bytes at an offset, each after the other."""
    taken = list[float]()
    for number in range(_TIMES):
        start = time.perf_counter()
        move(number * LEAST)
        taken.append(time.perf_counter() - start)
    return median(taken)

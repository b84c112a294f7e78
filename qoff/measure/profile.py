"""Measuring a `MachineProfile`: links, matmul and attention, within 20 seconds."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.layer_cache import BlockTable, PackedTokens
from qoff.kernels.layout.packing import packed_shapes
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.ops import Ops
from qoff.kernels.processor import usable_threads
from qoff.kvcache import PlainCache
from qoff.memory import DiskReader
from qoff.memory.arena import map_pages
from qoff.memory.io.spill import SpillFile
from qoff.plan.machine import fingerprint, profile_file, usable_memory
from qoff.plan.profile import Curve, Link, MachineProfile, Processor
from qoff.schema import replace_text

from .machine import machine

_LARGE, _SMALL, _TINY = 8 << 20, 1 << 20, 64 << 10  # bytes of a request
_FILE = 256 << 20  # bytes that are written and read, around the page cache
_POOL = 64 << 20  # bytes that are read in turn, more than caches hold
_SIZE, _GROUP = 4096, 32  # rows and columns of a matrix, columns of a group
_SHORT = 1024  # rows and columns of a matrix that takes tens of microseconds
_ROWS = (1, 4, 16, 64, 256, 512)
_FEW = (1, 16, 256)  # of other bits than 4
_NEAR = (1, 4, 16, 64)  # of a matrix that is in the last cache
_OF_CACHE = 0.8  # of which a layer's matrices may take so much
_WIDE, _MANY_ROWS = 2048, (64, 512)  # of matrices of floats
_GROUPS = (1, 4, 8)  # queries of a KV head
_LEAST_S = 0.02  # of a sample
_LEAST = 64 << 10  # bytes that files are measured with
_PART = 4  # requests at a time beside matmuls
_IN_FLIGHT, _MANY = 2, 128  # requests at a time, as slots are; small ones
_BESIDE_S = 0.3  # that is computed beside a link
Submit = Callable[[int, int, int], Future[None]]  # offset, bytes, buffer


def measured_profile(device: torch.device, checkpoint: Path, spill: Path) -> MachineProfile:
    """Measure this machine; the files that are read and written are in these two folders.

    On a GPU, attention to packed K and V is taken to be limited by its memory. Raises QoffError
    where the disks have no room.
    """
    on_gpu = device.type == "cuda"
    cpu = _cpu()
    where = machine()
    read, write = _disk(spill)
    files = [f for f in sorted(checkpoint.glob("*.safetensors")) if f.stat().st_size > 4 * _LEAST]
    if files:
        read = _file_reads(files)
    elif checkpoint.stat().st_dev != spill.stat().st_dev:
        read, _ = _disk(checkpoint)
    to_device, from_device = _copies(device)
    name = torch.cuda.get_device_name(device) if on_gpu else str(where["cpu"])
    return MachineProfile(
        name=name,
        on_gpu=on_gpu,
        cores=usable_threads(),
        device=_gpu(device) if on_gpu else cpu,
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


def seconds_of(call: Callable[[], object], samples: int = 5) -> float:
    """The median seconds of a call, each sample long enough to be measured; once to warm up."""
    call()
    start = time.perf_counter()
    call()
    repeat = max(1, int(_LEAST_S / max(time.perf_counter() - start, 1e-7)))
    found = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        found.append((time.perf_counter() - start) / repeat)
    return median(found)


def random_matrix(shape: tuple[int, int], bits: int, packing: str, device: str = "cpu") -> QTensor:
    """A matrix of random codes, in groups of 32 with compact scales."""
    codes, scales = packed_shapes(shape, bits, _GROUP, packing)
    return QTensor(
        torch.randint(256, codes, dtype=torch.uint8, device=device),
        torch.full(scales, 128, dtype=torch.uint8, device=device),
        shape,
        bits,
        _GROUP,
        packing,
    )


def _cpu() -> Processor:
    from qoff.kernels.cpu import ops

    def linear(x: Tensor, matrix: QTensor) -> object:
        return ops.w4_linear(x, matrix)

    matmul = _matmul(linear, ops.PACKING, "cpu", torch.float32)
    near = _matmul(linear, ops.PACKING, "cpu", torch.float32, near=True)
    matmul |= {"16": _dense(torch.bfloat16), "32": _dense(torch.float32)}
    small = random_matrix((64, 64), 4, ops.PACKING)
    x = torch.randn(1, 64)
    call = seconds_of(lambda: ops.w4_linear(x, small))
    attention = {"4": _attention(4, _GROUPS), "8": _attention(8, (1, 4))}
    memory = torch.ones(_POOL // 4)
    read_s = seconds_of(memory.sum)
    rate, cache = memory.nbytes / read_s, int(_OF_CACHE * machine()["l3_bytes"])
    return Processor(matmul, attention, _prompt(ops), rate, call, near, cache)


def _gpu(device: torch.device) -> Processor:
    from qoff.kernels.triton import ops

    def linear(x: Tensor, matrix: QTensor) -> object:
        result = ops.w4_linear(x, matrix)
        torch.cuda.synchronize(device)
        return result

    place = str(device)
    matmul = _matmul(linear, ops.PACKING, place, torch.float16)
    small = random_matrix((64, 64), 4, ops.PACKING, place)
    x = torch.randn(1, 64, dtype=torch.float16, device=device)
    call = seconds_of(lambda: ops.w4_linear(x, small))
    source = torch.ones(1 << 30, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)

    def copied() -> None:
        into.copy_(source)
        torch.cuda.synchronize(device)

    rate = 2 * source.nbytes / seconds_of(copied)
    dense = torch.randn(4096, 4096, dtype=torch.float16, device=device)

    def multiplied() -> None:
        torch.mm(dense, dense)
        torch.cuda.synchronize(device)

    flops = 2 * 4096**3 / seconds_of(multiplied)
    attention = {str(bits): ((1.0, 1 / (0.7 * rate)),) for bits in (4, 8)}
    return Processor(matmul, attention, 4 / (0.5 * flops), rate, call)


def _matmul(
    linear: Callable[[Tensor, QTensor], object],
    packing: str,
    device: str,
    dtype: torch.dtype,
    near: bool = False,
) -> dict[str, Curve]:
    """near: of one matrix again and again, that stays in the last cache, in 4 bits alone."""
    found: dict[str, Curve] = {}
    for bits, rows in ((4, _NEAR),) if near else ((4, _ROWS), (6, _FEW), (8, _FEW)):
        nbytes = _SIZE * _SIZE * bits // 8
        matrices = [
            random_matrix((_SIZE, _SIZE), bits, packing, device)
            for _ in range(1 if near else max(2, _POOL // nbytes))
        ]
        curve = []
        for m in rows:
            x = torch.randn(m, _SIZE, dtype=dtype, device=device)
            some = matrices if m < 64 else matrices[:2]
            seconds = seconds_of(partial(_each, partial(linear, x), some), 3)
            curve.append((float(m), seconds / len(some) / _SIZE**2))
        found[str(bits)] = tuple(curve)
    return found


def _dense(dtype: torch.dtype) -> Curve:
    """Seconds for each element of a matrix of floats, by rows of x, as torch multiplies."""
    matrix, curve = torch.randn(_WIDE, _WIDE).to(dtype), []
    for m in _MANY_ROWS:
        x = torch.randn(m, _WIDE).to(dtype)
        seconds = seconds_of(partial(torch.mm, x, matrix.t()), 3)
        curve.append((float(m), seconds / _WIDE**2))
    return tuple(curve)


def _each(call: Callable[[Any], object], operands: Sequence[Any]) -> None:
    for one in operands:
        call(one)


def _attention(bits: int, groups: Sequence[int]) -> Curve:
    """Seconds for each byte of packed K and V, by queries of a KV head."""
    from qoff.kernels.cpu.packed_attention.attention import packed_attention

    heads, batch, context, form = 4, 8, 1024, KVFormat(64, bits, bits)
    blocks = context // BLOCK_TOKENS
    used = batch * blocks
    nbytes = used * heads * form.nbytes
    copies = 1 + _POOL // nbytes
    pool = map_pages(copies * nbytes).view(copies * used, heads, form.nbytes)
    pool.fill_(0x35)  # codes, and float16 numbers of 0.3
    ragged = Ragged.of([1] * batch, [context] * batch)
    order = torch.randperm(copies * used).int().view(copies, batch, blocks)
    tables = [BlockTable(table.contiguous(), [context] * batch, ragged) for table in order]
    packed = [PackedTokens(form, pool, table) for table in tables]
    curve = []
    for group in groups:
        q, every = torch.randn(batch, heads * group * form.head_dim), heads * group

        def attend(one: PackedTokens, q: Tensor = q, every: int = every) -> object:
            return packed_attention(q, every, one, scale=0.1)

        seconds = seconds_of(partial(_each, attend, packed), 3)
        curve.append((float(group), seconds / copies / nbytes))
    return tuple(curve)


def _prompt(ops: Ops) -> float:
    """Seconds for a query, a key and a channel of a head, where a prompt of 512 tokens is read."""
    tokens, shape = 512, HeadShape(8, 2, 64, 0.125)
    ragged = Ragged.of([tokens], [0])
    qkv = torch.randn(tokens, (8 + 2 * 2) * 64)

    def read() -> None:
        cache = PlainCache([shape], 1, tokens + 1)  # a pass does not keep it
        ops.attention(qkv, shape, cache.begin(ragged).open(0), ragged)

    pairs = tokens * (tokens + 1) / 2
    return seconds_of(read) / (pairs * shape.heads * shape.head_dim)


def _copies(device: torch.device) -> tuple[Link, Link]:
    """To the device and from it; beside a CPU both are copies by one thread."""
    on_gpu = device.type == "cuda"
    host = torch.ones(_POOL, dtype=torch.uint8, pin_memory=on_gpu)
    there = torch.ones(_POOL, dtype=torch.uint8, device=device)

    def link(source: Tensor, into: Tensor) -> Link:
        def copy() -> None:
            into.copy_(source, non_blocking=on_gpu)
            if on_gpu:
                torch.cuda.synchronize(device)

        if on_gpu:
            return Link(source.nbytes / seconds_of(copy), 1e-5)

        def part(at: int, nbytes: int, number: int) -> None:
            at %= _POOL
            into[at : at + nbytes].copy_(source[at : at + nbytes])

        with ThreadPoolExecutor(1, initializer=lambda: torch.set_num_threads(1)) as pool:
            return _link(lambda at, nbytes, number: pool.submit(part, at, nbytes, number))

    to_device = link(host, there)
    return to_device, link(there, host) if on_gpu else to_device


def _disk(folder: Path) -> tuple[Link, Link]:
    """Reads and writes of an unnamed file; each alone, and beside matrices that are multiplied."""
    with closing(DiskReader()) as reader, tempfile.TemporaryDirectory(dir=folder) as inside:
        spill = SpillFile(Path(inside), _FILE, reader)
        with closing(spill):
            buffers = [map_pages(_LARGE) for _ in range(_IN_FLIGHT)]
            for buffer in buffers:
                buffer.random_(256)
            writing = _link(lambda at, n, i: spill.write(at, buffers[i][:n]))
            reading = _link(lambda at, n, i: spill.read(at, buffers[i][:n]))
    return reading, writing


def _file_reads(files: Sequence[Path]) -> Link:
    """Reads of files that are there, in turn, as a checkpoint's layers are."""
    size = min(file.stat().st_size for file in files) // _LEAST * _LEAST
    large = min(_LARGE, size)
    with closing(DiskReader()) as reader:
        buffers = [map_pages(large) for _ in range(_IN_FLIGHT)]

        def submit(at: int, nbytes: int, number: int) -> Future[None]:
            turn, which = divmod(at // nbytes, len(files))
            first = turn * nbytes % (size - nbytes + 1) // _LEAST * _LEAST
            return reader.submit(files[which], first, buffers[number][:nbytes])

        return _link(submit, large)


def _link(submit: Submit, large: int = _LARGE) -> Link:
    """A link's rates beside matmuls, as it is used; what a request adds is measured alone."""
    small = min(_SMALL, large // 4)
    _run(submit, large, _FILE // 4)
    alone = median(_run(submit, large, _MANY * large // 4) for _ in range(3)) * 4 / _MANY
    short = median(_run(submit, small, _MANY * small) for _ in range(3)) / _MANY
    (rate, taken), (_, by_tiny) = _beside(submit, large), _beside(submit, _TINY)
    each = max((alone - short) / (large - small), alone / large / 2)  # seconds of a byte
    # Of one core: those of a byte, and of a request of any size.
    of_byte = max(0.0, (taken * large - by_tiny * _TINY) / (large - _TINY))
    of_request = max(0.0, _TINY * (by_tiny - of_byte))
    request_s = max(0.0, alone - large * each)
    return Link(1 / max(each, 1 / rate), request_s, of_byte, of_request)


def _beside(submit: Submit, large: int) -> tuple[float, float]:
    """Bytes a second beside matmuls, and seconds of one core that each takes from these.

    That is more than what the threads that move it use: they interrupt others, which the rest then
    wait for, after each of the short jobs of a model that is not large, and share the memory.
    """
    from qoff.kernels.cpu import ops

    matrices = [random_matrix((_SHORT, _SHORT), 4, ops.PACKING) for _ in range(4)]
    x = torch.randn(4, _SHORT)

    def compute(seconds: float) -> tuple[int, float]:
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            ops.w4_linear(x, matrices[count % 4])
            count += 1
        return count, time.perf_counter() - start

    rates, taken = [], []
    for _ in range(3):
        count, seconds = compute(_BESIDE_S)
        each = seconds / count
        stop, moved = threading.Event(), [0]

        def pump(stop: threading.Event = stop, moved: list[int] = moved) -> None:
            while not stop.is_set():
                _run(submit, large, _PART * large)
                moved[0] += _PART * large

        mover = threading.Thread(target=pump)
        mover.start()
        try:
            count, seconds = compute(_BESIDE_S)
        finally:
            stop.set()
        begun = moved[0] + _PART * large // 2  # half of what is under way
        mover.join()
        rates.append(begun / seconds)
        taken.append(max(0.0, seconds - count * each) * usable_threads() / begun)
    return median(rates), median(taken)


def _run(submit: Submit, size: int, total: int) -> float:
    """Seconds for requests of `size` bytes, a few in flight, until `total` bytes have moved."""
    start = time.perf_counter()
    pending: list[Future[None]] = []
    for number, at in enumerate(range(0, total, size)):
        if len(pending) == _IN_FLIGHT:
            pending.pop(0).result()
        pending.append(submit(at, size, number % _IN_FLIGHT))
    for one in pending:
        one.result()
    return time.perf_counter() - start

"""The rates of a link: its moves alone, and beside matmuls of the CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from qoff.kernels.processor import usable_threads
from qoff.memory.io.spill import SlotFill
from qoff.plan.profile import IN_FLIGHT, Link

from .processor import in_list, random_matrix

LARGE, _SMALL, _TINY = 8 << 20, 1 << 20, 64 << 10  # bytes of a request
_WARM = 32 << 20  # bytes before anything is timed
_MANY = 128  # small requests
_PART = 32 << 20  # bytes at a time beside matmuls
_SHORT = 1024  # rows and columns of a matrix that takes tens of microseconds
_JOBS = 16  # matmuls, one after the other
_BESIDE_S = 0.15  # that is computed alone, and beside a link
Move = Callable[[int, int], None]  # bytes of a request, and of all of them


class Requests:
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


class Listed:
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


def link_of(move: Move, asked: Move | None = None, large: int = LARGE) -> Link:
    """A link's rates beside matmuls, as it is used; what a request adds is measured alone.

    asked: moves what rounds ask for by Python, if that is another way.
    """
    small = min(_SMALL, large // 4)
    move(large, _WARM)
    alone = _seconds(move, large, _MANY * large // 8) * 8 / _MANY
    short = _seconds(move, small, _MANY * small) / _MANY
    rate, taken = _beside(move, large, listed=True)
    _, by_tiny = _beside(asked or move, _TINY, listed=False)
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


def _beside(move: Move, size: int, listed: bool) -> tuple[float, float]:
    """Bytes a second beside matmuls, and seconds of one core that each takes from these.

    listed: the matmuls are jobs of a list, as in rounds; else Python calls them, as where it has
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

    again = in_list(multiply) if listed else multiply

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

    with ThreadPoolExecutor(1) as pool:
        mover = pool.submit(pump)
        try:
            count, seconds = compute()
        finally:
            stop.set()
        begun = moved[0] + part // 2  # half of what is under way
        mover.result()
    return begun / seconds, max(0.0, seconds - count * each) * usable_threads() / begun

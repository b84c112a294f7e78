"""Triton's interpreter made to fail where a kernel reads or writes outside its operands.

By itself it follows every address: memory beside an operand is mostly there, and goes unnoticed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor


class OutsideOperandsError(Exception):
    """A kernel's address leads to none of the tensors that it was given."""


class Operands:
    """The memory of the tensors that the running kernel was given.

    Gaps between rows that lie apart count as theirs; the rest of a storage does not.
    """

    seen: Any = None  # what is shown each access, if anything: `add(writes, addresses, nbytes)`

    def __init__(self) -> None:
        self._kernel = ""
        self._named: list[tuple[int, int, str]] = []  # first byte, end, argument
        self._first: list[int] = []  # the same without overlaps, in order
        self._end: list[int] = []

    def launch(self, kernel: str, arguments: dict[str, Any]) -> None:
        """From now on these are allowed."""
        self._kernel = kernel
        self._named = sorted(
            (*_extent(x), name)
            for name, x in arguments.items()
            if isinstance(x, Tensor) and x.numel()
        )
        self._first, self._end = [], []
        for first, end, _ in self._named:
            if self._end and first <= self._end[-1]:
                self._end[-1] = max(self._end[-1], end)
            else:
                self._first.append(first)
                self._end.append(end)

    def check(self, what: str, addresses: Any, mask: Any, nbytes: int) -> None:
        """Raise OutsideOperandsError unless all unmasked elements of so many bytes are inside."""
        used = addresses[mask]
        if not used.size:
            return
        if Operands.seen is not None:
            Operands.seen.add(what == "writes", used, nbytes)
        least, most = int(used.min()), int(used.max())
        at = bisect_right(self._first, least) - 1
        if at >= 0 and most + nbytes <= self._end[at]:
            return
        begins, ends = np.array(self._first, np.uint64), np.array(self._end, np.uint64)
        nearest = np.searchsorted(begins, used, side="right") - 1
        outside = (nearest < 0) | (used + np.uint64(nbytes) > ends[nearest])
        if outside.any():
            raise OutsideOperandsError(self._where(what, int(used[outside][0]), nbytes))

    def _where(self, what: str, address: int, nbytes: int) -> str:
        """The operand whose memory is nearest, and how far that is."""

        def distance(operand: tuple[int, int, str]) -> int:
            first, end, _ = operand
            return max(first - address, address + nbytes - end)

        first, end, name = min(self._named, key=distance)
        return (
            f"{self._kernel} {what} {nbytes} bytes at byte {address - first} of {name}, "
            f"which has {end - first}"
        )


def _extent(x: Tensor) -> tuple[int, int]:
    """The first byte of a tensor, and the one behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


class _Memory:
    """What the interpreter reads and writes memory by, each access checked first."""

    def __init__(self, real: Any, operands: Operands) -> None:
        self._real, self._check = real, operands.check

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def load(self, addresses: Any, mask: Any, other: Any, dtype: np.dtype[Any]) -> Any:
        self._check("reads", addresses, mask, np.dtype(dtype).itemsize)
        return self._real.load(addresses, mask, other, dtype)

    def store(self, addresses: Any, value: Any, mask: Any) -> Any:
        self._check("writes", addresses, mask, value.itemsize)
        return self._real.store(addresses, value, mask)

    def atomic_rmw(self, how: Any, addresses: Any, value: Any, mask: Any, order: Any) -> Any:
        self._check("writes", addresses, mask, value.itemsize)
        return self._real.atomic_rmw(how, addresses, value, mask, order)

    def atomic_cas(self, addresses: Any, expected: Any, value: Any, order: Any) -> Any:
        self._check("writes", addresses, np.ones(addresses.shape, bool), value.itemsize)
        return self._real.atomic_cas(addresses, expected, value, order)


def check_interpreter() -> None:
    """Check every access of every kernel that this process interprets from now on."""
    from triton.runtime import interpreter

    operands = Operands()
    executor: Any = interpreter.GridExecutor
    bring: Callable[..., Any] = executor._init_args_hst

    def launch(self: Any, args: Any, kwargs: Any) -> Any:
        found = bring(self, args, kwargs)
        arguments = dict(zip(self.arg_names, found[0], strict=False)) | found[1]
        operands.launch(self.fn.__name__, arguments)
        return found

    executor._init_args_hst = launch
    interpreter._interpreter = _Memory(interpreter._interpreter, operands)

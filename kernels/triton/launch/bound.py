"""Launching a kernel again and again without binding its arguments anew each time."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import compress
from typing import Any

from torch import Tensor

from .options import LAUNCH


class BoundKernel:
    """A Triton kernel with its constants and options, to be called with the other arguments.

    Triton looks up what it compiled by the types, alignments and values of all arguments, and by
    constants and options as text. This does so once for each combination of what Triton specializes
    on; later launches go to the compiled kernel. The constants come last in the kernel's signature.
    Arguments that are not specialized on must be below 2**31, and always of one type.
    """

    def __init__(self, kernel: Any, **constants: Any) -> None:
        names = kernel.arg_names
        free = [name not in constants for name in names]
        count = sum(free)
        assert all(free[:count]), names
        self._kernel, self._keywords = kernel, {**constants, **LAUNCH}
        self._constants = tuple(constants[name] for name in names[count:])
        # Triton's interpreter has no `params`, and compiles nothing.
        params = getattr(kernel, "params", ())[:count]
        self._specialized = tuple(not param.do_not_specialize for param in params)
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, grid: tuple[int, int, int], first: Tensor, *others: Any) -> None:
        """Launch on the current stream of the GPU of the first argument."""
        args = (first, *others)
        key = (
            first.get_device(),
            *[
                (arg.dtype, arg.data_ptr() & 15) if isinstance(arg, Tensor) else arg
                for arg in compress(args, self._specialized)
            ],
        )
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._kernel[grid](*args, **self._keywords)
            if compiled is not None:
                self._compiled[key] = compiled
        else:
            compiled[grid](*args, *self._constants)

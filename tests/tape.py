"""Recordings of work on a CPU, as forgetful as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor


class _Tape(TorchDispatchMode):
    """Notes torch's operations, and launches of kernels that Triton interprets."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)

        def again() -> None:
            fresh = tree_leaves(func(*args, **kwargs))
            for old, new in zip(tree_leaves(found), fresh, strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)

        if not func.is_view or not _shares_memory(found, args):
            self.steps.append(again)
        return found

    def launch(self, run: Any) -> Callable[..., None]:
        def launched(*args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():
                run(*args, **kwargs)
            self.steps.append(lambda: run(*args, **kwargs))

        return launched


def _shares_memory(found: Any, args: Any) -> bool:
    """Whether a result is a view; in inference mode `to` and `reshape` count as such, too."""
    given = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, Tensor)}
    return all(x.untyped_storage().data_ptr() in given for x in tree_leaves(found))


def record(work: Callable[[], None]) -> Callable[[], None]:
    """Work as what it launched, on the tensors and with the numbers that it launched it with.

    It is run for that: it must be possible to do it twice.
    """
    tape = _Tape()
    with patch.object(GridExecutor, "__call__", tape.launch(GridExecutor.__call__)), tape:
        work()

    def replay() -> None:
        for step in tape.steps:
            step()

    return replay

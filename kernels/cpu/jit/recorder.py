"""Recording what ops do on a CPU, as one list of jobs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .pool import JobList, Pool, default_pool

_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty_like.default,
}


class JobRecorder:
    """Makes replays of work that consists of jobs of a pool, on memory that stays where it is.

    The work is done while it is recorded. What it allocates is memory that all recordings share:
    they are replayed one after another, and what one returns is used before the next.
    """

    def __init__(self, pool: Pool | None = None) -> None:
        self._pool = pool or default_pool()
        self._memory: list[Tensor] = []  # what recordings allocate

    @property
    def nbytes(self) -> int:
        """Bytes that recordings share."""
        return sum(memory.nbytes for memory in self._memory)

    def __call__(self, work: Callable[[], None]) -> Callable[[], bool] | None:
        """Do the work, and return what does it again; that says False if it cannot any more.

        None for work that torch has a part in: only allocations and views are torch's in a replay.
        """
        pool, watch = self._pool, _Watch(self._memory)
        with pool.recording() as jobs:
            moves = pool.moves
            with watch:
                work()
            if watch.computed:
                return None
        recorded = JobList(jobs)

        def replay(kept: list[Tensor] = watch.kept) -> bool:
            with pool.lock:
                if pool.moves != moves:
                    return False
                pool.run_all(recorded)
            return True

        return replay


class _Watch(TorchDispatchMode):
    """Notes whether torch computes; what torch allocates comes from `memory` instead."""

    def __init__(self, memory: list[Tensor]) -> None:
        super().__init__()
        self.computed = False
        self.kept: list[Tensor] = []  # alive as long as the jobs that know the addresses
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _EMPTY:
            return self._shared(found)
        places = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        if func._schema.is_mutable or not all(
            isinstance(x, Tensor) and x.untyped_storage().data_ptr() in places
            for x in tree_leaves(found)
        ):
            self.computed = True
        return found

    def _shared(self, like: Tensor) -> Tensor:
        """Memory of this form that nobody uses now: other recordings do at other times."""
        memory = next(filter(partial(_free, nbytes=like.nbytes), self._memory), None)
        if memory is None:
            with torch.inference_mode(False):  # it is written in that mode and outside of it
                memory = torch.empty(like.nbytes, dtype=torch.uint8)
            self._memory.append(memory)
        self.kept.append(memory)
        return memory[: like.nbytes].view(like.dtype).view(like.shape)


def _free(memory: Tensor, nbytes: int) -> bool:
    """Whether so many bytes fit a tensor of which there are no views."""
    if memory.numel() < nbytes:
        return False
    storage = memory.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) <= 2  # the tensor's own, and this one

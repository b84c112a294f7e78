"""Recording what ops do on a CPU, as one list of jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    they are replayed one after another, and what one returns is used before the next. It is as much
    as the recording that takes most.
    """

    def __init__(self, pool: Pool | None = None) -> None:
        self._pool = pool or default_pool()
        self._memory: list[Tensor] = []
        self._dropped = 0  # how often some of it was given up

    @property
    def nbytes(self) -> int:
        """Bytes that recordings share."""
        return sum(memory.nbytes for memory in self._memory)

    def __call__(self, work: Callable[[], None]) -> Callable[[], bool] | None:
        """Do the work, and return what does it again; that says False if it cannot any more.

        None for work that torch has a part in: only allocations and views are torch's in a replay.
        """
        pool, watch = self._pool, _Watch(self._take)
        with pool.recording() as jobs:
            moves = pool.moves
            with watch:
                work()
            if watch.computed:
                return None
        recorded, known = JobList(jobs), (moves, self._dropped)

        def replay() -> bool:
            with pool.lock:
                if (pool.moves, self._dropped) != known:
                    return False  # it knows addresses of memory that is gone
                pool.run_all(recorded)
            return True

        return replay

    def _take(self, nbytes: int, used: Sequence[Tensor]) -> Tensor:
        """Memory that nobody has now. used: by the recording under way, whose jobs know it."""
        free = [memory for memory in self._memory if _free(memory)]
        for memory in free:
            if memory.numel() >= nbytes:
                return memory
        for memory in free:
            if not any(memory is one for one in used):
                self._memory = [one for one in self._memory if one is not memory]
                self._dropped += 1
                break
        with torch.inference_mode(False):  # it is written in that mode and outside of it
            self._memory.append(torch.empty(nbytes, dtype=torch.uint8))
        return self._memory[-1]


class _Watch(TorchDispatchMode):
    """Notes whether torch computes; what torch allocates is taken from `take` instead."""

    def __init__(self, take: Callable[[int, Sequence[Tensor]], Tensor]) -> None:
        super().__init__()
        self.computed = False
        self._take, self._used = take, list[Tensor]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, of 120 MB, to keep it from this class

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _EMPTY:
            memory = self._take(found.nbytes, self._used)
            self._used.append(memory)
            return memory[: found.nbytes].view(found.dtype).view(found.shape)
        places = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        if func._schema.is_mutable or not all(
            isinstance(x, Tensor) and x.untyped_storage().data_ptr() in places
            for x in tree_leaves(found)
        ):
            self.computed = True
        return found


def _free(memory: Tensor) -> bool:
    """Whether there are no views of a tensor."""
    storage = memory.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) <= 2  # the tensor's own, and this one

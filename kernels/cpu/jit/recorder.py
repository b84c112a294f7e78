"""What ops do on a CPU as one list of jobs: recorded to be done again, or done later."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode

from .alike import AlikeLayers
from .pool import Job, JobList, Pool, default_pool

_UNUSED_BYTES = 16 << 20  # of memory that a deferral keeps for what is still to be computed
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
        self._given = pool
        self._memory: list[Tensor] = []
        self._views: list[int] = []  # of each, before the recording under way: results of others
        self._dropped = 0  # how often some of it was given up

    @property
    def pool(self) -> Pool:
        """The pool in use, which is another one after a fork."""
        return self._given or default_pool()

    @property
    def nbytes(self) -> int:
        """Bytes that recordings share."""
        return sum(memory.nbytes for memory in self._memory)

    @property
    def places(self) -> tuple[int, int]:
        """Another value when memory that recordings know the address of is gone."""
        return self.pool.moves, self._dropped

    def __call__(self, work: Callable[[], None]) -> JobReplay | None:
        """Do the work, and return what does it again.

        None for work that torch has a part in: only allocations and views are torch's in a replay.
        """
        pool, watch = self.pool, _Watch(self._take)
        with pool.recording() as jobs:
            self._views = [_users(memory) for memory in self._memory]
            moves = pool.moves
            with _in_force(watch):
                work()
        return None if watch.computed else JobReplay(self, (moves, self._dropped), pool, jobs)

    def deferring(self) -> AbstractContextManager[None]:
        """See `deferring`."""
        return deferring(self.pool)

    def alike_layers(self, count: int) -> AlikeLayers:
        """Of passes that are deferred, which all have so many layers."""
        return AlikeLayers(self.pool, count)

    def _take(self, nbytes: int, used: Sequence[Tensor]) -> Tensor:
        """Memory that is free now. used: by the recording under way, whose jobs know it."""
        both = enumerate(zip(self._memory, self._views, strict=True))
        free = [i for i, (memory, views) in both if _users(memory) <= views]
        for i in free:
            if self._memory[i].numel() >= nbytes:
                return self._memory[i]
        for i in free:
            if not any(self._memory[i] is one for one in used):
                del self._memory[i], self._views[i]
                self._dropped += 1
                break
        memory = _bytes(nbytes)
        self._memory.append(memory)
        self._views.append(_users(memory))
        return memory


class JobReplay:
    """A recording; see `JobRecorder`."""

    def __init__(
        self, recorder: JobRecorder, places: tuple[int, int], pool: Pool, jobs: Sequence[Job]
    ) -> None:
        self._recorder, self._places, self.pool = recorder, places, pool
        self.jobs = JobList(jobs)

    @property
    def stale(self) -> bool:
        """Whether it knows addresses of memory that is gone, or threads that are."""
        return self._recorder.pool is not self.pool or self._recorder.places != self._places

    def __call__(self) -> bool:
        """Do the work again, and say True; or nothing, and False, when it is stale."""
        return self.run(self.jobs)

    def run(self, jobs: JobList, times: int = 1) -> bool:
        """The same with jobs that are its own and others, so many times."""
        if self._recorder.pool is not self.pool:  # a fork may have left its lock taken
            return False
        with self.pool.lock:
            if self.stale:
                return False
            self.pool.run_all(jobs, times)
        return True


@contextmanager
def deferring(pool: Pool | None = None) -> Iterator[None]:
    """Do not wait for the jobs of ops within, but at the end, or when torch is to compute.

    Python then goes from op to op in one go, while the other threads go from job to job. What is
    read otherwise than by torch or by jobs has to be done: `Pool.catch_up`.
    """
    pool = pool or default_pool()
    mode = _Deferring(pool)  # its memory is there until the jobs are done
    with pool.deferring(), _in_force(mode):
        yield


@contextmanager
def _in_force(mode: TorchDispatchMode) -> Iterator[None]:
    """Within, torch asks a mode; not any more after an interrupt either.

    It takes torch some time to begin and to end with one, in Python, where Ctrl-C may come.
    """
    others = torch._C._len_torch_dispatch_stack()
    try:
        with mode:
            yield
    finally:
        while torch._C._len_torch_dispatch_stack() > others:
            torch._C._pop_torch_dispatch_stack(None)


class _Kind(Enum):
    """What an operation of torch's does with memory."""

    LOOKS = auto()  # views of it, sizes
    ALLOCATES = auto()
    TAKES = auto()  # what Python made: `torch.tensor`
    IS_MADE_OF_OTHERS = auto()  # which come alone where inference mode is off
    COMPUTES = auto()


_KINDS = dict.fromkeys(_EMPTY, _Kind.ALLOCATES) | {
    torch.ops.aten.lift_fresh.default: _Kind.TAKES,
}


def _kind(func: Any) -> _Kind:
    found = _KINDS.get(func)
    if found is None:
        aliases = [result.alias_info for result in func._schema.returns]
        looks = aliases and all(alias is not None and not alias.is_write for alias in aliases)
        found = _Kind.LOOKS if looks else _Kind.COMPUTES
        if looks and func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
            found = _Kind.IS_MADE_OF_OTHERS
        _KINDS[func] = found
    return found


class _Judge(TorchDispatchMode):
    """Sees what torch does between jobs."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, of 120 MB, to keep it from this class

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _kind(func)
        if kind is _Kind.IS_MADE_OF_OTHERS:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if kind is _Kind.COMPUTES:
            self.computes()
        found = func(*args, **(kwargs or {}))
        if kind is _Kind.ALLOCATES:
            return self.own(found).view(found.dtype).view(found.shape)
        if kind is not _Kind.LOOKS:
            self.made(found)
        return found

    @abstractmethod
    def own(self, found: Tensor) -> Tensor:
        """Memory for a tensor like this new one, uint8 of as many bytes."""

    def computes(self) -> None:
        """Torch is about to compute."""

    @abstractmethod
    def made(self, found: Any) -> None:
        """Torch, or Python, has made this."""


class _Watch(_Judge):
    """Notes whether torch computes; what torch allocates is taken from `take` instead."""

    def __init__(self, take: Callable[[int, Sequence[Tensor]], Tensor]) -> None:
        super().__init__()
        self.computed = False
        self._take, self._used = take, list[Tensor]()

    def own(self, found: Tensor) -> Tensor:
        memory = self._take(found.nbytes, self._used)
        self._used.append(memory)
        return memory[: found.nbytes]

    def made(self, found: Any) -> None:
        self.computed = True


class _Deferring(_Judge):
    """Has jobs done before torch computes, and keeps the memory that they are to use.

    What was allocated is used again when nobody has it any more, as it would be without this.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool = pool
        self._allocated = list[tuple[Tensor, int]]()  # memory, and its users when nobody has it
        self._kept = dict[int, Tensor]()  # what torch made, by its memory

    def own(self, found: Tensor) -> Tensor:
        for memory, users in self._allocated:
            if memory.nbytes == found.nbytes and _users(memory) == users:
                break
        else:
            self._let_go()
            memory = _bytes(found.nbytes)
            self._allocated.append((memory, _users(memory)))
        return memory

    def computes(self) -> None:
        self._pool.catch_up()
        # What others still have may be given to jobs to come, and let go before these are done.
        own = {_storage(memory) for memory, _ in self._allocated}
        kept = self._kept.items()
        alone = _users(_bytes(0))
        self._kept = {key: one for key, one in kept if key not in own and _users(one) > alone}

    def made(self, found: Any) -> None:
        for one in found if isinstance(found, list | tuple) else [found]:
            if isinstance(one, Tensor):
                self._kept[_storage(one)] = one.detach()  # another user than those who have `one`

    def _let_go(self) -> None:
        """Give back what is used no more, if it is much: plans count what is alive."""
        unused = [memory for memory, users in self._allocated if _users(memory) == users]
        if sum(memory.nbytes for memory in unused) > _UNUSED_BYTES:
            self.computes()
            self._allocated = [one for one in self._allocated if _users(one[0]) != one[1]]


def _bytes(count: int) -> Tensor:
    """Memory that is written in inference mode and outside of it."""
    with torch.inference_mode(False):
        return torch.empty(count, dtype=torch.uint8)


def _users(memory: Tensor) -> int:
    """How many tensors there are of the memory of one, views included."""
    return torch._C._storage_Use_Count(_storage(memory))


def _storage(x: Tensor) -> int:
    """What tells the memory of tensors apart."""
    address: int = x.untyped_storage()._cdata
    return address

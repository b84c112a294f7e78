"""Replaying work of a decode step instead of launching its kernels one by one."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from qoff.kernels.layout.ending import Ending
from qoff.kernels.ops import RecordWhileDone, Scratch
from qoff.kernels.upload import on_device, pinned
from qoff.memory.io.copy_stream import RECORDING
from qoff.process import uncollected

from .graph_steps import MOST, GraphSteps, Replay, StepsAhead

_MOST = 128  # recordings of a whole pass, or as many of each layer; then the oldest are forgotten

Record = Callable[[Callable[[], None]], Replay]


@dataclass(eq=False)
class Recording:
    """Work that is recorded, or will be."""

    keep: object  # what the key names by its id
    x: Tensor  # where the replay finds its input
    result: Any  # where it leaves it: tensors
    replay: Any = None  # a Replay, or a WorkReplay
    steps: StepsAhead | None = None  # what does those that follow it
    kept: object = None  # in the scratch of the ops, once it was replayed
    # That have done the work; not by numbers, which new threads have of those that ended.
    threads: WeakSet[threading.Thread] = field(default_factory=WeakSet)

    def done_here(self) -> bool:
        """Whether this thread has done the work; from now on it has."""
        here = threading.current_thread()
        done = here in self.threads
        self.threads.add(here)
        return done


class Replays:
    """Work on one tensor, recorded at the second call with the same key, and replayed from then on.

    A key says everything but the values in memory that the work depends on: addresses, sizes,
    numbers that the host hands to kernels. The first call only runs the work, which compiles what
    has to be. So does the first one of another thread, as long as nothing is recorded: cuBLAS has a
    handle for each thread, and cannot make one within a recording. Inputs and results are in memory
    of fixed addresses, which is this object's; all else that a recording reads or writes belongs to
    others. record: makes a replay of work without running it (default: as a CUDA graph). If that
    fails once, nothing is recorded or replayed any more, with a warning that says why. while_done:
    makes it of work that it does, so that the first call is recorded; None if it cannot. scratch:
    of the ops; recordings that dequantize are of what it keeps, which comes back after a replay.
    For one thread and one stream at a time.
    """

    def __init__(
        self,
        device: torch.device,
        record: Record | None = None,
        while_done: RecordWhileDone | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        self._device = device
        self.while_done = while_done
        self._scratch = scratch
        self._record = CudaRecorder(device) if record is None else record
        self._entries: dict[Hashable, Recording] = {}  # the one that was used last is last
        self._dequantizing = set[Hashable]()  # keys of work that uses the scratch
        self._fixed: dict[Hashable, Tensor] = {}
        self.recorded = self.replayed = self.failed = 0  # how often

    def run(
        self,
        key: Hashable,
        keep: object,
        x: Tensor,
        work: Callable[[Tensor], Any],
        parts: int = 1,
        using: Callable[[Any], bool] | None = None,
    ) -> Any:
        """Return `work(x)`, computed by it or by its recording; valid until the next call.

        It is a tensor, or whatever has tensors where the recording is made while the work is done.
        x: on the device, or in host memory to be brought there. The work may change it and return
        it. keep: lives as long as the key. parts: recordings that together are a pass. using: what
        replays one that was made while the work was done, and says whether; default: its call.
        """
        if self.failed:
            return work(on_device(x, self._device))
        fixed = self._memory("input", x)
        fixed.copy_(pinned(x, self._device), non_blocking=True)
        scratch, base = self._scratch, (tuple(x.shape), key)
        if scratch is not None and parts == 1:
            scratch.forget()  # it goes through all units, and has use for nothing of this one
        found = None if scratch is None else scratch.key
        whole: tuple[Hashable, Hashable] = base
        if base in self._dequantizing:
            whole = base, found
        entry = self._entries.pop(whole, None)
        if self.while_done is not None:
            return self._replay_or_do(whole, entry, keep, fixed, work, _MOST * parts, using)
        if entry is None:
            while len(self._entries) >= _MOST * parts:
                del self._entries[next(iter(self._entries))]
            if len(self._dequantizing) > _MOST * parts:
                self._dequantizing.clear()  # it is found out again
            uses = 0 if scratch is None else scratch.uses
            result = work(fixed)
            if scratch is not None and scratch.uses > uses:
                self._dequantizing.add(base)
                whole = (base, found)
            there = fixed if result is fixed else self._memory("result", result)
            self._entries[whole] = entry = Recording(keep, fixed, there)
            entry.done_here()
            return result
        if entry.replay is None and not entry.done_here():
            self._entries[whole] = entry
            return work(fixed)
        if entry.replay is None:
            kept = None if scratch is None else scratch.snapshot()
            entry.replay = self._recording_of(lambda: _into(entry.result, work(fixed)))
            if entry.replay is None:
                if scratch is not None:  # what was recorded has not happened
                    scratch.restore(kept)
                return work(fixed)
        entry.replay()
        self.replayed += 1
        if scratch is not None and base in self._dequantizing:
            entry.kept = entry.kept or scratch.snapshot()
            scratch.restore(entry.kept)
        self._entries[whole] = entry
        return entry.result

    def steady(self, role: str, x: Tensor) -> Tensor:
        """A copy of x in memory of a fixed address, of which there is one for a role and a size."""
        return self._memory(role, x).copy_(x)

    def find(self, key: Hashable, x: Tensor) -> Recording | None:
        """What was recorded for an input like x."""
        whole: tuple[Hashable, Hashable] = (tuple(x.shape), key)
        if whole in self._dequantizing:
            assert self._scratch is not None
            whole = whole, self._scratch.key
        entry = self._entries.get(whole)
        return None if entry is None or entry.replay is None else entry

    def steps_after(
        self, recording: Recording, counters: Sequence[Tensor], ending: Ending
    ) -> StepsAhead:
        """What does the steps that follow a whole pass; see `CachePass.counters`.

        ending: what makes logits of its result, where the recording has not.
        """
        replay, x, result = recording.replay, recording.x, recording.result
        if self.while_done is not None:
            from qoff.kernels.cpu.steps import Steps  # compiled when it is imported

            return Steps(replay, counters, x, result)
        scratch = self._scratch

        def replayed() -> None:
            if scratch is not None:
                scratch.forget()
            replay()

        found = self._memory("found", x.expand(MOST, -1)), self._memory("at", x[:1])
        return GraphSteps(replayed, self._recording_of, counters, x, result, ending, *found)

    def forget(self) -> None:
        """Let go of all recordings, which hold weights, and of the memory that they share."""
        self._entries.clear()
        self._dequantizing.clear()
        self._fixed.clear()

    def _recording_of(self, work: Callable[[], None]) -> Replay | None:
        """A replay of work; None where it cannot be recorded, and nothing is any more."""
        try:
            replay = self._record(work)
        except Exception as error:
            self._give_up(error)
            return None
        self.recorded += 1
        return replay

    def _replay_or_do(
        self,
        whole: tuple[Hashable, Hashable],
        entry: Recording | None,
        keep: object,
        x: Tensor,
        work: Callable[[Tensor], Any],
        most: int,
        using: Callable[[Any], bool] | None,
    ) -> Any:
        """The way of recordings that are made while the work is done."""
        assert self.while_done is not None
        if entry is not None:
            self._entries[whole] = entry
            if entry.replay is None:
                return work(x)
            if entry.replay() if using is None else using(entry.replay):
                self.replayed += 1
                return entry.result
        found: list[Any] = []
        replay = self.while_done(lambda: found.append(work(x)))
        for key, one in list(self._entries.items()):
            if getattr(one.replay, "stale", False):  # its result keeps memory alive
                del self._entries[key]
        while len(self._entries) >= most:
            del self._entries[next(iter(self._entries))]
        self._entries[whole] = Recording(keep, x, found[0] if replay else x, replay)
        self.recorded += replay is not None
        return found[0]

    def _memory(self, role: str, like: Tensor) -> Tensor:
        """Memory of a fixed address; all recordings share it, as they take turns."""
        rows = 1 << (len(like) - 1).bit_length()  # for two or more numbers of rows
        shape = (rows, *like.shape[1:])
        key = (role, shape, like.dtype)
        if key not in self._fixed:
            with torch.inference_mode(False):  # it is written in that mode and outside of it
                self._fixed[key] = torch.empty(shape, dtype=like.dtype, device=self._device)
        return self._fixed[key][: len(like)]

    def _give_up(self, error: Exception) -> None:
        self.failed += 1
        self.forget()
        reason = " ".join(str(error).split())
        warnings.warn(
            f"a CUDA graph could not be recorded ({type(error).__name__}: {reason}); this model "
            "goes on without graphs, which costs time on the host. QOFF_CUDA_GRAPHS=0 turns them "
            "off",
            RuntimeWarning,
            stacklevel=2,
        )


def _into(memory: Tensor, result: Tensor) -> None:
    if result is not memory:
        memory.copy_(result)


class CudaRecorder:
    """Records work as CUDA graphs that share their memory: they are replayed one after another.

    Its stream has a priority, as torch has 32 streams of each, and hands them out again and again:
    copies are on others, and what another thread enqueued there would be recorded, too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None  # a handle
        # The first, as the memory stays only with a graph; and those that torch may refer to.
        self._kept: list[torch.cuda.CUDAGraph] = []

    def __call__(self, work: Callable[[], None]) -> Replay:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device, priority=-1)
            self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        # What the garbage collector finds, like a model that nobody closed, may wait for the GPU or
        # free pinned memory: either ends a capture. On the stream, whose device is current, too.
        with RECORDING, uncollected(), torch.cuda.stream(self._stream):
            # Other threads go on copying weights meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        current.wait_stream(self._stream)
        self._kept = self._kept or [graph]
        return graph.replay

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed, so that the stream and torch's allocator are usable again."""
        assert self._stream is not None
        self._kept.append(graph)
        with suppress(RuntimeError):  # also raised where the capture is invalid, but it is over
            graph.capture_end()
        # torch does not get to this where the end of a capture is an error.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._stream.device.index, self._pool)
        can_draw_again(self._stream.device)


def can_draw_again(device: torch.device) -> None:
    """Let torch's default generator of a GPU draw, which it may not after a capture that failed.

    No number is other than it would have been. Generators that draw stay as they are: graphs of
    others know them.
    """
    generator = torch.cuda.default_generators[device.index]
    offset = generator.get_offset()
    try:
        torch.rand(1, device=device)
    except RuntimeError:  # its state is still marked as being captured; a copy is not
        generator.graphsafe_set_state(generator.clone_state())
    else:
        generator.set_offset(offset)

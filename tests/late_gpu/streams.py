"""Streams, events and graphs: what is asked for is queued, and done when it has to be."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .races import Region, Uses, done, forget


@dataclass(eq=False)
class Work:
    """Something that a stream does, once `waits` and all that the stream was asked before are done.

    seq: its place in its stream, from 1.
    """

    run: Callable[[], object] | None
    stream: LateStream
    seq: int
    waits: tuple[Work, ...] = ()
    name: str = ""
    uses: Uses | None = None
    done: bool = False


class Memory:
    """Memory of the device that torch's allocator gave out: one storage.

    uses: the newest use by each stream. made_by: the stream that it is given back to.
    """

    def __init__(self, made_by: LateStream, graph: LateGraph | None, region: Region) -> None:
        self.made_by, self.graph, self.region = made_by, graph, region
        self.uses: dict[LateStream, int] = {}
        self.recorded: set[LateStream] = set()
        weakref.finalize(self, _freed, made_by, self.uses, self.recorded, graph)


def _freed(
    made_by: LateStream,
    uses: dict[LateStream, int],
    recorded: set[LateStream],
    graph: LateGraph | None,
) -> None:
    """Who allocates next gets the memory, and uses it behind what `made_by` was asked so far."""
    if graph is not None:
        return
    known = made_by.knows
    host = DEVICE.host_knows
    for stream, seq in uses.items():
        if stream is made_by or stream in recorded:
            continue
        if max(known.get(stream, 0), host.get(stream, 0)) < seq:
            DEVICE.faults.append(f"memory of {made_by} was freed while {stream} may still use it")


class LateStream:
    """A CUDA stream. knows: which work of other streams is done before what comes to it next."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Work] = deque()
        self.knows: dict[LateStream, int] = {}
        self.tail: Work | None = None
        self.count = 0
        self.early = False
        self.capturing: LateGraph | None = None

    def __repr__(self) -> str:
        return f"stream {self.name}"


@dataclass(eq=False)
class LateGraph:
    """What was captured: works in the order of the calls, and the memory that they use."""

    works: list[tuple[Callable[[], object], Uses]] = field(default_factory=list)
    own: list[Any] = field(default_factory=list)  # memory allocated within
    others: dict[int, Any] = field(default_factory=dict)  # weak references to memory from before
    streams: list[LateStream] = field(default_factory=list)
    knew: dict[LateStream, dict[LateStream, int]] = field(default_factory=dict)  # before

    def joined_by(self, stream: LateStream) -> None:
        stream.capturing = self
        self.streams.append(stream)
        self.knew[stream] = dict(stream.knows)

    def ended(self) -> None:
        """What streams know of each other within a graph holds within it."""
        for stream in self.streams:
            stream.capturing, stream.knows = None, self.knew[stream]
        self.streams.clear()
        self.knew.clear()

    def replay(self, uses: Uses) -> list[str]:
        """Do what was captured, as the task that `uses` stands for; races."""
        within: dict[Region, Any] = {}
        return [race for run, own in self.works for race in done(run, own, uses, within)]


class Device:
    """All streams of the device, and what was found wrong."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.default = LateStream("default")
        self.streams = [self.default]
        self.host_knows: dict[LateStream, int] = {}
        self.faults: list[str] = []
        self.waited: Counter[str] = Counter()  # of the host, by the reason
        self.eager: Counter[str] = Counter()  # ops that are done at once, as shapes depend on data
        self.early_copies = False
        self._local = threading.local()

    @property
    def current(self) -> LateStream:
        return getattr(self._local, "stream", self.default)

    @current.setter
    def current(self, stream: LateStream) -> None:
        self._local.stream = stream

    def new_stream(self) -> LateStream:
        with self.lock:
            stream = LateStream(str(len(self.streams)))
            stream.early = self.early_copies
            self.streams.append(stream)
            return stream

    def submit(
        self,
        run: Callable[[], object] | None,
        memories: Iterable[Memory] = (),
        name: str = "",
        waits: tuple[Work, ...] = (),
        uses: Uses | None = None,
    ) -> Work | None:
        """Queue something on the current stream; within a capture, add it to the graph."""
        with self.lock:
            stream = self.current
            graph = stream.capturing
            stream.count += 1
            if graph is None:
                merge(stream.knows, self.host_knows)
            stream.knows[stream] = stream.count
            if uses is not None:
                uses.asked(name, stream)
            if graph is not None:
                if run is not None:
                    graph.works.append((run, uses or Uses()))
                for memory in memories:
                    if memory.graph is not graph:
                        graph.others[id(memory)] = weakref.ref(memory)
                return None
            for memory in memories:
                memory.uses[stream] = stream.count
            work = Work(run, stream, stream.count, waits, name, uses)
            stream.queue.append(work)
            stream.tail = work
            self._advance()
            return work

    def finish(self, work: Work | None) -> None:
        """Do a work, with all before it."""
        with self.lock:
            if work is None or work.done:
                return
            stream = work.stream
            while not work.done:
                first = stream.queue[0]
                for other in first.waits:
                    self.finish(other)
                if not first.done:  # a wait may have come back to this stream
                    self._do(first)
            self._advance()

    def synchronize(self, stream: LateStream | None, why: str) -> None:
        """The host waits for a stream, or all."""
        with self.lock:
            if self.current.capturing is not None:
                raise RuntimeError(
                    f"CUDA error: operation not permitted when stream is capturing ({why})"
                )
            self.waited[why] += 1
            for one in self.streams if stream is None else [stream]:
                self.finish(one.tail)
                merge(self.host_knows, one.knows)

    def _do(self, work: Work) -> None:
        found = work.stream.queue.popleft()
        assert found is work
        collects = gc.isenabled()
        gc.disable()  # what is collected may wait for the device, which is busy with this
        try:
            if work.run is not None and work.uses is not None:
                self.faults += done(work.run, work.uses, None, {})
                forget(work.uses, self._floor)
            elif work.run is not None:
                work.run()
        finally:
            work.done, work.run, work.waits, work.uses = True, None, (), None
            if collects:
                gc.enable()

    def _floor(self, stream: LateStream) -> int:
        """Up to which task of a stream all that is done from now on knows of it."""
        queued = [x.uses for one in self.streams for x in one.queue if x.uses is not None]
        known = [self.host_knows, *(uses.knows for uses in queued)]
        return min(one.get(stream, 0) for one in known)

    def _advance(self) -> None:
        """Let streams that are early do what they may."""
        moved = True
        while moved:
            moved = False
            for stream in self.streams:
                while stream.early and stream.queue and all(x.done for x in stream.queue[0].waits):
                    self._do(stream.queue[0])
                    moved = True


def merge(known: dict[LateStream, int], more: dict[LateStream, int]) -> None:
    for stream, seq in more.items():
        if known.get(stream, 0) < seq:
            known[stream] = seq


DEVICE = Device()

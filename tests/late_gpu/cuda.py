"""What stands in for `torch.cuda`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from . import tensors
from .races import Uses
from .streams import DEVICE, LateGraph, LateStream, Work, merge


class Stream:
    """`torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, *, late: LateStream | None = None):
        self._late = late or DEVICE.new_stream()
        self.device = tensors.GPU
        self.device_index = 0

    @property
    def cuda_stream(self) -> int:
        return 0 if self._late is DEVICE.default else id(self._late)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self._late is other._late

    def __hash__(self) -> int:
        return hash(self._late)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        with DEVICE.lock:
            if event._graph is not None and self._late.capturing is None:
                event._graph.joined_by(self._late)
            merge(self._late.knows, event._knows)
            if event._work is None:
                return
            with stream_of(self._late):
                DEVICE.submit(None, name="wait", waits=(event._work,))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        DEVICE.synchronize(self._late, "stream.synchronize")

    def query(self) -> bool:
        done = not self._late.queue
        if done:
            merge(DEVICE.host_knows, self._late.knows)
        return done


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self._work: Work | None = None
        self._graph: LateGraph | None = None
        self._knows: dict[LateStream, int] = {}
        self._at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        late = DEVICE.current if stream is None else stream._late
        with DEVICE.lock, stream_of(late):
            self._graph = late.capturing
            self._work = DEVICE.submit(self._mark, name="event")
            self._knows = dict(late.knows)

    def _mark(self) -> None:
        self._at = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        with DEVICE.lock:
            if self._graph is not None:
                raise RuntimeError("CUDA error: an event of a capture cannot be waited for")
            if self._work is None:
                return
            DEVICE.waited["event"] += 1
            DEVICE.finish(self._work)
            merge(DEVICE.host_knows, self._knows)

    def query(self) -> bool:
        """Asking is taken for waiting a while."""
        if self._work is not None and not self._work.done:
            DEVICE.finish(self._work)
            return False
        if self._work is not None:
            merge(DEVICE.host_knows, self._knows)
        return True

    def elapsed_time(self, other: Event) -> float:
        return (other._at - self._at) * 1e3


@contextmanager
def stream_of(late: LateStream) -> Iterator[None]:
    before, DEVICE.current = DEVICE.current, late
    try:
        yield
    finally:
        DEVICE.current = before


class StreamContext:
    """`torch.cuda.stream`."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = DEVICE.current
        if self._stream is not None:
            DEVICE.current = self._stream._late

    def __exit__(self, *_: object) -> None:
        DEVICE.current = self._before


def current_stream(device: Any = None) -> Stream:
    return Stream(late=DEVICE.current)


def default_stream(device: Any = None) -> Stream:
    return Stream(late=DEVICE.default)


def synchronize(device: Any = None) -> None:
    DEVICE.synchronize(None, "torch.cuda.synchronize")


class CUDAGraph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._late = LateGraph()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        stream = DEVICE.current
        if stream is DEVICE.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        assert stream.capturing is None
        self._late.joined_by(stream)

    def capture_end(self) -> None:
        self._late.ended()

    def replay(self) -> None:
        late = self._late
        dead = [name for name, memory in late.others.items() if memory() is None]
        if dead:
            raise RuntimeError(f"a graph uses {len(dead)} memories that have been freed")
        memories = [memory() for memory in late.others.values()]
        uses = Uses()

        def run() -> None:
            for own in late.own:
                tensors.poison(own)
            DEVICE.faults += late.replay(uses)

        DEVICE.submit(run, memories, "graph", uses=uses)

    def reset(self) -> None:
        self._late = LateGraph()

    def pool(self) -> Any:
        return (0, 0)


class _Guard:
    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class _Runtime:
    """`torch.cuda.cudart()`."""

    def cudaHostRegister(self, start: int, nbytes: int, flags: int) -> int:  # noqa: N802
        tensors.pin(start, nbytes)
        return 0

    def cudaHostUnregister(self, start: int) -> int:  # noqa: N802
        tensors.unpin(start)
        return 0


class _Generator:
    """The default generator."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        pass

    def clone_state(self) -> _Generator:
        return self

    def graphsafe_set_state(self, other: Any) -> None:
        pass


_PROPERTIES = SimpleNamespace(
    name="late GPU",
    major=9,
    minor=0,
    multi_processor_count=4,
    total_memory=8 << 30,
    shared_memory_per_block_optin=227 << 10,
    L2_cache_size=50 << 20,
)

STAND_INS: dict[str, Callable[..., Any] | Any] = {
    "Stream": Stream,
    "Event": Event,
    "CUDAGraph": CUDAGraph,
    "stream": StreamContext,
    "current_stream": current_stream,
    "default_stream": default_stream,
    "synchronize": synchronize,
    "device": _Guard,
    "device_of": _Guard,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "init": lambda: None,
    "_lazy_init": lambda: None,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "get_device_name": lambda device=None: _PROPERTIES.name,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": lambda device=None: _PROPERTIES,
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_current_stream_capturing": lambda: DEVICE.current.capturing is not None,
    "mem_get_info": lambda device=None: (8 << 30, 8 << 30),
    "memory_reserved": lambda device=None: 0,
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
    "memory_stats": lambda device=None: {},
    "empty_cache": lambda: None,
    "graph_pool_handle": lambda: (0, 0),
    "cudart": _Runtime,
    "default_generators": (_Generator(),),
    "manual_seed_all": lambda seed: None,
    "_sleep": lambda cycles: DEVICE.submit(lambda: None, name="sleep"),
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: None,
}

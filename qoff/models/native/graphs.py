"""Replaying the work of a layer on a GPU instead of launching its kernels one by one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MOST = 4096  # recordings; then all are forgotten: they may be of caches that are gone

Replay = Callable[[], None]


@dataclass
class _Entry:
    keep: object  # what the key names by its id
    replay: Replay | None = None


class Replays:
    """Work that changes hidden states in place, recorded at the second call with the same key.

    A key says everything but the values in memory that the work depends on: addresses, sizes,
    numbers that the host hands to kernels. The first call only runs the work, which compiles what
    has to be. Hidden states are copied to and from memory of fixed addresses. For one thread and
    one stream. record: makes a replay of work without running it (default: as a CUDA graph).
    """

    def __init__(self, record: Callable[[Callable[[], None]], Replay] | None = None) -> None:
        self._record = record or CudaRecorder()
        self._entries: dict[Hashable, _Entry] = {}
        self._fixed: dict[tuple[int, ...], Tensor] = {}

    def run(
        self, key: Hashable, keep: object, hidden: Tensor, work: Callable[[Tensor], None]
    ) -> None:
        """Do `work(hidden)`, or what it did when recorded. keep: lives as long as the key."""
        whole = (tuple(hidden.shape), key)
        entry = self._entries.get(whole)
        if entry is None:
            if len(self._entries) >= _MOST:
                self._entries.clear()
            self._entries[whole] = _Entry(keep)
            work(hidden)
            return
        fixed = self._fixed.setdefault(whole[0], hidden.new_empty(hidden.shape))
        fixed.copy_(hidden)
        if entry.replay is None:
            entry.replay = self._record(lambda: work(fixed))
        entry.replay()
        hidden.copy_(fixed)


class CudaRecorder:
    """Records work as CUDA graphs that share their memory: they are replayed one after another."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None  # a handle

    def __call__(self, work: Callable[[], None]) -> Replay:
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Other threads go on copying weights meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay

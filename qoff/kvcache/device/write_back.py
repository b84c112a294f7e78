"""New packed blocks on their way from a device to where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qoff.kvcache.store.base import BlockStore
from qoff.memory.instrumentation import PLAIN, Instrumentation

WRITE_BACK_BUFFERS = 2  # one is copied from while kernels fill another


@dataclass(frozen=True, eq=False)
class WriteBackBuffer:
    """Memory on the device, and in host memory what is copied there; uint8, equally long."""

    memory: Tensor
    host: Tensor


@dataclass(eq=False)
class WriteBack:
    """New blocks of one layer. records: where kernels write them, on the device."""

    layer: int
    blocks: tuple[int, ...]  # of the store
    records: Tensor  # uint8 [blocks, kv_heads, form.nbytes]
    buffer: WriteBackBuffer
    arrived: torch.cuda.Event | None = None

    @property
    def on_host(self) -> Tensor:
        return self.buffer.host[: self.records.nbytes].view(self.records.shape)

    def wait(self) -> None:
        """Return when what was sent is in host memory."""
        if self.arrived is not None:
            self.arrived.synchronize()


class WriteBackQueue:
    """Takes blocks that kernels write on a device to a store in host memory, from one thread.

    A write-back is filled from `take` to `send`, and in the store when `deliver` or a later `take`
    returns. buffers: one more than are filled at a time, each long enough for every write-back.
    """

    def __init__(
        self,
        store: BlockStore,
        buffers: Sequence[WriteBackBuffer],
        instrumentation: Instrumentation = PLAIN,
    ) -> None:
        self._store = store
        self._device = buffers[0].memory.device
        self._stream: torch.cuda.Stream | None = None
        self._poison = instrumentation.poison
        self._free: list[WriteBackBuffer] = []
        self._taken: list[WriteBack] = []
        self._sent: list[WriteBack] = []  # oldest first
        self.nbytes = sum(2 * buffer.memory.nbytes for buffer in buffers)  # on both sides
        for buffer in buffers:
            self._recycle(buffer)

    def take(self, layer: int, blocks: Sequence[int]) -> WriteBack:
        """A write-back of these blocks of the store."""
        if not self._free:
            self.deliver(self._sent[:1])
        buffer = self._free.pop()
        form, heads = self._store.forms[layer], self._store.kv_heads[layer]
        records = buffer.memory[: len(blocks) * heads * form.nbytes]
        records = records.view(len(blocks), heads, form.nbytes)
        write_back = WriteBack(layer, tuple(blocks), records, buffer)
        self._taken.append(write_back)
        return write_back

    def send(self, write_back: WriteBack) -> None:
        """Start the copy, behind the work of the current stream."""
        if self._device.type == "cuda":
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                write_back.on_host.copy_(write_back.records, non_blocking=True)
                write_back.arrived = torch.cuda.Event()
                write_back.arrived.record()
        else:
            write_back.on_host.copy_(write_back.records)
        self._taken.remove(write_back)
        self._sent.append(write_back)

    def deliver(self, write_backs: Sequence[WriteBack]) -> None:
        """Return when the blocks of those of these that were sent are in the store."""
        for write_back in [write_back for write_back in self._sent if write_back in write_backs]:
            write_back.wait()
            self._store.write(write_back.layer, write_back.blocks, write_back.on_host)
            self._sent.remove(write_back)
            self._recycle(write_back.buffer)

    def drop(self, write_backs: Sequence[WriteBack]) -> None:
        """Forget those of these that are not in the store."""
        for waiting in (self._taken, self._sent):
            for write_back in [write_back for write_back in waiting if write_back in write_backs]:
                write_back.wait()
                waiting.remove(write_back)
                self._recycle(write_back.buffer)

    def _recycle(self, buffer: WriteBackBuffer) -> None:
        if self._poison:
            buffer.memory.fill_(0xFF)
            buffer.host.fill_(0xFF)
        self._free.append(buffer)

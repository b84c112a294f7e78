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

    @classmethod
    def of(cls, nbytes: int, device: torch.device) -> WriteBackBuffer:
        """New memory, on the host such that is copied to without waiting."""
        return cls(
            torch.empty(nbytes, dtype=torch.uint8, device=device),
            torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda"),
        )


@dataclass(eq=False)
class WriteBack:
    """New blocks of one layer. records: where kernels write them, on the device."""

    layer: int
    blocks: tuple[int, ...]  # of the store
    records: Tensor  # uint8 [blocks, kv_heads, form.nbytes]
    buffer: WriteBackBuffer
    arrived: torch.cuda.Event | None = None


class WriteBackQueue:
    """Takes blocks that kernels write on a device to a store in host memory, from one thread.

    A write-back is filled from `take` to `send`, and in the store when `deliver` or a later `take`
    returns. buffers: WRITE_BACK_BUFFERS of a fixed size, enough for every write-back; without,
    memory grows to the most blocks of a layer that were on their way at once.
    """

    def __init__(
        self,
        store: BlockStore,
        device: torch.device,
        instrumentation: Instrumentation = PLAIN,
        buffers: Sequence[WriteBackBuffer] = (),
    ) -> None:
        self._store = store
        self._device = device
        self._poison = instrumentation.poison
        self._stream: torch.cuda.Stream | None = None
        self._buffers = len(buffers)
        self._free = list(buffers)
        for buffer in buffers:
            self._wipe(buffer)
        self._taken: list[WriteBack] = []
        self._sent: list[WriteBack] = []  # oldest first
        self.nbytes = sum(2 * buffer.memory.nbytes for buffer in buffers)  # on both sides

    def take(self, layer: int, blocks: Sequence[int]) -> WriteBack:
        """A write-back of these blocks of the store."""
        if not self._free and self._buffers >= WRITE_BACK_BUFFERS and self._sent:
            self.deliver(self._sent[:1])
        form, heads = self._store.forms[layer], self._store.kv_heads[layer]
        wanted = len(blocks) * heads * form.nbytes
        buffer = self._free.pop() if self._free else None
        if buffer is None or buffer.memory.nbytes < wanted:
            self._buffers += buffer is None
            self.nbytes += 2 * (wanted - (0 if buffer is None else buffer.memory.nbytes))
            buffer = WriteBackBuffer.of(wanted, self._device)
            self._wipe(buffer)
        records = buffer.memory[:wanted].view(len(blocks), heads, form.nbytes)
        write_back = WriteBack(layer, tuple(blocks), records, buffer)
        self._taken.append(write_back)
        return write_back

    def send(self, write_back: WriteBack) -> None:
        """Start the copy, behind the work of the current stream."""
        source, dest = write_back.records, _on_host(write_back)
        if self._device.type == "cuda":
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                dest.copy_(source, non_blocking=True)
                write_back.arrived = torch.cuda.Event()
                write_back.arrived.record()
        else:
            dest.copy_(source)
        self._taken.remove(write_back)
        self._sent.append(write_back)

    def deliver(self, write_backs: Sequence[WriteBack]) -> None:
        """Return when the blocks of those of these that were sent are in the store."""
        for write_back in [write_back for write_back in self._sent if write_back in write_backs]:
            _wait(write_back)
            self._store.write(write_back.layer, write_back.blocks, _on_host(write_back))
            self._sent.remove(write_back)
            self._recycle(write_back.buffer)

    def drop(self, write_backs: Sequence[WriteBack]) -> None:
        """Forget those of these that are not in the store."""
        for waiting in (self._taken, self._sent):
            for write_back in [write_back for write_back in waiting if write_back in write_backs]:
                _wait(write_back)
                waiting.remove(write_back)
                self._recycle(write_back.buffer)

    def _recycle(self, buffer: WriteBackBuffer) -> None:
        self._wipe(buffer)
        self._free.append(buffer)

    def _wipe(self, buffer: WriteBackBuffer) -> None:
        if self._poison:
            buffer.memory.fill_(0xFF)
            buffer.host.fill_(0xFF)


def _on_host(write_back: WriteBack) -> Tensor:
    return write_back.buffer.host[: write_back.records.nbytes].view(write_back.records.shape)


def _wait(write_back: WriteBack) -> None:
    if write_back.arrived is not None:
        write_back.arrived.synchronize()

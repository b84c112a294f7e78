"""What a copy stream asks of CUDA, by a stand-in for it."""

from __future__ import annotations

import ctypes
import gc
import mmap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qoff.memory.io import pinned
from qoff.memory.io.copy_stream import CopyStream

GPU = torch.device("cuda", 1)


class Driver:
    """libcuda.so.1 with memory for one allocation."""

    def __init__(self, code: int) -> None:
        self._code = code
        self.freed: list[int] = []
        self.contexts = [7]  # of the thread that allocates; others have none
        self.memory = mmap.mmap(-1, 1 << 16)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def cuMemHostAlloc(self, address: Any, nbytes: Any, flags: int) -> int:  # noqa: N802
        assert nbytes.value <= len(self.memory)
        address._obj.value = self.address
        return self._code

    def cuMemFreeHost(self, address: Any) -> None:  # noqa: N802
        if self.contexts == [7]:
            self.freed.append(address.value)

    def cuCtxGetCurrent(self, context: Any) -> None:  # noqa: N802
        context._obj.value = self.contexts[-1]

    def cuCtxPushCurrent_v2(self, context: Any) -> None:  # noqa: N802
        self.contexts.append(context.value)

    def cuCtxPopCurrent_v2(self, context: Any) -> None:  # noqa: N802
        context._obj.value = self.contexts.pop()


def test_pinned_memory_lives_as_long_as_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(0)
    monkeypatch.setattr(pinned.ctypes, "CDLL", lambda name: driver)
    memory = pinned.pinned_memory(5000)
    assert (memory.nbytes, memory.data_ptr()) == (5000, driver.address)
    piece = memory[100:].fill_(7)
    assert driver.memory[100] == driver.memory[4999] == 7
    del memory
    gc.collect()
    assert driver.freed == []
    driver.contexts.clear()  # in another thread
    del piece
    gc.collect()
    assert (driver.freed, driver.contexts) == ([driver.address], [])


def test_memory_that_is_refused_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned.ctypes, "CDLL", lambda name: Driver(2))
    with pytest.raises(OSError, match="cuMemHostAlloc gave error 2"):
        pinned.pinned_memory(4096)


def test_a_refusal_is_not_raised_again_by_the_next_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    last = [0]
    current: list[torch.device] = []

    class Device:
        def __init__(self, device: torch.device) -> None:
            self._device = device

        def __enter__(self) -> None:
            current.append(self._device)

        def __exit__(self, *_: object) -> None:
            current.pop()

    def register(address: int, nbytes: int, flags: int) -> int:
        assert current == [GPU]
        last[0] = 801
        return last[0]

    def launch(*_: object, device: torch.device) -> None:
        error, last[0] = last[0], 0
        if error:
            raise RuntimeError(f"CUDA error {error}")

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch, "ones", launch)
    stream = CopyStream.__new__(CopyStream)
    stream.device = GPU
    with pytest.raises(OSError, match="cudaHostRegister gave error 801"):
        stream.pin(torch.empty(4096, dtype=torch.uint8))
    assert last == [0]

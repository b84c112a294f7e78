"""Training on a GPU without one, whose memory is memory of the host.

Copies to it are made as late as they may be, when somebody waits for them, and what they are made
to is NaN until then: so what is computed too early is NaN, and so is the loss. Copies from it are
made by a thread that takes its time.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from qoff.hf.plugin import streaming
from qoff.memory import WeightStore
from qoff.memory.instrumentation import Instrumentation
from qoff.memory.io.copy_stream import Copy, Event
from qoff.memory.io.cuda_transfers import CudaTransfers
from qoff.memory.plan import place_in_host
from qoff.train import building
from qoff.train.gpu_link import GpuLink
from tests.memory.kinds import Done, SimulatedStream

STAGING = 8192  # bytes: so that units go in pieces


class LateStream(SimulatedStream):
    """Makes a copy, and those before it, when it is waited for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._waiting: list[_Late] = []
        self._guard = threading.RLock()

    def copy(self, source: Tensor, memory: Tensor, after: Event | None, timed: bool) -> Copy:
        assert source.shape == memory.shape
        late = _Late(self, source, memory)
        with self._guard:
            self._waiting.append(late)
        return Copy(late)

    def until(self, late: _Late) -> None:
        with self._guard:
            while late in self._waiting:
                one = self._waiting.pop(0)
                one.memory.copy_(one.source)


class _Late:
    def __init__(self, stream: LateStream, source: Tensor, memory: Tensor) -> None:
        self.source, self.memory, self._stream = source, memory, stream

    def synchronize(self) -> None:
        self._stream.until(self)


def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `offload`, and layers of `from_pretrained` that stream, take the CPU for a GPU."""

    def streams(device: torch.device) -> tuple[LateStream, SimulatedStream]:
        return LateStream(device), SimulatedStream(device)

    monkeypatch.setattr(sys.modules["qoff.train.offload"], "streams_of", streams)
    monkeypatch.setattr(building, "GpuLink", partial(GpuLink, poison=True))
    monkeypatch.setattr("qoff.train.gpu_link.STAGING", STAGING)
    monkeypatch.setattr(
        streaming, "transfers_to", lambda device: CudaTransfers(device, stream=SimulatedStream)
    )
    monkeypatch.setattr(
        streaming, "place_in_host", lambda part, plan, budget, _: place_in_host(part, plan, None, 2)
    )
    hooks = Instrumentation(poison=True)
    monkeypatch.setattr(streaming, "WeightStore", partial(WeightStore, instrumentation=hooks))


class _TwoDevices(TorchFunctionMode):
    """Refuses operations of both meta and main memory, but for numbers, as torch does with a GPU.

    What asks for values of tensors that have none is answered with 1, or with all.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__float__, Tensor.__bool__, Tensor.item) and args[0].is_meta:
            return True if func is Tensor.__bool__ else 1.0
        if func is torch.equal and args[0].is_meta:
            return False
        if func is Tensor.nonzero and args[0].is_meta:
            return torch.arange(args[0].numel(), device="meta")[:, None]
        if func is Tensor.copy_ and args[1].is_meta and not args[0].is_meta:
            return args[0]
        found = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim()]
        if len({x.device for x in found}) > 1:
            raise RuntimeError(f"{func} of tensors on two devices")
        return func(*args, **(kwargs or {}))


class _MetaStream(LateStream):
    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def copy(self, source: Tensor, memory: Tensor, after: Event | None, timed: bool) -> Copy:
        assert source.is_meta is not memory.is_meta
        assert source.shape == memory.shape
        done = Done()
        done.happened.set()
        return Copy(done)


@contextmanager
def on_meta(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have `offload` take the meta device for a GPU, within the calling thread."""

    def streams(_: torch.device) -> tuple[_MetaStream, _MetaStream]:
        found = _MetaStream(torch.device("cpu")), _MetaStream(torch.device("cpu"))
        for stream in found:
            stream.device = torch.device("meta")
        return found

    monkeypatch.setattr(sys.modules["qoff.train.offload"], "streams_of", streams)
    monkeypatch.setattr("qoff.train.walk.reads_embeddings", lambda *_: False)
    monkeypatch.setattr("qoff.hf.dispatch.units.check_values", lambda *_, **__: None)
    with _TwoDevices():
        yield

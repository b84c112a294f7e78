"""ThreadTransfers: transfers by host threads, for a device that is the CPU, and for tests."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from qoff.budgets import CPU
from qoff.memory.arena import Arena
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.memory.plan import Image, Residency

from .clock import SYSTEM
from .copies import Copies
from .disk import DiskReader
from .transfers import Mark, Transfers, UnitRead


class ThreadTransfers(Transfers):
    """Transfers for a device that is the CPU: computations are done when their calls return.

    Copies from host memory, of single experts or where somebody watches what is moved, take one
    more thread; the staging memory for repacking is part of the device arena.
    """

    def __init__(self, reader: DiskReader | None = None) -> None:
        super().__init__(CPU, reader)

    def open(
        self, residency: Residency, instrumentation: Instrumentation = PLAIN
    ) -> Mapping[str, Arena]:
        self._copies = self._new_copies(instrumentation)
        self._threads.append(self._copies)
        arenas = super().open(residency, instrumentation)
        if residency.staging_bytes:  # all is repacked alike
            self._staging = arenas["device"].alloc(residency.staging_bytes, "staging for repacking")
        return arenas

    @property
    def copying_s(self) -> float:
        return self._copies.busy_s  # waits for nothing else

    @property
    def sweeps(self) -> bool:
        return self.clock is SYSTEM and self._instrumentation.timeline is None

    def in_place(self, instrumentation: Instrumentation) -> bool:
        return not instrumentation.watches_copies

    def _new_copies(self, instrumentation: Instrumentation) -> Copies:
        return Copies(instrumentation=instrumentation)

    def read_unit(self, image: Image, memory: Tensor, verify: bool, after: Mark) -> UnitRead:
        return self.load_host(image, memory, verify, "disk to device")

    def copy_unit(self, image: Image, source: Tensor, memory: Tensor, after: Mark) -> UnitRead:
        read = UnitRead(self, image, memory)

        def move() -> None:
            read.check()
            self._copies.copy([(memory, source)])
            self.copied_bytes += source.nbytes

        copy = self._copies.call(move, source.nbytes, "host to device", image.label)
        read.futures.append(copy)
        return read

    def save(self, memory: Tensor, host: Tensor) -> None:
        self.clock.result(self._copies.submit([(host, memory)], "device to host", "expert"))

    def recycle(self, memory: Tensor) -> Mark:
        if self.poison:
            memory.fill_(0xFF)
        return None

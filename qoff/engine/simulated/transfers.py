"""What moves bytes, without any bytes: files that are not there, memory that nobody writes to."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qoff.budgets import CPU
from qoff.checkpoint import TensorEntry, WeightFile
from qoff.kvcache.device.write_back import WriteBack, WriteBackQueue
from qoff.memory import DiskReader, Transfers
from qoff.memory.io.copies import Copies
from qoff.memory.io.copy_stream import Copy, CopyStream, Event
from qoff.memory.io.direct import DirectFile
from qoff.memory.io.disk import ReadRequest
from qoff.memory.io.runs import Run
from qoff.memory.io.spill import SpillFile
from qoff.memory.io.transfers import UnitRead
from qoff.memory.plan import FileRange, Image

from .machine import VirtualLink, VirtualMachine

_NORESERVE = 0x4000  # of mmap on Linux


def unbacked(nbytes: int) -> Tensor:
    """Addresses for so many bytes, uint8; more than the machine has, as long as nothing is there.

    Raises OSError where the system has no such addresses.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)


class _NoFile(DirectFile):
    """A file that takes as long as one to read."""

    def __init__(self, path: Path, link: VirtualLink) -> None:
        self.path, self.direct, self._link = path, True, link

    def read(self, offset: int, dest: memoryview, address: int, bounce: memoryview) -> None:
        self._link.move(len(dest))

    def close(self) -> None:
        """Nothing is open."""

    def fileno(self) -> int:
        raise OSError(errno.ENOENT, "there is no file")


class SimulatedReader(DiskReader):
    """Reads nothing, and takes as long as the machine's disk."""

    def __init__(self, machine: VirtualMachine) -> None:
        super().__init__(chunk=machine.chunk, clock=machine.clock)
        self._machine, self._link = machine, machine.read

    def read_at_once(self, path: str | Path, nbytes: int, urgent: bool = False) -> ReadRequest:
        """A request of so many bytes, in as few reads as its parts would be if they were one.

        Parts would occupy the link one after another, too; a tile's scales alone are hundreds.
        """
        if self._machine.loading:
            request = ReadRequest()
            request.set_result(None)
            return request
        self._link.ask()
        return super().submit_parts(path, [(0, unbacked(nbytes))], urgent)

    def submit_parts(
        self, path: str | Path, parts: Sequence[tuple[int, Tensor]], urgent: bool = False
    ) -> ReadRequest:
        return self.read_at_once(path, sum(dest.nbytes for _, dest in parts), urgent)

    def submit_runs(self, path: Path, runs: Sequence[Run], dest: Tensor) -> ReadRequest:
        return self.read_at_once(path, sum(run.nbytes for run in runs))

    def read_here(self, path: str | Path, offset: int, dest: Tensor) -> None:
        self.count(dest.nbytes)
        self._link.move_alone(dest.nbytes)

    def count(self, nbytes: int) -> None:
        """Note bytes that are read in another way."""
        self._bytes += nbytes

    def _open(self, path: Path) -> DirectFile:
        return _NoFile(path, self._link)


class SimulatedReads(Transfers):
    """Reads of weights that come nowhere."""

    def _submit(self, image: Image, ranges: Sequence[FileRange], memory: Tensor) -> ReadRequest:
        assert isinstance(self.reader, SimulatedReader)
        whole = ranges is image.ranges
        nbytes = image.bytes_read if whole else sum(one.nbytes for one in ranges)
        return self.reader.read_at_once(image.file.path, nbytes)

    def _finish(self, read: UnitRead, lane: str) -> None:
        """Nothing is there to be checked, repacked or widened."""
        if read.image.repacked:
            self._start(read, read.image.ranges, self._staging, lane)
        self.clock.result(read.requests[-1])

    def read_floats(self, file: WeightFile, entry: TensorEntry) -> Tensor:
        return torch.empty(entry.shape)


class SimulatedSpill(SpillFile):
    """Keeps nothing, and takes as long as the machine's disk."""

    def __init__(
        self, machine: VirtualMachine, folder: Path, nbytes: int, reader: DiskReader, **more: Any
    ) -> None:
        self._link = machine.write
        super().__init__(folder, nbytes, reader, pwritev=self._pass, **more)
        self._path = folder / "spill"

    def write_here(self, offset: int, source: Tensor) -> None:
        self.written += source.nbytes
        self._link.move_alone(source.nbytes)

    def _pass(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self._link.ask()
        nbytes = sum(map(len, views))
        self._link.move(nbytes)
        return nbytes

    def _open(self) -> tuple[int, bool]:
        return 0, True

    def _close_file(self) -> None:
        self._fd = -1


class SimulatedCopies(Copies):
    """Copies nothing, and takes as long as the machine's links."""

    def __init__(self, machine: VirtualMachine, **more: Any) -> None:
        super().__init__(**more)
        self._to, self._from = machine.to_device, machine.from_device

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Time passes where `call` says how many bytes move."""

    def copy_runs(self, runs: Sequence[Run], dest: Tensor, source: Tensor) -> None:
        """As `copy`."""

    def put(self, dest: Tensor, source: Tensor) -> None:
        """As `copy`."""

    def _run(
        self,
        move: Callable[[], None],
        nbytes: int,
        lane: str,
        name: str,
        after: torch.cuda.Event | None,
    ) -> None:
        if nbytes:
            link = self._from if lane.startswith("device") else self._to
            link.ask()
            move = partial(_after, move, link, nbytes)
        super()._run(move, nbytes, lane, name, after)


def _after(move: Callable[[], None], link: VirtualLink, nbytes: int) -> None:
    move()
    link.move(nbytes)


class Arrival:
    """The end of a copy: as `copy_stream.Event`, and as what a write-back waits for."""

    def __init__(self, machine: VirtualMachine, when: float) -> None:
        self._clock, self._when = machine.clock, when

    def synchronize(self) -> None:
        if self._when > self._clock.now():
            self._clock.sleep_until(self._when)


class SimulatedStream(CopyStream):
    """As a GPU's, whose memory is addresses alone. What is computed has ended when it returns."""

    def __init__(self, machine: VirtualMachine) -> None:
        self.device = CPU
        self._machine = machine

    def allocate(self, nbytes: int) -> Tensor:
        return unbacked(nbytes)

    def allocate_pinned(self, nbytes: int) -> Tensor:
        return unbacked(nbytes)

    def pin(self, memory: Tensor) -> None:
        """It always is."""

    def unpin(self, memory: Tensor) -> None:
        """As `pin`."""

    def copy(self, source: Tensor, memory: Tensor, after: Event | None, timed: bool) -> Copy:
        self._machine.to_device.ask()
        return Copy(Arrival(self._machine, self._machine.to_device.start(source.nbytes)))

    def run(self, work: Callable[[], None]) -> Event:
        return Arrival(self._machine, self._machine.clock.now())

    def recycle(self, memory: Tensor, poison: bool) -> Event:
        return Arrival(self._machine, self._machine.clock.now())

    def order_after(self, event: Event) -> None:
        event.synchronize()

    def close(self) -> None:
        """Nothing is under way."""


class SimulatedWriteBack(WriteBackQueue):
    """Sends no blocks, and takes as long as the machine's link."""

    def __init__(self, machine: VirtualMachine, *arguments: Any) -> None:
        self.machine = machine
        super().__init__(*arguments)

    def send(self, write_back: WriteBack) -> None:
        link = self.machine.from_device
        link.ask()
        write_back.arrived = Arrival(self.machine, link.start(write_back.records.nbytes))  # type: ignore[assignment]
        self._taken.remove(write_back)
        self._sent.append(write_back)

    def deliver(self, write_backs: Sequence[WriteBack]) -> None:
        for write_back in [one for one in self._sent if one in write_backs]:
            write_back.wait()
            self._store.fill(write_back.layer, write_back.blocks, lambda *_: None)
            self._sent.remove(write_back)
            self._recycle(write_back.buffer)

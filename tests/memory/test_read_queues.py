"""Reads that are asked for one by one, by threads without Python."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from qoff.errors import DiskReadError
from qoff.kernels.cpu.jit.read_queue import ReadQueue
from qoff.memory import DiskReader
from qoff.memory.arena import map_pages
from qoff.memory.io.runs import Run

SLOT, SLOTS, EACH = 4 * 4096, 4, 8


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(16 * SLOT))
    return path


class Asked:
    """Slots that are read from a file, and what they ought to hold."""

    def __init__(self, reader: DiskReader, file: Path, queue: ReadQueue | None = None) -> None:
        self.queue = queue or reader.queue(SLOTS, EACH)
        self.memory = map_pages(SLOTS * SLOT).view(SLOTS, SLOT)
        self._reader, self._file = reader, file

    def ask(self, slots: list[int], units: list[int], urgent: int, cut: int = 0) -> None:
        """cut: bytes that are missing at the end of the file."""
        chunks = np.zeros((len(slots), EACH, 5), dtype=np.int64)
        counts = np.zeros(len(slots), dtype=np.int64)
        for i, (slot, unit) in enumerate(zip(slots, units, strict=True)):
            runs = [Run(unit * SLOT + cut, 0, SLOT)]
            found = self._reader.whole_blocks(self._file, runs)
            assert found is not None
            counts[i] = len(found)
            chunks[i, : len(found), 1:] = found
            chunks[i, :, 0] = self._reader.descriptor(self._file)
            chunks[i, :, 2] += self.memory[slot].data_ptr()
        self.queue.ask(np.array(slots), chunks, counts, urgent)

    def wait(self, slots: list[int]) -> None:
        deadline = time.monotonic() + 20
        while not self.queue.done(np.array(slots)).all():
            assert time.monotonic() < deadline
            self.queue.wait(np.array(slots))

    def expected(self, unit: int) -> Tensor:
        data = self._file.read_bytes()[unit * SLOT : (unit + 1) * SLOT]
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def test_slots_are_filled_again_and_again(reader: DiskReader, file: Path) -> None:
    asked = Asked(reader, file)
    for turn in range(4):
        units = [4 * turn + slot for slot in range(SLOTS)]
        asked.ask(list(range(SLOTS)), units, urgent=turn)
        asked.wait(list(range(SLOTS)))
        assert not asked.queue.failed(np.arange(SLOTS)).any()
        for slot, unit in enumerate(units):
            assert torch.equal(asked.memory[slot], asked.expected(unit))
    assert reader.stats.bytes == 16 * SLOT
    assert reader.stats.busy_s > 0


@pytest.fixture
def idle(reader: DiskReader, file: Path) -> Asked:
    """With a queue that no thread serves yet."""
    return Asked(reader, file, ReadQueue(SLOTS, EACH, reader._busy_words()))


def served(queue: ReadQueue) -> threading.Thread:
    thread = threading.Thread(target=queue.serve)
    thread.start()
    return thread


@pytest.mark.parametrize(("hurried", "last"), [([], 3), ([3], 1)])
def test_what_is_urgent_comes_first(idle: Asked, hurried: list[int], last: int) -> None:
    idle.memory = idle.memory[:1].expand(SLOTS, SLOT)  # what comes last stays there
    idle.ask([0, 1], [0, 1], urgent=1)
    idle.ask([2, 3], [2, 3], urgent=1)
    idle.queue.hurry(np.array(hurried, dtype=np.int64))
    thread = served(idle.queue)
    idle.wait([0, 1, 2, 3])
    idle.queue.stop()
    thread.join()
    assert torch.equal(idle.memory[0], idle.expected(last))


def test_what_is_dropped_is_not_read(reader: DiskReader, idle: Asked) -> None:
    idle.ask([0, 1, 2], [0, 1, 2], urgent=3)
    idle.queue.drop(np.array([1]))
    assert idle.queue.done(np.array([0, 1, 2])).tolist() == [False, True, False]
    thread = served(idle.queue)
    idle.wait([0, 2])
    idle.queue.stop()
    thread.join()
    assert idle.queue.failed(np.array([0, 1, 2])).tolist() == [False, True, False]
    assert reader.stats.bytes == 2 * SLOT


def test_what_cannot_be_read_fails_its_slot_alone(reader: DiskReader, file: Path) -> None:
    asked = Asked(reader, file)
    asked.ask([0], [15], urgent=1, cut=4096)  # the last page is not there
    asked.ask([1], [3], urgent=1)
    asked.wait([0, 1])
    assert asked.queue.failed(np.array([0, 1])).tolist() == [True, False]
    assert torch.equal(asked.memory[1], asked.expected(3))


def test_closing_the_reader_ends_its_queues(file: Path) -> None:
    reader = DiskReader(threads=2)
    asked = Asked(reader, file)
    assert reader.alive
    reader.close()
    assert asked.queue.stopped
    assert not reader.alive
    with pytest.raises(DiskReadError, match="the disk reader is closed"):
        reader.queue(SLOTS, EACH)


@pytest.mark.parametrize(
    ("runs", "whole"),
    [
        ([Run(4096, 0, 8192)], True),
        ([Run(4096, 0, 100)], True),
        ([Run(100, 0, 4096)], False),
        ([Run(4096, 100, 4096)], False),
        ([Run(0, 0, 4000), Run(8192, 4000, 96)], False),  # one would write where the other is
    ],
)
def test_what_is_no_whole_block_is_left_to_python(
    reader: DiskReader, file: Path, runs: list[Run], whole: bool
) -> None:
    assert (reader.whole_blocks(file, runs) is not None) == whole

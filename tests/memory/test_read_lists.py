"""Lists of reads that fill slots without Python, each as soon as it is given back."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qoff.errors import DiskReadError
from qoff.kernels.cpu.jit.reads import ReadList
from qoff.kernels.cpu.jit.slots import Slots
from qoff.memory import DiskReader
from qoff.memory.arena import map_pages
from qoff.memory.io.runs import Fill
from qoff.memory.io.spill import SpillFile

UNIT, UNITS = 3 * 4096, 5
TAIL = 100  # bytes of the last unit


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "units"
    path.write_bytes(os.urandom((UNITS - 1) * UNIT + TAIL))
    return path


MEMORY = map_pages(2 * UNIT).split(UNIT)


def fills(path: Path, slots: Slots, sizes: list[int]) -> list[Fill]:
    found = []
    for i, nbytes in enumerate(sizes):
        part = i * UNIT, MEMORY[i % 2][:nbytes]
        turn = slots.used(i % 2) + i // 2
        found.append(Fill(path, [part], slots.words(i % 2), turn))
    return found


def new_slots() -> Slots:
    return Slots([memory.data_ptr() for memory in MEMORY], UNIT, spoil=True)


def used(slots: Slots, sizes: list[int]) -> list[Tensor]:
    """What jobs find, one unit after another."""
    found = []
    for i, nbytes in enumerate(sizes):
        slots.wait(i % 2)
        found.append(MEMORY[i % 2][:nbytes].clone())
        slots.give_back(i % 2)
    return found


def test_each_unit_is_there_from_when_it_is_waited_for_to_when_it_is_given_back(
    reader: DiskReader, file: Path
) -> None:
    slots, sizes = new_slots(), [UNIT] * (UNITS - 1) + [TAIL]
    request = reader.submit_list(fills(file, slots, sizes), slots.fail)
    data = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    assert all(map(torch.equal, used(slots, sizes), data.split(UNIT)))
    request.result(20)
    assert (MEMORY[1][:UNIT] == 255).all()  # spoiled
    assert reader.stats.bytes == len(data)
    assert reader.stats.busy_s > 0


def test_a_unit_is_read_when_the_one_before_it_is_there(file: Path) -> None:
    overtaken, last = threading.Event(), UNIT - 4096

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset >= UNIT:
            overtaken.set()
        elif offset == last:
            assert not overtaken.wait(0.1)
        return os.preadv(fd, buffers, offset)

    reader, slots = DiskReader(threads=2, chunk=4096, preadv=preadv), new_slots()
    try:
        reader.submit_list(fills(file, slots, [UNIT] * 2), slots.fail).result(20)
    finally:
        reader.close()
    assert overtaken.is_set()


def test_a_file_that_ends_early_is_an_error_to_who_waits(reader: DiskReader, file: Path) -> None:
    slots, sizes = new_slots(), [UNIT] * (UNITS - 1) + [TAIL + 1]
    request = reader.submit_list(fills(file, slots, sizes), slots.fail)
    with pytest.raises(DiskReadError, match="short read"):
        used(slots, sizes)
    with pytest.raises(DiskReadError, match="short read"):
        request.result(20)
    assert slots.failed


def test_threads_that_stop_because_a_read_failed_tell_that(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, stop = list[BaseException](), ReadList.stop

    def slow_stop(self: ReadList) -> None:
        stop(self)
        time.sleep(0.1)  # the other threads find it stopped meanwhile, and end

    monkeypatch.setattr(ReadList, "stop", slow_stop)
    reader, slots = DiskReader(), new_slots()
    try:
        listed = fills(file, slots, [UNIT] * 3)  # the last waits for its slot
        listed[0] = Fill(file, [(UNITS * UNIT, MEMORY[0])], *listed[0][2:])
        with pytest.raises(DiskReadError, match="short read"):
            reader.submit_list(listed, told.append).result(20)
    finally:
        reader.close()
    assert {str(error) for error in told} == {str(told[0])}
    assert "short read" in str(told[0])


def test_a_spill_file_is_closed_while_its_list_waits_for_slots(
    reader: DiskReader, tmp_path: Path
) -> None:
    spill, slots = SpillFile(tmp_path, 4 * UNIT, reader), new_slots()
    each = fills(tmp_path, slots, [UNIT] * 4)  # nobody gives back the slots of the first two
    request = spill.read_list([(one.parts, one.words, one.turn) for one in each], slots.fail)
    closing = threading.Thread(target=spill.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    with pytest.raises(DiskReadError, match="abandoned"):
        request.result(20)


def test_an_abandoned_list_ends_without_its_slots(reader: DiskReader, file: Path) -> None:
    slots = new_slots()
    request = reader.submit_list(fills(file, slots, [UNIT] * 3), slots.fail)
    request.abandon()
    with pytest.raises(DiskReadError, match="abandoned"):
        request.result(20)


def test_what_is_urgent_waits_for_no_slot(file: Path) -> None:
    """All threads wait for what a pass gives back, which may need the urgent read first."""
    reader, slots = DiskReader(threads=1, chunk=4096), new_slots()
    found = torch.empty(UNIT, dtype=torch.uint8)
    try:
        request = reader.submit_list(fills(file, slots, [UNIT] * 3), slots.fail)
        slots.wait(1)  # what comes next has the slot that is not given back
        reader.submit(file, UNIT, found, urgent=True).result(20)
        assert not request.done()
    finally:
        reader.close()
    assert found.numpy().tobytes() == file.read_bytes()[UNIT : 2 * UNIT]


def test_a_read_that_is_under_way_counts_until_now(reader: DiskReader) -> None:
    """Else what it took before somebody looks would count as of what comes after."""
    words = reader._busy_words()
    words.reading, words.since = 1, time.perf_counter_ns() - 10**9
    start, before = time.perf_counter(), reader.stats.busy_s
    ended = time.perf_counter_ns()
    words.ns, words.reading, words.since = words.ns + ended - words.since, 0, ended
    after = reader.stats.busy_s
    assert 0 < after - before <= time.perf_counter() - start
    assert after == reader.stats.busy_s >= 1


def test_reads_at_the_same_time_count_once(reader: DiskReader, file: Path) -> None:
    """Those of threads without Python, for all of the time here, and those of Python."""
    words = reader._busy_words()
    start = time.perf_counter()
    words.reading, words.since = 1, time.perf_counter_ns()
    for _ in range(20):
        reader.submit(file, 0, torch.empty(file.stat().st_size, dtype=torch.uint8)).result(20)
    ended = time.perf_counter_ns()
    words.ns, words.reading, words.since = ended - words.since, 0, ended
    busy = reader.stats.busy_s
    assert 0 < busy <= time.perf_counter() - start
    assert busy == reader.stats.busy_s

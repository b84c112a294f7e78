from __future__ import annotations

import errno
import fcntl
import os
import random
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qoff.errors import DiskReadError
from qoff.memory.arena import map_pages
from qoff.memory.io.direct import BLOCK, SECTOR, DirectFile, Preadv
from qoff.memory.io.disk import DiskReader
from qoff.memory.io.runs import Run

SIZE = 300_001
CHUNKS = st.sampled_from([4096, 8192, 65536, 1 << 20])


@pytest.fixture(scope="module")
def content() -> bytes:
    return random.Random(7).randbytes(SIZE)


@pytest.fixture(scope="module")
def path(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("disk") / "data.bin"
    path.write_bytes(content)
    return path


def short(fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Deliver one block of what is asked for, as an interrupted read may."""
    return os.preadv(fd, [views[0][:4096]], offset)


def slow(fd: int, views: Sequence[memoryview], offset: int) -> int:
    time.sleep(offset % 7 * 1e-4)
    return os.preadv(fd, views, offset)


HOOKS: list[Preadv] = [os.preadv, short, slow]


@settings(max_examples=60)
@given(data=st.data(), threads=st.integers(1, 5), chunk=CHUNKS, direct=st.booleans())
def test_bytes_delivered_are_the_bytes_of_the_file(
    data: st.DataObject, threads: int, chunk: int, direct: bool, path: Path, content: bytes
) -> None:
    aligned = st.integers(0, SIZE // SECTOR).map(lambda sector: sector * SECTOR)
    hook = data.draw(st.sampled_from(HOOKS))
    with closing(DiskReader(threads, chunk, direct, hook)) as reader:
        wanted = []
        for _ in range(data.draw(st.integers(1, 4))):
            offset = data.draw(aligned | st.integers(0, SIZE))
            nbytes = data.draw(st.integers(0, SIZE - offset) | st.just(SIZE - offset))
            shift = data.draw(st.sampled_from([0, 4096, 512, 8, 513]))
            memory = map_pages(shift + nbytes + 10).fill_(0xAA)
            dest = memory[shift : shift + nbytes]
            request = reader.submit(path, offset, dest, urgent=data.draw(st.booleans()))
            wanted.append((request, memory, shift, offset, nbytes))
        for request, memory, shift, offset, nbytes in wanted:
            request.result(timeout=20)
            got = bytes(memory.numpy())
            assert got[shift : shift + nbytes] == content[offset : offset + nbytes]
            assert set(got[:shift] + got[shift + nbytes :]) <= {0xAA}, "wrote outside of dest"
        stats = reader.stats
        assert stats.bytes == sum(nbytes for *_, nbytes in wanted)
        assert (stats.busy_s > 0) == any(nbytes for *_, nbytes in wanted)
        assert stats.buffered_files <= {path}
        assert direct or stats.buffered_files


@given(beyond=st.integers(1, 50_000), aligned=st.booleans(), direct=st.booleans())
def test_a_read_beyond_the_end_names_file_and_offset(
    beyond: int, aligned: bool, direct: bool, path: Path
) -> None:
    with closing(DiskReader(2, 8192, direct)) as reader:
        start = SIZE // 4096 * 4096 - 8192 + (0 if aligned else 1)
        request = reader.submit(path, start, map_pages(SIZE - start + beyond))
        with pytest.raises(
            DiskReadError, match=rf"{path.name}: short read.*offset [23]\d\d,\d\d\d"
        ):
            request.result(timeout=20)


def test_a_refused_direct_read_is_done_buffered_and_recorded(path: Path, content: bytes) -> None:
    def refusing(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct reads here")
        return os.preadv(fd, views, offset)

    with closing(DiskReader(3, 4096, preadv=refusing)) as reader:
        dest = map_pages(SIZE)
        reader.submit(path, 0, dest).result(timeout=20)
        assert bytes(dest.numpy()) == content
        assert reader.stats.buffered_files == {path}


def test_reads_by_sectors_that_are_refused_later_stay_direct(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's first sectors can be read so, others by whole pages alone."""

    def by_pages(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT and (offset | len(views[0])) % BLOCK:
            raise OSError(errno.EINVAL, "whole pages alone")
        return os.preadv(fd, views, offset)

    monkeypatch.setattr("qoff.memory.io.direct._reads_sectors", lambda _: True)
    with closing(DirectFile(path, preadv=by_pages)) as file:
        if not file.direct:
            pytest.skip("a file system without O_DIRECT")
        dest, bounce = map_pages(9000), map_pages(BLOCK)
        view = memoryview(dest.numpy())
        file.read(SECTOR, view, dest.data_ptr(), memoryview(bounce.numpy()))
        assert bytes(view) == content[SECTOR : SECTOR + 9000]
        assert (file.direct, file.block) == (True, BLOCK)


def test_a_missing_file_is_a_disk_read_error(tmp_path: Path) -> None:
    with closing(DiskReader(1)) as reader, pytest.raises(DiskReadError, match=r"gone\.bin"):
        reader.submit(tmp_path / "gone.bin", 0, map_pages(4096)).result(timeout=20)


def test_only_the_failing_request_fails(path: Path, content: bytes) -> None:
    def broken(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if offset == 8192:
            raise OSError(errno.EIO, "Input/output error")
        return os.preadv(fd, views, offset)

    with closing(DiskReader(2, 4096, preadv=broken)) as reader:
        bad, good = map_pages(40_960), map_pages(40_960)
        failing = reader.submit(path, 0, bad)
        passing = reader.submit(path, 40_960, good)
        with pytest.raises(DiskReadError, match=r"offset 8,192 failed: Input/output error"):
            failing.result(timeout=20)
        passing.result(timeout=20)
        assert bytes(good.numpy()) == content[40_960:81_920]
        assert reader.stats.bytes == 81_920 - 4096  # what failed is not delivered


def test_reads_of_one_request_overlap(path: Path) -> None:
    threads = 4
    meeting = threading.Barrier(threads, timeout=20)

    def together(fd: int, views: Sequence[memoryview], offset: int) -> int:
        meeting.wait()  # raises unless `threads` reads are in flight at once
        return os.preadv(fd, views, offset)

    with closing(DiskReader(threads, 4096, preadv=together)) as reader:
        reader.submit(path, 0, map_pages(8 * 4096)).result(timeout=20)


def test_urgent_reads_go_first_and_abandoned_ones_are_skipped(path: Path) -> None:
    gate, order = threading.Event(), []

    def gated(fd: int, views: Sequence[memoryview], offset: int) -> int:
        gate.wait(20)
        order.append(offset)
        return os.preadv(fd, views, offset)

    with closing(DiskReader(1, 4096, preadv=gated)) as reader:
        first = reader.submit(path, 0, map_pages(4096))
        while reader.stats.busy_s == 0:  # until the thread is in the gate
            time.sleep(1e-3)
        dropped = reader.submit(path, 4096, map_pages(8192))
        last = reader.submit(path, 16384, map_pages(4096))
        urgent = reader.submit(path, 20480, map_pages(4096), urgent=True)
        dropped.abandon()
        gate.set()
        for request in (first, urgent, last):
            request.result(timeout=20)
        with pytest.raises(DiskReadError, match="abandoned"):
            dropped.result(timeout=20)
        assert order == [0, 20480, 16384]


def test_the_death_of_a_thread_fails_everything_and_hangs_nothing(path: Path) -> None:
    def deadly(fd: int, views: Sequence[memoryview], offset: int) -> int:
        raise SystemExit("killed")

    with closing(DiskReader(2, 4096, preadv=deadly)) as reader:
        requests = [reader.submit(path, 0, map_pages(65536)) for _ in range(3)]
        for request in requests:
            with pytest.raises(DiskReadError, match="died"):
                request.result(timeout=20)
        with pytest.raises(DiskReadError, match="died"):
            reader.submit(path, 0, map_pages(4096)).result(timeout=20)


def test_close_ends_waiting_reads_threads_and_files(path: Path) -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    before = set(threading.enumerate())
    reader = DiskReader(2, 4096, preadv=slow)
    request = reader.submit(path, 0, map_pages(SIZE))
    threads = set(threading.enumerate()) - before
    reader.close()
    assert len(threads) == 2
    assert not any(t.is_alive() for t in threads)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert request.done()
    with pytest.raises(DiskReadError, match="closed"):
        reader.submit(path, 0, map_pages(4096)).result(timeout=20)


@pytest.mark.parametrize("dest", [torch.zeros(64), torch.zeros(64, dtype=torch.uint8)[::2]])
def test_only_contiguous_bytes_are_filled(path: Path, dest: torch.Tensor) -> None:
    with closing(DiskReader(1)) as reader, pytest.raises(ValueError, match="uint8"):
        reader.submit(path, 0, dest)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("nbytes", [4608, 1000])
def test_many_short_runs_come_to_their_places(
    direct: bool, nbytes: int, path: Path, content: bytes
) -> None:
    asked: list[int] = []

    def noted(fd: int, views: Sequence[memoryview], offset: int) -> int:
        asked.append(len(views[0]))
        return os.preadv(fd, views, offset)

    sources = range(0, SIZE - nbytes, 3 * nbytes)
    runs = [Run(source, i * nbytes, nbytes) for i, source in enumerate(sources)]
    memory = map_pages(len(runs) * nbytes)
    with closing(DiskReader(direct=direct, preadv=noted)) as reader:
        reader.submit_runs(path, runs, memory).result(timeout=20)
        assert reader.stats.bytes == len(runs) * nbytes
        (file,) = reader._files.values()
        if file.direct and file.block == SECTOR and nbytes % SECTOR == 0:
            assert sum(asked) == len(runs) * nbytes  # no page around a run is read
        with pytest.raises(DiskReadError):
            reader.submit_runs(path, [Run(SIZE, 0, nbytes)], memory).result(timeout=20)
    expected = b"".join(content[source : source + nbytes] for source in sources)
    assert bytes(memory.numpy()) == expected

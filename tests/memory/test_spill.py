"""SpillFile: bytes come back as they were written, every failure is an error of ours at the place
that waits for it, and the space is free again however the process ends."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from qoff.errors import BudgetError, DiskReadError, DiskWriteError
from qoff.memory.arena import PAGE, map_pages
from qoff.memory.instrumentation import Instrumentation
from qoff.memory.io.disk import DiskReader
from qoff.memory.io.spill import Pwritev, SpillFile
from qoff.memory.io.timeline import Timeline

PAGES = 64
TIMEOUT_S = 30


@pytest.fixture
def reader() -> Iterator[DiskReader]:
    with closing(DiskReader()) as reader:
        yield reader


def pages(count: int, value: int | None = None) -> Tensor:
    """Aligned memory, random unless it has one value."""
    memory = map_pages(count * PAGE)
    if value is None:
        memory.copy_(torch.randint(0, 256, (count * PAGE,), dtype=torch.uint8))
    else:
        memory.fill_(value)
    return memory


def read(file: SpillFile, page: int, count: int) -> Tensor:
    memory = pages(count, 0)
    file.read(page * PAGE, memory).result(TIMEOUT_S)
    return memory


class Once:
    """`os.pwritev` that raises at its first `times` calls."""

    def __init__(self, code: int, times: int = 1) -> None:
        self.calls = 0
        self._code, self._times = code, times
        self._lock = threading.Lock()

    def __call__(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            self.calls += 1
            fails = self.calls <= self._times
        if fails:
            raise OSError(self._code, os.strerror(self._code))
        return os.pwritev(fd, views, offset)


def one_page_at_a_time(fd: int, views: Sequence[memoryview], offset: int) -> int:
    return os.pwritev(fd, [views[0][:PAGE]], offset)


def odd_lengths(fd: int, views: Sequence[memoryview], offset: int) -> int:
    """An interrupted write: the rest is no longer aligned."""
    return os.pwritev(fd, [bytes(views[0][:1000])], offset)


@settings(max_examples=20, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    pieces=st.lists(st.tuples(st.integers(0, PAGES - 8), st.integers(1, 8)), max_size=12),
    pwritev=st.sampled_from([os.pwritev, one_page_at_a_time]),
)
def test_what_is_read_was_written_last(
    pieces: list[tuple[int, int]], pwritev: Pwritev, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = torch.zeros(PAGES * PAGE, dtype=torch.uint8)
    folder = tmp_path_factory.getbasetemp()
    with (
        closing(DiskReader()) as reader,
        closing(SpillFile(folder, PAGES * PAGE, reader, pwritev=pwritev)) as file,
    ):
        for page, count in pieces:
            source = pages(count)
            file.write(page * PAGE, source).result(TIMEOUT_S)
            expected[page * PAGE : (page + count) * PAGE] = source
        assert torch.equal(read(file, 0, PAGES), expected)
        assert file.written == sum(count for _, count in pieces) * PAGE


def test_pieces_of_any_alignment_are_read(tmp_path: Path, reader: DiskReader) -> None:
    source = pages(PAGES)
    with closing(SpillFile(tmp_path, PAGES * PAGE, reader)) as file:
        file.write(0, source).result(TIMEOUT_S)
        for offset, nbytes in ((1, 10), (PAGE - 1, PAGE + 2), (5 * PAGE, 100), (777, 50_000)):
            found = torch.empty(nbytes, dtype=torch.uint8)
            file.read(offset, found).result(TIMEOUT_S)
            assert torch.equal(found, source[offset : offset + nbytes])


def test_writes_are_noted(tmp_path: Path, reader: DiskReader) -> None:
    timeline = Timeline()
    noted = Instrumentation(timeline)
    with closing(SpillFile(tmp_path, 4 * PAGE, reader, instrumentation=noted)) as file:
        file.write(0, pages(3)).result(TIMEOUT_S)
    assert [(x.lane, x.nbytes) for x in timeline.intervals] == [("host to disk", 3 * PAGE)]


@pytest.mark.parametrize("failures", [1, 2])
def test_a_file_system_that_refuses_direct_writes(
    tmp_path: Path, reader: DiskReader, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when both threads are refused at once."""
    asked = list[bool]()
    monkeypatch.setattr(
        "qoff.memory.io.spill.set_direct", lambda _, direct: asked.append(direct) or True
    )
    together = threading.Barrier(failures)

    def refuse(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if not refuse_calls:
            return os.pwritev(fd, views, offset)
        refuse_calls.pop()
        together.wait(TIMEOUT_S)
        raise OSError(errno.EINVAL, "Invalid argument")

    refuse_calls = [None] * failures
    sources = [pages(2) for _ in range(failures)]
    with closing(SpillFile(tmp_path, PAGES * PAGE, reader, pwritev=refuse)) as file:
        writes = [file.write(2 * i * PAGE, source) for i, source in enumerate(sources)]
        for write in writes:
            write.result(TIMEOUT_S)
        for i, source in enumerate(sources):
            assert torch.equal(read(file, 2 * i, 2), source)
    assert asked == [True] + [False] * failures


def test_the_rest_of_an_interrupted_write_need_not_be_aligned(
    tmp_path: Path, reader: DiskReader
) -> None:
    source = pages(2)
    with closing(SpillFile(tmp_path, 2 * PAGE, reader, pwritev=odd_lengths)) as file:
        file.write(0, source).result(TIMEOUT_S)
        assert torch.equal(read(file, 0, 2), source)


def test_einval_of_a_file_that_is_not_direct_is_an_error(
    tmp_path: Path, reader: DiskReader
) -> None:
    broken = Once(errno.EINVAL, times=2)
    with (
        closing(SpillFile(tmp_path, PAGE, reader, pwritev=broken)) as file,
        pytest.raises(DiskWriteError, match="Invalid argument"),
    ):
        file.write(0, pages(1)).result(TIMEOUT_S)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT])
def test_no_room_is_a_budget_error_with_bytes(
    tmp_path: Path, reader: DiskReader, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        BudgetError, match=r"needs 1,048,576 bytes, and .* has [\d,]+ bytes free"
    ) as refusal:
        SpillFile(tmp_path, 1 << 20, reader)
    assert str(tmp_path) in str(refusal.value)
    assert os.strerror(code) in str(refusal.value)
    assert descriptors() == before


def test_more_than_the_disk_has_is_refused(tmp_path: Path, reader: DiskReader) -> None:
    with pytest.raises(BudgetError, match="bytes free"):
        SpillFile(tmp_path, 1 << 55, reader)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_write_that_fails_is_an_error_of_that_write_alone(
    tmp_path: Path, reader: DiskReader, code: int
) -> None:
    with closing(SpillFile(tmp_path, 4 * PAGE, reader, pwritev=Once(code))) as file:
        message = rf"{re.escape(str(tmp_path))}: writing 4,096 bytes.*{os.strerror(code)}"
        with pytest.raises(DiskWriteError, match=message):
            file.write(0, pages(1)).result(TIMEOUT_S)
        assert file.written == 0
        file.write(0, pages(1, 3)).result(TIMEOUT_S)
        assert torch.equal(read(file, 0, 1), pages(1, 3))


def test_a_write_that_makes_no_progress_is_an_error(tmp_path: Path, reader: DiskReader) -> None:
    with (
        closing(SpillFile(tmp_path, PAGE, reader, pwritev=lambda *_: 0)) as file,
        pytest.raises(DiskWriteError, match="takes no more bytes"),
    ):
        file.write(0, pages(1)).result(TIMEOUT_S)


@pytest.mark.parametrize("death", [SystemExit(1), KeyboardInterrupt()])
def test_the_death_of_a_writing_thread_fails_all_writes(
    tmp_path: Path, reader: DiskReader, death: BaseException
) -> None:
    def die(fd: int, views: Sequence[memoryview], offset: int) -> int:
        raise death

    with closing(SpillFile(tmp_path, 8 * PAGE, reader, pwritev=die)) as file:
        for write in [file.write(i * PAGE, pages(1)) for i in range(8)]:
            with pytest.raises(DiskWriteError, match="died"):
                write.result(TIMEOUT_S)
        with pytest.raises(DiskWriteError, match="died"):
            file.write(0, pages(1)).result(TIMEOUT_S)


def test_a_short_read_is_an_error(tmp_path: Path, reader: DiskReader) -> None:
    with (
        closing(SpillFile(tmp_path, 4 * PAGE, reader)) as file,
        pytest.raises(DiskReadError, match="short read"),
    ):
        read(file, 3, 2)


def test_a_read_error_is_an_error(tmp_path: Path) -> None:
    def broken(fd: int, views: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with (
        closing(DiskReader(preadv=broken)) as reader,
        closing(SpillFile(tmp_path, 4 * PAGE, reader)) as file,
        pytest.raises(DiskReadError, match="Input/output error"),
    ):
        read(file, 0, 1)


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, reader: DiskReader) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskWriteError, match="cannot create a spill file"):
        SpillFile(tmp_path / "file" / "folder", PAGE, reader)


@pytest.mark.parametrize("nameless", [True, False])
def test_the_file_has_no_name(
    tmp_path: Path, reader: DiskReader, nameless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not nameless:
        monkeypatch.setattr(os, "open", refuse_tmpfile(os.open))
    with closing(SpillFile(tmp_path, 4 * PAGE, reader)) as file:
        source = pages(4)
        file.write(0, source).result(TIMEOUT_S)
        assert torch.equal(read(file, 0, 4), source)
        assert list(tmp_path.iterdir()) == []


def refuse_tmpfile(real: Callable[..., int]) -> Callable[..., int]:
    def refuse(path: str, flags: int, *rest: int, **options: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *rest, **options)

    return refuse


def test_close_gives_descriptors_and_space_back_and_closes_again(
    tmp_path: Path, reader: DiskReader
) -> None:
    before = descriptors()
    file = SpillFile(tmp_path, PAGES * PAGE, reader)
    file.write(0, pages(1)).result(TIMEOUT_S)
    read(file, 0, 1)
    file.close()
    file.close()
    assert descriptors() == before  # the reader's too: it would keep the space
    with pytest.raises(DiskReadError, match="is closed"):
        file.read(0, pages(1, 0))
    with pytest.raises(DiskWriteError, match="closed"):
        file.write(0, pages(1)).result(TIMEOUT_S)


def test_the_next_file_of_a_reader_is_another_one(tmp_path: Path, reader: DiskReader) -> None:
    """The system uses the number of a closed descriptor again at once."""
    for value in (1, 2):
        with closing(SpillFile(tmp_path, PAGE, reader)) as file:
            file.write(0, pages(1, value)).result(TIMEOUT_S)
            assert torch.equal(read(file, 0, 1), pages(1, value))


def test_close_waits_for_reads_and_fails_queued_writes(tmp_path: Path) -> None:
    gate = threading.Event()

    def held(fd: int, views: Sequence[memoryview], offset: int) -> int:
        gate.wait(TIMEOUT_S)
        return os.preadv(fd, views, offset)

    def held_write(fd: int, views: Sequence[memoryview], offset: int) -> int:
        gate.wait(TIMEOUT_S)
        return os.pwritev(fd, views, offset)

    with closing(DiskReader(preadv=held)) as reader:
        file = SpillFile(tmp_path, 8 * PAGE, reader, pwritev=held_write)
        memory = pages(1, 9)
        request = file.read(0, memory)
        writes = [file.write(i * PAGE, pages(1)) for i in range(1, 7)]  # not what is read
        closing_thread = threading.Thread(target=file.close)
        closing_thread.start()
        with pytest.raises(DiskWriteError, match="closed"):
            writes[-1].result(TIMEOUT_S)
        gate.set()
        closing_thread.join(TIMEOUT_S)
        assert not closing_thread.is_alive()
        assert request.done()
        assert torch.equal(memory, pages(1, 0))
        assert all(write.done() for write in writes)


SPILL = """
import sys, time
from pathlib import Path
from qoff.memory.io.disk import DiskReader
from qoff.memory.io.spill import SpillFile
file = SpillFile(Path(sys.argv[1]), 64 << 20, DiskReader())
print("ready", flush=True)
time.sleep(300)
"""


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    """64 MiB of a file system of its own size: a file without a name and a process is gone."""
    folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    folder = folder / f"qoff-spill-{os.getpid()}"
    folder.mkdir()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", SPILL, str(folder)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (held,) = (link for link in open_files(process.pid) if link.startswith(str(folder)))
        assert held.endswith("(deleted)")
        process.send_signal(signal.SIGKILL)
        process.wait(TIMEOUT_S)
        process.stdout.close()
        deadline = time.monotonic() + TIMEOUT_S
        while Path(f"/proc/{process.pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert list(folder.iterdir()) == []
        everyone = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
        assert not [x for pid in everyone for x in open_files(pid) if x.startswith(str(folder))]
    finally:
        folder.rmdir()


def open_files(pid: int) -> list[str]:
    """What the descriptors of a process are open on, as far as one may see it."""
    found = []
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            found.append(os.readlink(link))  # noqa: PTH115 - a deleted file's name is no path
    except OSError:
        pass
    return found


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))

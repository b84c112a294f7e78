"""Damage and death: an error of our own in acquire(), no hang, nothing left behind."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from qoff.checkpoint import Checkpoint
from qoff.errors import ChecksumError, DiskReadError
from qoff.memory import (
    HEAD,
    DiskReader,
    Residency,
    ThreadTransfers,
    Unit,
    WeightStore,
    plan_residency,
    residency_of,
)
from qoff.memory.io.direct import DirectFile
from qoff.memory.io.transfers import FileDigest
from qoff.memory.plan import EMBEDDING, Image
from tests.instruments import threads_beside
from tests.memory.checkpoints import Truth, all_names, write_checkpoint

LAYERS = 4
UNITS: list[Unit] = [*range(LAYERS), HEAD]


@pytest.fixture(scope="module", params=["rows16", "split32"])
def pristine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    path = tmp_path_factory.mktemp("ck") / "model"
    return write_checkpoint(path, LAYERS, request.param)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No thread and no descriptor survives a test."""
    gc.collect()  # models that other tests dropped are closed here, not meanwhile
    before = len(list(Path("/proc/self/fd").iterdir()))
    threads = set(threading.enumerate())  # other tests' models may be open
    yield
    assert threads_beside(threads) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == before


class Faulty:
    """Reads that fail in one file while `broken`."""

    def __init__(self, name: str, fault: BaseException) -> None:
        self.broken = True
        self._name = name
        self._fault = fault

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        if self.broken and Path(f"/proc/self/fd/{fd}").resolve().name == self._name:
            raise self._fault
        return os.preadv(fd, views, offset)


def consume(store: WeightStore, units: Sequence[Unit]) -> None:
    for unit in units:
        with store.use(unit):
            pass


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def test_a_file_truncated_after_opening_is_a_disk_read_error(checkpoint: Checkpoint) -> None:
    path = checkpoint.layers[1].path
    os.truncate(path, checkpoint.layers[1].nbytes - 5000)
    with (
        WeightStore(checkpoint, residency_of(checkpoint, [])) as store,
        pytest.raises(DiskReadError, match=f"{path.name}: short read"),
    ):
        store.acquire(1)


def test_a_file_removed_after_opening_is_a_disk_read_error(checkpoint: Checkpoint) -> None:
    checkpoint.layers[0].path.unlink()
    with pytest.raises(DiskReadError, match="00000"):
        WeightStore(checkpoint, plan_residency(checkpoint, None))


@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("kept", ["all", "first", "last"])
def test_a_flipped_bit_in_a_file_with_resident_weights_is_found_before_it_is_served(
    checkpoint: Checkpoint, kept: str, at: int
) -> None:
    file = checkpoint.layers[1]
    flip(file.path, file.data_start if at == 0 else file.nbytes - 1)
    names = list(file.weights)
    resident = {"all": all_names(checkpoint), "first": names[:1], "last": names[-1:]}[kept]
    with (
        pytest.raises(ChecksumError, match=file.path.name),
        WeightStore(checkpoint, residency_of(checkpoint, resident)) as store,
    ):
        store.acquire(1)


class Hashed(FileDigest):
    """Remembers which files were compared with their checksums as they passed."""

    files: ClassVar[list[Path]] = []

    def __init__(self, reader: DiskReader, image: Image) -> None:
        super().__init__(reader, image)
        self.files.append(image.file.path)


@pytest.fixture(autouse=True)
def hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qoff.memory.io.transfers.FileDigest", Hashed)


def test_a_file_is_hashed_once(checkpoint: Checkpoint) -> None:
    Hashed.files.clear()
    with WeightStore(checkpoint, residency_of(checkpoint, [])) as store:
        consume(store, UNITS * 3)
    files = checkpoint.files
    assert sorted(Hashed.files) == sorted(file.path for file in files)


@pytest.mark.parametrize("death", [SystemExit(1), KeyboardInterrupt(), MemoryError()])
def test_the_death_of_reading_threads_is_an_error_and_not_a_hang(
    checkpoint: Checkpoint, death: BaseException
) -> None:
    faulty = Faulty(checkpoint.layers[3].path.name, death)
    transfers = ThreadTransfers(DiskReader(preadv=faulty.preadv))
    with WeightStore(checkpoint, residency_of(checkpoint, []), transfers=transfers) as store:
        with pytest.raises((DiskReadError, MemoryError)):
            consume(store, UNITS)
        if not isinstance(death, Exception):  # an ordinary error does not kill a thread
            for unit in UNITS:
                with pytest.raises(DiskReadError, match="died"):
                    consume(store, [unit])


def test_a_closed_store_serves_nothing_and_closes_again(checkpoint: Checkpoint) -> None:
    for plan in (residency_of(checkpoint, []), plan_residency(checkpoint, None)):
        store = WeightStore(checkpoint, plan)
        store.acquire(0)
        store.close()
        store.close()
        with pytest.raises(ValueError, match="closed"):
            store.acquire(0)
        store.release(0)  # a pass that the closing interrupted still gives back what it has


def test_an_arena_that_cannot_be_had_leaves_nothing_behind(checkpoint: Checkpoint) -> None:
    plan = plan_residency(checkpoint, None)
    impossible = Residency(plan.resident, 0, 0, 1 << 60, 0, 0, plan.packing)
    with pytest.raises(MemoryError, match="refused"):
        WeightStore(checkpoint, impossible)


STREAMED = {"whole layers": {}, "tiles": {"tile_bytes": 4096}}


@pytest.mark.parametrize("how", STREAMED)
def test_a_file_that_changes_while_it_streams_ends_the_run(
    checkpoint: Checkpoint, how: str
) -> None:
    file = checkpoint.layers[1]
    plan = residency_of(checkpoint, [], packing="rows16", **STREAMED[how])  # type: ignore[arg-type]
    with WeightStore(checkpoint, plan) as store:
        units = list(store._streamed)
        consume(store, units * 2)
        flip(file.path, file.nbytes - 1)
        with pytest.raises(ChecksumError, match=file.path.name):
            consume(store, units * 2)  # the first may have been read ahead


def test_a_file_that_is_touched_but_is_the_same_streams_on(checkpoint: Checkpoint) -> None:
    file, truth = checkpoint.layers[1], Truth(checkpoint, "rows16")
    with WeightStore(checkpoint, residency_of(checkpoint, [])) as store:
        consume(store, UNITS)
        hashed = len(Hashed.files)
        file.path.touch()
        consume(store, UNITS * 2)
        file.path.unlink()  # the file is still open
        consume(store, UNITS * 2)
        with store.use(1) as weights:
            assert truth.wrong(1, weights) == []
        assert 1 <= len(Hashed.files) - hashed <= 2  # not once a pass


def test_jobs_do_not_read_a_file_that_is_to_be_compared(checkpoint: Checkpoint) -> None:
    """Without Python nothing is compared, so a round over a file that was touched has Python."""

    def sweeps() -> bool:
        sweep = store.sweep()
        if sweep is None:
            return False
        store._ring.swept(done=False)
        return True

    packing = checkpoint.config["quantization_config"]["packing"]
    with WeightStore(checkpoint, residency_of(checkpoint, [], packing=packing)) as store:
        consume(store, UNITS)
        assert sweeps()
        consume(store, UNITS)
        checkpoint.layers[2].path.touch()  # which is in no slot
        assert not sweeps()
        consume(store, UNITS)
        assert sweeps()


def test_rows_of_a_file_that_changes_are_not_served(checkpoint: Checkpoint) -> None:
    outer = checkpoint.outer
    with WeightStore(checkpoint, residency_of(checkpoint, [])) as store:
        before = store.gather_rows(EMBEDDING, torch.tensor([3]))
        assert torch.equal(store.gather_rows(EMBEDDING, torch.tensor([3])), before)
        flip(outer.path, outer.nbytes - 1)
        with pytest.raises(ChecksumError, match=outer.path.name):
            store.gather_rows(EMBEDDING, torch.tensor([3]))


def test_what_cannot_be_closed_is_told_once_and_the_rest_is(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads, files and memory are given back whatever fails first."""
    store = WeightStore(checkpoint, residency_of(checkpoint, []))
    consume(store, UNITS)
    with monkeypatch.context() as patched:
        closed = DirectFile.close

        def close(self: DirectFile) -> None:
            closed(self)
            if self.path == checkpoint.layers[0].path:
                raise DiskReadError(f"{self.path}: cannot be closed: Input/output error")

        patched.setattr(DirectFile, "close", close)
        with pytest.raises(DiskReadError, match=r"00000.*cannot be closed"):
            store.close()
    store.close()
    assert store.arena._memory is None
    assert store._views == {}

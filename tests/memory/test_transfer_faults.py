"""What goes wrong in transfers of every kind: reads, bits, use of what is not there, death."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qoff.checkpoint import Checkpoint
from qoff.errors import ChecksumError, DiskReadError
from qoff.kernels.layout.qtensor import QTensor
from qoff.memory import (
    DiskReader,
    WeightStore,
)
from qoff.memory.io.transfers import FileDigest
from tests.instruments import POISON
from tests.memory.checkpoints import (
    Truth,
    all_names,
)
from tests.memory.kinds import (
    PACKING,
    UNITS,
    make,
    opened,
    plan_for,
)

pytestmark = pytest.mark.usefixtures("no_thread_left")


def consume(store: WeightStore, passes: int = 1) -> None:
    for unit in UNITS * passes:
        with store.use(unit):
            pass


def test_a_read_error_is_raised_where_the_unit_is_acquired(
    kind: str, checkpoint: Checkpoint
) -> None:
    truth = Truth(checkpoint, PACKING)
    name, broken = checkpoint.layers[2].path.name, True

    def faulty(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if broken and Path(f"/proc/self/fd/{fd}").resolve().name == name:
            raise OSError(5, "Input/output error")
        return os.preadv(fd, views, offset)

    plan = plan_for(kind, checkpoint)
    transfers = make(kind, DiskReader(preadv=faulty))
    with WeightStore(checkpoint, plan, transfers=transfers) as store:
        for _ in range(2):
            for unit in UNITS:
                if unit == 2:
                    with pytest.raises(DiskReadError, match=rf"{name}.*Input/output error"):
                        store.acquire(unit)
                else:
                    with store.use(unit) as weights:
                        assert truth.wrong(unit, weights) == []
        with pytest.raises(DiskReadError):
            store.acquire(2)
        broken = False  # the next call tries again
        with store.use(2) as weights:
            assert truth.wrong(2, weights) == []


def acquire_twice(store: WeightStore) -> None:
    with suppress(ChecksumError):
        store.acquire(1)
    store.acquire(1)  # what is damaged stays so


@pytest.mark.parametrize("where", ["header", "data", "last"])
@pytest.mark.parametrize("place", ["streamed", "resident", "host", "pieces"])
def test_a_flipped_bit_is_found(kind: str, where: str, place: str, checkpoint: Checkpoint) -> None:
    file = checkpoint.layers[1]
    at = {"header": 9, "data": file.data_start + 100, "last": file.nbytes - 1}[where]
    content = bytearray(file.path.read_bytes())
    content[at] ^= 0x10
    file.path.write_bytes(content)
    every = all_names(checkpoint)
    resident = {"streamed": [], "host": [], "resident": every, "pieces": list(file.weights)}[place]
    if place == "pieces":
        resident = [n for n in every if n != "model.norm.weight"]
    plan = plan_for(kind, checkpoint, resident, sources=1 << 20 if place == "host" else 0)
    refused = pytest.raises(ChecksumError, match=file.path.name)
    with refused, opened(kind, checkpoint, plan) as store:
        acquire_twice(store)
    with opened(kind, checkpoint, plan, verify=False) as store:
        store.acquire(1)


@pytest.mark.parametrize("beyond", [0, 7])
def test_the_check_ends_with_the_last_byte(beyond: int, checkpoint: Checkpoint) -> None:
    """Whether or not the image has bytes behind it."""
    file = checkpoint.layers[1]
    data = torch.tensor(bytearray(file.path.read_bytes()[file.data_start :]), dtype=torch.uint8)
    image: Any = SimpleNamespace(file=file, data_at=0)
    with closing(DiskReader()) as reader:
        for damage in (0, 1):
            data[-1] += damage
            digest, half = FileDigest(reader, image), len(data) // 2
            digest.update(0, data[:half])
            refused = pytest.raises(ChecksumError) if damage else nullcontext()
            with refused:
                digest.update(half, torch.cat((data[half:], data.new_zeros(beyond))))


def test_use_after_release_shows_as_nan(kind: str, pristine: Checkpoint) -> None:
    gate = threading.Event()
    gate.set()

    def gated(fd: int, views: Sequence[memoryview], offset: int) -> int:
        gate.wait(20)
        return os.preadv(fd, views, offset)

    plan = plan_for(kind, pristine)
    transfers = make(kind, DiskReader(preadv=gated))
    with WeightStore(pristine, plan, transfers=transfers, instrumentation=POISON) as store:
        store.acquire(1)
        matrix = store.acquire(0)["mlp.down_proj"]
        assert isinstance(matrix, QTensor)
        assert not matrix.dequantize().isnan().any()
        gate.clear()
        store.release(0)
        assert matrix.dequantize().isnan().all()
        gate.set()


def test_close_while_units_are_under_way(kind: str, pristine: Checkpoint) -> None:
    def slow(fd: int, views: Sequence[memoryview], offset: int) -> int:
        time.sleep(0.02)
        return os.preadv(fd, views, offset)

    plan = plan_for(kind, pristine, sources=30_000)
    transfers = make(kind, DiskReader(threads=1, chunk=4096, preadv=slow))
    store = WeightStore(pristine, plan, transfers=transfers, verify=False)
    outcome: list[object] = []

    def consume() -> None:
        try:
            for unit in UNITS:
                with store.use(unit):
                    pass
        except (DiskReadError, ValueError) as error:
            outcome.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    time.sleep(0.03)
    start = time.perf_counter()
    store.close()
    thread.join(20)
    assert time.perf_counter() - start < 5
    assert len(outcome) == 1


@pytest.mark.parametrize("death", [SystemExit(1), KeyboardInterrupt()])
def test_the_death_of_a_reading_thread_is_an_error(
    kind: str, pristine: Checkpoint, death: BaseException
) -> None:
    name = pristine.layers[3].path.name

    def deadly(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if Path(f"/proc/self/fd/{fd}").resolve().name == name:
            raise death
        return os.preadv(fd, views, offset)

    transfers = make(kind, DiskReader(preadv=deadly))
    plan = plan_for(kind, pristine)
    with (
        WeightStore(pristine, plan, transfers=transfers) as store,
        pytest.raises(DiskReadError),
    ):
        consume(store)

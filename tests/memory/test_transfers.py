"""What every kind of transfers must do: threads, a simulated copy stream, CUDA."""

from __future__ import annotations

import errno
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError
from qoff.kernels.layout.qtensor import QTensor
from qoff.memory import (
    HEAD,
    Timeline,
    Unit,
    WeightStore,
    plan_residency,
    residency_of,
)
from qoff.memory.instrumentation import Instrumentation
from qoff.memory.io.cuda_transfers import CudaTransfers, clip
from qoff.memory.plan import EMBEDDING, FileRange, Image, streamed_images
from tests.instruments import POISON
from tests.memory.checkpoints import (
    Truth,
    all_names,
    check_pass,
    file_bytes,
    same_bits,
    write_checkpoint,
)
from tests.memory.kinds import (
    LAYERS,
    PACKING,
    STAGING,
    UNITS,
    SimulatedStream,
    make,
    opened,
    plan_for,
)
from tests.programs import printed

pytestmark = pytest.mark.usefixtures("no_thread_left")


@pytest.fixture(scope="module")
def six_bits(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("six") / "model"
    return write_checkpoint(path, LAYERS, PACKING, tied=False, odd=True)


@settings(max_examples=20)
@given(data=st.data())
def test_every_plan_serves_the_same_bits(
    data: st.DataObject, kind: str, pristine: Checkpoint
) -> None:
    truth = Truth(pristine, PACKING)
    resident = data.draw(st.sets(st.sampled_from(all_names(pristine)), max_size=12))
    slots = data.draw(st.sampled_from([2, 3]))
    tile_bytes = data.draw(st.none() | st.integers(1, 20_000))
    sources = data.draw(st.integers(0, 200_000))
    plan = plan_for(kind, pristine, sorted(resident), slots, tile_bytes, sources)
    with opened(kind, pristine, plan) as store:
        for _ in range(2):
            check_pass(store, truth)
        ids = torch.tensor([99, 0, 17, 17])
        rows = store.gather_rows(EMBEDDING, ids).cpu()
        assert same_bits(rows, truth.embedding.dequantize()[ids])
        assert store.stats.arena_peak == plan.device_bytes
        assert store.host_arena.used == plan.host_bytes


@settings(max_examples=15)
@given(data=st.data(), acquired=st.lists(st.sampled_from(UNITS), max_size=12))
def test_any_order_serves_the_same_bits(
    data: st.DataObject, acquired: list[Unit], kind: str, pristine: Checkpoint
) -> None:
    """Jumps abandon transfers that are under way, in slots that are then used again."""
    truth = Truth(pristine, PACKING)
    plan = plan_for(kind, pristine, sources=data.draw(st.integers(0, 150_000)))
    with opened(kind, pristine, plan) as store:
        for unit in acquired:
            with store.use(unit) as weights:
                assert truth.wrong(unit, weights) == []


@pytest.mark.parametrize("tile_bytes", [None, 5000])
@pytest.mark.parametrize("sources", [0, 300_000])
def test_codes_of_six_bits_arrive_as_bytes(
    tile_bytes: int | None, sources: int, kind: str, six_bits: Checkpoint
) -> None:
    truth = Truth(six_bits, PACKING)
    for resident in ([], all_names(six_bits)):
        plan = plan_for(kind, six_bits, resident, 2, tile_bytes, sources)
        with opened(kind, six_bits, plan) as store:
            for _ in range(2):
                check_pass(store, truth)
            ids = torch.tensor([99, 0, 17, 17])
            rows = store.gather_rows(EMBEDDING, ids).cpu()
            assert same_bits(rows, truth.embedding.dequantize()[ids])
            assert store.stats.arena_peak == plan.device_bytes


def test_resident_weights_larger_than_a_staging_buffer(kind: str, pristine: Checkpoint) -> None:
    names = [n for n in all_names(pristine) if n != "model.norm.weight"]
    plan = plan_for(kind, pristine, names)
    assert plan.slot_bytes < plan.resident_bytes // LAYERS
    with opened(kind, pristine, plan) as store:
        check_pass(store, Truth(pristine, PACKING))


def test_everything_resident(kind: str, pristine: Checkpoint) -> None:
    plan = plan_residency(pristine, None, packing=PACKING, host_staging=STAGING[kind])
    with opened(kind, pristine, plan) as store:
        check_pass(store, Truth(pristine, PACKING))


def test_timelines_have_every_link(kind: str, pristine: Checkpoint) -> None:
    plan = plan_for(kind, pristine, sources=60_000)
    timeline = Timeline()
    with opened(kind, pristine, plan, Instrumentation(timeline)) as store:
        for unit in UNITS * 2:
            with store.use(unit):
                pass
        time.sleep(0.05)
    assert {x.lane for x in timeline.intervals} == {
        "disk to device",
        "disk to host",
        "host to device",
    }
    assert all(x.start <= x.stop and x.nbytes > 0 for x in timeline.intervals)


def test_a_streamed_unit_is_one_copy(pristine: Checkpoint) -> None:
    plan = plan_for("simulated", pristine, sources=60_000)
    transfers = make("simulated")
    with WeightStore(pristine, plan, transfers=transfers) as store:
        assert isinstance(transfers, CudaTransfers)
        stream = transfers.stream
        assert isinstance(stream, SimulatedStream)
        assert len(stream.pinned) == 1  # one allocation: sources and buffers
        for unit in UNITS * 3:
            with store.use(unit):
                pass
        for unit in UNITS[:2]:
            store.acquire(unit)
        assert stream.copies == 3 * len(UNITS) + 2
    assert stream.pinned == []


class Unpinned(SimulatedStream):
    """No memory can be registered; `driver` says whether the driver pins some."""

    driver = False

    def pin(self, memory: torch.Tensor) -> None:
        raise OSError(errno.ENOMEM, "cudaHostRegister gave error 801")

    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        if not self.driver:
            raise OSError(errno.ENOMEM, "cuMemHostAlloc gave error 2")
        return self.allocate(nbytes)


@pytest.mark.parametrize("driver", [True, False])
def test_weights_stream_from_memory_that_is_not_pinned(
    driver: bool, pristine: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unpinned, "driver", driver)
    warns = pytest.warns(UserWarning, match=r"gave error 801; cuMem.*RLIMIT_MEMLOCK")
    transfers = CudaTransfers("cpu", stream=Unpinned)
    plan = plan_for("simulated", pristine, sources=1 << 20)
    with nullcontext() if driver else warns:
        store = WeightStore(pristine, plan, transfers=transfers, instrumentation=POISON)
    with store:
        assert transfers.stream.pageable is not driver
        for _ in range(2):
            check_pass(store, Truth(pristine, PACKING))
        assert store.stats.bytes_copied > 0


def test_a_store_made_in_inference_mode_streams_outside_of_it(
    kind: str, pristine: Checkpoint
) -> None:
    truth = Truth(pristine, PACKING)
    with torch.inference_mode():
        store = opened(kind, pristine, plan_for(kind, pristine, sources=100_000))
        check_pass(store, truth)
    with store:
        check_pass(store, truth)


def test_the_next_unit_is_read_while_one_is_copied(pristine: Checkpoint) -> None:
    """With a copy that does not end, the read of the unit after it still completes."""
    hold = threading.Event()

    class Held(SimulatedStream):
        def copy(self, source, memory, after, timed):  # type: ignore[no-untyped-def]
            class Gate:
                def synchronize(self) -> None:
                    assert hold.wait(20)

            return super().copy(source, memory, Gate(), timed)

    plan = plan_for("simulated", pristine)
    images = streamed_images(pristine, plan)
    transfers = CudaTransfers("cpu", stream=Held)
    with WeightStore(pristine, plan, transfers=transfers, verify=False) as store:
        wanted = file_bytes(images[0]) + file_bytes(images[1])
        deadline = time.perf_counter() + 10
        while store.stats.bytes_read < wanted and time.perf_counter() < deadline:
            time.sleep(0.005)
        assert store.stats.bytes_read == wanted
        hold.set()


def test_plans_that_do_not_fit_the_transfers_are_refused(tmp_path: Path) -> None:
    for packing, match in (("rows16", "repacked"), ("split32", "0 staging buffers")):
        checkpoint = write_checkpoint(tmp_path / packing, 1, packing)
        plan = residency_of(checkpoint, [], packing="split32")
        transfers = make("simulated")
        with pytest.raises(ArgumentError, match=match):
            WeightStore(checkpoint, plan, transfers=transfers)
    with pytest.raises(ArgumentError, match="too few"):
        CudaTransfers(host_staging=1)


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    step=st.integers(1, 60),
)
def test_pieces_cover_every_range_once(sizes: list[int], step: int) -> None:
    ranges, at = [], 0
    for i, size in enumerate(sizes):
        ranges.append(FileRange(1000 * i, size, at))
        at += size + 3
    covered = [
        (part.at + start, part.offset + i)
        for start in range(0, at, step)
        for part in clip(ranges, start, start + step)
        for i in range(part.nbytes)
    ]
    assert len({offset for _, offset in covered}) == len(covered) == sum(sizes)


@pytest.mark.gpu
def test_slots_are_not_overwritten_while_the_gpu_computes(pristine: Checkpoint) -> None:
    """The host runs ahead of long computations that read the slots."""
    truth = Truth(pristine, PACKING)
    plan = plan_for("cuda", pristine, sources=1 << 20)
    with opened("cuda", pristine, plan) as store:
        found: list[tuple[Unit, torch.Tensor]] = []
        for unit in UNITS * 6:
            with store.use(unit) as weights:
                torch.cuda._sleep(20_000_000)
                name = "lm_head" if unit == HEAD else "mlp.down_proj"
                matrix = weights[name]
                assert isinstance(matrix, QTensor)
                found.append((unit, matrix.codes.clone()))
        for unit, codes in found:
            expected = truth.units[unit]["lm_head" if unit == HEAD else "mlp.down_proj"]
            assert isinstance(expected, QTensor)
            assert torch.equal(codes.cpu(), expected.codes)


def test_cuda_is_not_initialized_by_what_does_not_use_it(pristine: Checkpoint) -> None:
    code = (
        "import sys, torch; from qoff.memory import *; from qoff.checkpoint import Checkpoint;"
        "c = Checkpoint.open(sys.argv[1]);"
        "WeightStore(c, plan_residency(c, None)).close();"
        "assert not torch.cuda.is_initialized();"
        "assert 'qoff.memory.io.cuda_transfers' not in sys.modules"
    )
    printed("-c", code, pristine.path)


def test_a_copy_that_was_given_up_does_not_hold_up_what_leaves_for_its_place() -> None:
    """Of memory that is not pinned, where copies wait for the threads that read."""

    class Unpinned(SimulatedStream):
        pageable = True

    transfers = CudaTransfers("cpu", stream=Unpinned)
    transfers._stream = stream = Unpinned(torch.device("cpu"))
    device, host = torch.ones(3, 64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    file = SimpleNamespace(path=Path("f"))
    image = cast(Image, SimpleNamespace(nbytes=64, label="x", file=file, data_at=None))
    transfers.save(device[0], host)
    busy = threading.Event()
    for _ in range(transfers.host_staging):
        transfers._stagers.submit(busy.wait)
    read = transfers.copy_unit(image, host, device[1], None)
    read.abandon()
    busy.set()
    read.settle()
    transfers.save(device[2], host)
    leaving = transfers._leaving
    assert leaving is not None
    for one in (stream, leaving):
        one.close()
    assert host.min() == 1
    transfers._stream = transfers._leaving = None
    transfers.close()

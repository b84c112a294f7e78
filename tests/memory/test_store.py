from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from os import preadv
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qoff.checkpoint import Checkpoint
from qoff.errors import DiskReadError, OpError
from qoff.kernels.layout.qtensor import QTensor
from qoff.memory import (
    HEAD,
    DiskReader,
    ThreadTransfers,
    Unit,
    WeightStore,
    plan_residency,
    residency_of,
)
from qoff.memory.turn import Turn
from tests.instruments import POISON
from tests.memory.checkpoints import Truth, all_names, same_bits, write_checkpoint
from tests.memory.kinds import racing_transfers

LAYERS = 4
UNITS: list[Unit] = [*range(LAYERS), HEAD]
KINDS = [("rows16", True), ("rows16", False), ("split32", True), ("split32", False)]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    packing, tied = request.param
    path = tmp_path_factory.mktemp("ck") / "model"
    return write_checkpoint(path, LAYERS, packing, tied)


@pytest.fixture(scope="module")
def truth(checkpoint: Checkpoint) -> dict[str, Truth]:
    return {packing: Truth(checkpoint, packing) for packing in ("rows16", "split32")}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp("ck") / "small", LAYERS)


@settings(max_examples=20)
@given(
    data=st.data(),
    slots=st.sampled_from([2, 3]),
    packing=st.sampled_from(["rows16", "split32"]),
)
def test_every_residency_serves_the_same_bits(
    data: st.DataObject,
    slots: int,
    packing: str,
    checkpoint: Checkpoint,
    truth: dict[str, Truth],
) -> None:
    names = all_names(checkpoint)
    resident = data.draw(st.sets(st.sampled_from(names)) | st.just(set(names)) | st.just(set()))
    plan = residency_of(checkpoint, resident, slots, packing=packing)
    with WeightStore(
        checkpoint,
        plan,
        transfers=racing_transfers(),
        instrumentation=POISON,
    ) as store:
        for unit in UNITS * 2:
            with store.use(unit) as weights:
                assert truth[packing].wrong(unit, weights) == []


@settings(max_examples=15)
@given(
    data=st.data(),
    slots=st.sampled_from([2, 3]),
    acquired=st.lists(st.sampled_from(UNITS), max_size=10),
)
def test_any_order_of_acquisition_serves_the_same_bits(
    data: st.DataObject,
    slots: int,
    acquired: list[Unit],
    checkpoint: Checkpoint,
    truth: dict[str, Truth],
) -> None:
    plan = residency_of(checkpoint, {"model.layers.1.mlp.down_proj"}, slots)
    with WeightStore(
        checkpoint, plan, transfers=racing_transfers(), instrumentation=POISON
    ) as store:
        held: list[Unit] = []
        for unit in acquired:
            if unit not in held and len(set(held)) == slots:
                store.release(held.pop(data.draw(st.integers(0, slots - 1)) % len(held)))
            if unit not in held and len(set(held)) == slots:
                continue  # what was released is held twice
            held.append(unit)
            assert truth["rows16"].wrong(unit, store.acquire(unit)) == []
            for other in held:
                again = store.acquire(other)
                assert truth["rows16"].wrong(other, again) == []
                store.release(other)
            if data.draw(st.booleans()):
                store.release(held.pop())


def test_slots_lie_before_what_stays(checkpoint: Checkpoint) -> None:
    plan = residency_of(checkpoint, {"model.layers.1.mlp.down_proj"}, slots=2)
    with WeightStore(checkpoint, plan) as store:
        assert store._resident
        places = [memory.storage_offset() for memory in store._slots]
    first = plan.staging_bytes  # for another packing
    assert places == [first, first + plan.slot_bytes]


def test_threads_that_share_a_store_all_get_the_right_bits(
    checkpoint: Checkpoint, truth: dict[str, Truth]
) -> None:
    plan = residency_of(checkpoint, set(), slots=3)
    wrong: list[object] = []

    def consume(seed: int) -> None:
        choose = random.Random(seed)
        try:
            for _ in range(25):
                unit = choose.choice(UNITS)
                with store.use(unit) as weights:
                    wrong.extend(truth["rows16"].wrong(unit, weights))
        except Exception as error:
            wrong.append(error)

    with WeightStore(
        checkpoint, plan, transfers=racing_transfers(), instrumentation=POISON
    ) as store:
        threads = [threading.Thread(target=consume, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert wrong == []


class Log:
    """Which files were read, in order; lets a test wait until a number of reads is done."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.files: list[str] = []

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        count = preadv(fd, views, offset)
        with self._changed:
            self.files.append(Path(f"/proc/self/fd/{fd}").resolve().name)
            self._changed.notify_all()
        return count

    def wait_for(self, reads: int) -> list[str]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.files) >= reads, timeout=20)
            return list(self.files)


@pytest.mark.parametrize("slots", [2, 3])
def test_a_released_slot_is_read_into_unasked_and_across_the_end_of_the_cycle(
    small: Checkpoint, slots: int
) -> None:
    log = Log()
    reader = DiskReader(threads=1, preadv=log.preadv)
    transfers = ThreadTransfers(reader)
    outer = [n for n in all_names(small) if not n.startswith("model.layers.")]
    plan = residency_of(small, outer, slots)
    files = [file.path.name for file in small.layers]
    with WeightStore(small, plan, transfers=transfers, verify=False) as store:
        whole = log.files.count(small.outer.path.name)
        per_unit = 2  # whole blocks, then the unaligned end of the file
        for step in range(3 * LAYERS):
            seen = log.wait_for(whole + per_unit * (step + slots))[whole:]
            expected = [files[i % LAYERS] for i in range(step + slots) for _ in range(per_unit)]
            assert seen == expected
            store.acquire(step % LAYERS)
            assert log.files[whole:] == expected, "read into a slot that is in use"
            store.release(step % LAYERS)


def test_following_the_order_reads_every_byte_once_a_cycle(small: Checkpoint) -> None:
    plan = residency_of(small, set())
    with WeightStore(small, plan, verify=False) as store:
        for unit in UNITS:
            with store.use(unit):
                pass
        before = store.stats.bytes_read
        for unit in UNITS * 2:
            with store.use(unit):
                pass
        for unit in UNITS[: plan.slots]:  # wait for what is read ahead
            store.acquire(unit)
        total = sum(f.nbytes - f.data_start for f in small.files)
        ahead = store.stats.bytes_read - before - 2 * total
        assert 0 <= ahead <= plan.slots * plan.slot_bytes


def test_nothing_is_read_when_all_is_resident(checkpoint: Checkpoint) -> None:
    with WeightStore(checkpoint, plan_residency(checkpoint, None)) as store:
        loaded = store.stats.bytes_read
        first = [store.acquire(unit) for unit in UNITS]
        again = [store.acquire(unit) for unit in UNITS]
        assert all(a is b for a, b in zip(first, again, strict=True))
        assert store.stats.bytes_read == loaded
        assert store.stats.wait_s == 0


def test_a_slot_gives_the_same_objects_every_time(small: Checkpoint) -> None:
    with WeightStore(small, residency_of(small, set())) as store:
        seen: dict[tuple[Unit, int], object] = {}
        for unit in UNITS * 6:
            with store.use(unit) as weights:
                matrix = weights["mlp.down_proj" if unit != HEAD else "lm_head"]
                assert isinstance(matrix, QTensor)
                key = (unit, matrix.codes.data_ptr())
                assert seen.setdefault(key, matrix) is matrix
        assert len(seen) <= 2 * len(UNITS)


def test_use_after_release_shows_as_nan(checkpoint: Checkpoint) -> None:
    gate = threading.Event()
    gate.set()

    def gated(fd: int, views: Sequence[memoryview], offset: int) -> int:
        gate.wait(20)
        return preadv(fd, views, offset)

    transfers = ThreadTransfers(DiskReader(preadv=gated))
    with WeightStore(
        checkpoint,
        residency_of(checkpoint, set()),
        transfers=transfers,
        instrumentation=POISON,
    ) as store:
        store.acquire(1)
        weights = store.acquire(0)
        matrix, norm = weights["mlp.down_proj"], weights["input_layernorm.weight"]
        assert isinstance(matrix, QTensor)
        assert isinstance(norm, torch.Tensor)
        assert not matrix.dequantize().isnan().any()
        gate.clear()  # what is read into the slot next does not arrive
        store.release(0)
        assert matrix.dequantize().isnan().all()
        assert norm.isnan().all()
        gate.set()


def test_more_units_than_slots_cannot_be_held(small: Checkpoint) -> None:
    with WeightStore(small, residency_of(small, set())) as store:
        store.acquire(0)
        store.acquire(2)
        with pytest.raises(RuntimeError, match="all 2 are held by units 0, 2"):
            store.acquire(3)
        store.release(2)
        store.acquire(3)


def test_what_was_not_acquired_cannot_be_released(small: Checkpoint) -> None:
    with WeightStore(small, residency_of(small, set())) as store:
        with pytest.raises(ValueError, match="not acquired"):
            store.release(0)
        with pytest.raises(ValueError, match="no unit 17"):
            store.acquire(17)
        with pytest.raises(ValueError, match="no unit 'tail'"):
            store.acquire("tail")


@given(ids=st.lists(st.integers(0, 99), max_size=40), resident=st.booleans())
def test_rows_are_the_same_from_memory_and_from_disk(
    ids: list[int], resident: bool, checkpoint: Checkpoint, truth: dict[str, Truth]
) -> None:
    names = all_names(checkpoint) if resident else []
    with WeightStore(checkpoint, residency_of(checkpoint, names), verify=False) as store:
        for name in (n for n in ("model.embed_tokens", "lm_head") if n in checkpoint.outer.weights):
            rows = store.gather_rows(name, torch.tensor(ids, dtype=torch.int64))
            known = truth["rows16"].units[HEAD]
            if name in known:
                assert same_bits(rows, known[name].dequantize()[ids])
            assert rows.shape == (len(ids), 64)
            assert rows.dtype == torch.float32


def test_an_untied_embedding_on_disk_gives_the_rows_of_a_resident_one(
    tmp_path: Path,
) -> None:
    for packing in ("rows16", "split32"):
        checkpoint = write_checkpoint(tmp_path / packing, 1, packing, tied=False)
        ids = torch.tensor([99, 0, 17, 17, 16, 98])
        with (
            WeightStore(checkpoint, residency_of(checkpoint, [])) as streaming,
            WeightStore(checkpoint, plan_residency(checkpoint, None)) as resident,
        ):
            rows = [s.gather_rows("model.embed_tokens", ids) for s in (streaming, resident)]
            assert same_bits(*rows)
            assert rows[0].unique(dim=0).shape[0] == 5


def test_rows_that_are_not_there_are_refused(small: Checkpoint) -> None:
    with WeightStore(small, residency_of(small, set())) as store:
        for ids in ([100], [-1], [0, 1000]):
            with pytest.raises(OpError, match="rows 0 to 99"):
                store.gather_rows("model.embed_tokens", torch.tensor(ids))


def go_through(
    store: WeightStore, first: Sequence[Unit], then: Callable[[], None] = lambda: None
) -> None:
    """A turn of these units, and of all."""
    with Turn(store) as turn:
        for unit in first:
            turn.acquire(unit)
        then()
        for unit in UNITS:
            turn.acquire(unit)


class Kept:
    """What is made of weights, as ops on a GPU keep it."""

    kept = False

    def keep(self) -> None:
        self.kept = True

    def forget(self) -> None:
        self.kept = False


@pytest.mark.parametrize("ends", [None, DiskReadError("broken"), KeyboardInterrupt()], ids=repr)
def test_nothing_made_of_weights_is_kept_longer_than_they_are_held(
    ends: BaseException | None, small: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch: Any = Kept()
    with WeightStore(small, residency_of(small, set())) as store:
        acquire, release = store.acquire, store.release

        def acquired(unit: Unit) -> Any:
            if unit == HEAD and isinstance(ends, DiskReadError):
                raise ends
            return acquire(unit)

        def released(unit: Unit) -> None:
            assert not scratch.kept
            release(unit)

        monkeypatch.setattr(store, "acquire", acquired)
        monkeypatch.setattr(store, "release", released)
        with (
            nullcontext() if ends is None else pytest.raises(type(ends)),
            Turn(store, scratch) as turn,
        ):
            for unit in UNITS:
                turn.acquire(unit)
                assert scratch.kept
            if ends is not None:  # amid the last one
                raise ends
        assert not scratch.kept
        assert not any(load.holders for load in store._ring._loads)


def interrupting(monkeypatch: pytest.MonkeyPatch, of: object, name: str, after: bool) -> None:
    """Have Ctrl-C come the next time that something is called, before it is done or after it."""
    work = getattr(of, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(of, name, work)
        if not after:
            signal.raise_signal(signal.SIGINT)
        found = work(*args, **kwargs)
        if after:
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(of, name, interrupted)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", ["read_unit", "recycle", "acquire", "release"])
def test_an_interrupt_loses_no_slot(
    name: str, after: bool, small: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    plan = residency_of(small, set(), slots=2)
    try:
        with WeightStore(small, plan, transfers=ThreadTransfers()) as store:
            for unit in UNITS:  # once more than there are slots
                of: object = store if name in ("acquire", "release") else store._transfers
                with pytest.raises(KeyboardInterrupt):
                    go_through(store, [unit], partial(interrupting, monkeypatch, of, name, after))
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
                ring = store._ring
                assert len(ring._free) + len(ring._loads) == plan.slots
                assert not any(load.holders for load in ring._loads)
            go_through(store, UNITS)
    finally:
        signal.signal(signal.SIGINT, before)

"""Sources in host memory: which units, how many bytes over which link, the same bits."""

from __future__ import annotations

import os
import shutil
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qoff.checkpoint import Checkpoint
from qoff.errors import BudgetError, ChecksumError, DiskReadError
from qoff.memory import (
    HEAD,
    DiskReader,
    ThreadTransfers,
    Timeline,
    Unit,
    WeightStore,
    place_in_host,
    plan_residency,
    residency_of,
)
from qoff.memory.instrumentation import Instrumentation
from qoff.memory.plan import EMBEDDING, LM_HEAD, streamed_images
from qoff.memory.plan.placement import spread_evenly
from tests.instruments import POISON
from tests.links import Link, behind
from tests.memory.checkpoints import Truth, check_pass, file_bytes, same_bits, write_checkpoint

LAYERS = 4
UNITS: list[Unit] = [*range(LAYERS), HEAD]
KINDS = [(p, t) for p in ("rows16", "split32") for t in (True, False)]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    packing, tied = request.param
    return write_checkpoint(tmp_path_factory.mktemp("ck") / "model", LAYERS, packing, tied)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp("ck") / "small", LAYERS, tied=False)


@settings(max_examples=12)
@given(
    host_memory=st.integers(0, 200_000),
    tile_bytes=st.none() | st.integers(1, 20_000),
    packing=st.sampled_from(["rows16", "split32"]),
)
def test_any_share_in_host_memory_serves_the_same_bits(
    host_memory: int, tile_bytes: int | None, packing: str, checkpoint: Checkpoint
) -> None:
    truth = Truth(checkpoint, packing)
    plan = residency_of(checkpoint, [], packing=packing, tile_bytes=tile_bytes)
    plan = place_in_host(checkpoint, plan, host_memory)
    assert plan.host_bytes <= host_memory
    with WeightStore(checkpoint, plan, instrumentation=POISON) as store:
        for _ in range(2):
            check_pass(store, truth)
        ids = torch.tensor([3, 99, 3, 0])
        rows = truth.embedding.dequantize()[ids]
        assert same_bits(store.gather_rows(EMBEDDING, ids), rows)
        assert store.host_arena.used == plan.host_bytes


@given(
    sizes=st.lists(st.integers(1, 1000), max_size=30),
    budget=st.integers(0, 20_000),
)
def test_sources_are_spread_evenly_and_fill_the_budget(sizes: list[int], budget: int) -> None:
    nbytes: dict[Unit, int] = dict(enumerate(sizes))
    chosen = spread_evenly(nbytes, budget)
    held = sum(nbytes[u] for u in chosen)
    assert held <= budget
    assert all(held + size > budget for unit, size in nbytes.items() if unit not in chosen)
    if budget >= sum(sizes):
        assert len(chosen) == len(sizes)


@pytest.mark.parametrize("count", [1, 3, 10, 29])
def test_alike_units_alternate(count: int) -> None:
    nbytes: dict[Unit, int] = dict.fromkeys(range(30), 100)
    chosen = sorted(spread_evenly(nbytes, 100 * count + 50), key=str)
    assert len(chosen) == count
    for unit in range(30):
        share = sum(1 for u in chosen if isinstance(u, int) and u <= unit)
        assert abs(share - (unit + 1) * count / 30) <= 1


def test_bytes_are_counted_by_link(small: Checkpoint) -> None:
    plan = residency_of(small, [])
    images = streamed_images(small, plan)
    plan = place_in_host(small, plan, images[0].nbytes * 2)
    assert len(plan.host) == 2
    watched = Instrumentation(on_copy=lambda nbytes: None)
    with WeightStore(small, plan, verify=False, instrumentation=watched) as store:
        loaded = sum(file_bytes(images[u]) for u in plan.host)
        for unit in UNITS * 3:
            with store.use(unit):
                pass
        for unit in UNITS[: plan.slots]:
            store.acquire(unit)  # wait for what is read ahead
        ahead = UNITS[: plan.slots]
        passes = [*UNITS * 3, *ahead]
        copied = sum(images[u].nbytes for u in passes if u in plan.host)
        read = sum(file_bytes(images[u]) for u in passes if u not in plan.host)
        assert (store.stats.bytes_copied, store.stats.bytes_read - loaded) == (copied, read)


def test_a_cpu_computes_with_what_is_in_host_memory_where_it_lies(small: Checkpoint) -> None:
    plan = residency_of(small, [])
    plan = place_in_host(small, plan, streamed_images(small, plan)[0].nbytes * 2)
    layers = [unit for unit in UNITS if unit in plan.host]
    assert 0 < len(layers) < len(UNITS)
    with WeightStore(small, plan, instrumentation=POISON) as store:
        kept = [store.acquire(unit) for unit in layers]
        for _ in range(2):
            check_pass(store, Truth(small, plan.packing))
        assert [store.acquire(unit) for unit in layers] == kept  # nobody waits for a slot
        assert store.stats.bytes_copied == 0


def test_nothing_is_read_when_all_sources_are_in_host_memory(small: Checkpoint) -> None:
    plan = place_in_host(small, residency_of(small, []), 1 << 20)
    assert plan.host == {*UNITS, EMBEDDING}
    with WeightStore(small, plan) as store:
        loaded = store.stats.bytes_read
        for unit in UNITS * 3:
            with store.use(unit):
                pass
        store.gather_rows(EMBEDDING, torch.tensor([3, 98]))
        assert store.stats.bytes_read == loaded


@pytest.mark.parametrize("slow", ["host", "disk"])
def test_a_slow_link_is_waited_for(small: Checkpoint, slow: str) -> None:
    plan = place_in_host(small, residency_of(small, []), 80_000)
    assert 0 < len(plan.host) < len(UNITS)
    link = Link(1e6, latency_s=0.01)
    hooks = behind(host=link if slow == "host" else None)
    preadv = link.preadv if slow == "disk" else os.preadv
    transfers = ThreadTransfers(DiskReader(threads=1, preadv=preadv))
    with WeightStore(
        small, plan, transfers=transfers, verify=False, instrumentation=hooks
    ) as store:
        for unit in UNITS * 2:
            with store.use(unit):
                pass
        assert store.stats.wait_s > 0.03


def test_units_that_are_moved_are_intervals_of_a_timeline(small: Checkpoint) -> None:
    plan = place_in_host(small, residency_of(small, ["model.layers.0.mlp.down_proj"]), 60_000)
    timeline = Timeline()
    with WeightStore(small, plan, instrumentation=Instrumentation(timeline)) as store:
        for unit in UNITS * 2:
            with store.use(unit):
                pass
    lanes = {x.lane for x in timeline.intervals}
    assert lanes == {"disk to device", "disk to host", "host to device"}
    for lane in lanes:
        intervals = sorted((x for x in timeline.intervals if x.lane == lane), key=lambda x: x.start)
        assert all(x.nbytes > 0 and x.start <= x.stop for x in intervals)
        assert all(a.stop <= b.start for a, b in pairwise(intervals))
    labels = [x.name for x in timeline.intervals if x.lane == "host to device"]
    assert {"layer-00000", "layer-00001", "layer-00002", "layer-00003", "outer"} >= set(labels)


def test_host_memory_that_does_not_hold_the_buffers_is_refused(small: Checkpoint) -> None:
    budget = residency_of(small, []).device_bytes
    slot = residency_of(small, []).slot_bytes
    refusal = rf"host memory: .*{2 * slot:,} bytes, and the budget is 1,000"
    with pytest.raises(BudgetError, match=refusal):
        plan_residency(small, budget, host_memory=1000, host_staging=2)
    plan = plan_residency(small, budget, host_memory=2 * slot, host_staging=2)
    assert (plan.host_bytes, plan.host) == (2 * slot, frozenset())
    assert plan_residency(small, budget, host_staging=2).host_bytes == 2 * slot


def test_more_host_memory_reads_less_from_disk(checkpoint: Checkpoint) -> None:
    budget = residency_of(checkpoint, []).device_bytes
    held = []
    for host_memory in range(0, 250_000, 10_000):
        plan = plan_residency(checkpoint, budget, host_memory=host_memory)
        assert plan.host_bytes <= host_memory
        held.append(plan.host_bytes)
    assert held == sorted(held)
    wanted = {*UNITS} if LM_HEAD not in checkpoint.outer.weights else {*UNITS, EMBEDDING}
    assert plan.host == wanted


def test_a_flipped_bit_is_found_when_host_memory_is_filled(
    small: Checkpoint, tmp_path: Path
) -> None:
    shutil.copytree(small.path, tmp_path / "model")
    damaged = Checkpoint.open(tmp_path / "model")
    path = damaged.layers[2].path
    content = bytearray(path.read_bytes())
    content[-300] ^= 8
    path.write_bytes(content)
    plan = place_in_host(damaged, residency_of(damaged, []), 1 << 20)
    with pytest.raises(ChecksumError, match=path.name):
        WeightStore(damaged, plan)


def test_a_host_arena_that_cannot_be_had_is_a_budget_error(small: Checkpoint) -> None:
    plan = replace(residency_of(small, []), host_weight_bytes=1 << 60)
    with pytest.raises(BudgetError, match="host memory: the system refused"):
        WeightStore(small, plan)


def test_closing_wakes_who_waits_for_a_copy(small: Checkpoint) -> None:
    plan = place_in_host(small, residency_of(small, []), 1 << 20)
    store = WeightStore(small, plan, instrumentation=behind(host=Link(1e5)))
    outcome: list[object] = []

    def consume() -> None:
        try:
            for unit in UNITS:
                outcome.append(store.acquire(unit))
                store.release(unit)
        except (DiskReadError, ValueError) as error:
            outcome.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    time.sleep(0.05)
    store.close()
    thread.join(20)
    assert not thread.is_alive()
    assert isinstance(outcome[-1], (DiskReadError, ValueError))


@pytest.mark.parametrize("in_place", [False, True])
def test_there_are_no_slots_where_all_that_streams_is_computed_with_in_host_memory(
    small: Checkpoint, in_place: bool
) -> None:
    budget = plan_residency(small, None).device_bytes * 3 // 4
    some, every = (
        plan_residency(small, budget, host_memory=host, in_place=in_place) for host in (1, 1 << 30)
    )
    assert every.streamed
    assert (some.slots, every.slots) == (2, 0 if in_place else 2)
    assert every.device_bytes == some.device_bytes - (every.slot_bytes * 2 if in_place else 0)
    if in_place:
        with WeightStore(small, every) as store:
            for unit in UNITS:
                with store.use(unit):
                    pass

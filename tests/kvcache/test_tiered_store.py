"""Blocks on three tiers: room and places, and nothing is kept of what fails or is given up."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from qoff.errors import ArgumentError, BudgetError, DiskReadError, DiskWriteError
from qoff.kernels.layout.ragged import Ragged, Span
from qoff.kvcache import PackedCache
from qoff.kvcache.store.placement import DISK, TIERS, KVPlacement
from qoff.memory.io.disk import DiskReader
from qoff.memory.io.spill import Pwritev
from tests.kvcache.test_tiered import (
    FORMS,
    HEADS,
    LAYERS,
    MOST_TOKENS,
    PLACEMENTS,
    PLAIN,
    SAME,
    SEQUENCES,
    WINDOW,
    assert_empty,
    assert_same_records,
    cache_on,
    forward,
    plan_of,
    tiered,
)
from tests.tolerances import assert_close

FRACTIONS = st.one_of(
    st.sampled_from([0.0, 0.1, 1 / 3, 0.5, 2 / 3, 0.9, 1.0]), st.floats(0, 1)
).map(float)


@settings(max_examples=200, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    device=FRACTIONS,
    host=FRACTIONS,
    most=st.integers(0, 40),
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4),
)
def test_capacity_suffices(
    device: float, host: float, most: int, lengths: list[tuple[int, int]]
) -> None:
    """For sequences of any expected number of blocks up to `most`, however few come about."""
    placement = KVPlacement(device, min(host, 1 - device))
    capacity = placement.capacity(most)
    for expected, there in lengths:
        expected = min(expected, most)
        tiers = [placement.tier(i, expected) for i in range(min(there, expected))]
        assert all(tiers.count(tier) <= capacity[tier] for tier in TIERS)
        assert tiers == sorted(tiers, key=TIERS.index)
        whole = [placement.tier(i, expected) for i in range(expected)]
        assert {tier: whole.count(tier) for tier in TIERS} == placement.split(expected)
        beyond = [*whole, *(placement.tier(expected + i, expected) for i in range(3))]
        assert beyond == sorted(beyond, key=TIERS.index)


@pytest.mark.parametrize("wrong", [(-0.1, 0), (0, -0.1), (0.7, 0.4), (float("nan"), 0)])
def test_fractions_out_of_range_are_refused(wrong: tuple[float, float]) -> None:
    with pytest.raises(ArgumentError, match="use fractions"):
        KVPlacement(*wrong)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_more_blocks_than_there_are_are_refused_without_a_leak(
    placement: KVPlacement, tmp_path: Path
) -> None:
    """The second sequence does not fit; the first goes on, and the second after it."""
    tokens = 400
    with tiered(tmp_path, placement, plan_of(placement, True, 1, tokens)) as store:
        cache = cache_on(store, 2, tokens=tokens)
        qkv = [torch.randn(tokens - 1, PLAIN.qkv_width) for _ in LAYERS]
        first = Ragged.of([tokens - 1], [0])
        forward(cache.subset([0]), first, qkv, PLAIN, True)
        used = {tier: store.used(tier) for tier in TIERS}
        for _ in range(3):
            with pytest.raises(BudgetError, match=r"all \d+ KV blocks of the \w+ are in use"):
                cache.subset([1]).begin(first)
            with pytest.raises(BudgetError, match="in use"):
                cache.begin(Ragged((Span(1, 0, tokens - 1, 0),)))
            assert {tier: store.used(tier) for tier in TIERS} == used
        one = [torch.randn(1, PLAIN.qkv_width) for _ in LAYERS]
        forward(cache, Ragged.of([1], [tokens - 1]), one, PLAIN, True)
        cache.reset(0)
        forward(cache.subset([1]), first, qkv, PLAIN, True)
        cache.reset(1)
        assert_empty(store)


def test_a_pass_that_failed_before_one_that_does_not_fit_is_given_back_once(
    tmp_path: Path,
) -> None:
    placement = KVPlacement(0, 0)
    plan = plan_of(placement, True, 1, 400)
    with tiered(tmp_path, placement, plan) as store:
        cache = cache_on(store, 2, tokens=400)
        small, large = Ragged.of([200], [0]), Ragged.of([399, 399], [0, 0])
        step = cache.begin(small)
        assert store.used(DISK) == 2
        with pytest.raises(BudgetError):
            cache.begin(large)
        assert store.used(DISK) == 0
        other = cache_on(store, 1, tokens=400)
        late = other.begin(Ragged.of([400], [0]))
        assert store.used(DISK) == plan.blocks[DISK]  # also those that were given back
        step.abandon()
        assert store.used(DISK) == plan.blocks[DISK]
        late.abandon()
        assert_empty(store)


def test_blocks_that_were_not_expected_stay_in_order(tmp_path: Path) -> None:
    placement = KVPlacement(0.34, 0.33)
    with tiered(tmp_path, placement, plan_of(placement, True, 2)) as store:
        caches = cache_on(store, 1, tokens=300), cache_on(None, 1)
        for count in (300, 200, 1, 130, 1):
            qkv = [torch.randn(count, PLAIN.qkv_width) for _ in LAYERS]
            ragged = Ragged.of([count], caches[0].lengths)
            found, expected = (forward(cache, ragged, qkv, PLAIN, True) for cache in caches)
            for mine, other in zip(found, expected, strict=True):
                assert_close(mine, other, tolerance=SAME)


def test_shared_blocks_are_free_when_nobody_uses_them(tmp_path: Path) -> None:
    placement = KVPlacement(0.34, 0.33)
    with tiered(tmp_path, placement, plan_of(placement, True, 1)) as store:
        cache = cache_on(store)
        qkv = [torch.randn(500, PLAIN.qkv_width) for _ in LAYERS]
        forward(cache.subset([0]), Ragged.of([500], [0]), qkv, PLAIN, False)
        used = {tier: store.used(tier) for tier in TIERS}
        assert sum(used.values()) == 7
        records = [store.read(0, block).clone() for block in cache.blocks[0]]
        cache.fork(0, 1)
        cache.fork(0, 2)
        for slot in (1, 0):
            cache.reset(slot)
            assert {tier: store.used(tier) for tier in TIERS} == used
        for block, record in zip(cache.blocks[2], records, strict=True):
            assert torch.equal(store.read(0, block), record)
        cache.reset(2)
        assert_empty(store)


def test_what_is_abandoned_half_way_gives_blocks_and_slots_back(tmp_path: Path) -> None:
    placement = KVPlacement(0, 0)
    with tiered(tmp_path, placement, plan_of(placement, False, 2)) as store:
        cache = cache_on(store, 2)
        qkv = [torch.randn(300, PLAIN.qkv_width) for _ in LAYERS]
        forward(cache.subset([0]), Ragged.of([300], [0]), qkv, PLAIN, True)
        used = store.used(DISK)
        for opened in (False, True):
            half = cache.subset([0]).begin(Ragged.of([200], [300]))
            half.prefetch(0)
            half.prefetch(1)
            if opened:
                half.open(0)
            half.abandon()
            half.abandon()
            assert store.used(DISK) == used
        cache.reset(0)
        assert_empty(store)


def test_a_block_that_is_written_again_is_what_was_written_last(tmp_path: Path) -> None:
    """Also when the first write is still on its way: two threads write."""
    gate, first = threading.Event(), threading.Event()

    def pwritev(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if not first.is_set():
            first.set()
            gate.wait(1)

        return os.pwritev(fd, views, offset)

    placement = KVPlacement(0, 0)
    plan = plan_of(placement, True, 1)
    with tiered(tmp_path, placement, plan, pwritev=pwritev) as store:
        for value in (1, 2):
            (block,) = store.allocate([0], 1, 0)
            store.write(0, [block], torch.full((1, 2, FORMS[0].nbytes), value, dtype=torch.uint8))
            if value == 1:
                assert first.wait(20)
                store.release([block])
        assert (store.read(0, block) == 2).all()
        gate.set()
        assert store.spill is not None
        deadline = time.monotonic() + 20
        while store.spill.written < 2 * plan.stride and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (store.read(0, block) == 2).all()


class Failing:
    """`os.pwritev` or `os.preadv` that fails while `broken`."""

    def __init__(self, call: Pwritev) -> None:
        self.broken = False
        self._call = call

    def __call__(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        if self.broken:
            raise OSError(errno.EIO, "Input/output error")
        return self._call(fd, views, offset)


def test_a_block_that_was_not_written_is_an_error_wherever_it_is_wanted(tmp_path: Path) -> None:

    pwritev = Failing(os.pwritev)
    placement = KVPlacement(0, 0)
    with tiered(tmp_path, placement, plan_of(placement, True, 2), pwritev=pwritev) as store:
        cache = cache_on(store, 1)
        qkv = [torch.randn(600, PLAIN.qkv_width) for _ in LAYERS]
        ragged = Ragged.of([600], [0])
        pwritev.broken = True
        forward(cache.subset([0]), ragged, qkv, PLAIN, True)
        for _ in range(2):
            with pytest.raises(DiskWriteError, match="Input/output error"):
                store.read(0, cache.blocks[0][0])
            step = cache.begin(Ragged.of([1], [600]))
            with pytest.raises(DiskWriteError, match="Input/output error"):
                step.prefetch(0)
            with pytest.raises(DiskWriteError, match="Input/output error"):
                step.open(0)
            step.abandon()
        cache.reset(0)
        assert_empty(store)
        pwritev.broken = False
        cache.reset(0, MOST_TOKENS)
        forward(cache.subset([0]), ragged, qkv, PLAIN, True)
        other = cache_on(None, 1)
        forward(other, ragged, qkv, PLAIN, False)
        assert_same_records(cache, other)


@pytest.mark.parametrize("placement", [KVPlacement(0, 0), KVPlacement(0, 0.5)])
def test_what_a_sequence_reads_stays_one_run_a_tier_for_thousands_of_sequences(
    placement: KVPlacement, tmp_path: Path
) -> None:
    """Of any lengths, admitted and ended in any order, block by block in turns."""
    random_ = random.Random(5)
    plan = plan_of(placement, False, 2 * SEQUENCES)
    with tiered(tmp_path, placement, plan) as store:
        first = [store.claim(SEQUENCES), store.claim(SEQUENCES)]
        assert first == [0, SEQUENCES]
        most = PackedCache.blocks_of(MOST_TOKENS, WINDOW, 0)
        rows: list[list[int]] = [[] for _ in range(2 * SEQUENCES)]
        expected = [0] * len(rows)
        for _ in range(4000):
            owner = random_.randrange(len(rows))
            if len(rows[owner]) == expected[owner]:
                store.release(rows[owner])
                rows[owner], expected[owner] = [], random_.randint(1, most)
            rows[owner] += store.allocate([len(rows[owner])], expected[owner], owner)
            for batch in first:
                blocks = sorted(b for row in rows[batch : batch + SEQUENCES] for b in row)
                found = store.copy_plan(blocks)
                assert len(found.from_disk) <= SEQUENCES
                assert len(found.from_host) <= SEQUENCES
        assert len(set().union(*rows)) == sum(map(len, rows))


def test_shared_blocks_take_no_place_from_others(tmp_path: Path) -> None:
    """Every block that the plan counts is handed out, whoever shares those of whom."""
    placement, most = KVPlacement(0, 0), PackedCache.blocks_of(MOST_TOKENS, WINDOW, 0)
    with tiered(tmp_path, placement, plan_of(placement, False, 2)) as store:
        shared = store.allocate(range(most // 2), most, 0)
        store.share(shared)
        store.release(shared)  # the first sequence has ended, the second goes on with its blocks
        second = shared + store.allocate(range(most // 2, most), most, 1)
        first = store.allocate(range(most), most, 0)
        assert sorted(first + second) == list(range(2 * most))
        with pytest.raises(BudgetError, match="all 20 KV blocks of the disk are in use"):
            store.allocate([0], most, 0)


def test_a_read_goes_through_a_few_blocks_of_others(tmp_path: Path) -> None:
    placement = KVPlacement(0, 0)
    with tiered(tmp_path, placement, plan_of(placement, True, 2)) as store:
        blocks = [*store.allocate([0, 1], 9, 0), *store.allocate([0], 9, 1)]
        each = store.plan.blocks[DISK] // 2
        assert blocks == [0, 1, each]
        whole = store.copy_plan(blocks, room=2 * each)
        assert (len(whole.from_disk), whole.places) == (1, (0, 1, each))
        assert whole.count == each + 1
        dense = store.copy_plan(blocks)
        assert (len(dense.from_disk), dense.places, dense.count) == (2, (0, 1, 2), 3)


def test_nothing_is_read_into_a_slot_that_a_failed_write_leaves_free(tmp_path: Path) -> None:
    plan, reads = plan_of(KVPlacement(0, 0), True, 1), []
    pwritev = Failing(os.pwritev)

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        reads.append(offset)
        return os.preadv(fd, views, offset)

    reader = DiskReader(preadv=preadv)
    with tiered(tmp_path, KVPlacement(0, 0), plan, reader=reader, pwritev=pwritev) as store:
        first, _, third = store.allocate([0, 1, 2], 3, 0)
        record = torch.ones(1, HEADS[0], FORMS[0].nbytes, dtype=torch.uint8)
        store.write(0, [first], record)
        store.read(0, first)
        reads.clear()
        pwritev.broken = True
        store.write(0, [third], record)
        copy_plan = store.copy_plan([first, third])
        assert len(copy_plan.from_disk) == 2
        with pytest.raises(DiskWriteError, match="Input/output error"):
            store.bring(0, copy_plan, torch.empty(2 * plan.stride, dtype=torch.uint8))
        assert not reads


def test_a_read_error_is_raised_where_the_layer_is_opened(tmp_path: Path) -> None:

    preadv = Failing(os.preadv)
    placement = KVPlacement(0, 0)
    plan = plan_of(placement, True, 2)
    with tiered(tmp_path, placement, plan, reader=DiskReader(preadv=preadv)) as store:
        cache = cache_on(store, 1)
        qkv = [torch.randn(600, PLAIN.qkv_width) for _ in LAYERS]
        forward(cache.subset([0]), Ragged.of([600], [0]), qkv, PLAIN, True)
        preadv.broken = True
        for ahead in (True, False):
            step = cache.begin(Ragged.of([1], [600]))
            if ahead:
                step.prefetch(0)
            with pytest.raises(DiskReadError, match="Input/output error"):
                step.open(0)
            step.abandon()
        preadv.broken = False
        one = [torch.randn(1, PLAIN.qkv_width) for _ in LAYERS]
        forward(cache, Ragged.of([1], [600]), one, PLAIN, True)
        cache.reset(0)
        assert_empty(store)

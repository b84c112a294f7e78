"""A cache on a GPU whose older blocks are in host memory or on disk, against one that has them all.

Both are told the same: the same records, the same attention but for rounding. Without a GPU
everything is in CPU tensors, and Triton interprets the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.kernels.layout.heads import HeadShape, QueryScale
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.ragged import Ragged, Span
from qoff.kvcache import DeviceCache, KVPlacement
from qoff.kvcache.device.blocks import DeviceBlocks
from qoff.kvcache.device.cache import DeviceCachePass
from qoff.kvcache.device.tables import offloaded_blocks
from qoff.kvcache.device.write_back import WriteBackBuffer, WriteBackQueue
from qoff.kvcache.groups import one_group
from qoff.kvcache.store.base import GrowingBlocks
from qoff.kvcache.store.placement import DEVICE, DISK, HOST
from qoff.kvcache.store.plan import BlockPlan
from qoff.kvcache.store.pool import BlockPool
from qoff.kvcache.store.sparse import BlockBounds
from qoff.kvcache.store.tiered import TieredBlocks
from qoff.memory.arena import PAGE, Arena, round_up
from qoff.memory.io.copies import Copies
from qoff.memory.io.disk import DiskReader
from qoff.memory.io.spill import SpillFile
from tests.instruments import POISON
from tests.tolerances import PACKED_ATTENTION, assert_close
from tests.triton_module import triton_module

triton_ops = triton_module("ops")
kv_append = triton_module("attention.append").kv_append

GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE, WINDOWED = HeadShape(2, 1, 64, 0.125), HeadShape(2, 1, 64, 0.125, window=150)
SCALED = HeadShape(2, 1, 64, 0.125, query_scale=QueryScale(0.5, 32))
FORMS = (KVFormat(64), KVFormat(64, 3, 2), KVFormat(64, k_bits=8))
HALF, NONE = KVPlacement(0.5, 0.5), KVPlacement(0, 1)


BLOCKS = 64  # enough for every test, on each tier


def buffers(count: int, nbytes: int) -> list[WriteBackBuffer]:
    on_gpu = GPU.type == "cuda"
    return [
        WriteBackBuffer(
            torch.empty(nbytes, dtype=torch.uint8, device=GPU),
            torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_gpu),
        )
        for _ in range(count)
    ]


def in_host_memory(forms: Sequence[KVFormat], placement: KVPlacement) -> TieredBlocks:
    """Blocks that are all attended to where they lie, so that nothing is copied."""
    records = tuple(form.nbytes for form in forms)
    plan = BlockPlan(records, {DEVICE: 0, HOST: BLOCKS, DISK: 0}, 1, 0, True)
    arenas = {tier: Arena(tier, plan.tier_bytes()[tier]) for tier in (DEVICE, HOST)}
    heads = [1] * len(forms)
    with closing(Copies()) as copies:
        return TieredBlocks(
            forms, heads, plan, placement, arenas, copies, None, instrumentation=POISON
        )


def bounds_of(forms: Sequence[KVFormat]) -> BlockBounds:
    """Bounds on the device, which are NaN until a block is made."""
    nbytes = sum(round_up(BLOCKS * form.bound_bytes, PAGE) for form in forms)
    arena = Arena(DEVICE, nbytes, lambda n: torch.empty(n, dtype=torch.uint8, device=GPU))
    bounds = BlockBounds(forms, [1] * len(forms), BLOCKS, arena)
    for layer in bounds.layers:
        layer.fill_(0xFF)
    return bounds


class Pair:
    """A hybrid cache and one that keeps all on the device."""

    def __init__(
        self,
        sequences: int,
        placement: KVPlacement = HALF,
        *,
        capacity: int = 256,
        shape: HeadShape = SHAPE,
        dtype: torch.dtype = torch.float16,
        offloaded: TieredBlocks | None = None,
        forms: Sequence[KVFormat] = FORMS[:1],
        top: float = 1.0,
        steady: bool = False,
    ) -> None:
        self.shape, self.dtype, self.forms = shape, dtype, forms
        shapes = [shape] * len(forms)
        options: dict[str, Any] = {"window": 0, "capacity": capacity, "device": GPU, "dtype": dtype}
        options |= {"attention_top": top, "steady": steady}
        self.resident = DeviceCache(shapes, forms, sequences, **options)
        self.offloaded = offloaded or in_host_memory(forms, placement)
        records = [(BLOCKS, 1, form.nbytes) for form in forms]
        layers = [torch.empty(record, dtype=torch.uint8, device=GPU) for record in records]
        queue = WriteBackQueue(
            self.offloaded, buffers(2, BLOCKS * max(form.nbytes for form in forms)), POISON
        )
        pool = BlockPool(DEVICE, layers, BLOCKS, poison=True)
        bounds = bounds_of(forms) if top < 1 else None
        store = DeviceBlocks(forms, pool, placement, self.offloaded, queue, bounds=bounds)
        self.hybrid = DeviceCache(
            shapes, forms, sequences, **options, stores={one_group(shapes)[0]: store}
        )

    @property
    def offloaded_tokens(self) -> list[int]:
        """How many tokens of each sequence, its oldest, are not on the device."""
        return [64 * len(offloaded_blocks(blocks)) for blocks in self.hybrid.blocks]

    @property
    def used(self) -> int:
        return self.hybrid.store.pool.used + self.offloaded.used(HOST)

    def both(self, move: Callable[[DeviceCache], object]) -> None:
        for cache in (self.resident, self.hybrid):
            move(cache)
        self.check()

    def forward(self, counts: list[int], slots: list[int] | None = None) -> None:
        slots = list(range(len(counts))) if slots is None else slots
        ragged = self.ragged(counts, slots)
        self.step(ragged, self.random(ragged.tokens))
        self.check()

    def step(self, ragged: Ragged, qkvs: list[Tensor]) -> None:
        steps = [cache.begin(ragged) for cache in (self.resident, self.hybrid)]
        for layer, qkv in enumerate(qkvs):
            self.same(layer, qkv, ragged, *steps)
        for step in steps:
            step.end()

    def ragged(self, counts: list[int], slots: list[int]) -> Ragged:
        starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
        return Ragged(
            tuple(
                Span(slot, start, end - start, self.resident.lengths[slot])
                for slot, (start, end) in zip(slots, pairwise(starts), strict=True)
            )
        )

    def random(self, tokens: int) -> list[Tensor]:
        """Queries, keys and values of each layer."""
        return [torch.randn(tokens, self.shape.qkv_width).to(GPU, self.dtype) for _ in self.forms]

    def same(
        self,
        layer: int,
        qkv: Tensor,
        ragged: Ragged,
        resident: DeviceCachePass,
        hybrid: DeviceCachePass,
    ) -> None:
        """One layer of a pass of both caches."""
        hybrid.prefetch(layer)
        more = resident.rows - len(qkv)  # in slots without new tokens
        qkv = torch.nn.functional.pad(qkv, (0, 0, 0, more), value=1.0)
        expected, found = (
            triton_ops.attention(qkv, self.shape, step.open(layer), ragged)
            for step in (resident, hybrid)
        )
        assert hybrid.open(layer) is hybrid.open(layer)
        for step in (resident, hybrid):
            step.close(layer)
        same = slice(ragged.tokens)
        assert_close(found[same].cpu(), expected[same].cpu(), tolerance=PACKED_ATTENTION)

    def check(self) -> None:
        """The same tokens, in the same records."""
        assert self.hybrid.lengths == self.resident.lengths
        assert self.hybrid.packed == self.resident.packed
        for mine, others in zip(self.hybrid.blocks, self.resident.blocks, strict=True):
            for a, b in zip(mine, others, strict=True):
                for layer in range(len(self.forms)):
                    records = self.hybrid.store.read(layer, a), self.resident.store.read(layer, b)
                    assert torch.equal(*records)


@pytest.mark.parametrize("placement", [HALF, NONE], ids=["half", "none"])
def test_ragged_passes_over_both_tiers(placement: KVPlacement) -> None:
    pair = Pair(3, placement)
    for counts in ([170, 1, 63], [21, 71, 41]):
        pair.forward(counts)
    pair.forward([1, 1], [2, 0])
    pair.forward([2, 1], [2, 1])
    assert pair.hybrid.packed == [192, 64, 64]
    assert pair.offloaded_tokens == [128 if placement is HALF else 192, 64, 64]
    pair.forward([70, 1, 130])
    assert pair.hybrid.packed == [256, 64, 192]
    assert pair.offloaded_tokens == ([128, 64, 128] if placement is HALF else [256, 64, 192])
    pair.forward([1, 1, 1])


def test_layers_of_their_own_forms_in_bfloat16() -> None:
    pair = Pair(6, dtype=torch.bfloat16, forms=(*FORMS, FORMS[0]))
    for count in (100, 28, 1):
        pair.forward([count] * 6)
    assert pair.offloaded_tokens == [128] * 6


def test_a_sliding_window_over_both_tiers() -> None:
    pair = Pair(2, shape=WINDOWED)
    for counts in ([200, 130], [1, 1], [60, 3], [1, 1]):
        pair.forward(counts)
    assert pair.offloaded_tokens == [128, 128]


def test_slots_are_filled_forked_and_emptied() -> None:
    pair = Pair(3, capacity=0)
    pair.both(lambda cache: cache.reset(0, 256))
    pair.forward([150], [0])
    pair.both(lambda cache: cache.fork(0, 2))
    pair.forward([1, 1], [0, 2])
    pair.both(lambda cache: cache.reset(0, 128))
    pair.both(lambda cache: cache.adopt(0, cache.blocks[2][:1]))
    pair.forward([70, 50], [0, 2])
    assert pair.offloaded_tokens == [64, 0, 128]
    assert pair.hybrid.packed == [128, 0, 192]
    pair.both(lambda cache: cache.select([2, 0, 2]))
    pair.both(lambda cache: cache.forget(100))
    pair.forward([1, 1, 1])
    for slot in range(3):
        pair.both(lambda cache, slot=slot: cache.reset(slot))
    assert pair.used == 0


def test_blocks_after_one_on_the_device_are_there_too() -> None:
    """Whatever the placement would say of a sequence as long as the fork will be."""
    pair = Pair(2, capacity=0)
    pair.both(lambda cache: cache.reset(0, 128))
    pair.forward([130], [0])
    pair.both(lambda cache: cache.reset(1, 1024))
    pair.both(lambda cache: cache.fork(0, 1))
    pair.forward([62], [1])
    assert pair.hybrid.packed == [128, 192]
    assert pair.offloaded_tokens == [64, 64]
    assert [block >= 0 for block in pair.hybrid.blocks[1]] == [False, True, True]
    pair.forward([1, 1])


def test_a_pass_over_a_subset_beside_one_over_the_others() -> None:
    pair = Pair(3, NONE, forms=FORMS)
    pair.forward([66, 64], [0, 1])
    decoded = pair.ragged([1], [0])
    read = Ragged.of([70, 64], [0, 64])
    caches = pair.resident, pair.hybrid
    ones = [cache.begin(decoded) for cache in caches]
    manys = [cache.subset([2, 1]).begin(read) for cache in caches]
    for layer, (one, many) in enumerate(zip(pair.random(1), pair.random(134), strict=True)):
        pair.same(layer, one, decoded, *ones)
        pair.same(layer, many, read, *manys)
    for step in (*ones, *manys):
        step.end()
    pair.check()
    assert pair.hybrid.lengths == [67, 128, 70]
    assert pair.offloaded_tokens == [64, 128, 64]
    pair.forward([1, 1, 1])


def test_a_pass_that_was_given_up_leaves_no_trace() -> None:
    pair = Pair(1)
    pair.forward([60])
    for abandoned in (True, False):
        ragged = pair.ragged([70], [0])
        step = pair.hybrid.begin(ragged)
        triton_ops.attention(pair.random(70)[0], SHAPE, step.open(0), ragged)
        step.close(0)
        if abandoned:
            step.abandon()
    with pytest.raises(ArgumentError, match="half-way"):
        pair.hybrid.begin(ragged)
    step.abandon()
    assert pair.used == 0


@pytest.mark.parametrize("attends_on_host", [True, False])
def test_blocks_on_disk_are_read_ahead_into_a_ring(tmp_path: Path, attends_on_host: bool) -> None:
    placement = KVPlacement(0.25, 0.25)
    plan = BlockPlan(
        tuple(form.nbytes for form in FORMS), {DEVICE: 0, HOST: 2, DISK: 4}, 2, 6, attends_on_host
    )
    tiers = plan.tier_bytes()
    with (
        closing(DiskReader()) as reader,
        closing(Copies()) as copies,
        closing(SpillFile(tmp_path, tiers[DISK], reader)) as spill,
    ):
        arenas = {tier: Arena(tier, tiers[tier]) for tier in (DEVICE, HOST)}
        offloaded = TieredBlocks(
            FORMS,
            [1] * len(FORMS),
            plan,
            placement,
            arenas,
            copies,
            spill,
            instrumentation=POISON,
        )
        pair = Pair(2, placement, offloaded=offloaded, forms=FORMS)
        for counts in ([260, 70], [1, 1], [1, 60]):
            pair.forward(counts)
        assert pair.offloaded_tokens == [192, 128]
        assert (offloaded.used(HOST), offloaded.used(DISK)) == (1, 4)
        for arena in arenas.values():
            arena.close()


def test_write_backs_arrive_in_any_order_and_dropped_ones_never() -> None:
    store = GrowingBlocks(FORMS, [2] * len(FORMS))
    store.allocate(range(4), 4, 0)
    queue = WriteBackQueue(store, buffers(3, 2 * 2 * max(form.nbytes for form in FORMS)), POISON)
    before = [layer.clone() for layer in store.pool.layers]
    dropped = queue.take(0, [0, 1])
    for pending, code in (
        (queue.take(1, [2]), 1),
        (queue.take(0, [3]), 2),
        (dropped, 3),
    ):
        assert (pending.records == 0xFF).all()
        pending.records.fill_(code)
        queue.send(pending)
    queue.drop([dropped])
    last = queue.take(1, [0])
    assert (last.records == 0xFF).all()
    last.records.fill_(4)
    queue.send(last)
    while queue._sent:
        queue.deliver(queue._sent[-1:])
    layers = store.pool.layers
    assert (layers[0][3] == 2).all()
    assert (layers[1][2] == 1).all()
    assert (layers[1][0] == 4).all()
    assert torch.equal(layers[0][:3], before[0][:3])


def test_steps_that_are_recorded_have_rows_without_tokens() -> None:
    """Three of five sequences are four rows. Queries are scaled once, wherever keys lie."""
    pair = Pair(5, shape=SCALED, steady=True)
    pair.forward([130, 64, 1, 70, 1])
    pair.forward([1, 1, 1], [0, 1, 3])
    assert pair.offloaded_tokens == [128, 64, 0, 64, 0]


@pytest.mark.parametrize(
    ("placement", "shape"), [(HALF, SHAPE), (NONE, SHAPE), (HALF, WINDOWED)], ids=str
)
def test_what_is_chosen_does_not_depend_on_where_it_lies(
    placement: KVPlacement, shape: HeadShape
) -> None:
    """Also of forks, and of sequences all of whose blocks are chosen."""
    pair = Pair(4, placement, shape=shape, top=0.5, capacity=384, steady=True)
    pair.forward([256, 70, 1, 130])
    pair.forward([1, 1, 1], [0, 1, 3])
    pair.both(lambda cache: cache.reset(2))
    pair.both(lambda cache: cache.fork(0, 2))
    pair.forward([63, 57, 1, 1])
    pair.forward([1, 1, 1], [2, 1, 0])
    assert pair.hybrid.packed == [320, 128, 256, 128]


def test_no_more_is_read_than_is_chosen(tmp_path: Path) -> None:
    """From disk, of blocks whose bounds are on the device, by tokens that change little by little.

    What the CPU reads of them is what comes of the GPU's lists: all else is NaN.
    """
    dense = STEPS * FAR * FORMS[0].nbytes
    assert bytes_read(tmp_path, 1.0) >= dense
    assert 0.5 * dense <= bytes_read(tmp_path, 0.5) <= 0.52 * dense


FAR, STEPS = 50, 8


def bytes_read(folder: Path, top: float) -> int:
    """Bytes of steps of one token over `FAR` blocks, all of which are on disk."""
    form, placement = FORMS[0], KVPlacement(0, 0)
    blocks = {DEVICE: 0, HOST: 0, DISK: FAR + 1}
    plan = BlockPlan((form.nbytes,), blocks, 1, FAR + 1, True, choice_bytes=int(top < 1))
    tiers = plan.tier_bytes()
    with (
        closing(DiskReader()) as reader,
        closing(Copies()) as copies,
        closing(SpillFile(folder, tiers[DISK], reader)) as spill,
    ):
        arenas = {tier: Arena(tier, tiers[tier]) for tier in (DEVICE, HOST)}
        hooks = {"instrumentation": POISON}
        lists = [form], [1], plan, placement, arenas, copies, spill
        pair = Pair(1, placement, offloaded=TieredBlocks(*lists, **hooks), top=top)
        prompt = pair.ragged([64 * FAR], [0])
        (now,) = pair.random(64 * FAR)
        for cache in (pair.resident, pair.hybrid):
            step = cache.begin(prompt)
            _, k, v = now.unflatten(1, (-1, 64)).split([2, 1, 1], dim=1)
            kv_append(k, v, step.open(0))
            step.close(0)
            step.end()
        pair.check()
        before = reader.stats.bytes
        for _ in range(STEPS):
            now = 0.95 * now[-1:] + 0.3 * torch.randn_like(now[-1:])
            pair.step(pair.ragged([1], [0]), [now])
        for arena in arenas.values():
            arena.close()
        return reader.stats.bytes - before

"""Layers with windows keep the blocks that they will read, and compute what they would with all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.ragged import Ragged
from qoff.kvcache import DeviceCache, PackedCache
from qoff.kvcache.device.blocks import DeviceBlocks
from qoff.kvcache.groups import FORGETTABLE, LayerGroup, layer_groups, one_group
from qoff.kvcache.slots import SlotCache
from qoff.kvcache.store.base import GrowingBlocks
from qoff.kvcache.store.pool import BlockPool
from tests.triton_module import triton_module

triton_ops = triton_module("ops")

KINDS = (HeadShape(4, 2, 64, 0.125), HeadShape(4, 2, 64, 0.125, window=100))
SHAPES = (*KINDS, HeadShape(4, 2, 64, 0.125, window=192, chunked=True), KINDS[1])
FORMS = (KVFormat(64), KVFormat(64, k_bits=8), KVFormat(64), KVFormat(64, 3, 2))
WINDOW = 16


class Twins:
    """A cache that frees blocks, and one that keeps them."""

    attention: Callable[..., Tensor] = staticmethod(cpu.attention)
    dtype = torch.float32
    shapes: tuple[HeadShape, ...] = SHAPES

    def __init__(self, sequences: int) -> None:
        self.frees, self.keeps = self.caches(sequences)
        self.both = self.frees, self.keeps

    def caches(self, sequences: int) -> tuple[SlotCache, SlotCache]:
        store = GrowingBlocks(FORMS, [shape.kv_heads for shape in SHAPES])
        frees = PackedCache(SHAPES, FORMS, sequences, window=WINDOW)
        stores = {one_group(SHAPES)[0]: store}
        return frees, PackedCache(SHAPES, FORMS, sequences, window=WINDOW, stores=stores)

    def forward(self, *counts: int) -> None:
        ragged = Ragged.of(counts, self.frees.lengths)
        steps = [cache.begin(ragged) for cache in self.both]
        for layer, shape in enumerate(self.shapes):
            qkv = torch.randn(ragged.tokens, shape.qkv_width).to(self.dtype)
            found = list[Tensor]()
            for step in steps:
                found.append(self.attention(qkv.clone(), shape, step.open(layer), ragged))
                step.close(layer)
            assert torch.equal(*found)
        for step in steps:
            step.end()

    def decode(self, tokens: int) -> None:
        for _ in range(tokens):
            self.forward(*[1] * self.frees.sequences)

    def blocks(self) -> list[int]:
        """In use, of each group."""
        found = list[int]()
        for group in self.frees.groups:
            assert isinstance(group.store, GrowingBlocks | DeviceBlocks)
            found.append(group.store.pool.used)
        return found


class DeviceTwins(Twins):
    """The same for a GPU's ops, of few heads: they are interpreted."""

    attention = staticmethod(triton_ops.attention)
    dtype = torch.float16
    shapes = (
        HeadShape(1, 1, 64, 0.125),
        HeadShape(1, 1, 64, 0.125, window=130),
        HeadShape(1, 1, 64, 0.125, window=64, chunked=True),
    )

    def __init__(self, sequences: int, top: float) -> None:
        self.top = top
        super().__init__(sequences)

    def caches(self, sequences: int) -> tuple[SlotCache, SlotCache]:
        forms, heads, device = FORMS[:3], [1, 1, 1], torch.device("cpu")
        store = DeviceBlocks(forms, BlockPool.growing("device", forms, heads, 0, device))
        frees, keeps = (
            DeviceCache(
                self.shapes,
                forms,
                sequences,
                window=0,
                attention_top=self.top,
                device=device,
                stores=stores,
            )
            for stores in (None, {one_group(self.shapes)[0]: store})
        )
        return frees, keeps


def test_groups_are_the_layers_of_a_window_that_is_shorter_than_sequences() -> None:
    assert [(g.layers, g.reach) for g in layer_groups(SHAPES)] == [
        ((0,), 0),
        ((2,), -192),
        ((1, 3), 100),
    ]
    assert [(g.layers, g.reach) for g in layer_groups(SHAPES, 0, tokens=150)] == [
        ((0, 2), 0),
        ((1, 3), 100),
    ]
    assert [g.reach for g in layer_groups(SHAPES, 0, tokens=100)] == [0]


@pytest.mark.parametrize("reach", [100, 64, 1, -192, -100])
@pytest.mark.parametrize("back", [0, 5])
def test_blocks_at_once_are_the_most_that_single_tokens_leave(reach: int, back: int) -> None:
    group = LayerGroup((0,), reach, back)
    most = 0
    for past in range(700):
        assert group.readable(group.unseen(past), past - back)
        most = max(most, (past + 1 - WINDOW) // 64 - group.unseen(past))
    assert group.blocks_at_once(700, WINDOW) == most
    assert most <= -(-(abs(reach) + back + 64) // 64)


def test_any_moves_are_as_with_all_blocks() -> None:
    torch.manual_seed(0)
    twins = Twins(2)
    twins.forward(500, 90)
    twins.decode(70)
    twins.forward(3, 300)
    for cache in twins.both:
        cache.forget(100)  # packed ones, too
    twins.decode(3)
    for cache in twins.both:
        cache.select([1, 0, 1])
    twins.forward(150, 1, 2)
    twins.decode(66)
    for cache in twins.both:
        cache.reset(1)
        cache.fork(0, 1)
    twins.forward(1, 200, 64)
    most = [g.group.blocks_at_once(1000, WINDOW) for g in twins.frees.groups]
    live = [[len(g.live(slot)) for slot in range(3)] for g in twins.frees.groups]
    assert all(max(row) <= n for row, n in zip(live[1:], most[1:], strict=True))
    assert live[0] == [packed // 64 for packed in twins.frees.packed]
    for cache in twins.both:
        for slot in range(3):
            cache.reset(slot)
    assert twins.blocks() == [0, 0, 0]


def test_memory_is_that_of_the_windows_however_long_a_sequence_is() -> None:
    twins = Twins(1)
    cache = twins.frees
    for _ in range(8):
        twins.forward(256)
    window = -(-(100 + FORGETTABLE + 64) // 64)
    assert twins.blocks()[0] == cache.packed[0] // 64 == 31
    assert twins.blocks()[2] <= window
    assert isinstance(cache, PackedCache)
    cache.reserve(4096)
    record = sum(FORMS[layer].nbytes * 2 for layer in (1, 3))
    assert cache.stores[2].nbytes <= 16 * record  # which it grows by, at least
    assert cache.bytes_for(1 << 20) - cache.bytes_for(1 << 19) < 1.1 * (8192 * 2 * FORMS[0].nbytes)


def test_what_is_gone_cannot_be_gone_back_to() -> None:
    twins = Twins(1)
    twins.forward(700)
    cache = twins.frees
    assert cache.can_forget([FORGETTABLE])
    assert not cache.can_forget([FORGETTABLE + 128])
    before = cache.lengths[0], [g.live(0) for g in cache.groups]
    with pytest.raises(ArgumentError, match="300 tokens cannot be forgotten"):
        cache.forget(300)
    assert (cache.lengths[0], [g.live(0) for g in cache.groups]) == before
    cache.forget(700)
    assert twins.blocks() == [0, 0, 0]


def test_forgetting_all_gives_up_a_pass_that_was_left_half_way() -> None:
    twins = Twins(1)
    twins.forward(400)
    cache = twins.frees
    left = cache.begin(Ragged.of([400], cache.lengths))
    left._closed = 1  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match="half-way"):
        cache.begin(Ragged.of([1], cache.lengths))
    cache.forget(400)
    assert twins.blocks() == [0, 0, 0]
    cache.begin(Ragged.of([9], cache.lengths)).abandon()


def test_a_pass_that_is_given_up_takes_nothing() -> None:
    twins = Twins(1)
    twins.forward(400)
    before = twins.blocks()
    cache = twins.frees
    started = cache.begin(Ragged.of([400], cache.lengths))
    assert twins.blocks() != before
    started.abandon()
    assert twins.blocks() == before
    twins.decode(2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted without a GPU alone")
@pytest.mark.parametrize("top", [1.0, 0.5])
def test_a_device_cache_frees_blocks_and_computes_the_same(top: float) -> None:
    torch.manual_seed(0)
    twins = DeviceTwins(2, top)
    twins.forward(330, 60)
    twins.decode(2)
    for cache in twins.both:
        cache.forget(3)
        cache.select([1, 0])
    twins.forward(70, 1)
    live = [sum(len(group.live(slot)) for slot in range(2)) for group in twins.frees.groups]
    assert twins.blocks() == live
    kept = sum(twins.frees.packed) // 64
    assert live[0] == kept == 7
    assert max(live[1:]) < kept
    pools = [group.store.pool.capacity for group in twins.frees.groups]  # type: ignore[attr-defined]
    assert max(pools[1:]) == 16  # which they grow by
    for cache in twins.both:
        cache.reset(0)
        cache.fork(1, 0)
    twins.decode(1)

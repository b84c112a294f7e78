"""The cache on a GPU: exact attention over what its blocks dequantize to.

Without a GPU everything is in CPU tensors, and Triton interprets the kernels.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from qoff.errors import ArgumentError, OpError
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.ragged import Ragged, Span
from qoff.kernels.layout.rotation import rotate_values
from qoff.kernels.reference import ops as reference_ops
from qoff.kernels.reference.kv_blocks import dequantize_blocks, quantize_blocks
from qoff.kvcache import DeviceCache, PlainCache
from qoff.kvcache.device.blocks import DeviceBlocks
from qoff.kvcache.device.rings import Rings
from qoff.kvcache.groups import one_group
from qoff.kvcache.store.pool import BlockPool
from tests.tolerances import PACKED_ATTENTION, assert_close
from tests.triton_module import triton_module

triton_ops = triton_module("ops")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = HeadShape(2, 1, 64, 0.125)
GROUPED = HeadShape(4, 2, 64, 0.125)
FORMS = (KVFormat(64), KVFormat(64, 8, 8))
KeyValue = tuple[Tensor, Tensor]  # [tokens, kv_heads, D]


class Told:
    """A cache, and beside it every key and value as the cache ought to know it."""

    def __init__(
        self, sequences: int, window: int = 64, shape: HeadShape = SHAPE, rotated: bool = False
    ) -> None:
        self.shape, self.window, self.rotated = shape, window, rotated
        self.cache = DeviceCache(
            [shape] * len(FORMS), FORMS, sequences, window=window, values_rotated=rotated,
            device=DEVICE,
        )  # fmt: skip
        none = torch.empty(0, shape.kv_heads, shape.head_dim).half()
        self.tokens: list[list[KeyValue]] = [[(none, none)] * len(FORMS) for _ in range(sequences)]
        self.packed = [0] * sequences

    def forward(self, counts: list[int], slots: list[int] | None = None) -> None:
        """A pass over random new tokens; every layer's output is checked."""
        slots = list(range(len(counts))) if slots is None else slots
        starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
        spans = tuple(
            Span(slot, start, end - start, len(self.tokens[slot][0][0]))
            for slot, (start, end) in zip(slots, pairwise(starts), strict=True)
        )
        ragged = Ragged(spans)
        step = self.cache.begin(ragged)
        for layer in range(len(FORMS)):
            qkv = torch.randn(ragged.tokens, self.shape.qkv_width).half()
            heads = [self.shape.heads, self.shape.kv_heads, self.shape.kv_heads]
            q, k, v = qkv.view(ragged.tokens, -1, 64).split(heads, dim=1)
            found = triton_ops.attention(qkv.to(DEVICE), self.shape, step.open(layer), ragged).cpu()
            step.close(layer)
            for span in spans:
                rows = slice(span.start, span.start + span.count)
                k_before, v_before = self.tokens[span.slot][layer]
                kv = torch.cat((k_before, k[rows])), torch.cat((v_before, v[rows]))
                self.tokens[span.slot][layer] = kv
                expected = self._expected(q[rows], layer, span.slot, span.past)
                assert_close(found[rows], expected, dtype=torch.float16)
        step.end()
        for slot in slots:
            left = len(self.tokens[slot][0][0]) - self.packed[slot] - self.window
            new = max(0, left) // 64
            for layer in range(len(FORMS)) if new else ():
                self._check_blocks(layer, slot, self.packed[slot] // 64)
            self.packed[slot] += 64 * new
        self.check()

    def check(self) -> None:
        assert self.cache.lengths == [len(t[0][0]) for t in self.tokens]
        assert self.cache.packed == self.packed

    def select(self, sequences: list[int]) -> None:
        self.cache.select(sequences)
        self.tokens = [list(self.tokens[i]) for i in sequences]
        self.packed = [self.packed[i] for i in sequences]
        self.check()

    def forget(self, count: int) -> None:
        for slot, layers in enumerate(self.tokens):
            left = max(0, len(layers[0][0]) - count)
            if left < self.packed[slot]:
                for layer in range(len(FORMS)):
                    layers[layer] = self._known(layer, slot)  # what comes back is dequantized
                self.packed[slot] = left // 64 * 64
            self.tokens[slot] = [(k[:left], v[:left]) for k, v in layers]
        self.cache.forget(count)
        self.check()

    def _known(self, layer: int, slot: int) -> KeyValue:
        """Keys and values, the packed ones as they come out of their blocks."""
        k, v = self.tokens[slot][layer]
        packed, form = self.packed[slot], FORMS[layer]
        old_k, old_v = dequantize_blocks(self._records(layer, slot)[: packed // 64], form)
        if self.rotated:
            old_v = rotate_values(old_v, back=True)
        known_k, known_v = (
            torch.cat((old.transpose(1, 2).flatten(0, 1).half(), x[packed:]))
            for old, x in ((old_k, k), (old_v, v))
        )
        return known_k, known_v

    def _records(self, layer: int, slot: int) -> Tensor:
        return self.cache.store.pool.layers[layer].cpu()[self.cache.blocks[slot]]

    def _check_blocks(self, layer: int, slot: int, first: int) -> None:
        """The blocks from `first` on hold the tokens they ought to, but for codes one off."""
        records, form = self._records(layer, slot)[first:], FORMS[layer]
        k, v = (
            x[64 * first : 64 * (first + len(records))].unflatten(0, (-1, 64)).transpose(1, 2)
            for x in self.tokens[slot][layer]
        )
        opening = (first + torch.arange(len(records)) == 0)[:, None]
        v = rotate_values(v) if self.rotated else v
        wanted = dequantize_blocks(quantize_blocks(k, v, form, opening), form)
        for found, known in zip(dequantize_blocks(records, form), wanted, strict=True):
            assert_close(found, known, tolerance=PACKED_ATTENTION)

    def _expected(self, q: Tensor, layer: int, slot: int, past: int) -> Tensor:
        group = self.shape.heads // self.shape.kv_heads
        k, v = (x.repeat_interleave(group, 1).double() for x in self._known(layer, slot))
        scores = torch.einsum("thd,khd->htk", q.double(), k) * self.shape.scale
        back = past + torch.arange(len(q))[:, None] - torch.arange(len(k))
        hidden = (back < 0) | (back >= (self.shape.window or 10**9))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("htk,khd->thd", weights, v).flatten(1)


@pytest.mark.parametrize("window", [1, 100])
def test_long_and_short_passes(window: int) -> None:
    told = Told(3, window)
    for counts in ([170, 1, 63], [1, 1, 1], [1, 70, 1]):
        told.forward(counts)


def test_rotated_values() -> None:
    slots = [2, 0, 1]
    told = Told(3, 16, rotated=True)
    for counts in ([170, 1, 63], [1, 1, 1], [1, 70, 1]):
        told.forward(counts, slots)
    told.forget(100)
    told.forward([1, 1, 1], slots)


def test_decoding_over_the_ends_of_blocks() -> None:
    told = Told(2, 37, GROUPED)
    told.forward([99, 163])
    for _ in range(3):
        told.forward([1, 1])
    assert told.packed == [64, 128]


def test_a_sliding_window() -> None:
    told = Told(2, 10, HeadShape(2, 1, 64, 0.125, window=50))
    for counts in ([150, 3], [1, 1], [20, 40], [1, 1]):
        told.forward(counts)


@pytest.mark.parametrize(
    ("slots", "count"), [([2, 0, 3, 1], 1), ([3, 0], 20), ([3, 0], 1)], ids=str
)
def test_any_slots_in_any_order(slots: list[int], count: int) -> None:
    told = Told(4, 0)
    told.forward([70, 1, 63, 33])
    told.forward([count] * len(slots), slots)
    told.forward([1, 1, 1, 1])


@pytest.mark.parametrize("seed", range(2))
def test_any_moves(seed: int) -> None:
    numbers = random.Random(seed)
    told = Told(2, numbers.choice([0, 40, 64]))
    told.forward([90, 5])
    for _ in range(6):
        slots = len(told.tokens)
        move, number = (
            numbers.choice(["decode", "append", "forget", "select"]),
            numbers.randint(1, 150),
        )
        if move == "decode":
            told.forward([1] * slots)
        elif move == "append":
            told.forward([numbers.randint(1, number) for _ in range(slots)])
        elif move == "forget":
            told.forget(number)
        else:
            told.select(numbers.choices(range(slots), k=numbers.randint(1, 3)))
    told.forward([1] * len(told.tokens))


def test_sequences_that_were_one_share_their_blocks() -> None:
    told = Told(1, 0)
    told.forward([64 * 3])
    assert told.cache.store.pool.used == 3
    told.select([0] * 3)
    assert told.cache.store.pool.used == 3
    told.forward([64] * 3)
    assert told.cache.store.pool.used == 6
    told.select([2])
    assert told.cache.store.pool.used == 4


def test_room_that_was_asked_for_does_not_grow() -> None:
    cache = DeviceCache([SHAPE], FORMS[:1], 2, window=64, capacity=640, device=DEVICE)
    before = cache.store.pool.layers[0].data_ptr()
    ragged = Ragged.of([640, 600], [0, 0])
    cache.begin(ragged)
    assert cache.store.pool.layers[0].data_ptr() == before
    assert cache.store.pool.used == 17


def test_a_steady_cache_says_more_blocks_than_there_are_only_at_decode() -> None:
    """Working space is counted for the blocks of a sequence; that of decode is bounded."""
    cache = DeviceCache([SHAPE], FORMS[:1], 1, window=0, steady=True, device=DEVICE)
    said = []
    for count in (200, 100, 1, 1):
        step = cache.begin(Ragged.of([count], cache.lengths))
        said.append(step.open(0).step.max_packed)
        step.close(0)
        step.end()
    assert said == [0, 192, 1024, 1024]


def test_as_many_sequences_in_another_order_are_replayed() -> None:
    """Beam search selects its sequences after each step."""
    with torch.inference_mode():  # in which a cache may be made
        cache = DeviceCache([SHAPE], FORMS[:1], 3, steady=True, capacity=64, device=DEVICE)
        for ring in cache.rings.all:
            ring.copy_(torch.arange(3)[:, None, None, None].expand_as(ring))
    keys, rows = [], []
    for kept in ([0, 1, 2], [2, 0, 0], [1, 1, 0], [0, 1]):
        cache.select(kept)
        step = cache.begin(Ragged.of([1] * len(kept), cache.lengths))
        keys.append(step.replay_key())
        rows.append([ring[:, 0, 0, 0].tolist() for ring in cache.rings.all])
        step.end()
    assert rows == [[order] * 2 for order in ([0, 1, 2], [2, 0, 0], [0, 0, 2], [0, 0])]
    assert keys[0] is not None
    assert keys[1:3] == [keys[0]] * 2
    assert keys[3] != keys[0]


@pytest.mark.parametrize(("tokens", "opened"), [(1, 0), (1, 1), (60, 1), (200, 0)])
def test_a_pass_that_failed_can_be_done_again(tokens: int, opened: int) -> None:
    """Nothing has been written over: attention sees each sequence as it was."""
    told = Told(1, 0)
    told.forward([63 if tokens == 1 else 4])
    ragged = Ragged.of([tokens], told.cache.lengths)
    step = told.cache.begin(ragged)
    for layer in range(opened):
        qkv = torch.randn(tokens, SHAPE.qkv_width).half().to(DEVICE)
        triton_ops.attention(qkv, SHAPE, step.open(layer), ragged)
        step.close(layer)
    told.forward([tokens])
    assert told.cache.store.pool.used == told.packed[0] // 64


def test_a_long_pass_that_failed_between_layers_is_the_end() -> None:
    told = Told(1, 0)
    told.forward([100])
    told.cache.begin(Ragged.of([300], [100])).open(0)
    with pytest.raises(ArgumentError, match="half-way"):
        told.cache.begin(Ragged.of([1], [100]))


def test_other_uses_are_refused() -> None:
    told = Told(1, 0)
    with pytest.raises(ArgumentError, match="does not continue"):
        told.cache.begin(Ragged.of([1], [7]))
    with pytest.raises(ArgumentError, match="does not continue"):
        told.cache.begin(Ragged.of([1, 1], [0, 0]))
    ragged = Ragged.of([2], [0])
    opened = told.cache.begin(ragged).open(0)
    wide = SHAPE.qkv_width
    for qkv, complaint in (
        (torch.zeros(2, wide), "qkv is float16"),
        (torch.zeros(2, wide - 1).half(), str(wide)),
        (torch.zeros(3, wide).half(), "opened for 2"),
        (torch.zeros(2, wide).bfloat16(), "qkv is float16"),
    ):
        with pytest.raises(OpError, match=complaint):
            triton_ops.attention(qkv.to(DEVICE), SHAPE, opened, ragged)


@pytest.mark.parametrize(("heads", "last"), [((4, 2), False), ((4, 2), True), ((1, 1), False)])
def test_the_reference_is_met_with_norms_and_rotation(heads: tuple[int, int], last: bool) -> None:
    """One attention op, Qwen3's norms included, against `reference_ops` on an unpacked cache."""
    shape = HeadShape(*heads, 64, 0.125, norm_eps=1e-6, norm_last=last)
    cache = DeviceCache([shape], FORMS[:1], 2, device=DEVICE)
    plain = PlainCache([shape], 2)
    norms = {"q_norm": torch.rand(64) + 0.5, "k_norm": torch.rand(64) + 0.5}
    angles = torch.randn(64, 32)
    rotary = angles.cos(), angles.sin()
    for counts in ([5, 9], [1, 1], [3, 1]):
        ragged = Ragged.of(counts, cache.lengths)
        qkv = torch.randn(ragged.tokens, shape.qkv_width).half()
        outs = []
        for ops, memory, x in (
            (triton_ops, cache, qkv.to(DEVICE)),
            (reference_ops, plain, qkv.float()),
        ):
            step = memory.begin(ragged)
            tables = [table.to(x.device) for table in rotary]
            vectors = {name: norm.to(x.device) for name, norm in norms.items()}
            found = ops.attention(x, shape, step.open(0), ragged, rotary=tables, **vectors)
            outs.append(found.cpu().float())
            step.end()
        assert_close(outs[0], outs[1], dtype=torch.float16)


def test_rings_beside_shared_blocks_take_what_they_hold() -> None:
    """torch's allocator rounds up what it is asked for: of each layer that would be MiBs."""
    shapes = [SHAPE] * len(FORMS)
    pool = BlockPool.growing("device", FORMS, [1] * len(FORMS), 0, DEVICE)
    stores = {one_group(shapes)[0]: DeviceBlocks(FORMS, pool)}
    cache = DeviceCache(shapes, FORMS, 3, window=16, device=DEVICE, stores=stores)
    memory = {x.untyped_storage() for x in cache.rings.all}
    sizes = {one.data_ptr(): one.nbytes() for one in memory}
    assert [*sizes.values()] == [Rings.bytes_for(shapes, 3, 16, torch.float16)]

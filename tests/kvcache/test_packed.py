"""The packed cache against exact attention over what its blocks dequantize to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.rotation import rotate_values
from qoff.kernels.reference import ops as reference_ops
from qoff.kernels.reference.kv_blocks import dequantize_blocks, quantize_blocks
from qoff.kvcache import KVQuant, PackedCache
from qoff.kvcache.host.recent import RecentWorkspace
from qoff.kvcache.store.base import GrowingBlocks
from tests.tolerances import PACKED_ATTENTION, assert_close

SHAPE = HeadShape(4, 2, 64, 0.125)
FORMS = (KVFormat(64), KVFormat(64, k_bits=8))
Tokens = list[tuple[Tensor, Tensor]]  # of each layer: k and v [tokens, kv_heads, D]


class Told:
    """A packed cache, and beside it every key and value as the cache ought to know it."""

    def __init__(
        self,
        sequences: int,
        window: int,
        attention: Callable[..., Tensor],
        forms: Sequence[KVFormat] = FORMS,
        rotated: bool = False,
    ) -> None:
        self.cache = PackedCache(
            [SHAPE] * len(forms), forms, sequences, window=window, values_rotated=rotated
        )
        self.rotated = rotated
        self.window = window
        self.forms = forms
        self._attention = attention
        none = torch.empty(0, SHAPE.kv_heads, SHAPE.head_dim)
        self.tokens: list[Tokens] = [[(none, none)] * len(self.forms) for _ in range(sequences)]
        self.packed = [0] * sequences
        self.kept = [0] * sequences  # so many tokens are told as they come out of their blocks

    def forward(self, counts: list[int]) -> None:
        """A pass over random new tokens; every layer's output is checked."""
        ragged = Ragged.of(counts, [len(t[0][0]) for t in self.tokens])
        step = self.cache.begin(ragged)
        for layer in range(len(self.forms)):
            qkv = torch.randn(ragged.tokens, SHAPE.qkv_width)
            q, k, v = qkv.view(ragged.tokens, -1, 64).split([4, 2, 2], dim=1)
            found = self._attention(qkv.clone(), SHAPE, step.open(layer), ragged)
            step.close(layer)
            for span in ragged.spans:
                rows = slice(span.start, span.start + span.count)
                before = self.tokens[span.slot][layer]
                kv = torch.cat((before[0], k[rows])), torch.cat((before[1], v[rows]))
                self.tokens[span.slot][layer] = kv
                expected = self._expected(q[rows], layer, span.slot, span.past)
                assert_close(found[rows], expected, tolerance=PACKED_ATTENTION)
        step.end()
        lengths = [len(t[0][0]) for t in self.tokens]
        self.packed = [
            max(packed, packed + max(0, n - packed - self.window) // 64 * 64)
            for n, packed in zip(lengths, self.packed, strict=True)
        ]
        self.check()

    def check(self) -> None:
        assert self.cache.lengths == [len(t[0][0]) for t in self.tokens]
        assert self.cache.packed == self.packed

    def select(self, sequences: list[int]) -> None:
        self.cache.select(sequences)
        self.tokens = [list(self.tokens[i]) for i in sequences]
        self.packed = [self.packed[i] for i in sequences]
        self.kept = [self.kept[i] for i in sequences]
        self.check()

    def forget(self, count: int) -> None:
        self.cache.forget(count)
        for slot, layers in enumerate(self.tokens):
            left = max(0, len(layers[0][0]) - count)
            if left < self.packed[slot]:
                for layer in range(len(self.forms)):
                    layers[layer] = self._known(layer, slot)  # what comes back is dequantized
                self.packed[slot] = self.kept[slot] = left // 64 * 64
            self.tokens[slot] = [(k[:left], v[:left]) for k, v in layers]
        self.check()

    def _known(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        """Keys and values, the packed ones as they come out of their blocks."""
        k, v = self.tokens[slot][layer]
        packed, kept = self.packed[slot], self.kept[slot]
        if packed == kept:
            return k, v
        rows = k, rotate_values(v) if self.rotated else v
        blocks = (x[kept:packed].unflatten(0, (-1, 64)).transpose(1, 2) for x in rows)
        form, opening = self.forms[layer], (torch.arange(kept, packed, 64) == 0)[:, None]
        keys, values = dequantize_blocks(quantize_blocks(*blocks, form, opening), form)
        known = keys, rotate_values(values, back=True) if self.rotated else values
        return tuple(  # type: ignore[return-value]
            torch.cat((x[:kept], old.transpose(1, 2).flatten(0, 1), x[packed:]))
            for old, x in zip(known, (k, v), strict=True)
        )

    def _expected(self, q: Tensor, layer: int, slot: int, past: int) -> Tensor:
        k, v = (x.repeat_interleave(2, 1).double() for x in self._known(layer, slot))
        scores = torch.einsum("thd,khd->htk", q.double(), k) * SHAPE.scale
        later = torch.arange(len(k)) > past + torch.arange(len(q))[:, None]
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return torch.einsum("htk,khd->thd", weights, v).flatten(1).float()


ATTENTION = {"cpu": cpu.attention, "reference": reference_ops.attention}


def test_a_pass_takes_room_for_its_widest_layer_before_any_job_knows_where_it_is() -> None:
    shapes = [HeadShape(4, heads, 64, 0.125) for heads in (1, 2)]
    cache = PackedCache(shapes, FORMS, 1, workspace=RecentWorkspace())
    for count in (150, 250):  # more than there is room for between passes
        step = cache.begin(Ragged.of([count], [0]))
        narrow, wide = (step.open(layer).values.untyped_storage() for layer in range(2))
        assert narrow.data_ptr() == wide.data_ptr()


def test_a_store_may_pack_blocks_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one on disk does, whose blocks may lie the other way round."""
    told = Told(2, 16, cpu.attention)
    store = told.cache.stores[0]
    packed = store.fill

    def backwards(layer: int, blocks: Sequence[int], fill: Callable[..., None]) -> None:
        last = len(blocks) - 1
        packed(layer, blocks[::-1], lambda places, *to: fill([last - i for i in places], *to))

    monkeypatch.setattr(store, "fill", backwards)
    for counts in ([300, 90], [1, 1]):
        told.forward(counts)


@pytest.mark.parametrize(
    ("window", "attention"), [(0, "reference"), (0, "cpu"), (1, "cpu"), (64, "cpu"), (100, "cpu")]
)
def test_long_and_short_passes(window: int, attention: str) -> None:
    told = Told(3, window, ATTENTION[attention])
    for counts in ([300, 1, 63], [1, 1, 1], [1, 130, 1], [200, 1, 2], [1, 1, 1]):
        told.forward(counts)
    for _ in range(20):  # over the end of a block of one of them
        told.forward([1, 1, 1])


@pytest.mark.parametrize("attention", ATTENTION.values(), ids=ATTENTION)
def test_rotated_values(attention: Callable[..., Tensor]) -> None:
    told = Told(2, 16, attention, rotated=True)
    for counts in ([300, 1], [1, 1], [1, 130], [70, 1]):
        told.forward(counts)
    told.forget(60)
    told.forward([20, 20])


@settings(max_examples=15)
@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from(["decode", "append", "append", "forget", "select"]),
            st.integers(1, 150),
        ),
        min_size=3,
        max_size=10,
    ),
    window=st.sampled_from([0, 40, 64]),
)
def test_any_moves(moves: list[tuple[str, int]], window: int) -> None:
    numbers = random.Random(0)
    told = Told(2, window, cpu.attention)
    told.forward([90, 5])
    for move, number in moves:
        slots = len(told.tokens)
        if move == "decode":
            told.forward([1] * slots)
        elif move == "append":
            told.forward([numbers.randint(1, number) for _ in range(slots)])
        elif move == "forget":
            told.forget(number)
        else:
            told.select(numbers.choices(range(slots), k=numbers.randint(1, 3)))


def used(cache: PackedCache) -> int:
    assert isinstance(cache.stores[0], GrowingBlocks)
    return cache.stores[0].pool.used


def test_sequences_that_were_one_share_their_blocks() -> None:
    told = Told(1, 0, cpu.attention)
    told.forward([64 * 10])
    assert used(told.cache) == 10
    told.select([0] * 5)
    assert used(told.cache) == 10
    told.forward([64] * 5)
    assert used(told.cache) == 15
    told.select([3])
    assert used(told.cache) == 11


def test_costs_what_its_bits_say() -> None:
    told = Told(1, 64, cpu.attention)
    told.forward([64 * 21])
    recent = 2 * 2 * 128 * 2 * 64 * 4  # layers, K and V, tokens, heads, channels, float32
    blocks = 2 * 20 * (KVFormat(64).nbytes + KVFormat(64, k_bits=8).nbytes)
    assert blocks + recent <= told.cache.nbytes <= 1.6 * blocks + recent


@pytest.mark.parametrize(("tokens", "closed"), [(1, 0), (1, 1), (200, 0)])
def test_a_pass_that_failed_can_be_done_again(tokens: int, closed: int) -> None:
    """Nothing has been written over: attention sees each sequence as it was."""
    told = Told(1, 0, cpu.attention)
    told.forward([63])
    ragged = Ragged.of([tokens], [63])
    step = told.cache.begin(ragged)
    for layer in range(closed):
        step.open(layer)
        step.close(layer)
    told.forward([tokens])
    assert used(told.cache) == told.packed[0] // 64


def test_a_long_pass_that_failed_between_layers_is_the_end() -> None:
    told = Told(1, 0, cpu.attention)
    told.forward([100])
    step = told.cache.begin(Ragged.of([300], [100]))
    step.open(0)
    step.close(0)
    with pytest.raises(ArgumentError, match="half-way"):
        told.cache.begin(Ragged.of([1], [100]))


def test_other_uses_are_refused() -> None:
    with pytest.raises(ArgumentError, match="window of -1"):
        KVQuant(window=-1)
    with pytest.raises(ArgumentError, match="not 4 and 5"):
        KVQuant(v_bits=5)

"""Sparse decode attention: the CPU's choice of blocks and its result, against the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.cpu.jit.pool import Pool
from qoff.kernels.cpu.packed_attention.attention import packed_attention
from qoff.kernels.cpu.packed_attention.operands import SelectedBlocks
from qoff.kernels.cpu.packed_attention.select import select_blocks
from qoff.kernels.layout.heads import HeadShape, cache_shapes
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.layer_cache import BlockTable, LayerCache, PackedTokens, kept_blocks
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.reference import ops as reference_ops
from qoff.kernels.reference.kv_blocks import quantize_blocks
from qoff.kernels.reference.select_blocks import block_bounds
from qoff.kernels.reference.select_blocks import select_blocks as reference_select
from tests.tolerances import PACKED_ATTENTION, assert_close

NAN_BYTE = 0xFF  # float16 of two such bytes is NaN


@dataclass(frozen=True)
class Case:
    """One layer: sequences with packed blocks in some parts, and unpacked tokens."""

    shape: HeadShape
    form: KVFormat
    qkv: Tensor
    keys: Tensor
    values: Tensor
    parts: tuple[PackedTokens, ...]
    ragged: Ragged

    def cache(self, top: float) -> LayerCache:
        packed = torch.zeros(len(self.ragged.spans), dtype=torch.int64)
        for part in self.parts:
            packed += torch.tensor(part.table.counts)
        places = self.ragged.positions - packed[self.ragged.slots]
        tensors = self.keys.clone(), self.values.clone()
        return LayerCache(*tensors, places, int(places.max()), self.parts, top)

    def attend(self, top: float) -> Tensor:
        out = torch.full((self.ragged.tokens, self.shape.heads * self.shape.head_dim), torch.nan)
        return cpu.attention(self.qkv.clone(), self.shape, self.cache(top), self.ragged, out=out)

    def expected(self, top: float) -> Tensor:
        qkv = self.qkv.double()
        return reference_ops.attention(qkv, self.shape, self.cache(top), self.ragged).float()

    def select(self, top: float, threads: Pool | None = None) -> tuple[SelectedBlocks, ...]:
        return select_blocks(
            self.qkv, self.shape.heads, self.parts, top, window=self.shape.reach, threads=threads
        )

    def lists(self, top: float) -> list[list[list[list[int]]]]:
        """SelectedBlocks blocks by part, sequence, KV head."""
        return [
            [
                [heads[: int(n)].tolist() for heads, n in zip(*row, strict=True)]
                for row in zip(chosen.blocks, chosen.counts, strict=True)
            ]
            for chosen in self.select(top)
        ]

    def expected_lists(self, top: float) -> list[list[list[list[int]]]]:
        found: list[list[list[list[int]]]] = [[] for _ in self.parts]
        for span in self.ragged.spans:
            query = self.qkv[span.start].double().unflatten(0, (-1, self.shape.head_dim))
            chosen = reference_select(
                query[: self.shape.heads], self.parts, span, top, self.shape.reach
            )
            for part, mask in zip(found, chosen, strict=True):
                part.append([head.nonzero()[:, 0].tolist() for head in mask])
        return found


def make(
    form: KVFormat,
    heads: int,
    kv_heads: int,
    blocks: tuple[tuple[int, ...], ...],
    *,
    window: int = 0,
    recent: int = 7,
    sinks: int = 0,
    counts: tuple[int, ...] | None = None,
) -> Case:
    """blocks: of each sequence, in each part. Blocks in no table hold NaN."""
    options = {"window": abs(window) or None, "chunked": window < 0}
    shape = HeadShape(heads, kv_heads, form.head_dim, form.head_dim**-0.5, **options)
    sequences, parts = len(blocks), len(blocks[0])
    unpacked = recent + sinks
    pasts = [64 * sum(row) + unpacked for row in blocks]
    ragged = Ragged.of(counts or [1] * sequences, pasts)
    packed, firsts = [], [sinks] * sequences
    for p in range(parts):
        used = [row[p] for row in blocks]
        total = sum(used) + 1
        k, v = torch.randn(2, total, kv_heads, 64, form.head_dim)
        k += torch.randn(total, kv_heads, 1, form.head_dim)  # blocks differ as a whole
        pool = quantize_blocks(k, v, form)
        order = torch.randperm(total).int()
        pool[order[-1]] = NAN_BYTE
        table = torch.full((sequences, max(1, *used)), -1, dtype=torch.int32)
        start = 0
        for s, count in enumerate(used):
            table[s, :count] = order[start : start + count]
            start += count
        tokens = [64 * count for count in used]
        packed.append(PackedTokens(form, pool, BlockTable(table, tokens, ragged, tuple(firsts))))
        firsts = [first + count for first, count in zip(firsts, tokens, strict=True)]
    capacity = -(-(unpacked + max(counts or (1,))) // 16) * 16
    keys, values = (
        torch.full(size, torch.nan) for size in cache_shapes(sequences, shape, capacity)
    )
    vectors = -(-unpacked // 16)
    keys[:, :, :vectors] = torch.randn_like(keys[:, :, :vectors])
    values[:, :, :unpacked] = torch.randn_like(values[:, :, :unpacked])
    qkv = torch.randn(ragged.tokens, shape.qkv_width)
    return Case(shape, form, qkv, keys, values, tuple(packed), ragged)


def check(case: Case, top: float) -> None:
    assert case.lists(top) == case.expected_lists(top)
    assert_close(case.attend(top), case.expected(top), tolerance=PACKED_ATTENTION)


@pytest.mark.parametrize("top", [0.01, 0.25, 0.9])
@pytest.mark.parametrize("k_bits", [4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_equals_the_reference(group: int, head_dim: int, k_bits: int, top: float) -> None:
    form = KVFormat(head_dim, k_bits)
    check(make(form, 2 * group, 2, ((40, 3), (1, 0), (0, 0), (0, 17))), top)


@pytest.mark.parametrize("group", [17, 40])
def test_more_query_heads_than_fit_one_call(group: int) -> None:
    check(make(KVFormat(64), group, 1, ((20,),)), 0.2)


@pytest.mark.parametrize("head_dim", [96, 256])
def test_the_other_head_sizes(head_dim: int) -> None:
    check(make(KVFormat(head_dim), 2, 1, ((5, 30, 0, 4), (1, 1, 1, 1))), 0.3)


@pytest.mark.parametrize("top", [0.1, 0.5])
@pytest.mark.parametrize("window", [1, 60, 64, 100, 300, 1500, 9999, -60, -64, -700, -1100, -9999])
def test_blocks_outside_the_window_are_no_candidates(window: int, top: float) -> None:
    """Below 0: windows begin at multiples of so many tokens."""
    check(make(KVFormat(64), 4, 2, ((11, 9), (17, 0), (2, 1)), window=window), top)


def test_unpacked_tokens_before_the_blocks_are_always_attended() -> None:
    case = make(KVFormat(64), 4, 2, ((9, 12), (3, 1)), sinks=32)
    check(case, 0.2)
    assert [part.table.first for part in case.parts] == [(32, 32), (608, 224)]


def test_the_choice_does_not_depend_on_placement() -> None:
    whole = make(KVFormat(64), 6, 2, ((40,), (7,)))
    (part,) = whole.parts
    for cuts in ([10, 20], [40, 0], [0, 3], [33, 39]):
        pieces, start = [], [0, 0]
        for cut in [*cuts, 40]:
            stop = [max(old, min(cut, n)) for old, n in zip(start, (40, 7), strict=True)]
            table = torch.full((2, 40), -1, dtype=torch.int32)
            for s in range(2):
                table[s, : stop[s] - start[s]] = part.table.blocks[s, start[s] : stop[s]]
            counts = [64 * (b - a) for a, b in zip(start, stop, strict=True)]
            firsts = tuple(64 * a for a in start)
            pieces.append(replace(part, table=BlockTable(table, counts, whole.ragged, firsts)))
            start = stop
        split = replace(whole, parts=tuple(pieces))
        joined = [
            [
                [
                    block + piece.table.first[s] // BLOCK_TOKENS
                    for piece, rows in zip(pieces, split.lists(0.3), strict=True)
                    for block in rows[s][head]
                ]
                for head in range(2)
            ]
            for s in range(2)
        ]
        assert [joined] == whole.lists(0.3)
        assert_close(split.attend(0.3), whole.attend(0.3), tolerance=1e-3)


def test_all_blocks_are_dense_attention_bit_for_bit() -> None:
    for blocks in (((40, 3), (1, 0)), ((1,),)):
        case = make(KVFormat(128), 8, 2, blocks)
        assert torch.equal(case.attend(0.999), case.attend(1.0))
        plain = LayerCache(*(getattr(case.cache(1.0), n) for n in ("keys", "values", "places")),
                           case.cache(1.0).longest, case.parts)  # fmt: skip
        dense = cpu.attention(case.qkv.clone(), case.shape, plain, case.ragged)
        assert torch.equal(dense, case.attend(1.0))


def test_prefill_is_dense() -> None:
    case = make(KVFormat(64), 4, 2, ((12,), (5,)), counts=(3, 1))
    assert torch.equal(case.attend(0.1), case.attend(1.0))
    assert torch.equal(case.expected(0.1), case.expected(1.0))


def test_what_is_not_chosen_is_not_attended() -> None:
    case = make(KVFormat(64), 6, 2, ((30, 3), (9, 2)))
    out, lists = case.attend(0.2), case.lists(0.2)
    for part, rows in zip(case.parts, lists, strict=True):
        codes, _, _, values, v_scale, v_minimum = case.form.views(part.pool)
        for s, heads in enumerate(rows):
            for head, chosen in enumerate(heads):
                used = part.table.blocks[s, : part.table.counts[s] // 64].tolist()
                for place in set(range(len(used))) - set(chosen):
                    for view in (codes, values, v_scale, v_minimum):
                        view[used[place], head] = torch.nan if view.is_floating_point() else 255
    assert torch.equal(case.attend(0.2), out)


def test_blocks_of_a_pool_may_lie_apart() -> None:
    case = make(KVFormat(80), 6, 2, ((30, 3), (9, 2)))
    apart = []
    for part in case.parts:
        wide = torch.full((len(part.pool), 5, case.form.nbytes), NAN_BYTE, dtype=torch.uint8)
        wide[:, 1:3] = part.pool
        apart.append(replace(part, pool=wide[:, 1:3]))
    spread = replace(case, parts=tuple(apart))
    assert spread.lists(0.2) == case.lists(0.2)
    assert torch.equal(spread.attend(0.2), case.attend(0.2))


def test_the_first_block_of_a_sequence_is_kept_beside_another() -> None:
    case = make(KVFormat(64), 4, 2, ((0, 12, 8), (3, 0, 6)))
    case.qkv[:, : 4 * 64] = 1.0
    for part in case.parts:
        case.form.views(part.pool)[2][part.table.blocks[:, 0].long()] = -9.0
    check(case, 0.2)
    lists = case.lists(0.2)
    assert all(head[0] == 0 for part, s in ((1, 0), (0, 1)) for head in lists[part][s])
    assert all(0 not in head for part, s in ((2, 0), (2, 1)) for head in lists[part][s])
    assert all(0 not in head for head in case.lists(0.01)[1][0])  # a single one is the best


def test_of_equal_blocks_the_first_are_chosen() -> None:
    case = make(KVFormat(64), 2, 2, ((6, 5),))
    pools = [part.pool[:1].expand_as(part.pool).contiguous() for part in case.parts]
    same = replace(
        case,
        parts=tuple(replace(part, pool=pools[0][: len(part.pool)]) for part in case.parts),
    )
    pools[0][:] = quantize_blocks(*torch.randn(2, 1, 2, 64, 64), case.form)
    assert same.lists(0.3) == [[[[0, 1, 2, 3]] * 2], [[[]] * 2]]
    assert same.lists(0.7) == [[[list(range(6))] * 2], [[[0, 1]] * 2]]


@pytest.mark.parametrize("top", [0.07, 0.1, 0.3, 1 / 3, 0.5, 0.9])
def test_how_many_are_kept(top: float) -> None:
    sizes = (*range(1, 34), 100, 130)
    case = make(KVFormat(64), 1, 1, tuple((n,) for n in sizes))
    counts = case.select(top)[0].counts[:, 0].tolist()
    assert counts == [kept_blocks(top, n) for n in sizes]


def test_kept_blocks_is_rounded_up() -> None:
    assert [kept_blocks(0.1, n) for n in (0, 1, 10, 11, 30, 31)] == [1, 1, 1, 2, 3, 4]
    assert kept_blocks(0.07, 100) == 7
    assert kept_blocks(1.0, 100) == 100


def test_threads_change_nothing() -> None:
    case = make(KVFormat(128), 8, 2, ((200, 30), (1, 0), (0, 77)))
    found = []
    for count in (1, 2, 3):
        pool = Pool(count)
        found.append(case.select(0.15, pool))
        pool.close()
    for chosen in found[1:]:
        for part, other in zip(found[0], chosen, strict=True):
            assert torch.equal(part.counts, other.counts)
            listed = torch.arange(part.blocks.shape[-1]) < part.counts[..., None]
            assert torch.equal(part.blocks[listed], other.blocks[listed])


def test_the_bound_is_one() -> None:
    form = KVFormat(64)
    k = torch.randn(5, 1, 64, 64)
    query = torch.randn(1, 64)
    scores = (k @ query.T)[..., 0].amax(-1).T
    bounds = block_bounds(query, quantize_blocks(k, k, form), form)
    assert (scores <= bounds + 0.1).all()  # the minima and scales are rounded to float16


@pytest.mark.parametrize("top", [0.0, -0.1, 1.5, float("nan")])
def test_other_fractions_are_refused(top: float) -> None:
    case = make(KVFormat(64), 2, 2, ((2,),))
    with pytest.raises(OpError, match="packed blocks, is in"):
        case.cache(top)
    with pytest.raises(OpError, match="fraction of the blocks is in"):
        case.select(top)


def test_other_operands_are_refused() -> None:
    case = make(KVFormat(64), 2, 2, ((2, 2),))
    (first, second), (chosen, _) = case.parts, case.select(0.5)
    with pytest.raises(OpError, match="one new token a sequence"):
        make(KVFormat(64), 2, 2, ((2,),), counts=(2,)).select(0.5)
    with pytest.raises(OpError, match="the parts differ"):
        replace(case, parts=(first, replace(second, pool=second.pool[:, :1].contiguous()))).select(
            0.5
        )
    for wrong, message in (
        (replace(chosen, blocks=chosen.blocks.long()), "chosen blocks must be contiguous int32"),
        (replace(chosen, counts=chosen.counts[:, :1]), "their counts must be contiguous int32"),
    ):
        with pytest.raises(OpError, match=message):
            packed_attention(case.qkv, 2, first, scale=1.0, chosen=wrong)

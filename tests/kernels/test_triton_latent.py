"""Triton's ops of latent attention in the interpreter against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.device_cache import DeviceLayerCache, PassTables
from qoff.kernels.layout.heads import HeadShape, QueryScale
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.latent import LatentShape
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.scales import COMPACT
from qoff.kernels.reference import attention as reference_attention
from qoff.kernels.reference import kv_blocks, latent
from tests.kernels.attention_operands import ints, random_cache, without_oldest
from tests.kernels.test_latent import heads_of, norm_of, tables, weight_of
from tests.tolerances import RELATIVE_RMS, assert_close
from tests.triton_module import triton_module

triton_ops = triton_module("ops")
products = triton_module("latent.products")
attention = triton_module("latent.attention")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton interprets kernels only where there is no GPU"
)
SMALL = LatentShape(3, 64, 16, 32, 48)
FORM = KVFormat(96, latent=64)
HALF = torch.float16


@pytest.mark.parametrize(
    ("shape", "bits", "scales", "dtype", "tokens"),
    [
        (SMALL, 4, COMPACT, torch.float16, 1),
        (SMALL, 4, COMPACT, torch.float16, 70),
        (LatentShape(2, 96, 80, 16, 80), 8, torch.float16, torch.bfloat16, 20),
        (LatentShape(1, 512, 128, 64, 128), 4, torch.float32, torch.float16, 2),
    ],
    ids=str,
)
def test_products_with_each_heads_matrices(
    shape: LatentShape, bits: int, scales: torch.dtype, dtype: torch.dtype, tokens: int
) -> None:
    weight = weight_of(shape, bits, scales).to_packing("split32")
    norm, queries = norm_of(shape), shape.heads * shape.query_dim
    both = torch.randn(tokens, queries + shape.head_dim).to(dtype)
    q, kv = both.split([queries, shape.head_dim], 1)
    expected = latent.absorb(q.float(), kv.float(), weight, norm, shape)
    found = triton_ops.absorb(q, kv, weight, norm, shape)
    assert_close(found.float(), expected, tolerance=2 * RELATIVE_RMS[dtype])
    x = torch.randn(tokens, shape.heads * shape.latent).to(dtype)
    expected = latent.expand(x.float(), weight, shape)
    found = triton_ops.expand(x, weight, shape)
    assert_close(found.float(), expected, tolerance=2 * RELATIVE_RMS[dtype])


def test_wrong_operands_of_products_are_refused() -> None:
    weight, norm = weight_of(SMALL), norm_of(SMALL)
    q, kv = torch.zeros(2, 3 * 48, dtype=HALF), torch.zeros(2, 96, dtype=HALF)
    with pytest.raises(OpError, match="packing split32"):
        triton_ops.absorb(q, kv, weight, norm, SMALL)
    weight = weight.to_packing("split32")
    with pytest.raises(OpError, match="kv is"):
        triton_ops.absorb(q, kv[:, 1:], weight, norm, SMALL)
    with pytest.raises(OpError, match="x is"):
        triton_ops.expand(q, weight, SMALL)


def _config(rows: int = 16, run: int = 1):
    """Runs of this many blocks, however few there are."""
    return attention.LatentConfig(rows, num_warps=1, programs=10**4, min_blocks=run)


def config_of(split: bool):
    """Blocks in runs of two, or all in one program with what is not packed."""
    return _config(run=2) if split else replace(_config(), programs=0)


def _shape(form: KVFormat, heads: int, **options) -> HeadShape:
    return HeadShape(heads, 1, form.head_dim, 0.1, latent=form.latent, **options)


@pytest.mark.parametrize(
    ("form", "dtype", "heads", "split"),
    [
        (FORM, torch.float16, 3, False),
        (KVFormat(96, 8, 8, latent=64), torch.bfloat16, 20, True),
        (KVFormat(64, 3, 3, latent=32), torch.float16, 5, False),
        (KVFormat(576, latent=512), torch.float16, 2, True),
    ],
    ids=str,
)
def test_decode_attends_to_blocks_and_the_ring(
    form: KVFormat, dtype: torch.dtype, heads: int, split: bool
) -> None:
    cache = random_cache(form, 1, [(2, 5), (1, 64), (0, 1), (0, 0), (3, 40)], dtype)
    step = replace(cache.step, row_start=ints([0, 1, 2, 3, 3, 4]))
    step = replace(step, positions=step.positions[:4])
    cache = replace(cache, step=step)
    both = torch.randn(4, heads + 1, form.head_dim).to(dtype)
    q, k = both.split([heads, 1], 1)
    out, lse = attention.latent_attention(q, k, cache, _shape(form, heads), config_of(split))
    there = [0, 1, 2, 4]
    queries = torch.zeros(5, heads, form.head_dim, dtype=torch.float64)
    queries[there] = q.double()
    expected = reference_attention.decode_attention(queries, cache, _shape(form, heads))
    assert_close(out, expected[0][there], dtype=dtype)
    assert_close(lse, expected[1][there], dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "split"), [(torch.float16, False), (torch.bfloat16, True)], ids=str
)
def test_prefill_attends_to_blocks_the_ring_and_itself(dtype: torch.dtype, split: bool) -> None:
    heads, rows = 3, [70, 1, 0, 33]
    cache = random_cache(FORM, 1, [(2, 5), (0, 0), (1, 3), (1, 64)], dtype, rows=rows)
    both = torch.randn(sum(rows), heads + 1, FORM.head_dim).to(dtype)
    q, k = both.split([heads, 1], 1)
    config = _config(32) if split else replace(_config(), programs=0)
    out, lse = attention.latent_attention(q, k, cache, _shape(FORM, heads), config)
    v = kv_blocks.latent_values(k, FORM.latent)
    expected = reference_attention.prefill_attention(
        q.double(), k.double(), v.double(), cache, _shape(FORM, heads)
    )
    assert_close(out, expected[0], dtype=dtype)
    assert_close(lse, expected[1], dtype=dtype)


def test_blocks_that_are_elsewhere_are_not_read() -> None:
    cache = random_cache(FORM, 1, [(4, 10), (3, 64), (1, 0), (2, 5)])
    holes, rest = without_oldest(cache, [2, 0, 1, 2])
    q, k = torch.randn(4, 4, FORM.head_dim, dtype=HALF).split([3, 1], 1)
    out, lse = attention.latent_attention(q, k, holes, _shape(FORM, 3), _config())
    expected = reference_attention.decode_attention(q.double(), rest, _shape(FORM, 3))
    assert_close(out, expected[0], dtype=HALF)
    assert torch.equal(lse[2], torch.full_like(lse[2], -torch.inf))


def test_parts_fill_the_processors() -> None:
    config = attention.LatentConfig(64, num_warps=8, programs=1, min_blocks=4)
    assert attention.cut(2, 1000, 132, config) == (1 + 63, 16)
    assert attention.cut(2, 10, 132, config) == (1 + 3, 4)
    assert attention.cut(132, 1000, 132, config) == (1, 1000)
    assert attention.cut(1, 0, 132, config) == (1, 0)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_appends_as_the_reference(bits: int) -> None:
    """Through the op: prompts that complete blocks, then tokens that do, then those that do not."""
    form, shape = (
        KVFormat(96, bits, bits, latent=64),
        replace(heads_of(SMALL), query_scale=QueryScale(0.1, 7)),
    )
    rotary, past, packed = tables(SMALL), [0, 0], [0, 0]
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    cache = _empty(form, table, 128)
    for counts, after in (([70, 63], [64, 0]), ([1, 1], [64, 64]), ([1, 1], [64, 64])):
        step = _pass(past, counts, packed, after, table)
        mine = replace(cache, step=step)
        theirs = replace(mine, pool=mine.pool.clone(), recent_k=mine.recent_k.clone())
        qkv = torch.randn(sum(counts), shape.qkv_width, dtype=HALF)
        vectors = qkv.unflatten(1, (-1, shape.head_dim))
        q, k = (
            kv_blocks.rope_keys(x, step.positions, 64, *rotary)
            for x in vectors.split([shape.heads, 1], 1)
        )
        assert shape.query_scale is not None
        q = q * shape.query_scale.of(step.positions)[:, None, None].half()
        v = kv_blocks.latent_values(k, 64)
        expected = reference_attention.prefill_attention(q.double(), k, v, theirs, shape)[0]
        kv_blocks.append(k, k[..., :0], theirs)
        ragged = Ragged.of(counts, past)
        found = triton_ops.attention(qkv, shape, mine, ragged, rotary=rotary)
        assert_close(found, expected.flatten(1), tolerance=2 * RELATIVE_RMS[HALF])
        for s, (old, new) in enumerate(zip(past, counts, strict=True)):
            kept = torch.arange(max(old, after[s]), old + new) % 128
            assert_close(mine.recent_k[s, kept], theirs.recent_k[s, kept], dtype=HALF)
        _assert_same_codes(mine.pool[table.flatten()], theirs.pool[table.flatten()], form)
        past = [n + count for n, count in zip(past, counts, strict=True)]
        packed = after


def _assert_same_codes(mine: Tensor, theirs: Tensor, form: KVFormat) -> None:
    """Keys of the records are the same but for a few roundings of halves."""
    found, expected = (kv_blocks.dequantize_blocks(x, form)[0] for x in (mine, theirs))
    assert ((found - expected).abs() > 0.01).float().mean() < 0.005


def _empty(form: KVFormat, table: Tensor, ring: int) -> DeviceLayerCache:
    pool = torch.zeros(4, 1, form.nbytes, dtype=torch.uint8)
    recent = torch.full((2, ring, 1, form.head_dim), torch.nan, dtype=HALF)
    step = _pass([0, 0], [1, 1], [0, 0], [0, 0], table)
    return DeviceLayerCache(form, pool, recent, recent[..., :0].contiguous(), step)


def _pass(
    past: list[int], counts: list[int], packed: list[int], after: list[int], table: Tensor
) -> PassTables:
    pairs = list(zip(past, counts, strict=True))
    return PassTables(
        start=ints(past),
        row_start=ints([0, counts[0], sum(counts)]),
        length=ints([n + count for n, count in pairs]),
        packed=ints(packed),
        after=ints(after),
        table=table,
        positions=ints([n + i for n, count in pairs for i in range(count)]),
        max_rows=max(counts),
        max_packed=max(packed),
        max_new_blocks=max(b - a for a, b in zip(packed, after, strict=True)) // 64,
    )

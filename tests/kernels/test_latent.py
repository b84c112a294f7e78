"""Multi-head latent attention: the reference's ops, which are attention of whole heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.cpu.jit.pool import Pool
from qoff.kernels.layout.ending import Norm
from qoff.kernels.layout.heads import HeadShape, cache_shapes
from qoff.kernels.layout.latent import LatentShape
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.scales import COMPACT, SCALE_DTYPES
from qoff.kernels.reference import ops as reference
from qoff.kernels.reference.attention import attend
from qoff.kernels.reference.elementwise import rms_norm, rope
from qoff.quant import quantize
from tests.tolerances import assert_close

SHAPES = [
    LatentShape(3, 64, 16, 32, 48),
    LatentShape(5, 32, 32, 16, 16),
    LatentShape(2, 512, 128, 64, 128),
]
SUMS = 1e-5


def weight_of(shape: LatentShape, bits: int = 8, scales: torch.dtype = COMPACT) -> QTensor:
    w = torch.randn(shape.rows, shape.latent)
    return quantize(w, bits, 32, packing="rows16", scale_dtype=scales)


def heads_of(shape: LatentShape) -> HeadShape:
    scale = shape.query_dim**-0.5
    return HeadShape(shape.heads, 1, shape.head_dim, scale, latent=shape.latent)


def norm_of(shape: LatentShape) -> Norm:
    return Norm(torch.rand(shape.latent) + 0.5, 1e-6, None, False)


def tables(shape: LatentShape) -> tuple[Tensor, Tensor]:
    angles = 6 * torch.rand(128, shape.rope_dim // 2)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("tokens", [1, 2, 7, 20])
@pytest.mark.parametrize(("shape", "bits"), [*zip(SHAPES, (3, 6, 8), strict=True)])
@pytest.mark.parametrize("scales", SCALE_DTYPES)
def test_products_with_each_heads_matrices(
    shape: LatentShape, bits: int, scales: torch.dtype, tokens: int
) -> None:
    weight, norm = weight_of(shape, bits, scales), norm_of(shape)
    # Queries and what is compressed lie side by side, as a projection leaves them.
    both = torch.randn(tokens, shape.heads * shape.query_dim + shape.head_dim)
    q, kv = both.split([shape.heads * shape.query_dim, shape.head_dim], 1)
    expected = reference.absorb(q, kv, weight, norm, shape)
    assert_close(cpu.absorb(q, kv, weight, norm, shape), expected, tolerance=SUMS)
    x = torch.randn(tokens, shape.heads * shape.latent)
    out = torch.full((tokens, 2 * shape.heads * shape.value_dim), 7.0)
    cpu.expand(x, weight, shape, out=out[:, : shape.heads * shape.value_dim])
    left, right = out.chunk(2, 1)
    assert_close(left, reference.expand(x, weight, shape), tolerance=SUMS)
    assert (right == 7).all()


def test_no_bit_depends_on_threads_or_on_what_is_computed_together() -> None:
    shape = SHAPES[0]
    weight, norm = weight_of(shape, 4), norm_of(shape)
    q, kv = torch.randn(9, shape.heads * shape.query_dim), torch.randn(9, shape.head_dim)
    x = torch.randn(9, shape.heads * shape.latent)
    found = []
    for threads in (1, 3):
        pool = Pool(threads)
        absorbed = cpu.absorb(q, kv, weight, norm, shape, pool=pool)
        found.append((absorbed, cpu.expand(x, weight, shape, pool=pool)))
        pool.close()
    single = [cpu.absorb(q[i : i + 1], kv[i : i + 1], weight, norm, shape) for i in range(9)]
    found.append((torch.cat(single), cpu.expand(x[:4], weight, shape)))
    for absorbed, expanded in found[1:]:
        assert torch.equal(absorbed, found[0][0])
        assert torch.equal(expanded, found[0][1][: len(expanded)])


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_appends_and_attends_as_the_reference(shape: LatentShape, bits: int) -> None:
    heads, rotary, past = heads_of(shape), tables(shape), [0, 0]
    caches = [[torch.zeros(size) for size in cache_shapes(2, heads, 96)] for _ in range(2)]
    for counts in ([40, 3], [1, 1], [5, 20]):
        ragged = Ragged.of(counts, past)
        qkv, found = torch.randn(ragged.tokens, heads.qkv_width), []
        for ops, both in zip((cpu, reference), caches, strict=True):
            cache = LayerCache(both[0], both[1], ragged.positions, ragged.longest)
            options: dict[str, Any] = {"activation_bits": bits} if ops is cpu else {}
            found.append(ops.attention(qkv.clone(), heads, cache, ragged, rotary=rotary, **options))
        assert_close(*found, tolerance=SUMS if bits == 16 else 1e-2)
        past = [n + count for n, count in zip(past, counts, strict=True)]
    for mine, theirs in zip(*caches, strict=True):
        assert_close(mine, theirs)


@pytest.mark.parametrize("shape", SHAPES)
def test_is_attention_of_heads_that_are_not_compressed(shape: LatentShape) -> None:
    tokens, rotary, norm = 11, tables(shape), norm_of(shape)
    weight, ragged = weight_of(shape), Ragged.of([tokens], [0])
    q, kv = torch.randn(tokens, shape.heads * shape.query_dim), torch.randn(tokens, shape.head_dim)
    heads = heads_of(shape)
    both = [torch.zeros(size) for size in cache_shapes(1, heads, 16)]
    cache = LayerCache(both[0], both[1], ragged.positions, ragged.longest)
    qkv = reference.absorb(q, kv, weight, norm, shape)
    attended = reference.attention(qkv, heads, cache, ragged, rotary=rotary)
    found = reference.expand(attended, weight, shape)

    latent, turning = kv.split([shape.latent, shape.rope_dim], 1)
    whole = rms_norm(latent, norm.weight, norm.eps) @ weight.dequantize().T
    keys, values = whole.unflatten(1, (shape.heads, -1)).split([shape.nope_dim, shape.value_dim], 2)
    plain, turns = q.unflatten(1, (shape.heads, -1)).split([shape.nope_dim, shape.rope_dim], 2)
    turned = rope(turning[:, None], ragged.positions, *rotary).expand(-1, shape.heads, -1)
    query = torch.cat((plain, rope(turns, ragged.positions, *rotary)), 2)
    key = torch.cat((keys, turned), 2)
    each = HeadShape(shape.heads, shape.heads, shape.query_dim, heads.scale)
    out, _ = attend(query, key.transpose(0, 1), values.transpose(0, 1), 0, 0, each)
    assert_close(found, out.flatten(1), tolerance=SUMS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packing": "split32"}, "packing rows16"),
        ({"q": torch.randn(2, 5)}, "q must be float32"),
        ({"heads": 4}, "q must be float32"),
        ({"norm": torch.ones(3)}, "norm must be contiguous"),
    ],
)
def test_other_operands_are_refused(change: dict[str, Any], message: str) -> None:
    shape = SHAPES[0]
    weight = weight_of(shape).to_packing(change.get("packing", "rows16"))
    q = change.get("q", torch.randn(2, shape.heads * shape.query_dim))
    norm = Norm(change.get("norm", torch.ones(shape.latent)), 1e-6, None, False)
    asked = replace(shape, heads=change.get("heads", shape.heads))
    with pytest.raises(OpError, match=message):
        cpu.absorb(q, torch.randn(2, shape.head_dim), weight, norm, asked)


def test_sizes_that_no_kernel_has_are_refused() -> None:
    with pytest.raises(OpError, match="latents of 40 channels"):
        LatentShape(2, 40, 16, 16, 16)
    shape = HeadShape(2, 1, 48, 1.0, latent=48)
    both = [torch.zeros(size) for size in cache_shapes(1, shape, 16)]
    ragged = Ragged.of([1], [0])
    cache = LayerCache(both[0], both[1], ragged.positions, ragged.longest)
    with pytest.raises(OpError, match="latent channels are a multiple of 32 below head_dim"):
        cpu.attention(torch.randn(1, shape.qkv_width), shape, cache, ragged)

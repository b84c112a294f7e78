"""Append and attention on the CPU against the reference in float64, over ragged batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qoff.errors import OpError
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.layout.heads import HeadShape, QueryScale, cache_shapes
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.reference import ops as reference_ops
from tests.tolerances import RELATIVE_RMS, relative_rms

SHAPES = [
    HeadShape(4, 4, 32, 32**-0.5),
    HeadShape(9, 3, 64, 0.125),
    HeadShape(2, 1, 16, 0.3, norm_eps=1e-5),
    HeadShape(4, 2, 80, 0.1, window=37, norm_eps=1e-6),
    HeadShape(2, 2, 128, 0.1, window=600),
    HeadShape(6, 2, 64, 0.4, soft_cap=2.0),
    HeadShape(4, 2, 32, 0.4, query_scale=QueryScale(0.5, 20)),
    HeadShape(4, 2, 32, 0.4, query_scale=QueryScale(0.5, 6, ahead=1)),
    HeadShape(8, 2, 64, 0.1, window=37, chunked=True),
    HeadShape(2, 2, 128, 0.1, window=600, chunked=True),
    HeadShape(4, 2, 32, 1.0, norm_eps=1e-5, norm_last=True, value_norm=True),
]
SUNK, PARTLY = SHAPES[5], SHAPES[3]  # with sinks; with channels that do not rotate
CHUNKED = SHAPES[8]


def _cache(shape: HeadShape, sequences: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.full(s, torch.nan, dtype=dtype) for s in cache_shapes(sequences, shape, 1408)]


def _layer(tensors: list[torch.Tensor], ragged: Ragged) -> LayerCache:
    return LayerCache(*tensors, ragged.positions, ragged.longest)


def _again(shape: HeadShape, caches: list[LayerCache], ragged: Ragged, bound: float) -> None:
    """Attend once more, with other queries of a layer that appends nothing."""
    own = replace(shape, appends=False)
    queries = torch.randn(ragged.tokens, own.qkv_width)
    kept = [tensor.clone() for tensor in (caches[0].keys, caches[0].values)]
    expected = reference_ops.attention(queries.double(), own, caches[1], ragged)
    assert relative_rms(cpu.attention(queries, own, caches[0], ragged), expected) < bound
    for tensor, before in zip((caches[0].keys, caches[0].values), kept, strict=True):
        assert torch.equal(tensor.nan_to_num(), before.nan_to_num())


def _run(shape: HeadShape, passes: list[list[int]], activation_bits: int = 16) -> None:
    """Feed the same passes (new tokens of each sequence) to both; compare every output."""
    bound = RELATIVE_RMS[torch.float32 if activation_bits == 16 else torch.bfloat16]
    sequences = len(passes[0])
    caches = _cache(shape, sequences, torch.float32), _cache(shape, sequences, torch.float64)
    angles = torch.rand(1408, 10 if shape is PARTLY else shape.head_dim // 2) * 6.3
    rotary = (angles.cos(), angles.sin())
    norms = {}
    if shape is SUNK:
        norms = {"sinks": torch.randn(shape.heads)}
    if shape.norm_eps:  # of each head, or of all
        heads = (4, 2) if shape is PARTLY else (1, 1)
        q_norm, k_norm = (torch.rand(n * shape.head_dim) + 0.5 for n in heads)
        norms = {"q_norm": q_norm, "k_norm": k_norm}
    pasts = [0] * sequences
    for counts in passes:
        ragged = Ragged.of(counts, pasts)
        qkv = torch.randn(ragged.tokens, shape.qkv_width)
        expected = reference_ops.attention(
            qkv.double(), shape, _layer(caches[1], ragged), ragged, rotary=rotary, **norms
        )
        actual = cpu.attention(
            qkv,
            shape,
            _layer(caches[0], ragged),
            ragged,
            rotary=rotary,
            activation_bits=activation_bits,
            **norms,
        )
        assert relative_rms(actual, expected) < bound
        if not shape.latent and "k_norm" not in norms:
            _again(shape, [_layer(tensors, ragged) for tensors in caches], ragged, bound)
        pasts = [p + c for p, c in zip(pasts, counts, strict=True)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_then_decode(shape: HeadShape) -> None:
    _run(shape, [[5, 1, 40], [1, 1, 1], [1, 1, 1]])


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_long_sequence_among_short_ones(shape: HeadShape) -> None:
    _run(shape, [[1200, 1], [1, 1], [3, 70], [1, 1]])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pairs_of_bfloat16(shape: HeadShape) -> None:
    _run(shape, [[523, 1, 7], [1, 1, 1], [5, 38, 1]], activation_bits=8)


@pytest.mark.parametrize("activation_bits", [16, 8])
@pytest.mark.parametrize("shape", [PARTLY, CHUNKED], ids=str)
def test_no_bit_depends_on_what_is_attended_together(
    shape: HeadShape, activation_bits: int
) -> None:
    qkv = torch.randn(100, shape.qkv_width)

    def attended(*counts: int) -> torch.Tensor:
        tensors, past, found = _cache(shape, 1, torch.float32), 0, []
        for count in counts:
            ragged = Ragged.of([count], [past])
            part = qkv[past : past + count].clone()
            found.append(
                cpu.attention(
                    part, shape, _layer(tensors, ragged), ragged, activation_bits=activation_bits
                )
            )
            past += count
        return torch.cat(found)

    together = attended(100)
    assert torch.equal(attended(7, 41, 2, 50), together)
    assert torch.equal(attended(64, 36), together)


@pytest.mark.parametrize("activation_bits", [16, 8])
@pytest.mark.parametrize("counts", [[1, 5], [5, 1], [3, 1, 4]])
def test_a_prompt_of_one_token_has_the_same_bits_beside_others(
    counts: list[int], activation_bits: int
) -> None:
    shape, at = SHAPES[3], sum(counts[: counts.index(1)])
    qkv = torch.randn(sum(counts), shape.qkv_width)

    def attended(counts: list[int], qkv: torch.Tensor) -> torch.Tensor:
        ragged = Ragged.of(counts, [0] * len(counts))
        layer = _layer(_cache(shape, len(counts), torch.float32), ragged)
        return cpu.attention(qkv.clone(), shape, layer, ragged, activation_bits=activation_bits)

    alone = attended([1], qkv[at : at + 1])
    assert torch.equal(attended(counts, qkv)[at : at + 1], alone)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 511, 512, 513, 1024, 1025])
def test_decode_at_the_edges_of_runs(length: int) -> None:
    shape = SHAPES[1]
    _run(shape, [[length], [1]] if length > 1 else [[1], [1], [1]])


@given(
    passes=st.integers(1, 3).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(1, 40), min_size=n, max_size=n), min_size=1, max_size=4
        )
    ),
    shape=st.sampled_from(SHAPES),
)
def test_any_ragged_passes(passes: list[list[int]], shape: HeadShape) -> None:
    _run(shape, passes)


def test_a_full_cache_is_refused() -> None:
    shape = SHAPES[0]
    ragged = Ragged.of([1], [1408])
    layer = _layer(_cache(shape, 1, torch.float32), ragged)
    with pytest.raises(OpError, match="beyond the cache's 1408"):
        cpu.attention(torch.randn(1, shape.qkv_width), shape, layer, ragged)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": torch.ones(2, 12)}, "qkv must be"),
        ({"keys": torch.ones(1)}, "keys must be"),
        ({"q_norm": torch.ones(3)}, "norms must be"),
        ({"rotary": (torch.ones(1, 16), torch.ones(1, 16))}, "reach position 1"),
        ({"rotary": (torch.ones(9, 17), torch.ones(9, 17))}, "cos and sin"),
        ({"rotary": (torch.ones(9, 15), torch.ones(9, 14))}, "cos and sin"),
        ({"sinks": torch.ones(3)}, "sinks must be"),
        ({"ragged": Ragged.of([1, 1], [0, 0])}, "2 sequences"),
    ],
)
def test_wrong_operands_are_refused(change: dict, message: str) -> None:
    shape = SHAPES[0]
    keys, values = _cache(shape, 1, torch.float32)
    operands = {
        "qkv": torch.ones(2, shape.qkv_width),
        "keys": keys,
        "values": values,
        "ragged": Ragged.of([2], [0]),
        **change,
    }
    qkv, keys, values, ragged = (operands.pop(n) for n in ("qkv", "keys", "values", "ragged"))
    with pytest.raises(OpError, match=message):
        cpu.attention(qkv, shape, _layer([keys, values], ragged), ragged, **operands)

"""Triton's prefill attention in the interpreter against the reference in float64."""

from __future__ import annotations

import pytest
import torch

from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.reference import attention as reference_attention
from qoff.kernels.triton.attention.prefill import PrefillConfig, prefill_attention
from qoff.kernels.triton.attention.prefill_scratch import scratch_heads
from tests.kernels.attention_operands import random_cache, without_oldest
from tests.tolerances import assert_close

pytest.importorskip("triton")

DIRECT = PrefillConfig(rows=16, num_warps=4, num_stages=1, scratch_tiles=10**6)
SCRATCH = PrefillConfig(rows=16, num_warps=4, num_stages=1, scratch_tiles=1)
FORMS = [
    KVFormat(64),
    KVFormat(80),
    KVFormat(96),
    KVFormat(128),
    KVFormat(192),
    KVFormat(256),
    KVFormat(64, k_bits=8, v_bits=8),
    KVFormat(80, k_bits=8),
    KVFormat(64, 4, 2),
    KVFormat(80, 2, 3),
]


def _check(
    form: KVFormat,
    sizes: list[tuple[int, int, int]],
    config: PrefillConfig = DIRECT,
    dtype: torch.dtype = torch.float16,
    heads: tuple[int, int] = (2, 1),
    sinks: torch.Tensor | None = None,
    **options,
) -> torch.Tensor:
    """Sequences of (blocks, recent tokens, new tokens); heads: of queries and of K and V."""
    rows = [n for _, _, n in sizes]
    cache = random_cache(form, heads[1], [(b, t) for b, t, _ in sizes], dtype, ring=96, rows=rows)
    qkv = torch.randn(sum(rows), heads[0] + 2 * heads[1], form.head_dim).to(dtype)
    q, k, v = qkv.split([heads[0], heads[1], heads[1]], dim=1)
    shape = HeadShape(*heads, form.head_dim, form.head_dim**-0.5, **options)
    expected = reference_attention.prefill_attention(q.double(), k, v, cache, shape, sinks)
    actual = prefill_attention(q, k, v, cache, shape, sinks, config=config)
    assert actual[0].dtype == dtype
    assert_close(actual[0], expected[0], dtype=dtype)
    assert_close(actual[1], expected[1], dtype=dtype)
    return actual[0]


@pytest.mark.parametrize("config", [DIRECT, SCRATCH], ids=["direct", "scratch"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form(form: KVFormat, config: PrefillConfig) -> None:
    _check(form, [(1, 5, 3), (2, 0, 9), (0, 70, 1)], config, heads=(4, 2))


@pytest.mark.parametrize("config", [DIRECT, SCRATCH], ids=["direct", "scratch"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [1, 3, 8])
def test_every_group_of_heads(group: int, dtype: torch.dtype, config: PrefillConfig) -> None:
    _check(KVFormat(64), [(2, 7, 11)], config, dtype, heads=(group, 1))


@pytest.mark.parametrize("new", [1, 3, 16, 17, 65, 150])
def test_tiles_of_queries(new: int) -> None:
    _check(KVFormat(64), [(1, 20, new)], heads=(1, 1))
    _check(KVFormat(64), [(0, 0, new)], heads=(3, 1))


def test_ragged_batches() -> None:
    _check(KVFormat(64), [(0, 0, 1), (9, 63, 2), (0, 3, 0), (1, 0, 40), (0, 0, 70)])


@pytest.mark.parametrize("config", [DIRECT, SCRATCH], ids=["direct", "scratch"])
@pytest.mark.parametrize("window", [1, 20, 64, 100, 1000])
@pytest.mark.parametrize("chunked", [False, True], ids=["sliding", "chunks"])
def test_windows(window: int, chunked: bool, config: PrefillConfig) -> None:
    sizes = [(3, 20, 40), (1, 0, 80), (0, 0, 70)]
    _check(KVFormat(64), sizes, config, window=window, chunked=chunked)


@pytest.mark.parametrize("config", [DIRECT, SCRATCH], ids=["direct", "scratch"])
@pytest.mark.parametrize("window", [None, 100])
def test_blocks_that_are_elsewhere_are_not_read(window: int | None, config: PrefillConfig) -> None:
    cache = random_cache(KVFormat(64), 1, [(4, 10), (3, 64), (1, 0)], rows=[3, 20, 1])
    holes, rest = without_oldest(cache, [2, 0, 1])
    q, k, v = torch.randn(24, 4, 64).half().split([2, 1, 1], dim=1)
    shape = HeadShape(2, 1, 64, 0.125, window)
    found = prefill_attention(q, k, v, holes, shape, config=config)
    for kept in (rest, holes):
        expected = reference_attention.prefill_attention(q.double(), k, v, kept, shape)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, dtype=torch.float16)


@pytest.mark.parametrize("soft_cap", [3.0, 50.0])
def test_soft_cap_and_sinks(soft_cap: float) -> None:
    sinks = torch.tensor([-1.0, 8.0])
    _check(KVFormat(64), [(2, 20, 30), (0, 0, 5)], soft_cap=soft_cap, sinks=sinks, window=90)


def test_a_scratch_for_some_heads_at_a_time() -> None:
    config = PrefillConfig(16, num_warps=4, num_stages=1, scratch_tiles=1, scratch_mib=1)
    # The table has room for 17 blocks: 544 KiB of K and V a head, so that two do not fit.
    assert scratch_heads(17 * 64 * 128, 3, 1) == 1
    _check(KVFormat(128), [(16, 0, 4)], config, heads=(3, 3))


def test_the_scratch_takes_as_many_heads_as_fit() -> None:
    assert scratch_heads(10**6, 8, 256) == 8
    assert scratch_heads(0, 8, 256) == 8
    assert scratch_heads(2**24, 8, 256) == 4
    assert scratch_heads(2**30, 8, 256) == 0


def test_no_new_tokens() -> None:
    assert _check(KVFormat(64), [(1, 0, 0)]).shape == (0, 2, 64)

"""Triton's decode attention in the interpreter against the reference in float64."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.rotation import rotate_values
from qoff.kernels.reference import attention as reference_attention
from qoff.kernels.reference import elementwise
from qoff.kernels.triton.attention.decode import decode_attention
from qoff.kernels.triton.attention.new_token import NewTokens
from qoff.kernels.triton.attention.runs import Split
from tests.kernels.attention_operands import decoding_in_runs, ints, random_cache, without_oldest
from tests.tolerances import assert_close

pytest.importorskip("triton")

FORMS = [
    KVFormat(64),
    KVFormat(80),
    KVFormat(96),
    KVFormat(128),
    KVFormat(192),
    KVFormat(256),
    KVFormat(64, k_bits=8, v_bits=8),
    KVFormat(96, k_bits=8),
    KVFormat(80, k_bits=8),
    KVFormat(64, 4, 2),
    KVFormat(80, 2, 3),
    KVFormat(80, v_bits=8),
    KVFormat(96, 3, 8),
]


def _shape(cache: DeviceLayerCache, heads: int, **options) -> HeadShape:
    kv_heads, dim = cache.recent_k.shape[2:]
    return HeadShape(heads, kv_heads, dim, **{"scale": dim**-0.5, **options})


def _check(
    cache: DeviceLayerCache,
    q: torch.Tensor,
    run: int | None = None,
    sinks: torch.Tensor | None = None,
    **options,
) -> torch.Tensor:
    shape = _shape(cache, q.shape[1], **options)
    expected = reference_attention.decode_attention(q.double(), cache, shape, sinks)
    with nullcontext() if run is None else decoding_in_runs(run) as config:
        actual = decode_attention(q, cache, shape, sinks, config)
    assert actual[0].dtype == q.dtype
    assert_close(actual[0], expected[0], dtype=q.dtype)
    assert_close(actual[1], expected[1], dtype=q.dtype)
    return actual[0]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form(form: KVFormat) -> None:
    cache = random_cache(form, 2, [(2, 5), (1, 64), (0, 1)])
    _check(cache, torch.randn(3, 4, form.head_dim, dtype=torch.float16), run=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [1, 3, 8, 9, 17])
def test_every_group_of_heads(group: int, dtype: torch.dtype) -> None:
    cache = random_cache(KVFormat(64), 1, [(3, 7), (1, 2)], dtype)
    _check(cache, torch.randn(2, group, 64).to(dtype), run=2)


def test_a_long_sequence_among_short_ones() -> None:
    cache = random_cache(KVFormat(64), 1, [(0, 3), (17, 63), (1, 1), (0, 64)])
    _check(cache, torch.randn(4, 2, 64, dtype=torch.float16))


@pytest.mark.parametrize(
    "sizes", [[(0, 0)], [(2, 0)], [(0, 0), (1, 0), (1, 70)], [(0, 1)]], ids=str
)
def test_nothing_cached_no_recent_window_and_more_than_a_tile_of_it(sizes: list) -> None:
    cache = random_cache(KVFormat(64), 2, sizes, ring=96)
    out = _check(cache, torch.randn(len(sizes), 2, 64, dtype=torch.float16))
    if sizes[0] == (0, 0):
        assert torch.equal(out[0], torch.zeros_like(out[0]))


@pytest.mark.parametrize("window", [1, 30, 64, 65, 100, 192, 1000])
@pytest.mark.parametrize("chunked", [False, True], ids=["sliding", "chunks"])
def test_windows(window: int, chunked: bool) -> None:
    cache = random_cache(KVFormat(64), 1, [(3, 20), (1, 64), (0, 9), (4, 0)])
    q = torch.randn(4, 2, 64, dtype=torch.float16)
    _check(cache, q, window=window, chunked=chunked, run=1)


def test_blocks_before_the_window_are_not_read() -> None:
    cache = random_cache(KVFormat(64), 1, [(4, 10)])
    q = torch.randn(1, 2, 64, dtype=torch.float16)
    table = cache.step.table.clone()
    table[0, :2] = 2**30
    out = _check(cache, q, window=100)
    spoiled = replace(cache, step=replace(cache.step, table=table))
    assert torch.equal(decode_attention(q, spoiled, _shape(cache, 2, window=100))[0], out)


@pytest.mark.parametrize("window", [None, 100])
def test_blocks_that_are_elsewhere_are_not_read(window: int | None) -> None:
    cache = random_cache(KVFormat(64), 1, [(4, 10), (3, 64), (1, 0), (2, 5)])
    holes, rest = without_oldest(cache, [2, 0, 1, 2])
    q = torch.randn(4, 2, 64, dtype=torch.float16)
    with decoding_in_runs(1) as config:
        out, lse = decode_attention(q, holes, _shape(cache, 2, window=window), config=config)
    # One that has no token at all attends to nothing.
    expected = _check(rest, q, window=window)
    assert_close(out, expected, dtype=torch.float16)
    assert torch.equal(lse[2], torch.full_like(lse[2], -torch.inf))
    _check(holes, q, window=window)


@pytest.mark.parametrize("soft_cap", [3.0, 50.0])
@pytest.mark.parametrize("form", [KVFormat(64), KVFormat(64, v_bits=8)], ids=str)
def test_soft_cap_and_sinks(form: KVFormat, soft_cap: float) -> None:
    cache = random_cache(form, 2, [(2, 20), (0, 7), (0, 0)])
    sinks = torch.tensor([-1.0, 0.5, 8.0, 3.0])
    _check(
        cache,
        torch.randn(3, 4, 64, dtype=torch.float16),
        soft_cap=soft_cap,
        sinks=sinks,
        window=90,
        run=1,
    )


@pytest.mark.parametrize("run", [1, 2, 5, 100])
def test_the_runs_do_not_matter(run: int) -> None:
    cache = random_cache(KVFormat(64), 1, [(5, 3)])
    _check(cache, torch.randn(1, 4, 64, dtype=torch.float16), run=run)


def test_small_values_and_far_scores_keep_their_precision() -> None:
    """An outlier key takes nearly all probability of each block; V is tiny."""
    form = KVFormat(64)
    cache = random_cache(form, 1, [(3, 9)])
    small = form.views(cache.pool)
    small[4].copy_(small[4] * 2**-9)
    small[5].copy_(small[5] * 2**-9)
    cache.recent_v.mul_(2**-9)
    _check(cache, 3 * torch.randn(1, 2, 64, dtype=torch.float16))


def test_rows_of_queries_may_lie_apart() -> None:
    cache = random_cache(KVFormat(64), 1, [(1, 3), (2, 9)])
    qkv = torch.randn(2, 4, 64, dtype=torch.float16)
    _check(cache, qkv[:, :2])


@pytest.mark.parametrize(
    ("heads", "sequences", "blocks", "parts", "run"),
    [
        (8, 1, 0, 4, 1),
        (8, 1, 16, 20, 1),  # as short as can be, where many processors have nothing to do
        (8, 1, 128, 68, 2),  # joining more parts takes longer
        (8, 1, 512, 132, 4),  # all programs at once: 1056
        (56, 1, 128, 18, 8),
        (8, 8, 128, 28, 5),
        (8, 500, 7, 2, 7),  # no run is worth cutting
        (0, 0, 0, 4, 1),
    ],
)
def test_runs_fill_rounds_of_programs(
    heads: int, sequences: int, blocks: int, parts: int, run: int
) -> None:
    split = Split(heads, sequences, 132, 8, blocks, 128)
    assert split.of(blocks) == (parts, run)


@pytest.mark.parametrize("sequences", [1, 3, 40])
def test_runs_hold_all_blocks_and_are_no_more_than_memory_is_reserved_for(sequences: int) -> None:
    for blocks in (*range(70), 1000, 2**14):
        split = Split(4, sequences, 132, 2, blocks, 64)
        parts, run = split.of(blocks)
        assert (parts - split.recent[0]) * run >= blocks
        assert parts <= split.most_parts


@pytest.mark.parametrize(
    ("dim", "pairs", "normed", "rotated", "dtype"),
    [
        (64, 32, True, False, torch.bfloat16),
        (80, 16, True, True, torch.float16),  # a part of the channels is turned
        (64, 0, False, True, torch.float16),
    ],
    ids=str,
)
def test_new_tokens(dim: int, pairs: int, normed: bool, rotated: bool, dtype: torch.dtype) -> None:
    """Normed, turned and put into the ring before it is attended.

    A sequence may have none, and a row may be no sequence's.
    """
    cache = random_cache(KVFormat(dim), 2, [(1, 5), (0, 0), (0, 64), (0, 1)], dtype)
    step = cache.step
    first_rows = ints([0, 1, 1, 2, 3])
    step = replace(step, row_start=first_rows, positions=ints([68, 63, 0, 0]))
    cache = replace(cache, step=step)
    shape = replace(_shape(cache, 4), norm_eps=1e-5)
    q, k, v = torch.randn(4, 3 * 4, dim).to(dtype).split([4, 4, 4], dim=1)
    k, v = k[:, :2], v[:, :2]
    tables = tuple(torch.rand(2, 200, pairs)) if pairs else None
    norms = tuple(torch.rand(2, dim) + 0.5) if normed else (None, None)
    rings = (cache.recent_k, cache.recent_v)
    idle = [ring[1].view(torch.int16).clone() for ring in rings]
    new = NewTokens(k, v, tables, *norms, rotated)
    with decoding_in_runs(1) as config:
        out, lse = decode_attention(q, cache, shape, config=config, new=new)
    for ring, before in zip(rings, idle, strict=True):
        assert torch.equal(ring[1].view(torch.int16), before)
    q, k, v, positions = q[:3], k[:3], v[:3], step.positions[:3]

    def turned(x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        x = x if norm is None else elementwise.rms_norm(x, norm, 1e-5)
        return x if tables is None else elementwise.rope(x, positions, *tables)

    slots, queries = [0, 2, 3], torch.zeros(4, 4, dim, dtype=dtype)
    queries[slots] = turned(q, norms[0])
    places = positions % cache.recent_k.shape[1]
    assert_close(cache.recent_k[slots, places.long()], turned(k, norms[1]), dtype=dtype)
    kept = rotate_values(v) if rotated else v
    assert_close(cache.recent_v[slots, places.long()], kept, dtype=dtype)
    expected = reference_attention.decode_attention(queries.double(), cache, shape)
    wanted = rotate_values(expected[0], back=True) if rotated else expected[0]
    assert_close(out[:3], wanted[slots], dtype=dtype)
    assert_close(lse[:3], expected[1][slots], dtype=dtype)

"""Triton's sparse decode attention in the interpreter: which blocks it chooses, and its result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qoff.errors import OpError
from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.heads import HeadShape, QueryScale
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.layer_cache import kept_blocks
from qoff.kernels.reference import attention as reference_attention
from qoff.kernels.reference import elementwise
from qoff.kernels.triton.attention.decode import decode_attention, decode_bytes
from qoff.kernels.triton.attention.new_token import NewTokens
from qoff.kernels.triton.attention.select_blocks import select_blocks, select_bytes
from tests.kernels.attention_operands import decoding_in_runs, ints, random_cache
from tests.tolerances import assert_close

pytest.importorskip("triton")

NAN_BYTE = 0xFF  # float16 of two such bytes is NaN


def _cache(
    form: KVFormat, kv_heads: int, sizes: list[tuple[int, int]], top: float, ring: int = 64
) -> DeviceLayerCache:
    return replace(random_cache(form, kv_heads, sizes, ring=ring), top=top)


def _exact(cache: DeviceLayerCache, heads: int) -> Tensor:
    """Make bounds of blocks sums without rounding, of which many are equal; returns queries."""
    _, scale, minimum, *_ = cache.form.views(cache.pool)
    kinds = torch.randint(0, 4, (3, len(cache.pool)))
    for x, kind, low in ((scale, kinds[0], 0), (minimum, kinds[1], -4)):
        few = torch.randint(low, 5, (4, *x.shape[1:])) / 8
        x.copy_(few[kind])
    shape = (len(cache.step.start), heads, cache.form.head_dim)
    return (torch.randint(-8, 9, shape) / 4).half()


def _lists(cache: DeviceLayerCache, q: Tensor, shape: HeadShape) -> list[list[list[int]]]:
    """Which blocks of each sequence are chosen for each KV head, in order."""
    chosen = select_blocks(q, cache, shape)
    assert chosen is not None
    blocks, counts, far = chosen
    far = torch.zeros_like(counts) if far is None else far
    found = []
    for table, *mine in zip(cache.step.table, blocks, counts, far, strict=True):
        place = {block: i for i, block in enumerate(table.tolist())}
        lists = zip(*(part.tolist() for part in mine), strict=True)
        found.append(
            [[*some[:away], *(place[block] for block in some[away:n])] for some, n, away in lists]
        )
    return found


def _without_oldest(cache: DeviceLayerCache, part: float) -> DeviceLayerCache:
    """The same with a part of each sequence's blocks in host memory, their bounds alone here."""
    form, step = cache.form, cache.step
    bounds = cache.pool[..., form.k_scale : form.v_codes].contiguous()
    pool, table, older = cache.pool.clone(), step.table.clone(), []
    for row, packed in zip(table, step.packed.tolist(), strict=True):
        count = int(part * packed) // 64
        pool[row[:count].long()] = NAN_BYTE
        row[:count] = -1 - row[:count]
        older.append(64 * count)
    most = max(n - m for n, m in zip(step.packed.tolist(), older, strict=True))
    how = {"resident_from": ints(older), "max_packed": most, "max_ranked": int(step.packed.max())}
    return replace(cache, pool=pool, bounds=bounds, step=replace(step, table=table, **how))


def _expected(cache: DeviceLayerCache, q: Tensor, shape: HeadShape) -> list[list[list[int]]]:
    found = []
    for s, end in enumerate(cache.step.length.tolist()):
        nothing = torch.zeros(shape.kv_heads, 0)
        chosen = (
            reference_attention.chosen_blocks(q[s].double(), s, cache, shape.reach)
            if end
            else nothing
        )
        found.append([head.nonzero()[:, 0].tolist() for head in chosen])
    return found


@given(
    form=st.sampled_from(
        [KVFormat(64), KVFormat(80, k_bits=8), KVFormat(96, 2, 3), KVFormat(128), KVFormat(256)]
    ),
    group=st.sampled_from([1, 3, 8, 17]),
    kv_heads=st.integers(1, 2),
    blocks=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    top=st.sampled_from([0.01, 0.07, 0.25, 0.6, 0.9]),
    window=st.sampled_from([0, 0, 100, 700, -640]),
    away=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_the_choice_is_that_of_the_reference(
    form: KVFormat,
    group: int,
    kv_heads: int,
    blocks: list[int],
    top: float,
    window: int,
    away: float,
) -> None:
    """Of equal bounds the first, whatever the windows, with slots that have no new token.

    So it is where the oldest blocks are in host memory, whose records the GPU does not have.
    """
    cache = _cache(form, kv_heads, [(n, 9 * (n > 0)) for n in (*blocks, 21)], top)
    shape = HeadShape(
        group * kv_heads, kv_heads, form.head_dim, 0.1, abs(window) or None, chunked=window < 0
    )
    q = _exact(cache, shape.heads)
    expected = _expected(cache, q, shape)
    if away:
        cache = _without_oldest(cache, away)
    chosen = select_blocks(q, cache, shape)
    if chosen is None:
        most = abs(window) // 64 + 1
        assert window
        assert kept_blocks(top, most) == most
    else:
        assert _lists(cache, q, shape) == expected
        keys = 4 * (len(blocks) + 1) * kv_heads * (21 if window == 0 else 0)
        nbytes = keys + sum(part.nbytes for part in chosen if part is not None)
        most = select_bytes(len(blocks) + 1, kv_heads, 21, top, away > 0)
        assert nbytes < most if window else nbytes == most


def test_more_blocks_than_are_compared_at_a_time() -> None:
    """And a bound of their number that is larger than any has, as in steps that are recorded."""
    cache = _cache(KVFormat(64), 1, [(1100, 3), (0, 0), (7, 1)], 0.3)
    table = torch.nn.functional.pad(cache.step.table, (0, 200), value=2**30)
    step = replace(cache.step, table=table, max_packed=64 * 1250)
    cache, shape = replace(cache, step=step), HeadShape(2, 1, 64, 0.1)
    q = _exact(cache, 2)
    assert _lists(cache, q, shape) == _expected(cache, q, shape)


@pytest.mark.parametrize("top", [0.1, 0.6])
@pytest.mark.parametrize(
    ("group", "options"),
    [
        (3, {}),
        (17, {"window": 650}),
        (4, {"window": 640, "chunked": True}),
        (2, {"soft_cap": 5.0}),
    ],
    ids=str,
)
def test_attention_is_that_of_the_reference(group: int, options: dict, top: float) -> None:
    form = KVFormat(64, 4, 8)
    cache = _cache(form, 2, [(13, 9), (1, 64), (0, 0), (5, 1)], top)
    q = torch.randn(4, 2 * group, 64).half()
    shape = HeadShape(2 * group, 2, 64, **{"scale": 0.125, **options})
    expected = reference_attention.decode_attention(q.double(), cache, shape)
    with decoding_in_runs(2) as config:
        actual = decode_attention(q, cache, shape, config=config)
    for found, wanted in zip(actual, expected, strict=True):
        assert_close(found, wanted, dtype=q.dtype)


def test_blocks_that_are_not_chosen_are_not_read() -> None:
    """Beside scales and minima of K."""
    cache, shape = _cache(KVFormat(64), 2, [(12, 5), (3, 20)], 0.25), HeadShape(4, 2, 64, 0.125)
    q = torch.randn(2, 4, 64).half()
    out, _ = decode_attention(q, cache, shape)
    spoiled = torch.full_like(cache.pool, NAN_BYTE)
    form = cache.form
    bounds = slice(form.k_scale, form.v_codes)
    spoiled[..., bounds] = cache.pool[..., bounds]
    for row, heads in zip(cache.step.table, _lists(cache, q, shape), strict=True):
        for head, places in enumerate(heads):
            for block in row[places].tolist():
                spoiled[block, head] = cache.pool[block, head]
    assert not torch.equal(spoiled, cache.pool)
    assert torch.equal(decode_attention(q, replace(cache, pool=spoiled), shape)[0], out)


@pytest.mark.parametrize("scaled", [False, True])
def test_new_tokens_are_normed_turned_and_scaled_before_the_choice(scaled: bool) -> None:
    cache = _cache(KVFormat(64), 1, [(9, 5), (0, 0), (11, 64)], 0.3)
    positions = ints([9 * 64 + 4, 11 * 64 + 63])
    step = replace(cache.step, row_start=ints([0, 1, 1, 2]), positions=positions)
    cache = replace(cache, step=step)
    scale = QueryScale(0.5, 100) if scaled else None
    shape = HeadShape(2, 1, 64, 0.125, norm_eps=1e-5, query_scale=scale)
    q, k, v = torch.randn(2, 4, 64).half().split([2, 1, 1], dim=1)
    tables, norm = tuple(torch.rand(2, 800, 32)), torch.rand(64) + 0.5
    out, _ = decode_attention(q, cache, shape, new=NewTokens(k, v, tables, norm, norm))
    queries = elementwise.rope(elementwise.rms_norm(q, norm, 1e-5), positions, *tables)
    if scale is not None:
        queries = queries * scale.of(positions)[:, None, None].half()
    every = torch.zeros(3, 2, 64).half()
    every[[0, 2]] = queries
    expected, _ = reference_attention.decode_attention(every.double(), cache, shape)
    assert_close(out, expected[[0, 2]], dtype=out.dtype)


class Allocated(TorchDispatchMode):
    """Counts the bytes of new tensors that are not initialized."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if "empty" in str(func):
            self.nbytes += found.nbytes
        return found


def test_no_more_is_allocated_than_is_counted() -> None:
    cache, shape = _cache(KVFormat(64), 2, [(12, 5), (3, 20)], 0.25), HeadShape(4, 2, 64, 0.125)
    q = torch.randn(2, 4, 64).half()
    with Allocated() as taken:
        decode_attention(q, cache, shape)
    counted = decode_bytes(2, 4, 2, 12, cache.form, q.dtype, q.device, cache.top)
    assert select_bytes(2, 2, 12, cache.top) == 4 * 2 * 2 * (12 + 3 + 1)
    assert select_bytes(2, 2, 12, cache.top) < taken.nbytes <= counted


def test_what_there_is_not_is_refused() -> None:
    cache, shape = _cache(KVFormat(64), 1, [(9, 5)], 0.3), HeadShape(1, 1, 64, 0.125)
    q = torch.randn(1, 1, 64).half()
    older = replace(cache, step=replace(cache.step, resident_from=ints([64])))
    with pytest.raises(OpError, match="needs bounds of those in host memory"):
        decode_attention(q, older, shape)
    with pytest.raises(OpError, match=r"in \(0, 1\], not 0"):
        replace(cache, top=0.0)

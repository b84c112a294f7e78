"""The reference of attention over the packed cache against torch's attention in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.reference.attention import decode_attention, prefill_attention
from qoff.kernels.reference.kv_blocks import dequantize_blocks
from tests.kernels.attention_operands import random_cache
from tests.tolerances import assert_close

WINDOWS = [(0, False), (40, False), (40, True)]
FORMS = [
    KVFormat(64),
    KVFormat(80, k_bits=8),
    KVFormat(96, v_bits=8),
]


def _plain_cache(cache: DeviceLayerCache, s: int, new: bool = False) -> tuple[Tensor, Tensor]:
    """K and V of a sequence, float64 [kv_heads, tokens, D], token by token.

    new: without the tokens of the pass.
    """
    form, rows = cache.form, ([], [])
    for position in range(int(cache.step.start[s] if new else cache.step.length[s])):
        if position < int(cache.step.packed[s]):
            record = cache.pool[cache.step.table[s, position // 64]]
            k, v = (x[:, position % 64].double() for x in dequantize_blocks(record, form))
        else:
            slot = position % cache.recent_k.shape[1]
            k, v = cache.recent_k[s, slot].double(), cache.recent_v[s, slot].double()
        rows[0].append(k)
        rows[1].append(v)
    if not rows[0]:
        return tuple(torch.zeros(2, cache.pool.shape[1], 0, form.head_dim).double())
    return torch.stack(rows[0], 1), torch.stack(rows[1], 1)


def _expected(q: Tensor, k: Tensor, v: Tensor, shape: HeadShape) -> Tensor:
    """q [n, Hq, D], the last n of the keys' positions."""
    n, total = len(q), k.shape[1]
    position = torch.arange(total - n, total)[:, None]
    key = torch.arange(total)[None, :]
    seen = key <= position
    if shape.window:
        near = position // shape.window == key // shape.window
        seen = seen & (near if shape.chunked else key > position - shape.window)
    out = scaled_dot_product_attention(
        q.double().transpose(0, 1), k, v, attn_mask=seen, scale=shape.scale, enable_gqa=True
    )
    return out.transpose(0, 1)


@pytest.mark.parametrize(("window", "chunked"), WINDOWS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_decode(form: KVFormat, window: int, chunked: bool) -> None:
    cache = random_cache(form, 2, [(2, 9), (0, 1), (1, 0)], ring=70)
    q = torch.randn(3, 6, form.head_dim, dtype=torch.float64)
    shape = HeadShape(6, 2, form.head_dim, 0.1, window, chunked=chunked)
    out, _ = decode_attention(q, cache, shape)
    for s in range(3):
        expected = _expected(q[s : s + 1], *_plain_cache(cache, s), shape)
        assert_close(out[s : s + 1], expected, tolerance=1e-6)


@pytest.mark.parametrize(("window", "chunked"), WINDOWS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_prefill(form: KVFormat, window: int, chunked: bool) -> None:
    cache = random_cache(form, 2, [(1, 9), (0, 0)], ring=70, rows=[5, 70])
    rows = cache.step.row_start
    q = torch.randn(75, 4, form.head_dim, dtype=torch.float64)
    k, v = torch.randn(2, 75, 2, form.head_dim, dtype=torch.float64)
    shape = HeadShape(4, 2, form.head_dim, 0.1, window, chunked=chunked)
    out, _ = prefill_attention(q, k, v, cache, shape)
    for s in range(2):
        mine = slice(int(rows[s]), int(rows[s + 1]))
        pairs = zip(_plain_cache(cache, s, new=True), (k[mine], v[mine]), strict=True)
        keys, values = (torch.cat((old, new.transpose(0, 1)), 1) for old, new in pairs)
        expected = _expected(q[mine], keys, values, shape)
        assert_close(out[mine], expected, tolerance=1e-6)


def test_log_sum_exp_soft_cap_and_sinks() -> None:
    form = KVFormat(64)
    cache = random_cache(form, 1, [(1, 3), (0, 0)])
    q = torch.randn(2, 2, 64, dtype=torch.float64)
    sinks = torch.tensor([0.5, -2.0])
    shape = HeadShape(2, 1, 64, 0.3, soft_cap=5.0)
    out, lse = decode_attention(q, cache, shape, sinks)
    k, v = _plain_cache(cache, 0)
    scores = 5 * torch.tanh(0.3 * q[0] @ k[0].T / 5)
    total = scores.exp().sum(-1) + sinks.double().exp()
    assert_close(lse[0].double(), total.log(), tolerance=1e-6)
    assert_close(out[0], scores.exp() @ v[0] / total[:, None], tolerance=1e-6)
    assert torch.equal(out[1], torch.zeros(2, 64, dtype=torch.float64))
    assert torch.equal(lse[1], sinks)


def test_no_keys_at_all() -> None:
    cache = random_cache(KVFormat(64), 1, [(0, 0)])
    q = torch.randn(1, 2, 64)
    out, lse = decode_attention(q, cache, HeadShape(2, 1, 64, 0.3))
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((1, 2), -torch.inf))

"""V rotated and back, and what rotation is for: an outlier channel costs the others little."""

from __future__ import annotations

import pytest
import torch

from qoff.kernels.cpu.packed_attention.attention import packed_attention
from qoff.kernels.layout.kv_format import HEAD_DIMS, KVFormat
from qoff.kernels.layout.layer_cache import BlockTable, PackedTokens
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.rotation import rotate_values, value_run
from qoff.kernels.reference.kv_blocks import dequantize_blocks, merge, quantize_blocks
from tests.tolerances import assert_close


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_back_is_the_inverse(head_dim: int, dtype: torch.dtype) -> None:
    v = torch.randn(5, 2, head_dim).to(dtype)
    assert_close(rotate_values(rotate_values(v), back=True), v)
    eye = torch.eye(head_dim, dtype=dtype)
    assert torch.equal(rotate_values(rotate_values(eye), back=True), eye)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_channel_is_spread_evenly_over_its_run(head_dim: int) -> None:
    run = value_run(head_dim)
    assert run >= 16
    spread = rotate_values(torch.eye(head_dim)).abs()
    assert torch.equal(
        spread, spread.max() * torch.block_diag(*[torch.ones(run, run)] * (head_dim // run))
    )


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_an_outlier_channel_costs_the_others_less_than_without_rotation(head_dim: int) -> None:
    form = KVFormat(head_dim)
    v = torch.randn(8, 64, head_dim)
    v[..., 3] *= 20
    _, plain = dequantize_blocks(quantize_blocks(v, v, form), form)
    turned = rotate_values(v)
    kept = rotate_values(
        dequantize_blocks(quantize_blocks(turned, turned, form), form)[1], back=True
    )
    assert float((kept - v).square().sum()) < 0.5 * float((plain - v).square().sum())


@pytest.mark.parametrize("counts", [(1, 1), (1, 20)], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_outputs_over_rotated_values_are_rotated_back(
    head_dim: int, counts: tuple[int, int]
) -> None:
    """Alone, and merged into attention to other tokens, whose values are not rotated."""
    form, heads = KVFormat(head_dim), 4
    k, v = torch.randn(2, 3, 2, 64, head_dim)
    ragged = Ragged.of(list(counts), [128, 64])
    table = BlockTable(torch.tensor([[0, 1], [2, 0]]).int(), [128, 64], ragged)
    packed = PackedTokens(form, quantize_blocks(k, v, form), table)
    query = torch.randn(ragged.tokens, heads * head_dim)
    turned, lse = packed_attention(query, heads, packed, scale=head_dim**-0.5)
    expected = rotate_values(turned.unflatten(1, (heads, -1)), back=True)
    alone, _ = packed_attention(query, heads, packed, scale=head_dim**-0.5, rotated=True)
    assert_close(alone.unflatten(1, (heads, -1)), expected)
    other, other_lse = torch.randn_like(expected), torch.randn_like(lse)
    wanted, wanted_lse = merge(torch.stack((other, expected)), torch.stack((other_lse, lse)))
    out, out_lse = other.flatten(1).clone(), other_lse.clone()
    packed_attention(query, heads, packed, scale=head_dim**-0.5, rotated=True, out=out, lse=out_lse)
    assert_close(out.unflatten(1, (heads, -1)), wanted)
    assert_close(out_lse, wanted_lse)


def test_what_has_no_packed_token_keeps_every_bit() -> None:
    form = KVFormat(64)
    ragged = Ragged.of([1], [5])
    table = BlockTable(torch.zeros(1, 1).int(), [0], ragged)
    packed = PackedTokens(form, torch.zeros(1, 1, form.nbytes).byte(), table)
    out, lse = torch.randn(1, 128), torch.randn(1, 2)
    before = out.clone(), lse.clone()
    packed_attention(torch.randn(1, 128), 2, packed, scale=0.1, rotated=True, out=out, lse=lse)
    assert torch.equal(out, before[0])
    assert torch.equal(lse, before[1])

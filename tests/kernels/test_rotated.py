"""V rotated and back, and what rotation is for: an outlier channel costs the others little."""

from __future__ import annotations

import pytest
import torch

from qoff.kernels.kv_format import HEAD_DIMS, KVFormat
from qoff.kernels.reference_kv import quantize_blocks, unpack_blocks
from qoff.kernels.rotated import rotate_values, value_run
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
    _, plain = unpack_blocks(quantize_blocks(v, v, form), form)
    turned = rotate_values(v)
    kept = rotate_values(unpack_blocks(quantize_blocks(turned, turned, form), form)[1], back=True)
    assert float((kept - v).square().sum()) < 0.5 * float((plain - v).square().sum())

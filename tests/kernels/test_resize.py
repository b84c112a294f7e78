"""Heads with more or fewer channels, against slices."""

from __future__ import annotations

import pytest
import torch

from qoff.errors import OpError
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.reference import ops as reference_ops


@pytest.mark.parametrize(("dim", "to"), [(128, 192), (192, 128), (16, 48), (32, 32), (48, 16)])
@pytest.mark.parametrize(("tokens", "heads", "first"), [(1, 3, 32), (5, 1, 0), (37, 8, 80)])
def test_heads_are_cut_or_have_zeros_behind(
    dim: int, to: int, tokens: int, heads: int, first: int
) -> None:
    x = torch.randn(tokens, first + heads * dim)
    wanted = torch.zeros(tokens, heads, to)
    kept = min(dim, to)
    wanted[..., :kept] = x[:, first:].view(tokens, heads, dim)[..., :kept]
    wanted = torch.cat((x[:, :first], wanted.flatten(1)), 1)
    for ops in (reference_ops, cpu):
        assert torch.equal(ops.resize_heads(x, dim, to, first=first), wanted)
        memory = torch.full((tokens, max(x.shape[1], wanted.shape[1]) + 16), torch.nan)
        given, out = memory[:, : x.shape[1]], memory[:, : wanted.shape[1]]
        given.copy_(x)
        assert ops.resize_heads(given, dim, to, first=first, out=out) is out
        assert torch.equal(out, wanted)
        assert memory[:, -16:].isnan().all()


def test_wrong_operands_are_refused() -> None:
    x = torch.randn(3, 96)
    with pytest.raises(OpError, match="multiples of 16 channels, not 24"):
        cpu.resize_heads(x, 24, 32)
    with pytest.raises(OpError, match="multiples of 16 channels, not 32 and 48 behind 8"):
        cpu.resize_heads(x, 32, 48, first=8)
    with pytest.raises(OpError, match="heads of 64 channels behind 0, not 96"):
        cpu.resize_heads(x, 64, 32)
    with pytest.raises(OpError, match="out must be float32"):
        cpu.resize_heads(x, 32, 16, out=torch.empty(3, 96))
    with pytest.raises(OpError, match="as far apart"):
        cpu.resize_heads(x, 32, 16, out=x.view(-1)[:144].view(3, 48))

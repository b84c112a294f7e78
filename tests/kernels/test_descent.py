"""Coordinate descent of the CPU's threads against plain torch."""

from __future__ import annotations

import pytest
import torch

from qoff.kernels.cpu.solvers import descent as cpu
from qoff.kernels.reference import descent as reference
from tests.quant.test_compensated import alike, weights


@pytest.mark.parametrize("bits", [4, 8])
def test_both_move_the_same_codes(bits: int) -> None:
    n, k, group = 37, 192, 32
    w, hessian = weights(n, k), alike(k, 8)
    scale = torch.rand(n, k // group, generator=torch.Generator().manual_seed(0)) * 0.01 + 0.01
    scale[3, 2] = 0  # a constant group
    wide = scale.repeat_interleave(group, 1)
    start = torch.where(wide == 0, 0, w / wide + 2 ** (bits - 1)).round().clamp(0, 2**bits - 1)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(1))
    found, left = [], []
    for descend in (cpu.descend, reference.descend):
        codes = start.clone()
        gradient = ((codes - 2 ** (bits - 1)) * wide - w) @ hessian
        descend(codes, gradient, scale, hessian, order, bits)
        error = (codes - 2 ** (bits - 1)) * wide - w
        torch.testing.assert_close(gradient, error @ hessian, rtol=1e-3, atol=1e-3)
        left.append(float((error @ hessian * error).sum()))
        found.append(codes)
    assert (found[0] != found[1]).float().mean() < 0.01  # where a level is as near as its neighbour
    assert left[0] == pytest.approx(left[1], rel=1e-3)
    assert not torch.equal(found[0], start)
    assert torch.equal(found[0][3, 64:96], start[3, 64:96])

"""Rounding with feedback on the CPU's threads against plain torch."""

from __future__ import annotations

import pytest
import torch

from qoff.kernels.cpu.solvers import feedback as cpu
from qoff.kernels.reference import feedback as reference


@pytest.mark.parametrize("bits", [4, 8])
def test_both_find_the_same_codes_and_leave_the_same_errors(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    count, rows, most = 96, 200, 2**bits - 1  # rows: no multiple of what a thread takes at a time
    own = torch.randn(count, rows, generator=generator)
    shifted = own + 0.1 * torch.randn(count, rows, generator=generator)
    feedback = 0.2 * torch.randn(count, count, generator=generator)
    groups = torch.randint(0, 3, (count,), generator=generator)
    scale = (1 + torch.rand(3, rows, generator=generator)) * 4 / most
    minimum = -most / 2 * scale
    scale[1, 5] = 0  # a constant group
    errors = [shifted.clone(), shifted.clone()]
    codes = [
        x.round_block(left, own, feedback, scale, minimum, groups, most)
        for x, left in zip((cpu, reference), errors, strict=True)
    ]
    assert (codes[0] != codes[1]).float().mean() < 0.01  # a level is as near as its neighbour
    levels = codes[0].float()
    assert int(levels.max()) == most
    assert int(levels[groups == 1][:, 5].max()) == 0
    values = minimum[groups] + levels * scale[groups]
    torch.testing.assert_close(errors[0], own - values, rtol=0, atol=1e-6)
    same = (codes[0] == codes[1]).all(0)
    assert same.float().mean() > 0.9
    torch.testing.assert_close(errors[0][:, same], errors[1][:, same], rtol=0, atol=1e-5)

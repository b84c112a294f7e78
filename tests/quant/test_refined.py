"""Refining a rounded matrix: its outputs come closer, and no scale is off its best value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qoff.kernels.layout.scales import expanded
from qoff.kernels.reference.quantization import minmax_scale, nearest_levels
from qoff.quant.refined import _moved, refined
from qoff.quant.solvers import compact
from tests.quant.test_compensated import alike, output_error, weights

Rounded = tuple[Tensor, Tensor, Tensor]  # codes, scale, minimum


def nearest(w: Tensor, bits: int, group: int, dtype: torch.dtype) -> Rounded:
    groups = w.view(len(w), -1, group)
    scale, minimum = minmax_scale(groups, bits, dtype)
    return nearest_levels(groups, scale, minimum, bits).to(torch.uint8).view_as(w), scale, minimum


def values(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    groups = codes.float().view(*scale.shape, -1)
    return (groups * scale.float()[..., None] + minimum.float()[..., None]).view(codes.shape)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (8, 64)])
def test_outputs_come_closer(bits: int, group: int, dtype: torch.dtype) -> None:
    w, moments = weights(37, 192), alike(192, 8)
    before = nearest(w, bits, group, dtype)
    after = refined(w, moments, *before, torch.arange(192), bits)
    assert [x.dtype for x in after] == [x.dtype for x in before]
    assert int(after[0].max()) < 2**bits
    lost = [output_error(w, values(*x), moments) for x in (before, after)]
    assert lost[1] < 0.5 * lost[0]


def test_each_row_is_refined_by_itself() -> None:
    w, moments, order = weights(9, 128), alike(128, 8), torch.arange(128)
    before = nearest(w, 4, 32, torch.float32)
    whole = refined(w, moments, *before, order, 4)
    for row in (slice(0, 1), slice(4, 9)):
        part = refined(w[row], moments, *(x[row] for x in before), order, 4)
        lost = (output_error(w[row], values(*x), moments) for x in (part, [y[row] for y in whole]))
        assert next(lost) == pytest.approx(next(lost), rel=1e-2)


def test_no_other_scale_is_better_for_codes_that_stay() -> None:
    w, order = weights(16, 64), torch.arange(64)
    moments = torch.linspace(0.5, 4, 64).diag()  # nothing to make up for
    found = nearest(w, 8, 32, torch.float32)
    for _ in range(8):
        found = refined(w, moments, *found, order, 8)
    lost = output_error(w, values(*found), moments)
    codes, scale, minimum = found
    for factor in (0.999, 1.001):
        assert output_error(w, values(codes, scale * factor, minimum), moments) > lost
        assert output_error(w, values(codes, scale, minimum * factor), moments) > lost


def test_constant_groups_and_values_on_a_grid_stay() -> None:
    codes = torch.randint(16, (8, 64), generator=torch.Generator().manual_seed(0))
    codes[:, 0], codes[:, 1] = 0, 15
    w = codes.float() * 0.25 - 1
    w[:, 32:] = 0.5
    before = nearest(w, 4, 32, torch.float16)
    after = refined(w, alike(64, 4), *before, torch.arange(64), 4)
    assert torch.equal(values(*after), w)


def test_zero_points_move_where_that_helps_and_products_follow() -> None:
    w, moments = weights(24, 128), alike(128, 8)
    scale, minimum = minmax_scale(w.view(24, 4, 32), 4, torch.float32)
    span, zero = compact(w.view(24, 4, 32), 4, (scale, minimum))
    levels = nearest_levels(w.view(24, 4, 32), *expanded(span, zero, 4), 4).view(24, 128)

    def error(zero: Tensor) -> Tensor:
        return values(levels, *expanded(span, zero, 4)) - w

    found, products = _moved(w, moments, levels, span, zero, 4)
    torch.testing.assert_close(products, error(found) @ moments, rtol=1e-3, atol=1e-4)
    before, after = ((e @ moments * e).sum(1) for e in (error(zero), error(found)))
    assert bool((after <= before * (1 + 1e-5)).all())
    assert float(after.sum()) < 0.95 * float(before.sum())

"""Bringing a rounded matrix closer: its scales by least squares, then its codes one at a time.

Both lower e H e^T, the square error of the outputs, for the errors e of a row and the second
moments H of its inputs. The best scales and minima of a row are those of a linear system once its
codes are known (of compact scales, the minima alone); coordinate descent, as in Behdin et al.,
"QuantEase" (2023), goes on from there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.kernels.layout.scales import COMPACT, expanded, zero_for

from .solvers import floats_of

_RIDGE = 1e-3  # of the curvature in each scale and minimum
_PART = 1 << 24  # numbers of the systems that are solved together


def refined(
    w: Tensor,
    hessian: Tensor,
    codes: Tensor,
    scale: Tensor,
    minimum: Tensor,
    order: Tensor,
    bits: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [N, K], scale and minimum [N, G], from those that rounding gave, of their dtypes.

    w: float32 [N, K]. hessian: float32 [K, K], positive definite. order: int64 [K], of columns.
    """
    if w.device.type == "cpu":
        from qoff.kernels.cpu.solvers.descent import descend  # numba, which loading does not need
    else:
        from qoff.kernels.reference.descent import descend  # a row is no more than a thread's work

    n, k = w.shape
    levels, groups = codes.float(), scale.shape[1]
    if scale.dtype == COMPACT:
        minimum, products = _moved(w, hessian, levels, scale, minimum, bits)
    else:
        rows = max(1, _PART // max(k, 4 * groups**2))
        parts = [slice(start, start + rows) for start in range(0, n, rows)]
        fitted = [_fitted(w[i], hessian, levels[i], scale[i], minimum[i]) for i in parts]
        scale, minimum = (torch.cat(x) for x in zip(*fitted, strict=True))
        products = _error(w, levels, scale.float(), minimum.float()) @ hessian
    descend(levels, products, floats_of((scale, minimum), bits)[0], hessian, order, bits)
    return levels.to(torch.uint8), scale, minimum


def _error(w: Tensor, levels: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """What codes are off, [N, K]; scale and minimum in float32."""
    grouped = levels.view(len(w), scale.shape[1], -1)
    return torch.addcmul(minimum[..., None], grouped, scale[..., None]).view_as(w).sub_(w)


def _moved(
    w: Tensor, hessian: Tensor, levels: Tensor, span: Tensor, zero: Tensor, bits: int
) -> tuple[Tensor, Tensor]:
    """Zero points of compact scales of less error, uint8 [N, G], for codes and spans as they are.

    And e H for the errors e that are left, [N, K]. Minima without rounding are one linear system
    for all rows; a row keeps its own where rounded ones are worse.
    """
    (n, k), groups = w.shape, span.shape[1]
    scale, minimum = expanded(span, zero, bits)
    products = _error(w, levels, scale, minimum) @ hessian
    missing = products.view(n, groups, -1).sum(2)
    across = hessian.view(groups, -1, k).sum(1)
    curvature = across.view(groups, groups, -1).sum(2)
    ridged = curvature.double()
    ridged.diagonal().mul_(1 + _RIDGE)
    factor, failed = torch.linalg.cholesky_ex(ridged)
    if int(failed):
        return zero, products
    change = torch.cholesky_solve(missing.double().T, factor).T
    found = zero_for(minimum - change.float(), scale * 2.0**bits)
    moved = expanded(span, found, bits)[1] - minimum
    gained = (moved * (2 * missing + moved @ curvature)).sum(1) < 0
    moved *= gained[:, None]
    return torch.where(gained[:, None], found, zero), products.addmm_(moved, across)


def _fitted(
    w: Tensor, hessian: Tensor, levels: Tensor, scale: Tensor, minimum: Tensor
) -> tuple[Tensor, Tensor]:
    """Scale and minimum of least error for codes, float32 [n, K]; as they were where that fails."""
    (n, k), count = w.shape, scale.shape[1]
    size = k // count
    grouped = levels.view(n, count, size)
    system = torch.empty(n, 2 * count, 2 * count, device=w.device)
    for i in range(count):
        across = slice(i * size, (i + 1) * size)
        product = (levels[:, across] @ hessian[across]).view(n, count, size)
        system[:, :count, i] = (product * grouped).sum(2)
        system[:, count:, i] = product.sum(2)
    system[:, :count, count:] = system[:, count:, :count].transpose(1, 2)
    system[:, count:, count:] = hessian.view(count, size, count, size).sum((1, 3))
    before = torch.cat([scale, minimum], 1).float()
    wanted = (w @ hessian).view(n, count, size)
    wanted = torch.cat([(wanted * grouped).sum(2), wanted.sum(2)], 1)
    missing = wanted - (system @ before[..., None])[..., 0]
    curvature = system.diagonal(dim1=1, dim2=2)
    curvature += _RIDGE * curvature + 1e-30  # a group whose codes are all 0 has none in its scale
    factor, failed = torch.linalg.cholesky_ex(system.double())
    change = torch.cholesky_solve(missing.double()[..., None], factor)[..., 0]
    found = (before + change).to(scale.dtype)
    good = (found.isfinite() & (failed == 0)[:, None]).view(n, 2, count).all(1)
    good &= found[:, :count] > 0
    return (
        torch.where(good, found[:, :count], scale),
        torch.where(good, found[:, count:], minimum),
    )

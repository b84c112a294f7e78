"""Rounding a matrix so that the errors of its outputs cancel, given what its inputs look like.

After Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (2022): columns are rounded one after another, and what rounding one of them does to
the outputs is made up for by the columns that are still to come. Those with the strongest inputs
come first. Scale and minimum of each group are chosen before, so that groups are those of
neighbouring columns all the same, as every kernel here reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.errors import OpError, QuantizationError
from qoff.kernels.layout.packing import check_format, pack_codes, pack_scale_min
from qoff.kernels.layout.qtensor import QTensor

from .matrix import Format
from .solvers import mse

DAMPING = 0.01  # of the mean of the diagonal of the Hessian
_BLOCK = 128  # columns whose errors reach the columns behind them together
_TRIES = 6  # each with ten times the damping


@torch.no_grad()
def compensated(
    w: Tensor,
    hessian: Tensor,
    form: Format,
    *,
    scale_dtype: torch.dtype = torch.float16,
    name: str = "weight",
) -> QTensor:
    """Quantize a matrix [N, K] whose inputs x [K] have the second moments E[x x^T] `hessian`.

    hessian: float32 [K, K], up to a factor. The result is in packing split32. Memory: three more
    matrices [K, K] and four [N, K] in float32. Raises QuantizationError for NaN and infinity, for
    groups that do not divide K, and for a range that `scale_dtype` cannot hold.
    """
    n, k = w.shape
    try:
        check_format((n, k), form.bits, form.group_size, "split32")
        importance = hessian.diagonal().float().clamp_min(0)
        groups = w.float().view(n, -1, form.group_size)
        weighted = importance.view(-1, form.group_size)
        # Groups of inputs that are always 0 keep their values.
        positive = weighted + weighted.mean().clamp_min(1e-30) * 1e-4
        scale, minimum = mse(groups, form.bits, scale_dtype, positive)
    except (OpError, QuantizationError) as error:
        raise QuantizationError(f"{name}: {error}") from error
    order = importance.argsort(descending=True)
    factor = _inverse_factor(hessian[order][:, order], name)
    codes = _rounded(w.float().T[order], factor, scale.T, minimum.T, order, form)
    packed = pack_codes(codes.T.contiguous(), form.bits, "split32")
    scale_min = pack_scale_min(scale, minimum, "split32")
    return QTensor(packed, scale_min, (n, k), form.bits, form.group_size, "split32")


def _inverse_factor(hessian: Tensor, name: str) -> Tensor:
    """The upper Cholesky factor of the inverse of a Hessian, damped as much as it takes."""
    wide = hessian.double()
    wide = (wide + wide.T) / 2
    mean = float(wide.diagonal().mean()) or 1.0
    damping = DAMPING
    for _ in range(_TRIES):
        damped = wide + damping * mean * torch.eye(len(wide), dtype=wide.dtype)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return upper.float()
        damping *= 10
    raise QuantizationError(
        f"{name}: the second moments of its inputs are no such matrix; they hold NaN, or infinity"
    )


def _rounded(
    columns: Tensor, factor: Tensor, scale: Tensor, minimum: Tensor, order: Tensor, form: Format
) -> Tensor:
    """Codes, uint8 [K, N], of columns [K, N] in the order they are rounded in, which it changes.

    scale, minimum: [G, N]. order: the place of each column in the matrix, and of its codes.
    """
    k, n = columns.shape
    most = 2**form.bits - 1
    places = order.tolist()
    wide, low = scale.float(), minimum.float()
    inverse = torch.where(wide == 0, 0, 1 / wide)
    codes = torch.empty(k, n, dtype=torch.uint8)
    for start in range(0, k, _BLOCK):
        stop = min(start + _BLOCK, k)
        block, part = columns[start:stop], factor[start:stop, start:stop]
        errors = torch.empty_like(block)
        for i in range(stop - start):
            place = places[start + i]
            group = place // form.group_size
            level = (block[i] - low[group]).mul_(inverse[group]).round_().clamp_(0, most)
            codes[place] = level.to(torch.uint8)
            value = level.mul_(wide[group]).add_(low[group])
            errors[i] = (block[i] - value) / part[i, i]
            block[i + 1 :].addr_(part[i, i + 1 :], errors[i], alpha=-1)
        columns[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    return codes

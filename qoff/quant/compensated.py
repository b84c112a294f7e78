"""Rounding a matrix so that the errors of its outputs cancel, given what its inputs look like.

After Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (2022), in the form of Chee et al., "QuIP" (2023), which gives the same codes with one
factorization and no inverse: with H = (U + 1) D (U + 1)^T, U strictly upper triangular, a column is
rounded after adding to it the errors of those before, times its column of U. Those with the
strongest inputs come first. Scale and minimum of each group are chosen before, so that groups are
those of neighbouring columns all the same, as every kernel here reads them. What comes out is
`refined`.

What is rounded may be a matrix that is `aimed`: on the inputs that it meets, which matrices before
it have changed, at the outputs of the original one on its own inputs. After Li et al., "GPTAQ:
Efficient Finetuning-Free Quantization for Asymmetric Calibration" (2025).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from qoff.errors import OpError, QuantizationError
from qoff.kernels.layout.packing import check_format, pack_codes, pack_scale_min
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.scales import COMPACT

from .matrix import Format, computed, within_range
from .refined import refined
from .solvers import SpanError, compact, floats_of, mse

# Of the mean of the diagonal of the Hessian: texts that it was not measured on lose least.
DAMPING = 0.1
AIM = 0.5  # of the way, for many inputs: more fits the text alone
_BLOCK = 128  # columns whose errors reach the columns behind them together
_WIDE = 256  # columns whose moments with those behind them are one product
_TRIES = 6  # each with ten times the damping
_SHRINKS, _REFITS = (0.92, 0.84, 0.76), 2  # of ranges, which are fitted to codes later
_CHUNK = 1 << 18  # weights whose range is chosen at a time


def moments(x: Tensor, device: torch.device | None = None) -> Tensor:
    """The sum of x x^T over inputs x, float32 [M, K]: float32 [K, K], where it is computed.

    device: where; None: on the GPU if there is one with room, else where the inputs are. A CPU
    takes little more than half the products.
    """
    return computed(lambda place: _moments(x.to(place)), x.device, device, "moments")


def _moments(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return x.T @ x
    k = x.shape[1]
    found = x.new_empty(k, k)
    for start in range(0, k, _WIDE):
        stop = min(start + _WIDE, k)
        torch.mm(x[:, start:stop].T, x[:, start:], out=found[start:stop, start:])
    return found.triu_().add_(found.triu(1).T)


def aimed(w: Tensor, hessian: Tensor, missing: Tensor, count: int, name: str = "weight") -> Tensor:
    """A matrix near w, float32 [N, K], whose outputs come nearer to what they should be.

    By ridge regression, AIM of the way, and less where there are not more inputs than columns.
    hessian: float32 [K, K], the sum of x x^T over `count` inputs x. missing: float32 [N, K], the
    sum of what outputs should have beside w x, times x^T. name: as for `compensated`, which
    refuses a Hessian that says nothing. Memory: two matrices [K, K] and two [N, K].
    """

    def compute(place: torch.device) -> Tensor:
        damped = hessian.to(place, copy=True)
        damped.diagonal().add_(DAMPING * float(damped.diagonal().mean()))
        factor, failed = torch.linalg.cholesky_ex(damped)
        if int(failed):
            return w
        moved = torch.cholesky_solve(missing.to(place).T, factor).T
        return w + moved.mul_(AIM * count / (count + len(hessian))).to(w.device)

    return computed(compute, w.device, None, name)


@torch.no_grad()
def compensated(
    w: Tensor,
    hessian: Tensor,
    form: Format,
    *,
    scale_dtype: torch.dtype = torch.float16,
    name: str = "weight",
    device: torch.device | None = None,
) -> QTensor:
    """Quantize a matrix [N, K] whose inputs x [K] have the second moments E[x x^T] `hessian`.

    hessian: float32 [K, K], up to a factor. device: where it is computed; None: on the GPU if there
    is one with room, else where the matrix is. The result is in packing split32, where the matrix
    is. Memory: two more matrices [K, K] and five [N, K] in float32. Raises QuantizationError for
    NaN and infinity, for groups that do not divide K, and for a range that `scale_dtype` cannot
    hold; where compact scales cannot, the matrix gets others, as from `quantize`.
    """

    def solve(scales: torch.dtype) -> QTensor:
        def compute(place: torch.device) -> QTensor:
            return _compensated(w.to(place), hessian.to(place), form, scales, name)

        return computed(compute, w.device, device, name)

    found = within_range(solve, scale_dtype, name)
    codes, scale_min = found.codes.to(w.device), found.scale_min.to(w.device)
    return replace(found, codes=codes, scale_min=scale_min)


def _compensated(
    w: Tensor, hessian: Tensor, form: Format, scale_dtype: torch.dtype, name: str
) -> QTensor:
    n, k = w.shape
    try:
        check_format((n, k), form.bits, form.group_size, "split32")
        importance = hessian.diagonal().float().clamp_min(0)
        scale, minimum = _ranges(w, importance, form, scale_dtype)
    except SpanError:
        raise
    except (OpError, QuantizationError) as error:
        raise QuantizationError(f"{name}: {error}") from error
    order = importance.argsort()  # the last one first
    feedback = _feedback(hessian[order][:, order], name)
    w = w.float()
    codes = _rounded(w, feedback, *floats_of((scale, minimum), form.bits), order, form)
    del feedback
    damped = hessian.clone()
    damped.diagonal().add_(DAMPING * (float(importance.mean()) or 1.0))
    codes, scale, minimum = refined(w, damped, codes, scale, minimum, order.flip(0), form.bits)
    packed = pack_codes(codes, form.bits, "split32")
    scale_min = pack_scale_min(scale, minimum, "split32")
    return QTensor(packed, scale_min, (n, k), form.bits, form.group_size, "split32")


def _ranges(
    w: Tensor, importance: Tensor, form: Format, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scale and minimum of each group, [N, G], of least squared error weighted by importance.

    As they are stored.
    """
    weighted = importance.view(-1, form.group_size)
    # Groups of inputs that are always 0 keep their values.
    positive = weighted + weighted.mean().clamp_min(1e-30) * 1e-4
    groups = w.float().view(len(w), -1, form.group_size)
    parts = groups.split(max(1, _CHUNK // w.shape[1]))
    dtype = torch.float32 if scale_dtype == COMPACT else scale_dtype
    found = [mse(part, form.bits, dtype, positive, _SHRINKS, _REFITS) for part in parts]
    if scale_dtype == COMPACT:
        found = [
            compact(part, form.bits, one, importance=positive)
            for part, one in zip(parts, found, strict=True)
        ]
    return torch.cat([scale for scale, _ in found]), torch.cat([least for _, least in found])


def _feedback(hessian: Tensor, name: str) -> Tensor:
    """The unit lower triangular factor of a Hessian, damped as much as it takes; changes it."""
    diagonal = hessian.diagonal()
    mean, damping, added = float(diagonal.mean()) or 1.0, DAMPING, 0.0
    for _ in range(_TRIES):
        diagonal += (damping - added) * mean
        lower, failed = torch.linalg.cholesky_ex(hessian)
        if not int(failed):
            return lower.div_(lower.diagonal().clone())
        added, damping = damping, damping * 10
    raise QuantizationError(
        f"{name}: the second moments of its inputs are no such matrix; they hold NaN, or infinity, "
        "as the weights before it do; get the model again, or use a solver without calibration"
    )


def _rounded(
    w: Tensor, feedback: Tensor, scale: Tensor, minimum: Tensor, order: Tensor, form: Format
) -> Tensor:
    """Codes, uint8 [N, K], of a matrix whose columns are rounded from the last of `order` on.

    scale, minimum: float32 [N, G].
    """
    if w.device.type == "cpu":
        from qoff.kernels.cpu.solvers.feedback import round_block  # numba, not always needed
    else:
        from qoff.kernels.reference.feedback import round_block

    n, k = w.shape
    groups, wide, low = order // form.group_size, scale.T.contiguous(), minimum.T.contiguous()
    columns = w.T[order]  # [K, N]; rounded ones become their errors
    codes = torch.empty(k, n, dtype=torch.uint8, device=w.device)
    for start in reversed(range(0, k, _BLOCK)):
        at = slice(start, min(start + _BLOCK, k))
        block, own = columns[at], columns[at].clone()
        block.addmm_(feedback[at.stop :, at].T, columns[at.stop :])
        codes[order[at]] = round_block(
            block, own, feedback[at, at], wide, low, groups[at], 2**form.bits - 1
        )
    return codes.T.contiguous()

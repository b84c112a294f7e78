"""What quantizing a matrix means, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.errors import QuantizationError
from qoff.kernels.layout.packing import check_format


def quantize(
    w: Tensor, bits: int, group_size: int, scale_dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    """Round a matrix to the nearest of 2**bits levels between each group's minimum and maximum.

    `w` is [N, K] of any float dtype. Returns codes uint8 [N, K], and scale and minimum [N, K/g] in
    `scale_dtype`; the codes are the nearest for the scale and minimum as rounded to that dtype.
    Raises OpError for a format that does not exist, QuantizationError for NaN, infinity, or a range
    that `scale_dtype` cannot hold.
    """
    n, k = w.shape
    check_format((n, k), bits, group_size, "split32")
    groups = w.float().reshape(n, k // group_size, group_size)
    scale, minimum = minmax_scale(groups, bits, scale_dtype)
    codes = nearest_levels(groups, scale, minimum, bits).to(torch.uint8)
    return codes.view(n, k), scale, minimum


def minmax_scale(groups: Tensor, bits: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the scale and minimum [N, G] that span each group of float32 [N, G, g].

    Raises QuantizationError for NaN, infinity, or a range that `scale_dtype` cannot hold.
    """
    low, high = torch.aminmax(groups, dim=2)
    if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
        bad = int((~torch.isfinite(groups)).sum())
        raise QuantizationError(f"{bad} of {groups.numel()} weights are NaN or infinite")
    span = high - low
    # By a tensor: on a GPU, torch multiplies by the inverse of a number, which rounds differently.
    scale = (span / span.new_tensor(2**bits - 1)).to(scale_dtype)
    minimum = (low + 0.0).to(scale_dtype)  # of zeros of both signs, which is least is left open
    if not bool((torch.isfinite(scale) & torch.isfinite(minimum) & torch.isfinite(span)).all()):
        largest = float(torch.maximum(low.abs(), high.abs()).max())
        advice = "use float32 scales" if scale_dtype == torch.float16 else "scale the weights down"
        raise QuantizationError(
            f"weights up to {largest:.4g} overflow {scale_dtype} scales and minima; {advice}"
        )
    return scale, minimum


def nearest_levels(groups: Tensor, scale: Tensor, minimum: Tensor, bits: int) -> Tensor:
    """Return the codes nearest to float32 groups [N, G, g] as float32 (0 where the scale is 0)."""
    wide = scale.float()[..., None]
    levels = (groups - minimum.float()[..., None]).div_(torch.where(wide == 0, torch.inf, wide))
    return levels.round_().clamp_(0, 2**bits - 1)

"""Random operands for op tests."""

from __future__ import annotations

import torch

from qoff.kernels.packing import pack_codes, pack_scale_min
from qoff.kernels.qtensor import QTensor


def random_weight(
    n: int,
    k: int,
    bits: int = 4,
    group_size: int = 64,
    *,
    packing: str = "cpu16",
    scale_dtype: torch.dtype = torch.float16,
) -> QTensor:
    """A QTensor [n, k] of uniform codes, every group with its own scale and minimum."""
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)
    scale = (0.5 + torch.rand(n, k // group_size)) / 2**bits / k**0.5
    minimum = -scale * (2**bits - 1) * (0.3 + 0.4 * torch.rand(n, k // group_size))
    return QTensor(
        pack_codes(codes, bits, packing),
        pack_scale_min(scale.to(scale_dtype), minimum.to(scale_dtype), packing),
        (n, k),
        bits,
        group_size,
        packing,
    )

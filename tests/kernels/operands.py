"""Random operands for op tests."""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.kernels.layout.packing import pack_codes, pack_scale_min
from qoff.kernels.layout.qexperts import QExperts
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.scales import COMPACT, span_below


def random_weight(
    n: int,
    k: int,
    bits: int = 4,
    group_size: int = 64,
    *,
    packing: str = "rows16",
    scale_dtype: torch.dtype = torch.float16,
) -> QTensor:
    """A QTensor [n, k] of uniform codes, every group with its own scale and minimum."""
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)
    if scale_dtype == COMPACT:
        span = span_below((0.5 + torch.rand(n, k // group_size)) / k**0.5).to(torch.uint8)
        zero = torch.randint(70, 180, span.shape, dtype=torch.uint8)
        packed = pack_codes(codes, bits, packing), pack_scale_min(span, zero, packing)
        return QTensor(*packed, (n, k), bits, group_size, packing)
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


def random_experts(
    count: int,
    hidden: int,
    inner: int,
    bits: int = 4,
    group_size: int = 32,
    *,
    packing: str = "rows16",
    scale_dtype: torch.dtype = torch.float16,
    gated: bool = True,
) -> tuple[QExperts, QExperts]:
    """gate_up and down of `count` experts in one buffer, expert by expert as in a layer's file.

    Where they are not gated, up and down.
    """
    form = {"packing": packing, "scale_dtype": scale_dtype}
    matrices = [
        (
            random_weight((1 + gated) * inner, hidden, bits, group_size, **form),
            random_weight(hidden, inner, bits, group_size, **form),
        )
        for _ in range(count)
    ]
    parts = [[x for q in pair for x in (q.codes, q.scale_min)] for pair in matrices]
    buffer = torch.cat([_bytes(part) for expert in parts for part in expert])
    placed: list[list[QTensor]] = [[], []]
    start = 0
    for pair in matrices:
        for q, found in zip(pair, placed, strict=True):
            views = []
            for part in (q.codes, q.scale_min):
                view = buffer[start : start + part.nbytes].view(part.dtype).view(part.shape)
                views.append(view)
                start += part.nbytes
            found.append(QTensor(*views, q.shape, q.bits, q.group_size, q.packing))
    return QExperts.of(placed[0]), QExperts.of(placed[1])


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8).flatten()

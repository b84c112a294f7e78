"""Random quantized matrices for the tests of the kernels that read them."""

import torch

from qoff.kernels.layout.packing import pack_codes, pack_scale_min
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.scales import COMPACT
from qoff.kernels.reference import quantization
from qoff.quant import quantize


def quantized(rows, columns, bits, group, scale_dtype=torch.float16, offset=0.3):
    """A QTensor [rows, columns] of random weights around `offset`, packing split32."""
    w = torch.randn(rows, columns) + offset
    if scale_dtype == COMPACT:
        return quantize(w, bits, group, "rtn", scale_dtype=COMPACT)
    codes, scale, minimum = quantization.quantize(w, bits, group, scale_dtype)
    return QTensor(
        pack_codes(codes, bits, "split32"),
        pack_scale_min(scale, minimum, "split32"),
        (rows, columns),
        bits,
        group,
        "split32",
    )

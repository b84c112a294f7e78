"""Quantize a matrix and multiply by it: python examples/one_kernel.py"""

import torch

from qoff.kernels.ops import ops_for
from qoff.quant import quantize

ops = ops_for(torch.device("cpu"))
weight = torch.randn(256, 512)  # [N, K]: outputs, inputs
x = torch.randn(3, 512)  # [M, K]: tokens
packed = quantize(weight, bits=4, group_size=64, packing=ops.PACKING)
y = ops.w4_linear(x, packed)  # [M, N]

bytes_packed = packed.codes.nbytes + packed.scale_min.nbytes
print(f"{weight.nbytes} bytes became {bytes_packed}")
print(f"error of the op: {(y - x @ packed.dequantize().T).abs().max():.1e}")
print(f"error of 4 bits: {(y - x @ weight.T).abs().max():.1e}")

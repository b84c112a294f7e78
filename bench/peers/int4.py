"""Other ways to multiply by a 4-bit matrix on the CPU, on the codes and scales of a QTensor."""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.kernels.layout.packing import unpack_codes, unpack_scale_min
from qoff.kernels.layout.qtensor import QTensor

_ZERO_CODE = 8  # torch's int4 value is (code - 8) * scale + zero


class TorchInt4:
    """torch's int4 op, which transformers and torchao use on CPUs; bfloat16 activations."""

    def __init__(self, weight: QTensor) -> None:
        codes = unpack_codes(weight.codes, weight.shape, weight.bits, weight.packing)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 2)
        scale, minimum = unpack_scale_min(weight.scale_min, weight.shape, weight.packing)
        zero = minimum.float() + _ZERO_CODE * scale.float()
        both = torch.stack([scale.float().T, zero.T], dim=-1)  # [K/g, N, 2]
        self._scale_zero = both.bfloat16().contiguous()
        self._group = weight.group_size

    def __call__(self, x: Tensor) -> Tensor:
        """x bfloat16 [M, K] -> bfloat16 [M, N]."""
        return torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, self._packed, self._group, self._scale_zero
        )


class DequantizeGemm:
    """torch alone: dequantize `tile` rows into a buffer, multiply in float32, go on.

    `tile` of all rows dequantizes the whole matrix; fewer keep the buffer in cache. The layout
    suits torch's vector loops: low nibbles are a row's first half, high nibbles its second.
    Buffers are shared by weights that are made with the same `buffers`.
    """

    def __init__(self, weight: QTensor, tile: int, buffers: dict[str, Tensor]) -> None:
        n, k = weight.shape
        codes = unpack_codes(weight.codes, weight.shape, weight.bits, weight.packing)
        self._codes = codes[:, : k // 2] | (codes[:, k // 2 :] << 4)
        scale, minimum = unpack_scale_min(weight.scale_min, weight.shape, weight.packing)
        self._scale = scale.float().unsqueeze(-1).contiguous()  # [N, K/g, 1]
        self._minimum = minimum.float().unsqueeze(-1).contiguous()
        self._tile = min(tile, n)
        self._nibbles = buffers.setdefault("nibbles", codes.new_empty(self._tile, k // 2))
        self._values = buffers.setdefault("values", torch.empty(self._tile, k))

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """x float32 [M, K] -> out float32 [M, N]."""
        n = len(self._codes)
        for start in range(0, n, self._tile):
            stop = min(n, start + self._tile)
            torch.mm(x, self._rows(start, stop).T, out=out[:, start:stop])
        return out

    def _rows(self, start: int, stop: int) -> Tensor:
        """Dequantize rows into the buffer: float32 [stop - start, K]."""
        codes, scale = self._codes[start:stop], self._scale[start:stop]
        nibbles, values = self._nibbles[: stop - start], self._values[: stop - start]
        half = values.shape[1] // 2
        values[:, :half] = torch.bitwise_and(codes, 15, out=nibbles)
        values[:, half:] = torch.bitwise_right_shift(codes, 4, out=nibbles)
        groups = values.view(len(values), scale.shape[1], -1)  # [rows, K/g, g]
        groups.mul_(scale).add_(self._minimum[start:stop])
        return values

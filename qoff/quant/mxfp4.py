"""Checkpoints whose experts are MXFP4, as gpt-oss has them, dequantized: not evenly spaced.

OCP Microscaling Formats (MX) Specification 1.0: 32 values of 4 bits, E2M1, share a power of two,
E8M0. For a tensor `name`, [experts, columns, rows], there are

    name_blocks  uint8 [experts, rows, columns / 32, 16], two values a byte, the first in the low
                 nibble: bits 0..2 are its magnitude, bit 3 its sign
    name_scales  uint8 [experts, rows, columns / 32], the exponent plus 127
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from qoff.errors import FormatError

from .stored import StoredTensors, TensorInfo, checked_shape

GROUP = 32  # values that share a scale
_BIAS = 127
_NAN = 255  # of a scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BYTES = (torch.uint8,)


class MXFP4:
    """How the experts of a model are stored; all else in it is floats."""

    def info(self, tensors: StoredTensors, module: str) -> TensorInfo | None:
        """No linear module is quantized."""
        return None

    def pieces(self, tensors: StoredTensors, module: str, rows: int) -> Iterator[Tensor]:
        """Never called, as `info` knows no module."""
        raise FormatError(f"{tensors.path}: {module} is not quantized")

    def stack(self, tensors: StoredTensors, name: str) -> TensorInfo | None:
        """Describe experts [experts, columns, rows], None if they are not quantized."""
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        if tensors.kind(blocks) is None:
            return None
        experts, rows, groups, _ = checked_shape(
            tensors, blocks, _BYTES, (None, None, None, GROUP // 2)
        )
        checked_shape(tensors, scales, _BYTES, (experts, rows, groups))
        return TensorInfo((experts, groups * GROUP, rows), None)

    def item(self, tensors: StoredTensors, name: str, index: int) -> Tensor:
        """One expert, float32 [columns, rows]. Raises FormatError for a scale that is NaN."""
        codes = tensors.read(f"{name}_blocks", index, index + 1)[0]  # [rows, groups, 16]
        scales = tensors.read(f"{name}_scales", index, index + 1)[0]
        if bool((scales == _NAN).any()):
            raise FormatError(
                f"{tensors.path}: tensor {name}_scales holds NaN; get the model again"
            )
        exponents = scales.to(torch.int32)[..., None] - _BIAS
        return torch.ldexp(e2m1(codes), exponents).flatten(1).T.contiguous()


def e2m1(codes: Tensor) -> Tensor:
    """The values of uint8 [..., C], float32 [..., 2 C]: of the low nibble, then of the high one."""
    values = torch.tensor([*_MAGNITUDES, *(-x for x in _MAGNITUDES)])
    return values[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()]

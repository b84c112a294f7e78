"""Quantizing, dequantizing and multiplying by packed weights as ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.packing import check_format, pack_codes, pack_scale_min, packed_shapes
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.reference import quantization

from .define import FLOATS, FLOATS_AND_32, Output, define, require, require_one

_SCALES = (torch.float16, torch.float32)


def quantize(
    w: Tensor, bits: int, group_size: int, scale_dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor]:
    """Return codes (uint8, packing split32) and scale_min [K/g, N, 2] of w [N, K].

    w: contiguous, float16, bfloat16 or float32. On a GPU a group with NaN or infinity gets a scale
    and minimum of NaN, one whose range `scale_dtype` cannot hold gets infinity, and nothing is
    raised, so that the GPU need not be waited for: check that scale_min is finite. On a CPU that
    is a QuantizationError. Raises OpError.
    """
    result: tuple[Tensor, Tensor] = _quantize(w, bits, group_size, scale_dtype)
    return result


def dequantize(
    codes: Tensor, scale_min: Tensor, bits: int, group_size: int, dtype: torch.dtype
) -> Tensor:
    """Return the matrix [N, K] in `dtype`: code * scale + minimum in float32, rounded once.

    codes: uint8, packing split32. scale_min: [K/g, N, 2] float16 or float32. dtype: float16 or
    bfloat16. Raises OpError.
    """
    result: Tensor = _dequantize(codes, scale_min, bits, group_size, dtype)
    return result


def w4_linear(
    x: Tensor, codes: Tensor, scale_min: Tensor, bias: Tensor | None, bits: int, group_size: int
) -> Tensor:
    """Return x @ W.T + bias [M, N] in the dtype of x, accumulated in float32.

    x: [M, K] float16 or bfloat16; its rows may lie apart, by a multiple of 16 bytes. codes: uint8,
    packing split32, of W [N, K], 4 or 8 bits. scale_min: [K/g, N, 2] float16 or float32. bias: [N]
    of the dtype of x. Raises OpError.
    """
    result: Tensor = _w4_linear(x, codes, scale_min, bias, bits, group_size)
    return result


def _check_quantize(
    w: Tensor, bits: int, group_size: int, scale_dtype: torch.dtype
) -> tuple[Output, Output]:
    require("w", w, FLOATS_AND_32, ("N", "K"), w.device)
    require_one("the dtype of scales", scale_dtype, _SCALES)
    codes, scale_min = packed_shapes((w.shape[0], w.shape[1]), bits, group_size, "split32")
    return Output(w, codes, torch.uint8), Output(w, scale_min, scale_dtype)


def _check_weight(
    codes: Tensor, scale_min: Tensor, bits: int, group_size: int, device: torch.device
) -> tuple[int, int]:
    """Raise OpError unless codes and scale_min are those of one matrix; return its shape."""
    require("codes", codes, (torch.uint8,), ("N", f"K * {bits} / 8"), device)
    require_one("a code of bits", bits, (4, 8))
    shape = (codes.shape[0], codes.shape[1] * 8 // bits)
    check_format(shape, bits, group_size, "split32")
    _, expected = packed_shapes(shape, bits, group_size, "split32")
    require("scale_min", scale_min, _SCALES, expected, device)
    _check_address("codes", codes, 16)
    _check_address("scale_min", scale_min, 16)
    return shape


def _check_address(name: str, tensor: Tensor, multiple: int) -> None:
    offset = tensor.storage_offset() * tensor.element_size()
    if offset % multiple:
        raise OpError(
            f"{name} must start at a multiple of {multiple} bytes, not at byte {offset} of its "
            "storage; call clone()"
        )


def _check_dequantize(
    codes: Tensor, scale_min: Tensor, bits: int, group_size: int, dtype: torch.dtype
) -> Output:
    shape = _check_weight(codes, scale_min, bits, group_size, codes.device)
    require_one("the dtype of a dequantized matrix", dtype, FLOATS)
    return Output(codes, shape, dtype)


def _check_w4_linear(
    x: Tensor, codes: Tensor, scale_min: Tensor, bias: Tensor | None, bits: int, group_size: int
) -> Output:
    n, k = _check_weight(codes, scale_min, bits, group_size, x.device)
    require("x", x, FLOATS, ("M", k), x.device, strided_rows=True)
    _check_address("x", x, 16)
    if x.shape[0] > 1 and x.stride(0) % 8:
        raise OpError(
            f"rows of x must start at multiples of 8 elements, not of {x.stride(0)}; "
            "call contiguous()"
        )
    if bias is not None:
        require("bias", bias, (x.dtype,), (n,), x.device)
    return Output(x, (x.shape[0], n))


def _quantize_anywhere(
    w: Tensor, bits: int, group_size: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    codes, scale, minimum = quantization.quantize(w, bits, group_size, scale_dtype)
    return pack_codes(codes, bits, "split32"), pack_scale_min(scale, minimum, "split32")


def _qtensor(codes: Tensor, scale_min: Tensor, bits: int, group_size: int) -> QTensor:
    shape = (codes.shape[0], codes.shape[1] * 8 // bits)
    return QTensor(codes, scale_min, shape, bits, group_size, "split32")


def _dequantize_anywhere(
    codes: Tensor, scale_min: Tensor, bits: int, group_size: int, dtype: torch.dtype
) -> Tensor:
    return _qtensor(codes, scale_min, bits, group_size).dequantize(dtype)


def _w4_linear_anywhere(
    x: Tensor, codes: Tensor, scale_min: Tensor, bias: Tensor | None, bits: int, group_size: int
) -> Tensor:
    y = x.float() @ _qtensor(codes, scale_min, bits, group_size).dequantize().T
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _cuda_quantize() -> Callable[..., Any]:
    from qoff.kernels.triton.linear.quantize import quantize

    return quantize


def _cuda_dequantize() -> Callable[..., Any]:
    from qoff.kernels.triton.linear.dequantize import dequantize

    return dequantize


def _cuda_w4_linear() -> Callable[..., Any]:
    from qoff.kernels.triton.linear.linear import w4_linear

    return w4_linear


_quantize = define(
    "quantize(Tensor w, int bits, int group_size, ScalarType scale_dtype) -> (Tensor, Tensor)",
    check=_check_quantize,
    cuda=_cuda_quantize,
    cpu=_quantize_anywhere,
)
_dequantize = define(
    "dequantize(Tensor codes, Tensor scale_min, int bits, int group_size, ScalarType dtype)"
    " -> Tensor",
    check=_check_dequantize,
    cuda=_cuda_dequantize,
    cpu=_dequantize_anywhere,
)
_w4_linear = define(
    "w4_linear(Tensor x, Tensor codes, Tensor scale_min, Tensor? bias, int bits, int group_size)"
    " -> Tensor",
    check=_check_w4_linear,
    cuda=_cuda_w4_linear,
    cpu=_w4_linear_anywhere,
)

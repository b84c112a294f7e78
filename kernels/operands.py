"""Checks of an op's operands before a kernel is launched on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.triton.launch.gpu import Gpu

FLOATS = (torch.float16, torch.bfloat16)
FLOATS_AND_32 = (torch.float16, torch.bfloat16, torch.float32)
INT32 = (torch.int32,)
INTS = (torch.int32, torch.int64)


def require(
    name: str,
    tensor: Tensor,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | str],
    device: torch.device,
    *,
    rows_apart: bool = False,
) -> None:
    """Raise OpError unless the operand `name` is of one of `dtypes`, of `shape`, and on `device`.

    shape: a number is the size itself, a name stands for any size ("T", "block_table rows"). The
    operand must be contiguous; with `rows_apart`, each of its rows must be. bfloat16 is refused for
    GPUs before compute capability 8.0.
    """
    if tensor.dtype not in dtypes or not (tensor.shape == shape or _fits(tensor.shape, shape)):
        raise OpError(f"{name} is {_described(dtypes, shape)}, not {_found(tensor)}")
    if tensor.device != device:
        raise OpError(f"{name} is on {tensor.device}, other operands on {device}; move it there")
    if not tensor.is_contiguous() and not (rows_apart and _contiguous_rows(tensor)):
        what = "have contiguous rows" if rows_apart else "be contiguous"
        raise OpError(
            f"{name} must {what}; its strides are {tuple(tensor.stride())} for shape "
            f"{tuple(tensor.shape)}; call contiguous()"
        )
    if tensor.dtype == torch.bfloat16 and Gpu.of(device).capability < 80:
        raise OpError(
            f"{name} is bfloat16, which a GPU of compute capability "
            f"{Gpu.of(device).capability / 10} cannot multiply; use float16"
        )


def _fits(found: Sequence[int], shape: Sequence[int | str]) -> bool:
    if len(found) != len(shape):
        return False
    for have, want in zip(found, shape, strict=True):  # for every operand of every launch
        if have != want and not isinstance(want, str):
            return False
    return True


def _contiguous_rows(tensor: Tensor) -> bool:
    step = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return tensor.shape[0] <= 1 or tensor.stride(0) >= step


def _described(dtypes: Sequence[torch.dtype], shape: Sequence[int | str]) -> str:
    names = " or ".join(_name(dtype) for dtype in dtypes)
    return f"{names} [{', '.join(map(str, shape))}]"


def _found(tensor: Tensor) -> str:
    return f"{_name(tensor.dtype)} [{', '.join(map(str, tensor.shape))}]"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

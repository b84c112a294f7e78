"""Checks of operands before their addresses are handed to compiled code."""

from __future__ import annotations

import ctypes
from typing import NoReturn

import torch
from torch import Tensor

from qoff.errors import OpError


def fail(op: str, message: str) -> NoReturn:
    raise OpError(f"{op}: {message}")


def check_dense(op: str, name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    """Raise OpError unless `value` is contiguous float32 of that shape on the CPU."""
    whole = value.dtype == torch.float32 and value.is_cpu and value.is_contiguous()
    if not whole or value.shape != shape:
        fail(
            op,
            f"{name} must be contiguous float32 {list(shape)} on the CPU, "
            f"not {value.dtype} {list(value.shape)} on {value.device}",
        )


def check_rows(op: str, name: str, value: Tensor, rows: int, columns: int) -> None:
    """Raise OpError unless `value` is float32 [rows, columns] on the CPU, each row contiguous."""
    rowwise = value.dtype == torch.float32 and value.is_cpu and value.stride(-1) == 1
    if not rowwise or value.shape != (rows, columns):
        fail(
            op,
            f"{name} must be float32 [{rows}, {columns}] with contiguous rows on the CPU, not "
            f"{value.dtype} {list(value.shape)} of strides {list(value.stride())} "
            f"on {value.device}",
        )


def address(tensor: Tensor | None) -> int:
    """The address of a tensor's first element, 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def int64s(*names: str) -> tuple[tuple[str, type], ...]:
    """Fields of the arguments of a compiled job."""
    return tuple((name, ctypes.c_int64) for name in names)


def offsets(arguments: type[ctypes.Structure]) -> tuple[int, ...]:
    """Where each field of a job's arguments lies, in bytes."""
    return tuple(getattr(arguments, name).offset for name, *_ in arguments._fields_)

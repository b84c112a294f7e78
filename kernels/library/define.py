"""One way to make an op of `torch.ops.qoff`: schema, check, and an implementation per device.

The check is the fake implementation too, so what torch.compile and meta tensors are told about an
op and what a call is held to cannot differ. It runs before every call, on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qoff.errors import OpError

FLOATS = (torch.float16, torch.bfloat16)
FLOATS_AND_32 = (torch.float16, torch.bfloat16, torch.float32)
INTS = (torch.int32,)

_LIBRARY = torch.library.Library("qoff", "FRAGMENT")  # the ops live as long as it does
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


class Output(NamedTuple):
    """A contiguous result of an op: on the device of `like`, of its dtype unless one is given."""

    like: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    def empty(self) -> Tensor:
        return self.like.new_empty(self.shape, dtype=self.dtype)


def define(
    schema: str,
    *,
    check: Callable[..., Any],
    cuda: Callable[[], Callable[..., Any]],
    cpu: Callable[..., Any],
) -> Callable[..., Any]:
    """Register an op of the library `qoff` and return it.

    schema: as torch.library has it, "silu_mul(Tensor gate_up) -> Tensor"; what the op writes to is
    a `Tensor(a!)`. check: called with the op's arguments; raises OpError for operands no
    implementation takes, and returns the `Output` of the op (a tuple of them for several, None for
    none): descriptions, so that a call allocates nothing twice. cuda: imports the Triton launcher
    and returns it; called at the first call with CUDA tensors. cpu: the implementation for every
    other device.
    """
    name = schema.partition("(")[0].strip()
    _LIBRARY.define(schema, tags=_TAGS)
    launcher = cache(cuda)

    def on_cuda(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        tensor = next(x for x in args if isinstance(x, Tensor))
        with torch.cuda.device_of(tensor):  # Triton launches on the current device
            return launcher()(*args, **kwargs)

    def elsewhere(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return cpu(*args, **kwargs)

    def fake(*args: Any, **kwargs: Any) -> Any:
        return _materialize(check(*args, **kwargs))

    _LIBRARY.impl(name, on_cuda, "CUDA")
    _LIBRARY.impl(name, elsewhere, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qoff::{name}", fake, lib=_LIBRARY)
    op: Callable[..., Any] = getattr(torch.ops.qoff, name).default
    return op


def _materialize(outputs: Any) -> Any:
    if isinstance(outputs, Output):
        return outputs.empty()
    if isinstance(outputs, tuple):
        return tuple(_materialize(output) for output in outputs)
    return outputs


def require(
    name: str,
    tensor: Tensor,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | str],
    device: torch.device,
    *,
    strided_rows: bool = False,
) -> None:
    """Raise OpError unless the operand `name` is of one of `dtypes`, `shape`, and on `device`.

    shape: a number is the size itself, a name stands for any size ("T", "block_table rows"). The
    operand must be contiguous; with `strided_rows`, its rows (all but the first dimension) must be.
    """
    fits = tensor.ndim == len(shape) and all(
        isinstance(want, str) or have == want
        for have, want in zip(tensor.shape, shape, strict=True)
    )
    if tensor.dtype not in dtypes or not fits:
        raise OpError(f"{name} is {_described(dtypes, shape)}, not {_found(tensor)}")
    if tensor.device != device:
        raise OpError(f"{name} is on {tensor.device}, other operands on {device}; move it there")
    if not _contiguous(tensor, strided_rows):
        what = "have contiguous rows" if strided_rows else "be contiguous"
        raise OpError(
            f"{name} must {what}; its strides are {tuple(tensor.stride())} for shape "
            f"{tuple(tensor.shape)}; call contiguous()"
        )
    if tensor.dtype == torch.bfloat16 and capability(device) < 80:
        raise OpError(
            f"{name} is bfloat16, which a GPU of compute capability {capability(device) / 10} "
            "cannot multiply; use float16"
        )


def require_one(what: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise OpError unless `value` is one of `allowed`."""
    if value not in allowed:
        listed = ", ".join(str(choice) for choice in allowed)
        raise OpError(f"{what} {value!r} is not supported; there are {listed}")


def _contiguous(tensor: Tensor, strided_rows: bool) -> bool:
    if not strided_rows:
        return tensor.is_contiguous()
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


def capability(device: torch.device) -> int:
    """Compute capability of a GPU times ten; a large number for every other device.

    A fake tensor may be on a GPU that is not there; that counts as new.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return 1000
    return _gpu_capability(device.index)


@cache
def _gpu_capability(index: int | None) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor

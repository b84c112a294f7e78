"""The MLP of a mixture of experts as an op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.qexperts import QExperts, check_mlp

from .define import FLOATS, Output, define, require

_SCALES = (torch.float16, torch.float32)
_MULTIPLE = 16  # bytes, of every expert's address: what the kernels load at once


def experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: QExperts,
    down: QExperts,
    *,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return residual + sum over t of topk_weights * (down @ f(gate_up @ x + bias) + bias) [M, H].

    x: [M, H] float16 or bfloat16. topk_ids: int64 [M, T], topk_weights: float32 [M, T], T of at
    least 1. gate_up: E x [2I, H], rows in blocks of 16 of gate and of up in turn; down: E x [H, I];
    packing split32, every expert's codes and scales at multiples of 16 bytes. activation: f, see
    `reference_experts.activate`. Biases: [E, 2I] in the order of the rows and [E, H], residual: [M,
    H], in the dtype of x. Numbers in `chosen` are not checked on a GPU: that would wait for it.
    Raises OpError.
    """
    check_mlp(gate_up, down, activation)
    result: Tensor = _experts(
        x,
        topk_ids,
        topk_weights,
        *_parts(gate_up),
        gate_up_bias,
        *_parts(down),
        down_bias,
        residual,
        activation,
    )
    return result


def check_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: QExperts,
    down: QExperts,
    *,
    activation: str,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    residual: Tensor | None,
) -> Output:
    """Raise OpError for operands that the kernels for a GPU do not take."""
    check_mlp(gate_up, down, activation)
    device = x.device
    for name, weight in (("gate_up", gate_up), ("down", down)):
        _check_weight(name, weight, device)
    hidden, count = gate_up.shape[1], gate_up.count
    require("x", x, FLOATS, ("M", hidden), device)
    require("topk_ids", topk_ids, (torch.int64,), (len(x), "T"), device)
    if topk_ids.shape[1] < 1:
        raise OpError("a token chooses at least one expert; topk_ids is [M, 0]")
    require("topk_weights", topk_weights, (torch.float32,), tuple(topk_ids.shape), device)
    for name, bias, rows in (
        ("gate_up_bias", gate_up_bias, gate_up.shape[0]),
        ("down_bias", down_bias, hidden),
    ):
        if bias is not None:
            require(name, bias, (x.dtype,), (count, rows), device)
    if residual is not None:
        require("residual", residual, (x.dtype,), tuple(x.shape), device)
    return Output(x, tuple(x.shape))


def _check_weight(name: str, weight: QExperts, device: torch.device) -> None:
    if weight.packing != "split32":
        raise OpError(f"{name} is of packing {weight.packing}; the op takes split32")
    if weight.device != device:
        raise OpError(f"{name} is on {weight.device}, x on {device}; move it there")
    starts = (
        weight.codes.storage_offset(),
        weight.scale_min.storage_offset() * weight.scale_min.element_size(),
    )
    if any(number % _MULTIPLE for number in (*starts, *weight.strides)):
        raise OpError(
            f"{name}: codes and scales of every expert start at multiples of {_MULTIPLE} bytes of "
            f"their storage, not at {starts} and every {weight.strides} bytes"
        )


def _parts(weight: QExperts) -> tuple[Tensor, Tensor, int, int]:
    return weight.codes, weight.scale_min, weight.bits, weight.group_size


def _qexperts(codes: Tensor, scale_min: Tensor, bits: int, group_size: int) -> QExperts:
    if codes.dim() != 3 or bits not in (4, 8):
        raise OpError(
            "codes are [E, N, K * bits / 8] of 4 or 8 bits, packing split32, "
            f"not {list(codes.shape)} of {bits} bits"
        )
    shape = (codes.shape[1], codes.shape[2] * 8 // bits)
    return QExperts(codes, scale_min, shape, bits, group_size, "split32")


def _check(*args: Any) -> Output:
    operands, options = _joined(*args)
    return check_experts(*operands, **options)


def _joined(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up_codes: Tensor,
    gate_up_scale_min: Tensor,
    gate_up_bits: int,
    gate_up_group: int,
    gate_up_bias: Tensor | None,
    down_codes: Tensor,
    down_scale_min: Tensor,
    down_bits: int,
    down_group: int,
    down_bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the op as those of the functions."""
    gate_up = _qexperts(gate_up_codes, gate_up_scale_min, gate_up_bits, gate_up_group)
    down = _qexperts(down_codes, down_scale_min, down_bits, down_group)
    return (x, topk_ids, topk_weights, gate_up, down), {
        "activation": activation,
        "gate_up_bias": gate_up_bias,
        "down_bias": down_bias,
        "residual": residual,
    }


def _cuda() -> Callable[..., Any]:
    from qoff.kernels.triton.moe.experts import experts as launch

    return lambda *args: _call(launch, args)


def _reference(*args: Any) -> Tensor:
    from qoff.kernels.reference.experts import experts as compute

    (x, *operands), options = _joined(*args)
    result: Tensor = compute(x.float(), *operands, **_widened(options))
    return result.to(x.dtype)


def _widened(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x.float() if isinstance(x, Tensor) else x for name, x in options.items()}


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    operands, options = _joined(*args)
    return function(*operands, **options)


_experts = define(
    "experts(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor gate_up, "
    "Tensor gate_up_scale_min, "
    "int gate_up_bits, int gate_up_group, Tensor? gate_up_bias, Tensor down, "
    "Tensor down_scale_min, int down_bits, int down_group, Tensor? down_bias, Tensor? residual, "
    "str activation) -> Tensor",
    check=_check,
    cuda=_cuda,
    cpu=_reference,
)

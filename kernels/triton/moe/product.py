"""What the kernels of a mixture of experts on a GPU share: operands, and what ends a product.

A pair is a token and one of its experts; pair p is column p % T of token p // T.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.qexperts import QExperts

UNIT = 16  # bytes, in which distances of experts are told: what 128-bit loads are aligned to
TURN = tl.constexpr(16)  # rows of gate, then as many of up


class Product(NamedTuple):
    """One of the two products, out[p] = f(W[expert of p] x[p // per_token] + bias).

    f is the activation of gate and up, whose rows alternate in blocks of 16, or, with activation
    "", the pair's topk_weights times the sum.
    """

    x: Tensor  # float16 or bfloat16 [pairs / per_token, K], contiguous
    per_token: int
    topk_ids: Tensor  # int64 [M, T]
    topk_weights: Tensor  # float32 [M, T]
    weight: QExperts  # E x [N, K], packing split32
    bias: Tensor | None  # [E, N] in the dtype of x
    activation: str
    out: Tensor  # [pairs, N / 2] in the dtype of x; float32 [pairs, N] without an activation

    @property
    def pairs(self) -> int:
        return self.topk_ids.numel()

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What every kernel of a product takes first."""
        weight = self.weight
        bias, topk_weights, out = self.bias, self.topk_weights, self.out
        return self.x, weight.codes, weight.scale_min, bias, topk_weights, out

    @property
    def sizes(self) -> tuple[int, ...]:
        """per_token, distances of experts in units of 16 bytes, rows, bytes of a row, K."""
        codes, scale_min = self.weight.strides
        rows, k = self.weight.shape
        return self.per_token, codes // UNIT, scale_min // UNIT, rows, self.row_bytes, k

    @property
    def row_bytes(self) -> int:
        """Bytes of the codes of a row."""
        return self.weight.codes.shape[2]

    @property
    def group_bytes(self) -> int:
        return self.weight.group_size * self.weight.bits // 8

    @classmethod
    def gate_up(
        cls,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        weight: QExperts,
        bias: Tensor | None,
        activation: str,
    ) -> Product:
        """The first product, with memory for its result."""
        out = x.new_empty(topk_ids.numel(), weight.shape[0] // 2)
        return cls(x, topk_ids.shape[1], topk_ids, topk_weights, weight, bias, activation, out)

    @classmethod
    def down(
        cls,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        weight: QExperts,
        bias: Tensor | None,
    ) -> Product:
        """The second product, of a row of x for each pair, with memory for its result."""
        out = x.new_empty(topk_ids.numel(), weight.shape[0], dtype=torch.float32)
        return cls(x, 1, topk_ids, topk_weights, weight, bias, "", out)


@triton.jit
def expert_of(codes, scale_min, expert, code_distance, scale_distance):
    """The addresses of one expert's codes and scales; `expert` is int64."""
    UNITS: tl.constexpr = 16 * 8 // scale_min.dtype.element_ty.primitive_bitwidth
    return codes + expert * code_distance * 16, scale_min + expert * scale_distance * UNITS


@triton.jit
def _activate(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        value = gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == "gelu":
        value = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))
        u = gate * (1.0 + 0.044715 * gate * gate)
        value = gate / (1.0 + tl.exp(-1.5957691216057308 * u)) * up
    else:  # clamped_swiglu; comparisons keep NaN
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, up)
        up = tl.where(up < -7.0, -7.0, up)
        value = (up + 1.0) * gate / (1.0 + tl.exp(-1.702 * gate))
    return value


@triton.jit
def finish(
    y,  # float32 [BLOCK_N, C]
    first_row,
    pair,  # [C]
    keep,  # bool [C]
    bias,  # of the expert
    topk_weights,
    out,
    N,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Add the bias, activate or weigh, and write rows first_row .. of the pairs to keep."""
    BLOCK_N: tl.constexpr = y.shape[0]
    COLS: tl.constexpr = y.shape[1]
    row = first_row + tl.arange(0, BLOCK_N)
    if BIAS:
        y += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)[:, None]
    to = pair.to(tl.int64)
    if ACTIVATION == "":
        y *= tl.load(topk_weights + pair, mask=keep, other=0.0)[None, :]
        tl.store(out + to[None, :] * N + row[:, None], y, mask=(row < N)[:, None] & keep[None, :])
    else:
        turns = tl.reshape(y, (BLOCK_N // (2 * TURN), 2, TURN, COLS))
        is_gate = (tl.arange(0, 2) == 0)[None, :, None, None]
        gate = tl.sum(tl.where(is_gate, turns, 0.0), axis=1)
        up = tl.sum(tl.where(is_gate, 0.0, turns), axis=1)
        value = tl.reshape(_activate(gate, up, ACTIVATION), (BLOCK_N // 2, COLS))
        column = first_row // 2 + tl.arange(0, BLOCK_N // 2)
        target = out + to[None, :] * (N // 2) + column[:, None]
        inside = (column < N // 2)[:, None] & keep[None, :]
        tl.store(target, value.to(out.dtype.element_ty), mask=inside)

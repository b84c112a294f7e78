"""What the kernels of a mixture of experts on a GPU share: operands, and what ends a product.

A pair is a token and one of its experts; pair p is column p % T of token p // T.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.qexperts import QExperts
from qoff.kernels.triton.launch.overlap import let_next_begin, overlap_options, overlaps
from qoff.kernels.triton.launch.sizes import cdiv
from qoff.kernels.triton.linear.fma import FmaConfig
from qoff.kernels.triton.linear.gemm import GemmConfig
from qoff.kernels.triton.linear.gemv import GemvConfig
from qoff.kernels.triton.linear.product import form, has_wgmma
from qoff.kernels.triton.linear.skinny import SkinnyConfig

UNIT = 16  # bytes, in which distances of experts are told: what 128-bit loads are aligned to
TURN = tl.constexpr(16)  # rows of gate, then as many of up


class Product(NamedTuple):
    """One of the two products, out[p] = f(W[expert of p] x[row of p] + bias).

    f is the activation of gate and up, whose rows alternate in blocks of 16, or that of each row
    where it is not `gated`, or, with activation "", the pair's topk_weights times the sum. limit:
    of gate and up, see `layout.ending`.
    """

    x: Tensor  # float16 or bfloat16, contiguous, a row of K for each token, or for each pair
    topk_ids: Tensor  # int64 [M, T]
    topk_weights: Tensor  # float32 [M, T]
    weight: QExperts  # E x [N, K], packing split32
    bias: Tensor | None  # [E, N] in the dtype of x
    activation: str = ""
    gated: bool = True
    limit: float = 0.0

    @property
    def pairs(self) -> int:
        return self.topk_ids.numel()

    @property
    def group_bytes(self) -> int:
        return self.weight.group_size * self.weight.bits // 8

    def compute(
        self,
        kernel: Any,
        programs: int,
        which: Sequence[Tensor | int],
        config: GemvConfig | SkinnyConfig | GemmConfig | FmaConfig,
        step: int = 0,
        groups: int = 1,
    ) -> Tensor:
        """Launch a kernel with a row of programs for each of `programs` pairs or tiles.

        which: what tells it their pairs. step: bytes of a row that a program takes at once, if the
        kernel is told how often. groups: see `Form`. Returns [pairs, N / 2], or [pairs, N] where
        it is not gated, in the dtype of x; without an activation float32 [pairs, N].
        """
        x, weight, pairs, activation = self.x, self.weight, self.pairs, self.activation
        (n, k), row_bytes = weight.shape, weight.codes.shape[2]
        if activation:
            out = x.new_empty(pairs, n // (1 + self.gated))
        else:
            out = x.new_empty(pairs, n, dtype=torch.float32)
        steps = (cdiv(row_bytes, step),) if step else ()
        even, with_bias = bool(step) and row_bytes % step == 0, self.bias is not None
        what = weight.bits, self.group_bytes, even, with_bias, groups, activation
        kernel[(cdiv(n, config.block_n), programs)](
            x,
            weight.codes,
            weight.scale_min,
            self.bias,
            self.topk_weights,
            out,
            *which,
            pairs // len(x),
            *(distance // UNIT for distance in weight.strides),
            n,
            row_bytes,
            k,
            *steps,
            FORM=form(
                config,
                *what,
                gated=self.gated,
                limit=self.limit,
                aligned=n % TURN.value == 0,
                whole=n % config.block_n == 0,
                wgmma=has_wgmma(x.device),
                overlap=overlaps(x.device),
            ),
            **config.options,
            **overlap_options(x.device),
        )
        return out


@triton.jit
def expert_of(codes, scale_min, expert, code_distance, scale_distance):
    """The addresses of one expert's codes and scales; `expert` is int64."""
    UNITS: tl.constexpr = 16 * 8 // scale_min.dtype.element_ty.primitive_bitwidth
    return codes + expert * code_distance * 16, scale_min + expert * scale_distance * UNITS


@triton.jit
def _activated(z, ACTIVATION: tl.constexpr):
    """An activation of each number; comparisons keep NaN."""
    if ACTIVATION == "silu":
        value = z / (1.0 + tl.exp(-z))
    elif ACTIVATION == "gelu":
        value = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))
        u = z * (1.0 + 0.044715 * z * z)
        value = z / (1.0 + tl.exp(-1.5957691216057308 * u))
    else:  # relu, relu2
        value = tl.where(z < 0.0, 0.0, z)
        if ACTIVATION == "relu2":
            value *= value
    return value


@triton.jit
def _gated(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    if ACTIVATION == "clamped_swiglu":  # comparisons keep NaN
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, up)
        up = tl.where(up < -7.0, -7.0, up)
        value = (up + 1.0) * gate / (1.0 + tl.exp(-1.702 * gate))
    else:
        gate = _activated(gate, ACTIVATION)
        if LIMIT != 0.0:
            gate = tl.where(gate > LIMIT, LIMIT, gate)
            up = tl.where(up > LIMIT, LIMIT, up)
            up = tl.where(up < -LIMIT, -LIMIT, up)
        value = gate * up
    return value


@triton.jit
def finish(y, first_row, pair, keep, expert, bias, topk_weights, out, N, FORM: tl.constexpr):
    """Add the bias to y [BLOCK_N, COLS], activate or weigh it, and write rows first_row .. of the
    pairs [COLS] to keep [COLS]."""
    BLOCK_N: tl.constexpr = y.shape[0]
    COLS: tl.constexpr = y.shape[1]
    ACTIVATION: tl.constexpr = FORM.activation
    row = first_row + tl.arange(0, BLOCK_N)
    let_next_begin(FORM.overlap)
    if FORM.bias:
        expert_bias = tl.load(bias + expert * N + row, mask=row < N, other=0.0)
        y += expert_bias.to(tl.float32)[:, None]
    to = pair.to(tl.int64)
    if ACTIVATION == "":
        y *= tl.load(topk_weights + pair, mask=keep, other=0.0)[None, :]
        tl.store(out + to[None, :] * N + row[:, None], y, mask=(row < N)[:, None] & keep[None, :])
    elif not FORM.gated:
        value = _activated(y, ACTIVATION).to(out.dtype.element_ty)
        inside = (row < N)[:, None] & keep[None, :]
        tl.store(out + to[None, :] * N + row[:, None], value, mask=inside)
    else:
        turns = tl.reshape(y, (BLOCK_N // (2 * TURN), 2, TURN, COLS))
        is_gate = (tl.arange(0, 2) == 0)[None, :, None, None]
        gate = tl.sum(tl.where(is_gate, turns, 0.0), axis=1)
        up = tl.sum(tl.where(is_gate, 0.0, turns), axis=1)
        value = tl.reshape(_gated(gate, up, ACTIVATION, FORM.limit), (BLOCK_N // 2, COLS))
        column = first_row // 2 + tl.arange(0, BLOCK_N // 2)
        target = out + to[None, :] * (N // 2) + column[:, None]
        inside = (column < N // 2)[:, None] & keep[None, :]
        tl.store(target, value.to(out.dtype.element_ty), mask=inside)

"""The recurrence of linear attention, token by token, on a GPU: decode, and prompts of few tokens.

A program has some columns of the state of a value head of a sequence in registers, while all new
tokens of the sequence go by.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.delta import DeltaShape, DeltaWeights
from qoff.kernels.layout.states import DeviceLayerStates
from qoff.kernels.triton.launch.bound import BoundKernel
from qoff.kernels.triton.launch.sizes import next_power_of_2

from .step import softplus

_COLUMNS = 32  # of a state that a program has


@triton.jit
def forgetting(a, decay, bias, head, FLOOR: tl.constexpr):
    """Of tokens, the logarithm of what a head's state is multiplied by, or some rows of it."""
    rate = tl.exp(tl.load(decay + head))
    far = a.to(tl.float32) + bias
    forgets = -rate * softplus(far)
    if FLOOR < 0:
        forgets = FLOOR / (1.0 + tl.exp(tl.minimum(-rate * far, 80.0)))
    return forgets


@triton.jit
def gates(b, a, decay, dt_bias, head, LEARNS: tl.constexpr):
    """Of tokens, the logarithm of what a head's state is multiplied by, and how much it learns."""
    forgets = forgetting(a, decay, tl.load(dt_bias + head), head, 0.0)
    return forgets, LEARNS / (1.0 + tl.exp(-b.to(tl.float32)))


@triton.jit
def state_at(
    memory, s, head, tile,
    KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr, PANEL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Addresses of the tile of columns of a head's state, [KEY_PAD, COLUMNS]."""
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    whole = memory + (s.to(tl.int64) * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    panel = column // PANEL * (KEY_DIM * PANEL) + column % PANEL
    return whole + tl.arange(0, KEY_PAD)[:, None] * PANEL + panel[None, :]


@triton.jit
def delta_recur_kernel(
    mixed,  # [M, CHANNELS], as `convolve` leaves it
    b,  # [M, VALUE_HEADS], rows b_stride apart, in the order of the batch
    a,  # the same, or [M, VALUE_HEADS * KEY_DIM]; rows a_stride apart
    order,  # [M], or not read
    row_start, start, decay, dt_bias,
    memory,  # [S, VALUE_HEADS, VALUE_DIM / PANEL, KEY_DIM, PANEL]
    out,  # [M, VALUE_HEADS * VALUE_DIM]
    b_stride, a_stride,
    KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, PANEL: tl.constexpr,
    COLUMNS: tl.constexpr, ORDERED: tl.constexpr, BY_CHANNEL: tl.constexpr,
    FLOOR: tl.constexpr, LEARNS: tl.constexpr,
):  # fmt: skip
    """Some columns of a head's state, and what all new tokens of a sequence find in them."""
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    tile = tl.program_id(0)
    head = tl.program_id(1)
    s = tl.program_id(2)
    first_row = tl.load(row_start + s)
    end = tl.load(row_start + s + 1)
    if first_row >= end:
        return
    at = state_at(memory, s, head, tile, KEY_DIM, KEY_PAD, VALUE_HEADS, VALUE_DIM, PANEL, COLUMNS)
    inside = tl.arange(0, KEY_PAD) < KEY_DIM
    known = tl.arange(0, KEY_PAD) < tl.where(tl.load(start + s) > 0, KEY_DIM, 0)
    state = tl.load(at, mask=known[:, None], other=0.0)
    query = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + tl.arange(0, KEY_PAD)
    column = head * VALUE_DIM + tile * COLUMNS + tl.arange(0, COLUMNS)
    own = head * KEY_DIM + tl.arange(0, KEY_PAD)
    if BY_CHANNEL:
        bias = tl.load(dt_bias + own, mask=inside, other=0.0)
    for i in tl.range(0, end - first_row, num_stages=1):
        row = first_row + i
        line = mixed + row.to(tl.int64) * (2 * KEYS + VALUES)
        q = tl.load(line + query, mask=inside, other=0.0).to(tl.float32)
        k = tl.load(line + KEYS + query, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(line + 2 * KEYS + column).to(tl.float32)
        place = row
        if ORDERED:
            place = tl.load(order + row)
        beta = tl.load(b + place.to(tl.int64) * b_stride + head)
        far = a + place.to(tl.int64) * a_stride
        if BY_CHANNEL:
            each = tl.load(far + own, mask=inside, other=0.0)
            forgets = forgetting(each, decay, bias, head, FLOOR)
            learns = 1.0 / (1.0 + tl.exp(-beta.to(tl.float32)))
            state *= tl.exp(forgets)[:, None]
        else:
            forgets, learns = gates(beta, tl.load(far + head), decay, dt_bias, head, LEARNS)
            state *= tl.exp(forgets)
        lacks = learns * (v - tl.sum(state * k[:, None], axis=0))
        state += k[:, None] * lacks[None, :]
        found = tl.sum(state * q[:, None], axis=0)
        target = out + row.to(tl.int64) * VALUES + column
        tl.store(target, found.to(out.dtype.element_ty))
    tl.store(at, state, mask=inside[:, None])


def recur(
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    states: DeviceLayerStates,
) -> Tensor:
    """What tokens find in their heads' states, [M, shape.values] in the order of the slots.

    mixed: see `convolve`. b: [M, value_heads], a: [M, shape.decays], in the order of the batch;
    their rows may lie apart. `states.memory` is what it is after these tokens.
    """
    step = states.step
    out = mixed.new_empty(len(mixed), shape.values)
    kernel, grid = _bound(shape, step.order is not None)
    kernel(
        (*grid, len(step.start)), mixed, b, a, step.order, step.row_start, step.start,
        weights.decay, weights.dt_bias, states.memory, out, b.stride(0), a.stride(0),
    )  # fmt: skip
    return out


@cache
def _bound(shape: DeltaShape, ordered: bool) -> tuple[BoundKernel, tuple[int, int]]:
    """The kernel, and programs of a sequence."""
    sizes = tile_sizes(shape)
    kernel = BoundKernel(
        delta_recur_kernel, **sizes, ORDERED=ordered, BY_CHANNEL=shape.by_channel,
        FLOOR=shape.floor, LEARNS=shape.learns, num_warps=4, num_stages=1,
    )  # fmt: skip
    return kernel, (shape.value_dim // sizes["COLUMNS"], shape.value_heads)


def tile_sizes(shape: DeltaShape) -> dict[str, Any]:
    """Constants of kernels that have some columns of a state in registers."""
    return {
        "KEY_HEADS": shape.key_heads,
        "KEY_DIM": shape.key_dim,
        "KEY_PAD": next_power_of_2(shape.key_dim),
        "VALUE_HEADS": shape.value_heads,
        "VALUE_DIM": shape.value_dim,
        "PANEL": shape.panel,
        "COLUMNS": min(_COLUMNS, shape.panel),
    }

"""The decoder's ops on a GPU: the interface `ops.Ops` on Triton kernels.

Hidden states are float16 or bfloat16. Kernels are launched on the current stream of the operands'
GPU, and nothing waits for it, but for attention to blocks in host memory. The cache is a
`DeviceLayerCache`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.qexperts import QExperts
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.library.experts import check_experts

from .attention.append import kv_append
from .attention.decode import decode_attention
from .attention.offloaded import OffloadedAttention
from .attention.prefill import prefill_attention
from .attention.rotation import rotate_values
from .elementwise.interleaved_silu_mul import gated_silu
from .elementwise.rms_norm import rms_norm
from .elementwise.rope import rope
from .linear import linear
from .moe import experts as w4_experts

PACKING = "split32"
CACHE = "device"
USES_OUT = False
ACTIVATION_BITS: tuple[int, ...] = (16,)

_FLOATS = (torch.float16, torch.bfloat16)
Tables = tuple[Tensor, Tensor] | tuple[None, None]


def w4_linear(
    x: Tensor,
    weight: QTensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return f(rms_norm(x) @ W.T + bias) + residual; f is `reference_ops.gated_silu` or nothing.

    x: float16 or bfloat16 [M, K], contiguous; weight: [N, K], packing split32. norm [K], bias [N]:
    any float dtype. residual, out: like the result, [M, N] or [M, N / 2]; they may be the same.
    Every step is rounded to the dtype of x. Raises OpError.
    """
    _check_linear(x, weight, silu_mul)
    columns = weight.shape[0] // 2 if silu_mul else weight.shape[0]
    for name, tensor in (("residual", residual), ("out", out)):
        if tensor is not None:
            _check(name, tensor, x.dtype, (x.shape[0], columns), x.device)
    with _on(x):
        y = x if norm is None else rms_norm(x, norm, eps)[0]
        bias = None if bias is None else bias.to(x.dtype)
        codes, scale_min = weight.codes, weight.scale_min
        y = linear.w4_linear(y, codes, scale_min, bias, weight.bits, weight.group_size)
        if silu_mul:
            y = gated_silu(y)
        if residual is not None:
            return torch.add(y, residual, out=out)
        return y if out is None else out.copy_(y)


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
    out: Tensor | None = None,
) -> Tensor:
    """Return residual + sum over t of topk_weights * (down @ f(gate_up @ x + bias) + bias) [M, H].

    x: float16 or bfloat16 [M, H]; topk_ids: int64 [M, T], not checked; topk_weights: float32 [M,
    T]; weights: packing split32, see `library.experts`. Biases [E, 2I] and [E, H]: any float dtype.
    residual, out: like x; they may be the same. Activations are rounded to the dtype of x. Raises
    OpError.
    """
    biases = [None if b is None else b.to(x.dtype) for b in (gate_up_bias, down_bias)]
    operands = (x, topk_ids, topk_weights, gate_up, down)
    options: dict[str, Any] = {
        "activation": activation,
        "gate_up_bias": biases[0],
        "down_bias": biases[1],
        "residual": residual,
    }
    check_experts(*operands, **options)
    if out is not None:
        _check("out", out, x.dtype, tuple(x.shape), x.device)
    with _on(x):
        return w4_experts.experts(*operands, **options, out=out)


def attention(
    qkv: Tensor,
    shape: HeadShape,
    cache: DeviceLayerCache,
    ragged: Ragged,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Norm and rotate queries and keys, append keys and values to the cache, attend causally.

    qkv: float16 or bfloat16 [M, (heads + 2 kv_heads) * head_dim], the rows of `ragged`, for which
    the cache was opened. rotary: cos and sin, float32 [positions, R / 2], on the device. q_norm,
    k_norm: [head_dim], any float dtype. sinks: float32 [heads], scores of a key without a value.
    out: contiguous. Returns [M, heads * head_dim] in the dtype of qkv; with blocks in host memory,
    it returns when the CPU has attended to them. Raises OpError.
    """
    _check_attention(qkv, shape, cache, ragged)
    step = cache.step
    if out is not None:
        _check("out", out, qkv.dtype, (len(qkv), shape.heads * shape.head_dim), qkv.device)
    with _on(qkv):
        rows = qkv if step.order is None else qkv[step.order]
        heads = rows.view(len(rows), -1, shape.head_dim)
        query, key, value = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        query, key = _normed(query, q_norm, shape.norm_eps), _normed(key, k_norm, shape.norm_eps)
        tables: Tables = (None, None) if rotary is None else rotary
        query = _turned(query, step.positions, tables)
        attend = _decode if step.max_rows == 1 else _prefill
        offloaded = OffloadedAttention(query, cache.offloaded, shape) if cache.offloaded else None
        if cache.values_rotated:
            value = rotate_values(value)
        attended, lse = attend(query, key, value, tables, shape, cache, sinks)
        attended = attended if offloaded is None else offloaded.join(attended, lse)
        if cache.values_rotated:
            attended = rotate_values(attended, back=True)
        attended = attended.flatten(1)
        if step.order is not None:
            out = torch.empty_like(attended) if out is None else out
            out[step.order] = attended
            return out
        return attended if out is None else out.copy_(attended)


def _decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tables: Tables,
    shape: HeadShape,
    cache: DeviceLayerCache,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One query a sequence: its key goes to the ring first, complete blocks are packed last."""
    step, ring, blocks = (
        cache.step,
        (cache.recent_k, cache.recent_v),
        (cache.pool, cache.step.table),
    )
    _append(key, value, tables, cache, step.packed, 1, 0)
    slots = step.slots
    if slots is not None:
        every = query.new_zeros(len(step.start), *query.shape[1:])
        every[slots] = query
        query = every
    attended, lse = decode_attention(
        query,
        *blocks,
        step.packed,
        step.length,
        *ring,
        cache.form,
        shape.scale,
        soft_cap=shape.soft_cap,
        window=shape.window or 0,
        sinks=sinks,
        resident_from=step.resident_from,
        max_compressed=step.max_packed,
    )
    _pack(key, value, tables, cache, 0)
    if slots is None:
        return attended, lse
    return attended[slots], lse[slots] if cache.offloaded else lse


def _prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tables: Tables,
    shape: HeadShape,
    cache: DeviceLayerCache,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Many queries: they attend to the cache as it was and to each other, then it is written."""
    step, ring, blocks = (
        cache.step,
        (cache.recent_k, cache.recent_v),
        (cache.pool, cache.step.table),
    )
    key = _turned(key, step.positions, tables)
    attended, lse = prefill_attention(
        query,
        key,
        value,
        step.row_start,
        step.start,
        *blocks,
        step.packed,
        *ring,
        cache.form,
        shape.scale,
        soft_cap=shape.soft_cap,
        window=shape.window or 0,
        sinks=sinks,
        resident_from=step.resident_from,
        max_rows=step.max_rows,
        max_compressed=step.max_packed,
    )
    _pack(key, value, (None, None), cache, step.max_rows)
    return attended, lse


def _pack(
    key: Tensor, value: Tensor, tables: Tables, cache: DeviceLayerCache, max_rows: int
) -> None:
    """Pack the blocks that become complete, then write up to max_rows tokens to the ring."""
    step, before = cache.step, cache.step.packed
    if cache.write_back is not None and step.offloaded_until is not None:
        offloaded, count = step.offloaded_until, step.max_offloaded_blocks
        _append(key, value, tables, cache, offloaded, 0, count, before, cache.write_back)
        before = offloaded
    if max_rows or step.max_new_blocks:
        _append(key, value, tables, cache, step.after, max_rows, step.max_new_blocks, before)


def _append(
    key: Tensor,
    value: Tensor,
    tables: Tables,
    cache: DeviceLayerCache,
    after: Tensor,
    max_rows: int,
    max_new_blocks: int,
    before: Tensor | None = None,
    pool: Tensor | None = None,
) -> None:
    """Write up to max_rows tokens from `after` on to the ring, pack up to max_new_blocks before.

    The first block to pack begins at `before`, by default after those there are.
    """
    step, (cos, sin) = cache.step, tables
    kv_append(
        key,
        value,
        cos,
        sin,
        step.start,
        step.row_start,
        cache.recent_k,
        cache.recent_v,
        cache.pool if pool is None else pool,
        step.table,
        step.packed if before is None else before,
        after,
        max_rows,
        max_new_blocks,
        cache.form,
    )


def _normed(heads: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm of each head of [M, H, D]."""
    if weight is None:
        return heads
    rows = heads.contiguous().view(-1, heads.shape[2])
    return rms_norm(rows, weight, eps)[0].view(heads.shape)


def _turned(heads: Tensor, positions: Tensor, tables: Tables) -> Tensor:
    cos, sin = tables
    return heads if cos is None or sin is None else rope(heads, positions, cos, sin)


def _on(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current GPU: make it the one of x."""
    return torch.cuda.device_of(x) if x.is_cuda else nullcontext()


def _check(
    name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    if x.dtype != dtype or tuple(x.shape) != shape or x.device != device or not x.is_contiguous():
        raise OpError(
            f"{name} must be contiguous {dtype} {list(shape)} on {device}, "
            f"not {x.dtype} {list(x.shape)} of strides {list(x.stride())} on {x.device}"
        )


def _check_floats(name: str, x: Tensor, columns: int) -> None:
    if x.dtype not in _FLOATS or x.dim() != 2:
        raise OpError(f"{name} must be float16 or bfloat16 [M, {columns}], not {x.dtype}")
    _check(name, x, x.dtype, (x.shape[0], columns), x.device)


def _check_linear(x: Tensor, weight: QTensor, silu_mul: bool) -> None:
    _check_floats("x", x, weight.shape[1])
    if weight.packing != PACKING or weight.device != x.device:
        raise OpError(
            f"weights for a GPU are of packing {PACKING} on {x.device}, "
            f"not of {weight.packing} on {weight.device}"
        )
    if silu_mul and weight.shape[0] % 32:
        raise OpError(f"silu_mul needs a multiple of 32 rows, not {weight.shape[0]}")


def _check_attention(
    qkv: Tensor, shape: HeadShape, cache: DeviceLayerCache, ragged: Ragged
) -> None:
    _check_floats("qkv", qkv, shape.qkv_width)
    step, ring = cache.step, (shape.kv_heads, shape.head_dim)
    slots, window = cache.recent_k.shape[:2]
    _check("recent_k", cache.recent_k, qkv.dtype, (slots, window, *ring), qkv.device)
    if len(step.positions) != len(qkv) or len(qkv) != ragged.tokens:
        raise OpError(f"{len(qkv)} rows, but the cache was opened for {len(step.positions)}")

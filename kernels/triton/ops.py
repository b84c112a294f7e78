"""The decoder's ops on a GPU: the interface `ops.Ops` on Triton kernels.

Hidden states are float16 or bfloat16. Kernels are launched on the current stream of the operands'
GPU, and nothing waits for it, but for attention to blocks in host memory. The cache is a
`DeviceLayerCache`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.ending import PLAIN, Ending, Norm
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.rotation import rotate_values
from qoff.kernels.operands import require
from qoff.kernels.reference.delta import delta, gate
from qoff.kernels.reference.experts import route
from qoff.kernels.reference.linear import ended
from qoff.kernels.reference.low_rank import low_rank
from qoff.kernels.reference.ops import norm_all_heads

from .attention.append import new_blocks, pack_blocks, write_recent
from .attention.decode import decode_attention, decode_bytes
from .attention.new_token import NewTokens
from .attention.offloaded import OffloadedAttention, joined_bytes
from .attention.prefill import prefill_attention, prefill_bytes
from .elementwise.rms_norm import rms_norm
from .elementwise.rope import rope
from .latent.op import attend_to_latents, latents_bytes
from .latent.products import absorb, expand
from .linear import linear
from .linear.product import Epilogue
from .linear.scratch import Scratch
from .moe.experts import add_experts, experts

PACKING = "split32"
CACHE = "device"
USES_OUT = False
RECORDER = None  # CUDA graphs are
ACTIVATION_BITS: tuple[int, ...] = (16,)

__all__ = [
    "ACTIVATION_BITS",
    "CACHE",
    "PACKING",
    "RECORDER",
    "USES_OUT",
    "absorb",
    "add_experts",
    "attention",
    "attention_bytes",
    "delta",
    "expand",
    "experts",
    "gate",
    "low_rank",
    "norm",
    "route",
    "w4_linear",
]


def w4_linear(
    x: Tensor,
    weight: QTensor,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    end: Ending = PLAIN,
    out: Tensor | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    """Return norm(x) @ W.T + bias with what `end` says of it, and of the residual.

    x: float16 or bfloat16 [M, K], contiguous; weight: [N, K], packing split32. norm [K], bias [N]:
    any float dtype. residual, out: like the result, [M, N] or [M, N / 2]; they may be the same,
    but share no memory with x. The norm and the result are rounded to the dtype of x; every step
    is where the kernel leaves them to others (`gemm`, or a scratch; all of `end` but gated SiLU).
    scratch: where weights are dequantized if they are, None for one of its own. Raises OpError.
    """
    rows = weight.shape[0]
    if end.gated and rows % 32:
        raise OpError(f"a gate needs a multiple of 32 rows, not {rows}")
    for name, tensor in (("residual", residual), ("out", None if out is residual else out)):
        if tensor is not None:
            shape = (x.shape[0], rows // 2 if end.gated else rows)
            require(name, tensor, (x.dtype,), shape, x.device)
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        y = x if norm is None else _normalized(x, norm)
        added = None if bias is None else bias.to(x.dtype)
        fused = end.only_gated_silu
        epilogue = Epilogue(residual, end.gated, out) if fused else Epilogue()
        y = linear.w4_linear(y, weight, added, end=epilogue, scratch=scratch)
        if fused:
            return y
        y = _ended(y, end, residual)
        return y if out is None else out.copy_(y)


def norm(
    x: Tensor,
    by: Norm,
    *,
    scale: float = 1.0,
    residual: Tensor | None = None,
    sum_scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return sum_scale * (scale * norm(x) + residual), each step in the dtype of x.

    out is not x.
    """
    with torch.cuda.device_of(x):
        y = _ended(x, Ending(post_norm=by, scale=scale, sum_scale=sum_scale), residual)
        return y if out is None else out.copy_(y)


def _ended(z: Tensor, end: Ending, residual: Tensor | None) -> Tensor:
    """`reference.linear.ended`, with norms by the kernel that does them."""
    if end.post_norm is not None:
        z = _normalized(ended(z, end.by_element), end.post_norm)
        end = end._replace(activation="", gated=False, post_norm=None)
    if end.sum_norm is not None:
        return _normalized(ended(z, end.by_element, residual), end.sum_norm)
    return ended(z, end, residual)


def _normalized(x: Tensor, by: Norm) -> Tensor:
    if not by.centered:
        return rms_norm(x, by.weight, by.eps)[0]
    bias = None if by.bias is None else by.bias.to(x.dtype)
    return F.layer_norm(x, x.shape[-1:], by.weight.to(x.dtype), bias, by.eps)


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
    the cache was opened; with latents [M, (heads + 1) * head_dim], and written over. rotary: cos
    and sin, float32 [positions, R / 2], on the device. q_norm, k_norm: [head_dim], any float dtype,
    or of all heads (see the reference). sinks: float32 [heads], scores of a key without a value.
    out: contiguous. Returns [M, heads * value_dim] in the dtype of qkv; with blocks in host memory,
    it returns when the CPU has attended to them. Raises OpError.
    """
    require("qkv", qkv, (cache.recent_k.dtype,), ("M", shape.qkv_width), cache.recent_k.device)
    step, tokens = cache.step, qkv.shape[0]
    if step.positions.shape[0] != tokens:
        raise OpError(f"{tokens} rows, but the cache was opened for {len(step.positions)}")
    if out is not None:
        require("out", out, (qkv.dtype,), (len(qkv), shape.out_width), qkv.device)
    with torch.cuda.device_of(qkv):
        if shape.norms_all(q_norm, k_norm):
            qkv, q_norm, k_norm = norm_all_heads(qkv, shape, q_norm, k_norm), None, None
        rows = qkv if step.order is None else qkv[step.order]
        if shape.latent:
            attended = attend_to_latents(rows, shape, cache, rotary, sinks).flatten(1)
        else:
            norms = (q_norm, k_norm)
            attended = _attend_to_heads(rows, shape, cache, rotary, norms, sinks).flatten(1)
        if step.order is not None:
            out = torch.empty_like(attended) if out is None else out
            out[step.order] = attended
            return out
        return attended if out is None else out.copy_(attended)


def _attend_to_heads(
    rows: Tensor,
    shape: HeadShape,
    cache: DeviceLayerCache,
    rotary: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor | None, Tensor | None],
    sinks: Tensor | None,
) -> Tensor:
    """Attention of the rows of a pass to keys and values, [M, heads, head_dim]."""
    step = cache.step
    heads = rows.view(rows.shape[0], -1, shape.head_dim)
    query, key, value = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    if step.max_rows == 1 and not cache.offloaded:  # all else is done where it attends
        new = NewTokens(key, value, rotary, *norms, cache.values_rotated)
        return _decode(query, new, shape, cache, sinks)[0]
    if cache.values_rotated:
        value = rotate_values(value)
    query, key = (
        _prepared(x, norm, shape, step.positions, rotary)
        for x, norm in zip((query, key), norms, strict=True)
    )
    if shape.query_scale is not None:
        query = query * shape.query_scale.of(step.positions)[:, None, None].to(query.dtype)
    offloaded = OffloadedAttention(query, cache.offloaded, shape) if cache.offloaded else None
    attend = _decode if step.max_rows == 1 else _prefill
    attended, lse = attend(query, NewTokens(key, value), shape, cache, sinks)
    attended = attended if offloaded is None else offloaded.join(attended, lse)
    return rotate_values(attended, back=True) if cache.values_rotated else attended


def attention_bytes(
    tokens: int,
    sequences: int,
    blocks: int,
    shape: HeadShape,
    form: KVFormat,
    dtype: torch.dtype,
    device: torch.device,
    *,
    offloaded: bool = False,
    values_rotated: bool = False,
) -> int:
    """The most bytes `attention` allocates, its result included, as if it freed nothing.

    For up to `tokens` tokens of `sequences` sequences that have up to `blocks` packed blocks each.
    offloaded: some are attended on the CPU. values_rotated: the cache's V are.
    """
    joined = joined_bytes(tokens, shape, dtype) if offloaded else 0
    if shape.latent:
        return joined + latents_bytes(tokens, blocks, shape, form, dtype, device, offloaded)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # Rows in the order of the slots; queries and keys for their norm, normed and rotated.
    values = tokens * (queries + 2 * keys + 3 * (queries + keys))
    values += tokens * queries * (shape.query_scale is not None)
    values += tokens * queries * 2  # results in the order of the slots, and of the batch
    values += sequences * queries  # of decode, with those of sequences that wait
    if values_rotated:
        values += 2 * tokens * (keys + queries)
    both = (shape.heads, shape.kv_heads)
    work = max(
        decode_bytes(sequences, *both, blocks, form, dtype, device),
        prefill_bytes(tokens, *both, sequences, blocks, form, dtype, device),
    )
    return values * dtype.itemsize + work + joined


def _decode(
    query: Tensor,
    new: NewTokens,
    shape: HeadShape,
    cache: DeviceLayerCache,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One query a sequence: its key goes to the ring first, complete blocks are packed last."""
    attended, lse = decode_attention(query, cache, shape, sinks, new=new)
    _pack(new, cache, cache.step.length)
    return attended, lse


def _prefill(
    query: Tensor,
    new: NewTokens,
    shape: HeadShape,
    cache: DeviceLayerCache,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Many queries: they attend to the cache as it was and to each other, then it is written."""
    attended, lse = prefill_attention(query, new.key, new.value, cache, shape, sinks)
    _pack(new, cache, cache.step.start)
    write_recent(new.key, new.value, cache, cache.step.after)
    return attended, lse


def _pack(new: NewTokens, cache: DeviceLayerCache, start: Tensor) -> None:
    """Pack the blocks that become complete; start: see `new_blocks`."""
    for blocks in new_blocks(cache, start):
        pack_blocks(new.key, new.value, cache, blocks)


def _prepared(
    heads: Tensor,
    norm: Tensor | None,
    shape: HeadShape,
    positions: Tensor,
    tables: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Queries or keys, normed and turned."""
    if shape.norm_last:
        return _normed(_turned(heads, positions, tables), norm, shape.norm_eps)
    return _turned(_normed(heads, norm, shape.norm_eps), positions, tables)


def _normed(heads: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm of each head of [M, H, D]."""
    if weight is None:
        return heads
    rows = heads.contiguous().view(-1, heads.shape[2])
    return rms_norm(rows, weight, eps)[0].view(heads.shape)


def _turned(heads: Tensor, positions: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
    return heads if tables is None else rope(heads, positions, *tables)

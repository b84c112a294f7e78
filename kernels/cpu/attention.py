"""The attention op on the CPU: append to the cache, then attend, in one job."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from qoff.errors import OpError

from ..heads import HeadShape, cache_shapes
from ..ragged import Ragged
from .attention_fields import AttentionArguments
from .decode_attention import RUN, append_attend_job, partial_bytes
from .pool import Pool, default_pool
from .prefill_attention import append_prefill_job, tile_bytes


def _fail(message: str) -> None:
    raise OpError(f"attention: {message}")


def _check_qkv(qkv: Tensor, shape: HeadShape, ragged: Ragged) -> None:
    want = (ragged.tokens, shape.qkv_width)
    if qkv.dtype != torch.float32 or qkv.shape != want or qkv.stride(1) != 1:
        _fail(f"qkv must be float32 {list(want)}, not {qkv.dtype} {list(qkv.shape)}")
    if shape.head_dim % 16 or shape.heads % shape.kv_heads:
        _fail(f"head_dim must be a multiple of 16 and heads one of kv_heads: {shape}")


def _check_cache(keys: Tensor, values: Tensor, shape: HeadShape, ragged: Ragged) -> None:
    expected = cache_shapes(values.shape[0], shape, values.shape[2])
    for name, tensor, want in (("keys", keys, expected[0]), ("values", values, expected[1])):
        if tensor.dtype != torch.float32 or tensor.shape != want or not tensor.is_contiguous():
            _fail(f"{name} must be float32 {list(want)}, not {tensor.dtype} {list(tensor.shape)}")
    if ragged.longest >= values.shape[2]:
        _fail(f"position {ragged.longest} is beyond the cache's {values.shape[2]} tokens")
    if len(ragged.spans) > values.shape[0]:
        _fail(f"{len(ragged.spans)} sequences, but the cache holds {values.shape[0]}")


def _check_angles(
    rotary: tuple[Tensor, Tensor] | None, norms: tuple[Tensor | None, ...], dim: int, longest: int
) -> None:
    for table in rotary or ():
        if table.dtype != torch.float32 or table.dim() != 2 or table.shape[1] != dim // 2:
            _fail(f"cos and sin must be float32 [positions, {dim // 2}], not {list(table.shape)}")
        if table.shape[0] <= longest or not table.is_contiguous():
            _fail(f"the rotary table must be contiguous and reach position {longest}")
    for norm in norms:
        if norm is not None and (norm.dtype != torch.float32 or norm.shape != (dim,)):
            _fail(f"query and key norms must be float32 [{dim}], not {list(norm.shape)}")


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def attention(
    qkv: Tensor,
    shape: HeadShape,
    keys: Tensor,
    values: Tensor,
    ragged: Ragged,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    out: Tensor | None = None,
    pool: Pool | None = None,
) -> Tensor:
    """Norm and rotate queries and keys, append keys and values to the cache, attend to it.

    qkv: float32 [M, (heads + 2 kv_heads) * head_dim], one row a token of `ragged`; it is
    overwritten. keys, values: the layer's cache, laid out as `heads` says, with room for every
    position. rotary: cos and sin, float32 [positions, head_dim / 2]. q_norm, k_norm: float32
    [head_dim], RMSNorm over each head. Attention is causal within each sequence.
    Returns float32 [M, heads * head_dim]. Raises OpError for operands of the wrong form.
    """
    _check_qkv(qkv, shape, ragged)
    _check_cache(keys, values, shape, ragged)
    _check_angles(rotary, (q_norm, k_norm), shape.head_dim, ragged.longest)
    if out is None:
        out = torch.empty(ragged.tokens, shape.heads * shape.head_dim)
    cos, sin = rotary or (None, None)
    pool = pool or default_pool()
    runs = ragged.longest // RUN + 1
    if ragged.is_decode:
        job = append_attend_job
        scratch = ragged.tokens * shape.heads * runs * partial_bytes(shape.head_dim)
    else:
        job, scratch = append_prefill_job, pool.threads * tile_bytes(shape.head_dim)
    with pool.lock:
        args = AttentionArguments(
            qkv.data_ptr(), 4 * qkv.stride(0), ragged.tokens, shape.heads, shape.kv_heads,
            shape.head_dim, _address(q_norm), _address(k_norm), _address(cos), _address(sin),
            ragged.positions.data_ptr(), ragged.slots.data_ptr(), keys.data_ptr(),
            values.data_ptr(), values.shape[2], shape.window or 0, out.data_ptr(),
            4 * out.stride(0), runs, pool.workspace(scratch), shape.norm_eps, shape.scale,
        )  # fmt: skip
        pool.run(job.address, ctypes.addressof(args))
    return out

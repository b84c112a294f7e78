"""Queries and keys rotated, keys and values appended to a cache: what attention begins with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.operands import address, check_dense, check_rows, fail
from qoff.kernels.layout.heads import HeadShape, cache_shapes
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.ragged import Ragged

from .append import append_job
from .fields import AttentionArguments

_OP = "attention"


def append(
    qkv: Tensor,
    shape: HeadShape,
    cache: LayerCache,
    ragged: Ragged,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    pool: Pool | None = None,
) -> None:
    """Rotate queries and keys in place, and append keys to the cache: nothing is attended.

    Operands are those of `attention`. Raises OpError for operands of the wrong form.
    """
    check_appended(qkv, shape, cache, ragged)
    check_small(rotary, (), shape.head_dim - shape.latent, ragged.longest)
    pool = pool or default_pool()
    pool.run(append_job.address, arguments_of(qkv, shape, cache, ragged, rotary))


def arguments_of(
    qkv: Tensor,
    shape: HeadShape,
    cache: LayerCache,
    ragged: Ragged,
    rotary: tuple[Tensor, Tensor] | None,
) -> AttentionArguments:
    """What is appended, and the sizes of what is attended."""
    cos, sin = rotary or (None, None)
    by = shape.query_scale
    return AttentionArguments(
        qkv=qkv.data_ptr(), qkv_stride=4 * qkv.stride(0), tokens=ragged.tokens, heads=shape.heads,
        kv_heads=shape.kv_heads, head_dim=shape.head_dim, cos=address(cos), sin=address(sin),
        pairs=0 if cos is None else cos.shape[1], positions=ragged.positions.data_ptr(),
        places=cache.places.data_ptr(), slots=ragged.slots.data_ptr(), keys=cache.keys.data_ptr(),
        values=cache.values.data_ptr(), capacity=cache.values.shape[2], window=shape.reach,
        value_dim=shape.value_dim, latent=shape.latent, query_every=0 if by is None else by.every,
        query_ahead=0 if by is None else by.ahead, norm_last=shape.norm_last,
        value_norm=shape.value_norm, appends=shape.appends,
        query_beta=0.0 if by is None else by.beta, norm_eps=shape.norm_eps, scale=shape.scale,
        soft_cap=shape.soft_cap,
    )  # fmt: skip


def check_appended(qkv: Tensor, shape: HeadShape, cache: LayerCache, ragged: Ragged) -> None:
    keys, values, places = cache.keys, cache.values, cache.places
    check_rows(_OP, "qkv", qkv, ragged.tokens, shape.qkv_width)
    if shape.head_dim % 16 or shape.heads % shape.kv_heads:
        fail(_OP, f"head_dim must be a multiple of 16 and heads one of kv_heads: {shape}")
    if shape.latent % 32 or not 0 <= shape.latent < shape.head_dim:
        fail(_OP, f"latent channels are a multiple of 32 below head_dim: {shape}")
    if values.dim() != 4:
        fail(_OP, f"values must have 4 dimensions, not {list(values.shape)}")
    sequences, capacity = values.shape[0], values.shape[2]
    key_shape, value_shape = cache_shapes(sequences, shape, capacity)
    check_dense(_OP, "keys", keys, key_shape)
    check_dense(_OP, "values", values, value_shape)
    if places.dtype != torch.int64 or places.shape != (ragged.tokens,):
        fail(_OP, f"places must be int64 [{ragged.tokens}], not {list(places.shape)}")
    if cache.longest >= capacity:
        fail(_OP, f"place {cache.longest} is beyond the cache's {capacity} tokens")
    if ragged.sequences > sequences:
        fail(_OP, f"{ragged.sequences} sequences, but the cache holds {sequences}")


def check_small(
    rotary: tuple[Tensor, Tensor] | None,
    norms: Sequence[tuple[Tensor | None, int]],
    dim: int,  # that may turn
    longest: int,
) -> None:
    pairs = 0 if rotary is None else rotary[0].shape[1]
    for table in rotary or ():
        if table.dim() != 2 or table.shape[0] <= longest or table.shape[1] > dim // 2:
            fail(
                _OP,
                f"cos and sin must be [positions, up to {dim // 2}] and reach position {longest}, "
                f"not {list(table.shape)}",
            )
        check_dense(_OP, "cos and sin", table, (table.shape[0], pairs))
    for norm, numbers in norms:
        if norm is not None:
            check_dense(_OP, "query and key norms", norm, (numbers,))

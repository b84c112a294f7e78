"""The attention op on the CPU: append to the cache, then attend, in one job."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qoff.kernels.cpu.jit.emit import HAS_BF16
from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.operands import address, check_dense, check_rows, fail
from qoff.kernels.cpu.packed_attention.attention import packed_attention
from qoff.kernels.cpu.packed_attention.operands import SelectedBlocks
from qoff.kernels.cpu.packed_attention.select import select_blocks
from qoff.kernels.layout.heads import HeadShape, cache_shapes
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.ragged import Ragged

from .decode import append_attend_job
from .fields import AttentionArguments
from .prefill import append_prefill_job
from .scratch import decode_bytes, decode_runs, partials_together, prefill_bytes, token_bytes

_OP = "attention"


def _check(qkv: Tensor, shape: HeadShape, cache: LayerCache, ragged: Ragged, out: Tensor) -> None:
    keys, values, places = cache.keys, cache.values, cache.places
    check_rows(_OP, "qkv", qkv, ragged.tokens, shape.qkv_width)
    check_rows(_OP, "out", out, ragged.tokens, shape.out_width)
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


def _check_small(
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


def _move_on(a: AttentionArguments, tokens: int) -> None:
    """Let the job begin so many tokens later."""
    for name in ("positions", "places", "slots"):
        setattr(a, name, getattr(a, name) + 8 * tokens)
    a.qkv += a.qkv_stride * tokens
    a.out += a.out_stride * tokens
    if a.lse:
        a.lse += 4 * a.heads * tokens


def attention(
    qkv: Tensor,
    shape: HeadShape,
    cache: LayerCache,
    ragged: Ragged,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    sinks: Tensor | None = None,
    activation_bits: int = 16,
    out: Tensor | None = None,
    pool: Pool | None = None,
) -> Tensor:
    """Norm and rotate queries and keys, append keys and values to the cache, attend to it.

    qkv: float32 [M, (heads + 2 kv_heads) * head_dim], one row a token of `ragged`, of a latent
    shape without columns of values, or of queries alone where it does not append; it is
    overwritten. cache: the layer's, with room for every
    place. rotary: cos and sin, float32 [positions, R / 2]: of the first R of head_dim channels, or
    of those that turn in a latent shape. q_norm, k_norm: float32 [head_dim],
    RMSNorm over each head, or [heads * head_dim] and [kv_heads * head_dim], over all. sinks:
    float32 [heads], scores of a key without a value. activation_bits: 16; or 8, with which a
    prompt's queries, keys, values and weights are rounded to bfloat16 where the processor
    multiplies these faster (AVX512-BF16): about 3 digits each.
    Attention is causal within each sequence, and to what `cache.top` leaves of the packed blocks.
    Returns float32 [M, heads * value_dim]. Raises OpError for operands of the wrong form.
    """
    if out is None:
        out = torch.empty(ragged.tokens, shape.out_width)
    _check(qkv, shape, cache, ragged, out)
    heads = (shape.heads, shape.kv_heads) if shape.norms_all(q_norm, k_norm) else (1, 1)
    norms = [(by, n * shape.head_dim) for by, n in zip((q_norm, k_norm), heads, strict=True)]
    _check_small(rotary, norms, shape.head_dim - shape.latent, ragged.longest)
    if shape.latent and (q_norm is not None or k_norm is not None):
        fail(_OP, "latent queries and keys have no norms here")
    if sinks is not None:
        check_dense(_OP, "sinks", sinks, (shape.heads,))
    cos, sin = rotary or (None, None)
    pool = pool or default_pool()
    pairs = 0 if cos is None else cos.shape[1]
    lse = None if not cache.packed else torch.empty(ragged.tokens, shape.heads)
    tokens, runs = ragged.tokens, decode_runs(cache.longest)
    width = 2 if activation_bits == 8 and HAS_BF16 else 4
    if ragged.is_decode:
        job = append_attend_job
        each = token_bytes(shape, runs)
        together = partials_together(pool.threads, each)
        scratch = decode_bytes(pool.threads, min(tokens, together) * each)
    else:
        job, together = append_prefill_job, max(1, tokens)
        scratch = prefill_bytes(pool.threads, shape, width)
    by = shape.query_scale
    with pool.lock:
        args = AttentionArguments(
            qkv.data_ptr(), 4 * qkv.stride(0), ragged.tokens, shape.heads, shape.kv_heads,
            shape.head_dim, address(q_norm), address(k_norm), heads != (1, 1), address(sinks),
            address(cos), address(sin), pairs, ragged.positions.data_ptr(),
            cache.places.data_ptr(), ragged.slots.data_ptr(), cache.keys.data_ptr(),
            cache.values.data_ptr(), cache.values.shape[2],
            shape.reach, out.data_ptr(), 4 * out.stride(0), address(lse), runs,
            pool.workspace(scratch), width, shape.value_dim, shape.latent,
            0 if by is None else by.every, 0 if by is None else by.ahead,
            shape.norm_last, shape.value_norm, shape.appends,
            0.0 if by is None else by.beta, shape.norm_eps, shape.scale, shape.soft_cap,
        )  # fmt: skip
        for first in range(0, tokens, together):
            if first:
                _move_on(args, together)
            args.tokens = min(together, tokens - first)
            pool.run(job.address, args)
    chosen: Sequence[SelectedBlocks | None] = [None] * len(cache.packed)
    if cache.packed and cache.top < 1 and ragged.is_decode:
        chosen = select_blocks(
            qkv, shape.heads, cache.packed, cache.top, window=shape.reach, threads=pool
        )
    for packed, blocks in zip(cache.packed, chosen, strict=True):
        if packed.bounds is not None and blocks is not None:
            packed.bounds.bring(blocks.blocks, blocks.counts)
        packed_attention(
            qkv, shape.heads, packed, scale=shape.scale, soft_cap=shape.soft_cap,
            window=shape.reach, chosen=blocks, out=out, lse=lse, rotated=cache.values_rotated,
            threads=pool,
        )  # fmt: skip
    return out

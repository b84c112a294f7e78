"""The attention op on the CPU: append to the cache, then attend, in one job."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qoff.kernels.cpu.indexed.attend import attend_chosen
from qoff.kernels.cpu.jit.emit import HAS_BF16
from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.operands import address, check_dense, check_rows, fail
from qoff.kernels.cpu.packed_attention.attention import packed_attention
from qoff.kernels.cpu.packed_attention.operands import SelectedBlocks
from qoff.kernels.cpu.packed_attention.select import select_blocks
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.ragged import Ragged

from .appending import arguments_of, check_appended, check_small
from .decode import append_attend_job
from .fields import AttentionArguments
from .prefill import append_prefill_job
from .scratch import decode_bytes, decode_runs, partials_together, prefill_bytes, token_bytes

_OP = "attention"


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
    chosen: Tensor | None = None,
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
    float32 [heads], scores of a key without a value. chosen: what `choose` returned, of a latent
    shape; rows at position `top` or later attend to these tokens alone.
    activation_bits: 16; or 8, with which a prompt's other queries, keys, values and weights are
    rounded to bfloat16 where the processor multiplies these faster (AVX512-BF16): about 3 digits
    each.
    Attention is causal within each sequence, and to what `cache.top` leaves of the packed blocks.
    Returns float32 [M, heads * value_dim]. Raises OpError for operands of the wrong form.
    """
    if out is None:
        out = torch.empty(ragged.tokens, shape.out_width)
    check_appended(qkv, shape, cache, ragged)
    check_rows(_OP, "out", out, ragged.tokens, shape.out_width)
    heads = (shape.heads, shape.kv_heads) if shape.norms_all(q_norm, k_norm) else (1, 1)
    norms = [(by, n * shape.head_dim) for by, n in zip((q_norm, k_norm), heads, strict=True)]
    check_small(rotary, norms, shape.head_dim - shape.latent, ragged.longest)
    if shape.latent and (q_norm is not None or k_norm is not None):
        fail(_OP, "latent queries and keys have no norms here")
    if sinks is not None:
        check_dense(_OP, "sinks", sinks, (shape.heads,))
    if chosen is not None and (sinks is not None or cache.top < 1):
        fail(_OP, "attention to chosen tokens has no sinks, and no other choice of blocks")
    pool = pool or default_pool()
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
    with pool.lock:
        args = arguments_of(qkv, shape, cache, ragged, rotary)
        args.q_norm, args.k_norm = address(q_norm), address(k_norm)
        args.whole_norms, args.sinks = heads != (1, 1), address(sinks)
        args.out, args.out_stride, args.lse = out.data_ptr(), 4 * out.stride(0), address(lse)
        args.runs, args.width, args.scratch = runs, width, pool.workspace(scratch)
        args.below = 0 if chosen is None else chosen.shape[1]
        for first in range(0, tokens, together):
            if first:
                _move_on(args, together)
            args.tokens = min(together, tokens - first)
            pool.run(job.address, args)
    selected: Sequence[SelectedBlocks | None] = [None] * len(cache.packed)
    if cache.packed and cache.top < 1 and ragged.is_decode:
        selected = select_blocks(
            qkv, shape.heads, cache.packed, cache.top, window=shape.reach, threads=pool
        )
    for packed, blocks in zip(cache.packed, selected, strict=True):
        if packed.bounds is not None and blocks is not None:
            packed.bounds.bring(blocks.blocks, blocks.counts)
        packed_attention(
            qkv, shape.heads, packed, scale=shape.scale, soft_cap=shape.soft_cap,
            window=shape.reach, chosen=blocks, below=args.below, out=out, lse=lse,
            rotated=cache.values_rotated, threads=pool,
        )  # fmt: skip
    if chosen is not None:
        attend_chosen(qkv, shape, cache, ragged, chosen, out=out, pool=pool)
    return out

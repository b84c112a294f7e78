"""Which tokens new ones attend to, by an index of keys, on the CPU."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from qoff.kernels.cpu.attention.appending import append
from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.operands import check_rows
from qoff.kernels.layout.index import IndexShape
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.ragged import Ragged

from . import scratch as sizes
from .choose_job import ChooseArguments, choose_job
from .tokens import check_chosen, most_tokens, tokens_of

_OP = "choose"


def choose(
    qk: Tensor,
    weights: Tensor,
    shape: IndexShape,
    cache: LayerCache,
    ragged: Ragged,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
    pool: Pool | None = None,
) -> Tensor:
    """Append keys of an index to its cache, and choose tokens by it: see `reference.index.choose`.

    qk: float32 [M, shape.width], queries of all heads, then the key; rows contiguous, and
    overwritten. weights: float32 [M, heads], rows contiguous. out: contiguous int32 [M, top].
    Raises OpError for operands of the wrong form.
    """
    check_rows(_OP, "weights", weights, ragged.tokens, shape.heads)
    if out is None:
        out = torch.empty(ragged.tokens, shape.top, dtype=torch.int32)
    check_chosen(_OP, out, ragged.tokens)
    pool = pool or default_pool()
    append(qk, shape.keys, cache, ragged, rotary=rotary, pool=pool)
    longest = most_tokens(cache)
    if longest <= shape.top:
        return out
    with pool.lock:
        tokens, kept = tokens_of(cache, ragged)
        rows = ragged.tokens
        together = sizes.groups_together(rows, longest, tokens.group_count, tokens.each)
        base = pool.workspace(
            sizes.choose_bytes(pool.threads, shape.heads, shape.dim, rows, longest)
        )
        args = ChooseArguments(
            tokens=ctypes.addressof(tokens), queries=qk.data_ptr(), stride=4 * qk.stride(0),
            weights=weights.data_ptr(), weights_stride=4 * weights.stride(0), heads=shape.heads,
            top=shape.top, longest=sizes.padded(longest),
            scores=base + pool.threads * sizes.choose_thread_bytes(shape.heads, shape.dim),
            scratch=base, chosen=out.data_ptr(),
        )  # fmt: skip
        for first in range(0, tokens.group_count, together):
            args.first, args.count = first, min(together, tokens.group_count - first)
            pool.run(choose_job.address, args, keep=kept)
    return out

"""Attention to chosen tokens on the CPU."""

from __future__ import annotations

import ctypes

from torch import Tensor

from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.operands import fail
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.ragged import Ragged

from . import scratch as sizes
from .attend_job import AttendArguments, attend_job
from .tokens import check_chosen, most_tokens, tokens_of

_OP = "attend_chosen"


def attend_chosen(
    qkv: Tensor,
    shape: HeadShape,
    cache: LayerCache,
    ragged: Ragged,
    chosen: Tensor,
    *,
    out: Tensor,
    pool: Pool | None = None,
) -> None:
    """Let rows at position `top` or later attend to what they chose; others stay as they are.

    qkv, cache, out: as `attention` leaves them, of a latent shape without a window and a soft cap.
    chosen: int32 [M, top], positions that a row may see. Raises OpError for operands of another
    form.
    """
    if not shape.latent or shape.window is not None or shape.soft_cap or shape.kv_heads != 1:
        fail(_OP, f"a latent shape without a window and a soft cap, not {shape}")
    check_chosen(_OP, chosen, ragged.tokens)
    if most_tokens(cache) <= chosen.shape[1]:
        return
    pool = pool or default_pool()
    together = sizes.heads_together(shape.heads, ragged.tokens, pool.threads)
    with pool.lock:
        tokens, kept = tokens_of(cache, ragged)
        args = AttendArguments(
            tokens=ctypes.addressof(tokens), queries=qkv.data_ptr(), stride=4 * qkv.stride(0),
            heads=shape.heads, together=together, latent=shape.latent, top=chosen.shape[1],
            chosen=chosen.data_ptr(), out=out.data_ptr(), out_stride=4 * out.stride(0),
            scratch=pool.workspace(
                sizes.attend_bytes(pool.threads, shape.head_dim, shape.latent, together)
            ),
            scale=shape.scale,
        )  # fmt: skip
        pool.run(attend_job.address, args, keep=kept)

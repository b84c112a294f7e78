"""Attention over the packed KV cache on the CPU, where the cache is."""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.kernels.cpu.attention.scratch import partials_together
from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.operands import address, check_dense, check_rows
from qoff.kernels.layout.layer_cache import RUN_BLOCKS, PackedTokens
from qoff.kernels.layout.rotation import value_run

from .job import ITEM_BYTES, PackedArguments, packed_job
from .operands import SelectedBlocks, check_packed, check_selected
from .scratch import attend_bytes, chunk_count, decode_runs, thread_bytes, token_bytes

_OP = "packed_attention"


def packed_attention(
    queries: Tensor,
    heads: int,
    packed: PackedTokens,
    *,
    scale: float,
    soft_cap: float = 0.0,
    window: int = 0,
    chosen: SelectedBlocks | None = None,
    below: int = 0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    rotated: bool = False,
    threads: Pool | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend the new tokens of each sequence to its packed tokens, all of which are older.

    queries: float32 [M, at least heads * D], rotated, rows as the pass of the block table says.
    soft_cap: scaled scores become soft_cap * tanh(score / soft_cap), 0 for as they are.
    window: `HeadShape.reach`, of the positions of sequences. chosen: the blocks that
    are attended, for one new token a sequence; None: all. below: if not 0, rows from this position
    on attend to nothing here, and theirs of `out` and `lse` stay as they are.
    Returns float32 [M, heads * value_dim] and the natural log-sum-exp [M, heads] (0 and -inf for a
    query that sees no packed token). If `out` and `lse` are given, they hold attention to other
    tokens, and what is found here is merged into them. rotated: V is as `rotation.rotate_values`
    leaves it, but latent V, which never is; the output is rotated back. Raises OpError for operands
    of another form.
    """
    form, pool, table = packed.form, packed.pool, packed.table
    tokens = table.ragged.tokens
    check_packed(_OP, queries, heads, packed)
    if chosen is not None:
        check_selected(_OP, chosen, packed)
    merge = out is not None and lse is not None
    if out is None:
        out = torch.empty(tokens, heads * form.value_dim)
    if lse is None:
        lse = torch.empty(tokens, heads)
    check_rows(_OP, "out", out, tokens, heads * form.value_dim)
    check_dense(_OP, "lse", lse, (tokens, heads))
    # Only few queries need their blocks split between threads, and can afford partial results.
    longest = table.longest if chosen is None else chosen.blocks.shape[2]
    run, runs, workers = max(1, table.longest), 1, threads or default_pool()
    if table.ragged.is_decode:
        run, runs = RUN_BLOCKS, decode_runs(longest)
    each = token_bytes(form, heads, runs)
    together = partials_together(workers.threads, each)  # fewer than all only where it decodes
    with workers.lock:
        most = attend_bytes(workers.threads, form, min(tokens, together) * each)
        base = workers.workspace(most)
        partials = base + workers.threads * thread_bytes(chunk_count(form.half))
        args = PackedArguments(
            queries.data_ptr(), 4 * queries.stride(0), tokens, heads, pool.shape[1], form.half,
            form.k_bits, form.v_bits, pool.data_ptr(), form.nbytes, pool.stride(0),
            table.blocks.data_ptr(), table.blocks.shape[1], table.items.data_ptr(),
            len(table.items), window, runs, run, partials, base, out.data_ptr(),
            4 * out.stride(0), lse.data_ptr(), merge,
            address(None if chosen is None else chosen.blocks),
            address(None if chosen is None else chosen.counts), longest,
            value_run(form.head_dim) if rotated and not form.latent else 0, form.latent, 0, below,
            scale, soft_cap,
        )  # fmt: skip
        for first in range(0, tokens, together):
            if runs > 1:  # a decode pass, each of whose items is a token
                args.first = first
                args.tokens = args.item_count = min(together, tokens - first)
                args.items = table.items.data_ptr() + ITEM_BYTES * first
            workers.run(packed_job.address, args)
    return out, lse

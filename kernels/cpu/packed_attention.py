"""Decode attention over the packed KV cache on the CPU, where the cache is."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..kv_format import BLOCK_TOKENS, KVFormat
from .operands import check_dense, fail
from .packed_job import RUN, THREAD_BYTES, PackedArguments, packed_job, partial_floats
from .pool import Pool, default_pool

_OP = "packed_attention"


def _check_integers(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if value.dtype != torch.int32 or not value.is_contiguous() or value.shape != shape:
        fail(
            _OP,
            f"{name} must be contiguous int32 {list(shape)}, not {value.dtype} {list(value.shape)}",
        )


def _check(
    q: Tensor, pool: Tensor, block_table: Tensor, compressed: Tensor, form: KVFormat
) -> list[int]:
    """Refuse what would be read out of bounds; returns the packed tokens of each sequence."""
    sequences, heads, _ = q.shape
    check_dense(_OP, "q", q, (sequences, heads, form.head_dim))
    if form.k_form != "channel":
        fail(_OP, "K must be quantized per channel")
    if pool.dtype != torch.uint8 or not pool.is_contiguous() or pool.shape[2:] != (form.nbytes,):
        fail(
            _OP,
            f"pool must be contiguous uint8 [blocks, kv_heads, {form.nbytes}], "
            f"not {pool.dtype} {list(pool.shape)}",
        )
    if heads % pool.shape[1]:
        fail(_OP, f"{heads} heads are no multiple of {pool.shape[1]} KV heads")
    _check_integers("compressed", compressed, (sequences,))
    _check_integers("block_table", block_table, (sequences, block_table.shape[-1]))
    lengths: list[int] = compressed.tolist()
    for length, row in zip(lengths, block_table, strict=True):
        if length % BLOCK_TOKENS or length < 0:
            fail(_OP, f"packed tokens come in blocks of {BLOCK_TOKENS}: {lengths}")
        blocks = length // BLOCK_TOKENS
        if blocks > len(row):
            fail(_OP, f"{length} packed tokens, but the table has {len(row)} blocks")
        if blocks and not 0 <= int(row[:blocks].min()) <= int(row[:blocks].max()) < len(pool):
            outside = int(row[:blocks].max()) if int(row[:blocks].min()) >= 0 else "-1"
            fail(_OP, f"the table names block {outside} of a pool of {len(pool)}")
    return lengths


def packed_attention(
    q: Tensor,
    pool: Tensor,
    block_table: Tensor,
    compressed: Tensor,
    form: KVFormat,
    *,
    scale: float,
    first: Tensor | None = None,
    threads: Pool | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend one query per sequence and head to the packed tokens of its sequence.

    q: float32 [S, heads, D]. pool: uint8 [blocks, kv_heads, form.nbytes]. block_table: int32
    [S, n]: block of tokens 64 i to 64 i + 63. compressed: int32 [S], packed tokens of each
    sequence, a multiple of 64. first: int32 [S], the oldest token attended (a sliding window).
    Returns float32 [S, heads, D] and the natural log-sum-exp [S, heads]: 0 and -inf for a sequence
    without tokens. Raises OpError for operands of another form.
    """
    sequences, heads, _ = q.shape
    lengths = _check(q, pool, block_table, compressed, form)
    first = torch.zeros_like(compressed) if first is None else first
    _check_integers("first", first, (sequences,))
    runs = max(1, -(-max(lengths, default=0) // (BLOCK_TOKENS * RUN)))
    out, lse = torch.empty_like(q), torch.empty(sequences, heads)
    scaled = q * scale
    workers = threads or default_pool()
    with workers.lock:
        scratch = workers.threads * THREAD_BYTES
        partials = 4 * sequences * runs * heads * partial_floats(form.half)
        base = workers.workspace(scratch + partials)
        args = PackedArguments(
            scaled.data_ptr(), sequences, heads, pool.shape[1], form.half, form.k_bits, form.v_bits,
            pool.data_ptr(), form.nbytes, block_table.data_ptr(), block_table.shape[1],
            compressed.data_ptr(), first.data_ptr(), runs, base + scratch, base, out.data_ptr(),
            lse.data_ptr(),
        )  # fmt: skip
        workers.run(packed_job.address, ctypes.addressof(args))
    return out, lse

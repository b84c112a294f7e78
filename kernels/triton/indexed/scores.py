"""Scores of a sequence's tokens by an index of keys, on a GPU, to memory as float32.

A program has the keys of 64 tokens in 16 bits, for all rows of a tile: a product for each row,
whose results it weighs and adds up over the heads of the index.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.index import IndexShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.triton.attention.kv_tiles import TOKENS, form_constants
from qoff.kernels.triton.latent.tiles import load_packed_part, load_part
from qoff.kernels.triton.launch.bound import BoundKernel
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.launch.options import use_asm
from qoff.kernels.triton.launch.sizes import cdiv, next_power_of_2
from qoff.kernels.triton.linear.nibbles import dot16

_ROWS = 32  # of a tile
_PROGRAMS = 4  # for a processor, before a program has the keys of several blocks


@triton.jit(do_not_specialize=["run", "max_blocks", "most", "first", "last"])
def index_scores_kernel(
    qk,  # [rows, HEADS + 1, D]: queries, then the key, turned by RoPE
    weights,  # [rows, HEADS]
    row_start, start, pool, block_table, compressed, recent,
    scores,  # float32 [last - first, most]
    ring,  # W
    qk_stride, weights_stride, top,
    run,  # blocks of a program
    max_blocks,
    most,  # a multiple of 64
    first,  # row that scores begin with
    last,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, PAD: tl.constexpr,
    K_BITS: tl.constexpr, K_SCALE: tl.constexpr, NBYTES: tl.constexpr, ROWS: tl.constexpr,
    RING_HAS_NEW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Scores of the keys of a run of blocks, for the rows of a tile at position `top` or later.

    RING_HAS_NEW: `start` is the length of a sequence with its one new token, which is in the ring.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    s = tl.program_id(2)
    first_row = tl.load(row_start + s)
    begin = tl.load(start + s)
    count = tl.minimum(begin, 1) if RING_HAS_NEW else tl.load(row_start + s + 1) - first_row
    # The position of a row is its number from here on.
    zero = begin - 1 if RING_HAS_NEW else begin
    tile = tl.maximum(first - first_row, 0) + tl.program_id(1) * ROWS
    tile_end = tl.minimum(tl.minimum(tile + ROWS, count), last - first_row)
    if tile >= tile_end:
        return
    in_blocks = tl.load(compressed + s)
    blocks = (zero + tile_end + TOKENS - 1) // TOKENS
    head = tl.arange(0, HEADS_PAD)
    inside = head < HEADS
    token = tl.arange(0, TOKENS)
    for block in range(tl.program_id(0) * run, tl.minimum(tl.program_id(0) * run + run, blocks)):
        key = block * TOKENS + token
        if block * TOKENS < in_blocks:
            number = tl.load(block_table + s.to(tl.int64) * max_blocks + block).to(tl.int64)
            k_low, k_high = load_packed_part(
                pool + number * NBYTES, 0, HALF, PAD, HALF, K_BITS, K_SCALE, PAD == HALF, ASM
            )
        else:
            old = recent + (s.to(tl.int64) * ring + key % ring) * HEAD_DIM
            k_low, k_high = load_part(old, key < begin, 0, HALF, PAD, HALF)
            if not RING_HAS_NEW:
                row = first_row + key - begin
                new = qk + row.to(tl.int64) * qk_stride + HEADS * HEAD_DIM
                fresh = (key >= begin) & (key < begin + count)
                new_low, new_high = load_part(new, fresh, 0, HALF, PAD, HALF)
                k_low = tl.where(fresh[:, None], new_low, k_low)
                k_high = tl.where(fresh[:, None], new_high, k_high)
            k_low, k_high = k_low.to(tl.float16), k_high.to(tl.float16)
        begins = tl.maximum(tile, tl.maximum(block * TOKENS, top) - zero)
        for row in range(begins, tile_end):
            place = (first_row + row).to(tl.int64)
            queries = qk + place * qk_stride + head * HEAD_DIM
            q_low, q_high = load_part(queries, inside, 0, HALF, PAD, HALF)
            products = tl.zeros([HEADS_PAD, TOKENS], tl.float32)
            products = dot16(q_low.to(tl.float16), tl.trans(k_low), products, ASM)
            products = dot16(q_high.to(tl.float16), tl.trans(k_high), products, ASM)
            weight = tl.load(weights + place * weights_stride + head, mask=inside, other=0.0)
            weighed = tl.maximum(products, 0.0) * weight.to(tl.float32)[:, None]
            tl.store(scores + (place - first) * most + key, tl.sum(weighed, 0))


def index_scores(
    qk: Tensor,
    weights: Tensor,
    cache: DeviceLayerCache,
    shape: IndexShape,
    rows: range,
    scores: Tensor,
) -> None:
    """Write scores of rows at position `shape.top` or later, float32 [len(rows), most].

    qk: [M, heads + 1, D], turned, and weights [M, heads], in the ring's type; rows of the pass,
    which may lie apart. Scores of positions up to a row's own are written; most: a multiple of 64
    that no sequence is longer than.
    """
    step, most = cache.step, scores.shape[1]
    decodes, sequences = step.max_rows <= 1, len(step.start)
    kernel, processors = _bound(qk.device, qk.dtype, cache.form, shape, decodes)
    tiles = cdiv(min(max(1, step.max_rows), len(rows)), _ROWS)
    blocks = most // BLOCK_TOKENS
    run = max(1, blocks * tiles * sequences // (_PROGRAMS * processors))
    kernel(
        (cdiv(blocks, run), tiles, sequences),
        qk, weights, step.row_start, step.length if decodes else step.start, cache.pool,
        step.table, step.packed, cache.recent_k, scores, cache.recent_k.shape[1], qk.stride(0),
        weights.stride(0), shape.top, run, step.table.stride(0), most, rows.start, rows.stop,
    )  # fmt: skip


@cache
def _bound(
    device: torch.device, dtype: torch.dtype, form: KVFormat, shape: IndexShape, decodes: bool
) -> tuple[BoundKernel, int]:
    """The kernel for all that does not change from step to step, and processors."""
    gpu, constants = Gpu.of(device), form_constants(form)
    kernel = BoundKernel(
        index_scores_kernel,
        **{name: constants[name] for name in ("HEAD_DIM", "K_BITS", "K_SCALE", "NBYTES")},
        HEADS=shape.heads,
        HEADS_PAD=next_power_of_2(shape.heads),
        PAD=max(16, next_power_of_2(form.half)),
        ROWS=1 if decodes else _ROWS,
        RING_HAS_NEW=decodes,
        ASM=use_asm(),
        num_warps=4 if gpu.capability >= 80 else 8,  # products without tensor cores take more
        num_stages=1,
    )
    return kernel, gpu.processors

"""A product of a mixture of experts for many pairs: sorted by expert, in tiles of one expert each.

The tiles are numbered on the GPU without waiting for it: as many programs are launched as there
can be tiles, and those beyond the last do nothing. A tile is a product as in `linear.gemm` or
`linear.skinny`, with rows of x gathered.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.triton.launch.overlap import wait_for_earlier
from qoff.kernels.triton.linear.gemm import GemmConfig, gemm_sums
from qoff.kernels.triton.linear.skinny import SkinnyConfig, skinny_sums

from .product import Product, expert_of, finish

BLOCKS = (16, 32, 64)  # pairs of a tile
SMALL_GROUP = 32  # bytes of codes; smaller groups have no tiles of more than 32 pairs


class Tiles(NamedTuple):
    """Which pairs each tile has."""

    order: Tensor  # int32 [pairs], pairs sorted by expert
    table: Tensor  # int32 [3, tiles]: expert, place of the first pair, place after the last


@triton.jit(
    do_not_specialize=["per_token", "code_distance", "scale_distance", "steps", "tile_count"]
)
def experts_tile_kernel(
    x, codes, scale_min, bias, topk_weights, out, order, table, tile_count, per_token,
    code_distance, scale_distance, N, row_bytes, x_stride, steps, FORM: tl.constexpr,
):  # fmt: skip
    """Rows program_id(0) * BLOCK_N .. of tile program_id(1); see `finish` and the sums."""
    wait_for_earlier(FORM.overlap)
    BLOCK_N: tl.constexpr = FORM.config.block_n
    tile = tl.program_id(1)
    first_row = tl.program_id(0) * BLOCK_N
    row = first_row + tl.arange(0, BLOCK_N)
    expert = tl.load(table + tile).to(tl.int64)
    first = tl.load(table + tile_count + tile)
    last = tl.load(table + 2 * tile_count + tile)
    if last <= first:
        return
    place = first + tl.arange(0, FORM.config.block_m)
    keep = place < last
    pair = tl.load(order + place, mask=keep, other=0)
    token = pair // per_token
    codes, scales = expert_of(codes, scale_min, expert, code_distance, scale_distance)
    if FORM.config.wgmma:
        y = gemm_sums(x, codes, scales, row, token, keep, N, row_bytes, x_stride, 0, steps, FORM)
    else:
        y = skinny_sums(x, codes, scales, row, token, N, row_bytes, x_stride, 0, steps, FORM)
    finish(y, first_row, pair, keep, expert, bias, topk_weights, out, N, FORM)


def tiles(topk_ids: Tensor, experts: int, block: int) -> Tiles:
    """Sort the pairs of topk_ids, int64 [M, T], by expert, and cut each expert's by `block`.

    Experts that are not there get no tile. There are at least as many entries as tiles; the others
    have no pairs.
    """
    pairs = topk_ids.numel()
    sorted_, order = topk_ids.reshape(-1).sort(stable=True)
    edges = torch.searchsorted(sorted_, torch.arange(experts + 1, device=topk_ids.device))  # [E+1]
    counts = (edges.diff() + (block - 1)) // block  # tiles of each expert
    ends = counts.cumsum(0)
    number = torch.arange(min(pairs, experts + pairs // block), device=topk_ids.device)
    expert = torch.searchsorted(ends, number, right=True)
    there = expert < experts
    expert = expert.clamp(max=experts - 1)
    first = edges[expert] + (number - (ends - counts)[expert]) * block
    last = torch.where(there, torch.minimum(edges[expert + 1], first + block), first)
    table = torch.stack((expert, first, last)).to(torch.int32)
    return Tiles(order.to(torch.int32), table)


def tiles_bytes(pairs: int, experts: int) -> int:
    """The most bytes `tiles` allocates: pairs, experts and tiles as a few int64 tensors of each."""
    count = min(pairs, experts + pairs // BLOCKS[0])
    return 8 * (4 * pairs + 6 * (experts + 1) + 16 * count)


def block_for(pairs: int, experts: int) -> int:
    """Pairs of a tile: about as many as an expert has."""
    mean = pairs / experts
    return next((block for block in BLOCKS if block >= mean), BLOCKS[-1])


def config_for(block: int, group_bytes: int, capability: int) -> GemmConfig | SkinnyConfig:
    """The configuration of tiles of `block` pairs, or of 32 where groups are small.

    Smaller than those of the linear op: addresses of gathered rows take registers, too.
    """
    if capability == 90:
        return GemmConfig(block_n=64 if block > 32 else 128, block_m=block, stages=4)
    if block <= BLOCKS[0]:
        return SkinnyConfig(block_m=block)
    most = BLOCKS[-1] if group_bytes >= SMALL_GROUP else BLOCKS[1]  # scales take registers
    return SkinnyConfig(block_n=32, block_m=min(block, most), row_bytes=32)


def tile_product(p: Product, tiles_: Tiles, config: GemmConfig | SkinnyConfig) -> Tensor:
    """The product; the tiles are of `config.block_m` pairs."""
    count = tiles_.table.shape[1]
    return p.compute(experts_tile_kernel, count, (*tiles_, count), config, config.step)

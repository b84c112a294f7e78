"""Random operands on a device for the checks and cases of the GPU bench."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.reference.kv_blocks import quantize_blocks

_DISTINCT = 1 << 26  # values; larger caches repeat them


def random_weight(
    n: int,
    k: int,
    device: torch.device,
    bits: int = 4,
    group: int = 64,
    scales: torch.dtype = torch.float16,
) -> QTensor:
    """Uniform codes, every group with a scale and a minimum of its own, values near 1/sqrt(K)."""
    codes = torch.randint(0, 256, (n, k * bits // 8), dtype=torch.uint8, device=device)
    scale = (0.5 + torch.rand(k // group, n, device=device)) / 2**bits / k**0.5
    minimum = -scale * (2**bits - 1) * (0.3 + 0.4 * torch.rand(k // group, n, device=device))
    scale_min = torch.stack((scale, minimum), 2).to(scales)
    return QTensor(codes, scale_min, (n, k), bits, group, "split32")


@dataclass(frozen=True)
class Cache:
    """A packed KV cache, its physical blocks in random order, and the ring of newest tokens."""

    pool: Tensor
    block_table: Tensor
    compressed: Tensor
    length: Tensor
    recent_k: Tensor
    recent_v: Tensor
    form: KVFormat


def random_cache(
    form: KVFormat,
    kv_heads: int,
    lengths: list[int],
    dtype: torch.dtype,
    device: torch.device,
    window: int = BLOCK_TOKENS,
) -> Cache:
    """Sequences of `lengths` tokens; the last, incomplete block of each is in the ring.

    A sequence whose length is a positive multiple of 64 keeps its last block in the ring.
    """
    blocks = [max(0, length - 1) // BLOCK_TOKENS for length in lengths]
    total = max(1, sum(blocks))
    pool = torch.empty(total, kv_heads, form.nbytes, dtype=torch.uint8, device=device)
    spread = torch.linspace(-1, 1, form.head_dim, device=device).exp2()
    distinct = min(total, max(1, _DISTINCT // (kv_heads * BLOCK_TOKENS * form.head_dim)))
    k = torch.randn(distinct, kv_heads, BLOCK_TOKENS, form.head_dim, device=device) * spread
    records = quantize_blocks(k, torch.randn_like(k), form)
    for first in range(0, total, distinct):
        piece = pool[first : first + distinct]
        piece.copy_(records[: len(piece)])
    table = torch.zeros(len(lengths), max([*blocks, 1]), dtype=torch.int32, device=device)
    order = torch.randperm(total, device=device).int()
    first = 0
    for s, count in enumerate(blocks):
        table[s, :count] = order[first : first + count]
        first += count
    shape = (2, len(lengths), window, kv_heads, form.head_dim)
    recent = torch.randn(shape, device=device).to(dtype)
    compressed = torch.tensor([64 * b for b in blocks], dtype=torch.int32, device=device)
    length = torch.tensor(lengths, dtype=torch.int32, device=device)
    return Cache(pool, table, compressed, length, recent[0], recent[1], form)

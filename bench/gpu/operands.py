"""Random operands on a device for the checks and cases of the GPU bench."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qoff.kernels.layout.device_cache import DeviceLayerCache, PassTables
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.qexperts import QExperts
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


def together(matrices: Sequence[QTensor]) -> QExperts:
    """A copy of them as experts."""
    first = matrices[0]
    codes = torch.stack([one.codes for one in matrices])
    scale_min = torch.stack([one.scale_min for one in matrices])
    form = first.shape, first.bits, first.group_size, first.packing
    return QExperts(codes, scale_min, *form)


def random_cache(
    form: KVFormat,
    kv_heads: int,
    lengths: list[int],
    dtype: torch.dtype,
    device: torch.device,
    rows: list[int] | None = None,
) -> DeviceLayerCache:
    """Sequences of `lengths` tokens; the last, incomplete block of each is in the ring.

    A sequence whose length is a positive multiple of 64 keeps its last block in the ring. rows: new
    tokens of each in the pass, which come after these; None: one, the last of these. Physical
    blocks are in random order.
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
    ring = (2, len(lengths), BLOCK_TOKENS, kv_heads, form.head_dim)
    recent = torch.randn(ring, device=device).to(dtype)
    pasts = [max(0, n - 1) for n in lengths] if rows is None else lengths
    counts = [min(n, 1) for n in lengths] if rows is None else rows

    packed = [BLOCK_TOKENS * b for b in blocks]
    step = step_of(pasts, counts, packed, packed, table)
    values = recent[1, ..., : form.own_value_dim].contiguous()
    return DeviceLayerCache(form, pool, recent[0], values, step)


def step_of(
    pasts: list[int], counts: list[int], packed: list[int], after: list[int], table: Tensor
) -> PassTables:
    """A pass of new tokens of each sequence. packed, after: tokens in blocks before it and then.

    table: int32 [sequences, blocks], on the device.
    """

    def on_device(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=table.device)

    sequences = list(zip(pasts, counts, strict=True))
    return PassTables(
        start=on_device(pasts),
        row_start=on_device([sum(counts[:s]) for s in range(len(counts) + 1)]),
        length=on_device([past + count for past, count in sequences]),
        packed=on_device(packed),
        after=on_device(after),
        table=table,
        positions=on_device([past + i for past, count in sequences for i in range(count)]),
        max_rows=max(counts),
        max_packed=max(packed),
        max_new_blocks=max((b - a) // BLOCK_TOKENS for a, b in zip(packed, after, strict=True)),
    )

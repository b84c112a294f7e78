"""Which packed blocks a new token attends to, in plain torch.

K that is quantized per channel brings the bounds of its block along: its minimum, and that plus all
levels of its scale. A query's score of any token in the block is at most
sum over channels of max(q * minimum, q * maximum) (Quest: Tang et al., 2024, arXiv 2406.10774).
"""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.kernels.layout.heads import first_seen
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.layer_cache import PackedTokens, kept_blocks
from qoff.kernels.layout.ragged import Span


def block_bounds(query: Tensor, records: Tensor, form: KVFormat) -> Tensor:
    """Largest possible scores, before scaling, of blocks, summed over each KV head's queries.

    query: [heads, D]; records: uint8 [n, kv_heads, form.nbytes]. Returns [kv_heads, n] in the dtype
    of the query.
    """
    _, scale, minimum, *_ = form.views(records)
    low = minimum.to(query.dtype)[:, :, None]  # [n, kv_heads, 1, D]
    high = low + (2**form.k_bits - 1) * scale.to(query.dtype)[:, :, None]
    groups = query.unflatten(0, (records.shape[1], -1))  # [kv_heads, group, D]
    return torch.maximum(groups * low, groups * high).sum((-1, -2)).T


def first_block(table_first: int, span: Span, reach: int) -> int:
    """The first block, of a part that begins at position `table_first`, a new token may see."""
    return max(0, first_seen(span.past, reach) - table_first) // BLOCK_TOKENS


def select_blocks(
    query: Tensor, packed: tuple[PackedTokens, ...], span: Span, top: float, reach: int
) -> list[Tensor]:
    """Choose the `kept_blocks` of largest bound, of all parts together; of equal ones the first.

    query: [heads, D], of the one new token. reach: `HeadShape.reach`; blocks that it hides are
    not chosen and do not count. Where two are kept, the first block of the sequence is one of them,
    as an attention sink (Xiao et al., 2024, arXiv 2309.17453). Returns bool [kv_heads, blocks] per
    part.
    """
    bounds: list[Tensor] = []
    counts: list[int] = []
    sinks: list[int] = []  # columns of all bounds together
    for part in packed:
        table = part.table
        blocks = table.blocks[span.slot, : table.counts[span.slot] // BLOCK_TOKENS].long()
        found = block_bounds(query, part.pool[blocks], part.form)
        start = table.first[span.slot] if table.first else 0
        first = first_block(start, span, reach)
        found[:, :first] = -torch.inf
        if start == first == 0 and len(blocks):
            sinks.append(sum(x.shape[1] for x in bounds))
        bounds.append(found)
        counts.append(max(0, len(blocks) - first))
    joint = torch.cat(bounds, 1)
    if kept_blocks(top, sum(counts)) > 1:
        joint[:, sinks] = torch.inf
    kept = min(kept_blocks(top, sum(counts)), sum(counts))
    best = joint.sort(dim=-1, descending=True, stable=True).indices[:, :kept]
    chosen = torch.zeros_like(joint, dtype=torch.bool).scatter(1, best, True)
    return list(chosen.split([x.shape[1] for x in bounds], 1))

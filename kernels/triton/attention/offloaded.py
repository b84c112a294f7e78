"""Attention to blocks in host memory, on the CPU, while a GPU attends to the other tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kernels.layout.layer_cache import PackedTokens

from .merge import merge, merge_bytes
from .select_blocks import ChosenBlocks


class OffloadedAttention:
    """One layer of one pass: queries go to the host when it is made, results come back in `join`.

    query: float16 or bfloat16 [M, heads, D], rotated. The first rows are those of `offloaded`,
    whose pools and tables are in host memory; others have no meaning. chosen: what single tokens
    attend to, whose lists go there, too; None: all blocks. The CPU attends to those of them that
    are in host memory, and has those brought there that are on disk.
    """

    def __init__(
        self,
        query: Tensor,
        offloaded: Sequence[PackedTokens],
        shape: HeadShape,
        chosen: ChosenBlocks | None = None,
    ) -> None:
        self._offloaded, self._shape = offloaded, shape
        self._query = _on_host(query[: offloaded[0].table.ragged.tokens])
        self._chosen: tuple[Tensor, Tensor] | None = None
        if chosen is not None:
            assert chosen.far is not None
            self._chosen = _on_host(chosen.blocks), _on_host(chosen.far)
        self._arrived = _mark(query)

    def join(self, attended: Tensor, lse: Tensor) -> Tensor:
        """Merge what is found into attention to other tokens, [M, heads, D] and its log-sum-exp.

        lse: natural, float32 [M, heads]. Work launched before goes on meanwhile. Raises OpError for
        blocks of a form that the CPU does not attend to.
        """
        found, found_lse = self._attend()
        rows = len(self._query)
        near, near_lse = attended[:rows], lse[:rows]
        outs, lses = near.new_empty(2, *near.shape), lse.new_empty(2, *near_lse.shape)
        for both, resident, offloaded in ((outs, near, found), (lses, near_lse, found_lse)):
            both[0].copy_(resident)
            both[1].copy_(offloaded.view(resident.shape), non_blocking=True)
        merged = merge(outs, lses)[0]
        if rows == len(attended):
            return merged
        near.copy_(merged)
        return attended

    def _attend(self) -> tuple[Tensor, Tensor]:
        """Output [M, heads * D] in the queries' dtype and log-sum-exp [M, heads], on the host."""
        # Compiled when they are imported.
        from qoff.kernels.cpu.packed_attention.attention import packed_attention
        from qoff.kernels.cpu.packed_attention.operands import SelectedBlocks

        if self._arrived is not None:
            self._arrived.synchronize()
        queries = self._query.flatten(1).float()
        out: Tensor | None = None
        lse: Tensor | None = None
        for part in self._offloaded:
            chosen = None if self._chosen is None else chosen_of(part, *self._chosen)
            if chosen is not None and part.bring is not None:
                part.bring(*chosen)
            out, lse = packed_attention(
                queries,
                self._shape.heads,
                part,
                scale=self._shape.scale,
                soft_cap=self._shape.soft_cap,
                window=self._shape.reach,
                chosen=None if chosen is None else SelectedBlocks(*chosen),
                out=out,
                lse=lse,
            )
        assert out is not None
        assert lse is not None
        if self._arrived is None:
            return out.to(self._query.dtype), lse
        return (
            out.new_empty(out.shape, dtype=self._query.dtype, pin_memory=True).copy_(out),
            lse.pin_memory(),
        )


def chosen_of(part: PackedTokens, blocks: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
    """What is chosen of a part: int32 [M, kv_heads, n], places in its block table, and counts.

    blocks, far: as in `ChosenBlocks`, of the slots of a pass, on the host.
    """
    table = part.table
    slots = [span.slot for span in table.ragged.spans]
    starts = [table.first[slot] if table.first else 0 for slot in slots]
    ends = [start + table.counts[slot] for start, slot in zip(starts, slots, strict=True)]
    begin, end = (
        torch.tensor(tokens, dtype=torch.int32)[:, None, None] // BLOCK_TOKENS
        for tokens in (starts, ends)
    )
    lists = blocks[slots]
    there = torch.arange(lists.shape[2]) < far[slots][:, :, None]
    before, within = ((there & (lists < edge)).sum(2) for edge in (begin, end))
    # Places ascend, so those of the part are neighbours.
    index = before[:, :, None] + torch.arange(lists.shape[2])
    places = lists.gather(2, index.clamp_(max=lists.shape[2] - 1)) - begin
    return places, (within - before).int()


def chosen_bytes(sequences: int, kv_heads: int, kept: int) -> int:
    """The most bytes of host memory that lists of up to `kept` blocks of a KV head take."""
    lists = sequences * kv_heads
    pinned = _power_of_two(4 * lists * kept) + _power_of_two(4 * lists)
    # What comes, what is there, the index, and what is found of one part while another is.
    return pinned + lists * (kept * (4 + 3 + 2 * 8 + 2 * 4) + 8 * 8)


def joined_bytes(tokens: int, shape: HeadShape, dtype: torch.dtype) -> int:
    """Bytes of the GPU that `join` allocates: both parts one behind the other, and their merge."""
    return 3 * merge_bytes(tokens, shape.heads, shape.value_dim, dtype.itemsize)


def host_bytes(tokens: int, shape: HeadShape, dtype: torch.dtype) -> int:
    """The most bytes of host memory for queries and results, and for their pinned copies.

    torch pins memory in powers of two.
    """
    values, rows = tokens * shape.heads * shape.head_dim, tokens * shape.heads
    pinned = 2 * _power_of_two(values * dtype.itemsize) + _power_of_two(4 * rows)
    return 2 * 4 * values + 4 * rows + pinned


def _on_host(x: Tensor) -> Tensor:
    """A copy in host memory, which is there when `_mark` says so."""
    there = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return there.copy_(x, non_blocking=True)


def _power_of_two(nbytes: int) -> int:
    return 1 << max(nbytes - 1, 0).bit_length()


def _mark(x: Tensor) -> torch.cuda.Event | None:
    """The point that work on a GPU has come to; None where x is in host memory."""
    if not x.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()
    return event

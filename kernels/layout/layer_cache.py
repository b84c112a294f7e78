"""What the attention of one layer reads and appends to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qoff.errors import OpError

from .kv_format import BLOCK_TOKENS, KVFormat
from .ragged import Ragged
from .steady import SteadyMemory

# Partial results of decode attention are of so many tokens that are not packed, or packed blocks;
# fixed, so that threads change no bit.
RUN_TOKENS = 512
RUN_BLOCKS = 8
# The position counts from the first token of the slot's blocks, before which there are others.
ITEM_FIELDS = (
    "first row", "rows", "slot", "position of the first row", "packed tokens", "tokens before",
)  # fmt: skip
_POSITION = ITEM_FIELDS.index("position of the first row")


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Which blocks hold packed tokens of each sequence in a forward pass; for all layers.

    Raises OpError for a table that does not go with the counts or with the pass.
    """

    blocks: Tensor  # int32 [slots, n]: the block of the tokens `first` + 64 i and on
    counts: Sequence[int]  # tokens of each slot in these blocks, multiples of 64
    ragged: Ragged
    first: Sequence[int] = ()  # position of each slot's first token here; empty: 0
    items: Tensor = field(init=False)  # int64 [items, ITEM_FIELDS]: tokens attended together
    longest: int = field(init=False)  # most blocks of a sequence in this pass
    last: int = field(init=False)  # largest block number, -1 without any

    def __post_init__(self) -> None:
        blocks, counts = self.blocks, self.counts
        if blocks.dtype != torch.int32 or blocks.dim() != 2 or not blocks.is_contiguous():
            raise OpError(
                "a block table is contiguous int32 [slots, blocks], "
                f"not {blocks.dtype} {list(blocks.shape)}"
            )
        if self.ragged.sequences > min(len(counts), len(blocks)):
            raise OpError(f"no packed tokens or no blocks for slot {self.ragged.sequences - 1}")
        last, longest, items = -1, 0, []
        for span in self.ragged.spans:
            count = counts[span.slot]
            before = self.first[span.slot] if self.first else 0
            past = span.past - before
            if count % BLOCK_TOKENS or not 0 <= count <= max(0, past):  # none before `first`
                raise OpError(
                    f"slot {span.slot}: {count} of {span.past} tokens cannot be packed in blocks"
                )
            used = count // BLOCK_TOKENS
            if used > blocks.shape[1]:
                raise OpError(f"{count} packed tokens, but room for {blocks.shape[1]} blocks")
            if used:
                low, high = (int(x) for x in torch.aminmax(blocks[span.slot, :used]))
                if low < 0:
                    raise OpError(f"slot {span.slot}: block {low} is no block")
                last = max(last, high)
            longest = max(longest, used)
            items += [
                (
                    span.start + first,
                    rows,
                    span.slot,
                    past + first,
                    count,
                    before,
                )
                for first, rows in span.items()
            ]
        for name, value in (
            ("items", torch.tensor(items)),
            ("longest", longest),
            ("last", last),
        ):
            object.__setattr__(self, name, value)

    def kept_in(self, memory: SteadyMemory, name: str) -> BlockTable:
        """The same, with its tensors in this memory."""
        same = copy(self)
        for part in ("blocks", "items"):
            object.__setattr__(same, part, memory.put(f"{name}, {part}", getattr(self, part)))
        return same

    @property
    def positions(self) -> Tensor:
        """Position of the first row of each item, int64 [items], a view."""
        return self.items.select(1, _POSITION)

    def told(self) -> tuple[int, ...]:
        """What kernels are told of it at decode, beside the values in its memory."""
        return (self.longest, *self.blocks.shape, self.blocks.data_ptr(), self.items.data_ptr())


@dataclass(frozen=True, eq=False)
class Bounds:
    """What blocks are chosen by, of a part whose blocks come to its pool when they are chosen.

    bring: called with what is chosen of the part, int32 [M, kv_heads, n], places in the table, and
    how many of the n there are, int32 [M, kv_heads]; those are in the pool when it returns.
    """

    pool: Tensor  # uint8 [blocks, kv_heads, form.bound_bytes]: K's scales and minima
    table: BlockTable  # of `pool`, otherwise as the part's
    bring: Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class PackedTokens:
    """Tokens of each sequence in one layer, in blocks of one pool."""

    form: KVFormat
    pool: Tensor  # uint8 [blocks, kv_heads, form.nbytes], each block contiguous
    table: BlockTable
    bounds: Bounds | None = None  # None: all blocks are in the pool, or come by `bring`
    # As `Bounds.bring`, where a GPU chooses: by bounds that it has.
    bring: Callable[[Tensor, Tensor], None] | None = None


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer, laid out as `heads` says, and what is packed of it.

    Packed tokens are in no place of `keys` and `values`, which hold the others one after another:
    `places` says where each new token goes, its position less its sequence's packed tokens. In a
    pass of one new token a sequence, each KV head attends to `kept_blocks(top, n)` of the n packed
    blocks that are in its window, of all parts together (`reference.select_blocks`), and to all
    tokens that are not packed; in other passes to everything. Raises OpError for `top` outside
    (0, 1]. values_rotated: V in blocks are as `rotation.rotate_values` leaves them, and what
    attention makes of them is rotated back.
    """

    keys: Tensor
    values: Tensor
    places: Tensor  # int64 [M]
    longest: int  # the largest of places
    packed: tuple[PackedTokens, ...] = ()  # the oldest tokens first
    top: float = 1.0  # fraction of a sequence's blocks that a single new token attends to
    values_rotated: bool = False

    def __post_init__(self) -> None:
        check_top(self.top)


def check_top(top: float) -> None:
    """Raise OpError unless `top` is a fraction of the packed blocks above 0."""
    if not 0 < top <= 1:
        raise OpError(f"top, a fraction of the packed blocks, is in (0, 1], not {top}")


def kept_blocks(top: float, blocks: int) -> int:
    """How many of `blocks` are attended: the fraction `top`, rounded up, at least 1."""
    return max(1, math.ceil(top * blocks - 1e-9))  # 0.07 * 100 is a little more than 7

"""What the attention of one layer reads and appends to on a GPU: packed blocks and a ring.

The oldest blocks of a sequence may be in host memory instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .kv_format import KVFormat
from .layer_cache import PackedTokens


@dataclass(frozen=True)
class PassTables:
    """The sequences of one forward pass in all S slots of a cache; for all layers.

    Rows are the new tokens in the order of their slots. A slot without new tokens counts as empty:
    zeros everywhere. Tensors are on the device, numbers are what the host knows without waiting.
    The tokens before `resident_from` are in host memory; those from `packed` to `offloaded_until`
    will be.
    """

    start: Tensor  # int32 [S], position of the first new token
    row_start: Tensor  # int32 [S + 1], row of the first new token
    length: Tensor  # int32 [S], tokens with the new ones
    packed: Tensor  # int32 [S], tokens in blocks before the pass
    after: Tensor  # int32 [S], tokens in blocks after it
    # int32 [S, columns]: the block of tokens 64 i and on, from `resident_from` on, the new blocks
    # too; from `packed` to `offloaded_until` the place in the write-back buffer.
    table: Tensor
    positions: Tensor  # int32 or int64 [M], of each row
    order: Tensor | None  # int64 [M], where each row is among the new tokens; None: the same place
    slots: Tensor | None  # int64 [M], of each row, at decode; None: row i is slot i, of all S
    max_rows: int  # of a sequence; 1 for decode
    max_packed: (
        int  # at least `packed` less `resident_from` of each, at most what `table` has room for
    )
    max_new_blocks: int  # of a sequence, write-back aside
    resident_from: Tensor | None = None  # int32 [S], multiples of 64; None: 0
    offloaded_until: Tensor | None = None  # int32 [S], at least `packed`; None: no write-back
    max_offloaded_blocks: int = 0  # new ones of a sequence to be written back


@dataclass(frozen=True)
class DeviceLayerCache:
    """Keys and values of one layer on a GPU.

    Tokens up to `packed` are in blocks, the others in the rings: position p of a sequence in slot
    p % W. A pass attends to blocks as they were before it, and packs those that it completes.
    """

    form: KVFormat
    pool: Tensor  # uint8 [blocks, kv_heads, form.nbytes]
    recent_k: Tensor  # float16 or bfloat16 [S, W, kv_heads, D]
    recent_v: Tensor
    step: PassTables
    # The tokens before `resident_from`, in host memory; rows are in the order of the slots.
    offloaded: tuple[PackedTokens, ...] = ()
    write_back: Tensor | None = None  # like pool: where new blocks go that will be in host memory
    values_rotated: bool = False  # V in blocks and in the ring: `rotated.rotate_values`

    def replay_key(self) -> tuple[int, ...] | None:
        """What kernels are told of this cache beside the values in its memory.

        None for a pass that is not one new token for every slot in order, that packs blocks, or
        that attends to any in host memory.
        """
        step = self.step
        packs = step.max_new_blocks or step.max_offloaded_blocks
        if step.max_rows > 1 or packs or self.offloaded or not (step.order is step.slots is None):
            return None
        tensors = (self.pool, self.recent_k, self.recent_v, step.start, step.table)
        return (*(t.data_ptr() for t in tensors), step.table.shape[1], step.max_packed)

"""What the attention of one layer reads and appends to on a GPU: packed blocks and a ring.

The oldest blocks of a sequence may be in host memory instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.operands import FLOATS, INT32, INTS, require

from .heads import HeadShape
from .kv_format import BLOCK_TOKENS, KVFormat
from .layer_cache import PackedTokens, check_top


@dataclass(frozen=True)
class PassTables:
    """The sequences of one forward pass in all S slots of a cache; for all layers.

    Rows are the new tokens in the order of their slots; at decode others may follow, in slots
    without new tokens. Such a slot counts as empty: zeros everywhere. Tensors are on the device,
    numbers are what the host knows without waiting. The tokens before `resident_from` are in host
    memory; those from `packed` to `offloaded_until` will be. Raises OpError for tensors and numbers
    that do not fit each other; what is in the tensors is not looked at, as that would wait for the
    GPU.
    """

    start: Tensor  # int32 [S], position of the first new token
    row_start: Tensor  # int32 [S + 1], row of the first new token
    length: Tensor  # int32 [S], tokens with the new ones
    packed: Tensor  # int32 [S], tokens in blocks before the pass
    after: Tensor  # int32 [S], tokens in blocks after it
    # int32 [S, columns]: the block of tokens 64 i and on, the new blocks too: -1 - n for block n
    # before `resident_from`; from `packed` to `offloaded_until` the place in the write-back buffer.
    table: Tensor
    positions: Tensor  # int32 or int64 [M], of each row
    max_rows: int  # of a sequence; 1 for decode
    # At least `packed` less `resident_from` of each, at most what `table` has room for.
    max_packed: int
    max_new_blocks: int = 0  # of a sequence, write-back aside
    order: Tensor | None = None  # int64 [M], the place of each row among the new tokens; None: same
    slots: Tensor | None = None  # int64 [M], of each row, at decode; None: row i is slot i, of S
    resident_from: Tensor | None = None  # int32 [S], multiples of 64; None: 0
    offloaded_until: Tensor | None = None  # int32 [S], at least `packed`; None: no write-back
    max_offloaded_blocks: int = 0  # new ones of a sequence to be written back
    # At least `packed` of each; None: `max_packed`, as none is elsewhere.
    max_ranked: int | None = None
    # int32 [2, n]: `start`, `length`, `positions`, and how much larger they are in the next step.
    counters: Tensor | None = None

    def __post_init__(self) -> None:
        slots, device = len(self.start), self.start.device
        for name in ("start", "length", "packed", "after", "resident_from", "offloaded_until"):
            if (tensor := getattr(self, name)) is not None:
                require(name, tensor, INT32, (slots,), device)
        require("row_start", self.row_start, INT32, (slots + 1,), device)
        require("table", self.table, INT32, (slots, "blocks"), device, rows_apart=True)
        require("positions", self.positions, INTS, ("M",), device)
        columns = self.table.shape[1]
        if not 0 <= self.max_packed <= columns * BLOCK_TOKENS:
            raise OpError(
                f"max_packed is 0 up to the {columns * BLOCK_TOKENS} tokens that the block table "
                f"has room for, not {self.max_packed}"
            )
        if self.max_rows < 0 or not 0 <= self.max_new_blocks <= columns:
            raise OpError(
                f"max_rows is 0 or more, not {self.max_rows}; max_new_blocks is 0 up to the "
                f"{columns} columns of the block table, not {self.max_new_blocks}"
            )


@dataclass(eq=False)
class LentTokens:
    """New K and V of a layer to which later ones attend, too, once it has computed them.

    [T, kv_heads, D], as the ring has them.
    """

    key: Tensor | None = None
    value: Tensor | None = None


@dataclass(frozen=True)
class DeviceLayerCache:
    """Keys and values of one layer on a GPU.

    Tokens up to `packed` are in blocks, the others in the rings: position p of a sequence in slot
    p % W; W is 64 or more. A pass attends to blocks as they were before it, and packs those that it
    completes. With `lent` it leaves the new tokens there, and blocks and ring as they were. In a
    pass of at most one new token a sequence, each KV head attends to `kept_blocks(top, n)` of the n
    blocks that are in its window, as in `LayerCache`. Raises OpError for `top` outside (0, 1], and
    for tensors that do not fit each other, the form or the pass.
    """

    form: KVFormat
    pool: Tensor  # uint8 [blocks, kv_heads, form.nbytes]
    recent_k: Tensor  # float16 or bfloat16 [S, W, kv_heads, D]
    recent_v: Tensor  # the same, of a latent form without channels
    step: PassTables
    # The tokens before `resident_from`, in host memory; rows are in the order of the slots.
    offloaded: tuple[PackedTokens, ...] = ()
    write_back: Tensor | None = None  # like pool: where new blocks go that will be in host memory
    values_rotated: bool = False  # V of its own in blocks and ring: `rotation.rotate_values`
    lent: LentTokens | None = None  # never where each sequence has one new token at most
    top: float = 1.0  # fraction of a sequence's blocks that a single new token attends to
    # uint8 [blocks in host memory, kv_heads, form.bound_bytes]: their K's scales and minima, by
    # which a part of them is chosen.
    bounds: Tensor | None = None

    def __post_init__(self) -> None:
        check_top(self.top)
        recent, device = self.recent_k, self.step.start.device
        ring = (len(self.step.start), "W", "kv_heads", self.form.head_dim)
        require("recent_k", recent, FLOATS, ring, device)
        values = (*recent.shape[:3], self.form.own_value_dim)
        require("recent_v", self.recent_v, (recent.dtype,), values, device)
        if recent.shape[1] < BLOCK_TOKENS:
            raise OpError(f"a ring has {BLOCK_TOKENS} slots or more, not {recent.shape[1]}")
        records = ("blocks", recent.shape[2], self.form.nbytes)
        for name, pool in (("pool", self.pool), ("write_back", self.write_back)):
            if pool is None:
                continue
            require(name, pool, (torch.uint8,), records, device)
            if pool.storage_offset() % 16:
                raise OpError(f"{name} must start at a multiple of 16 bytes of its storage")
        if self.bounds is not None:
            bounds = ("blocks", recent.shape[2], self.form.bound_bytes)
            require("bounds", self.bounds, (torch.uint8,), bounds, device)

    def check_queries(self, query: Tensor, shape: HeadShape, sinks: Tensor | None) -> None:
        """Raise OpError unless `query` [rows, heads, D] and `sinks` [heads] fit cache and shape."""
        kv_heads, dim = self.recent_k.shape[2:]
        if (shape.kv_heads, shape.head_dim) != (kv_heads, dim) or shape.heads % kv_heads:
            raise OpError(f"{shape} does not fit a cache of {kv_heads} KV heads of {dim} channels")
        heads, dtype = (shape.heads, dim), (self.recent_k.dtype,)
        require("q", query, dtype, ("rows", *heads), self.recent_k.device, rows_apart=True)
        if sinks is not None:
            require("sinks", sinks, (torch.float32,), heads[:1], query.device)

    def check_fresh(self, key: Tensor, value: Tensor) -> None:
        """Raise OpError unless new keys and values are [T, kv_heads, D] like those of the rings."""
        self.check_keys(key)
        require("v", value, (key.dtype,), key.shape, key.device, rows_apart=True)

    def check_keys(self, key: Tensor) -> None:
        """Raise OpError unless new keys are [T, kv_heads, D] like those of the ring."""
        ring = self.recent_k
        require("k", key, (ring.dtype,), ("T", *ring.shape[2:]), ring.device, rows_apart=True)

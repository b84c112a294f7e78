"""Packing blocks of the KV cache on the CPU, and moving what is left unpacked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.operands import address, check_dense, fail
from qoff.kernels.layout.heads import KEYS_PER_VECTOR
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.rotation import rotation_signs, value_run

from .pack_job import (
    MOVE_FIELDS,
    ORIGIN_FIELDS,
    MoveArguments,
    PackArguments,
    move_job,
    pack_job,
)
from .scratch import pack_bytes

_OP = "pack_blocks"


def pack_blocks(
    keys: Tensor,
    values: Tensor,
    form: KVFormat,
    origins: NDArray[np.int64],
    records: Sequence[Tensor],
    *,
    rotated: bool = False,
    pool: Pool | None = None,
) -> None:
    """Write the records of blocks, as `reference.kv_blocks.quantize_blocks` makes them.

    keys, values: of the unpacked tokens, as `layout.heads` says; values of a latent form are not
    read. origins: int64 [n, 3], of each
    block the slot and place of its first token, a multiple of 16, and whether it opens a sequence.
    records: uint8 [kv_heads, form.nbytes] of each. rotated: V is turned first, as
    `layout.rotation.rotate_values` does. Raises OpError for operands of another form.
    """
    _check(keys, values, form.head_dim, form.value_dim)
    if origins.dtype != np.int64 or origins.shape != (len(records), len(ORIGIN_FIELDS) - 1):
        fail(_OP, f"origins of {len(records)} blocks are not {list(origins.shape)}")
    _check_places(origins[:, 0], origins[:, 1], BLOCK_TOKENS, values)
    shape = (values.shape[1], form.nbytes)
    for record in records:
        if record.dtype != torch.uint8 or record.shape != shape or not record.is_contiguous():
            fail(_OP, f"records are contiguous uint8 {list(shape)}, not {list(record.shape)}")
    addresses = np.array([record.data_ptr() for record in records], np.int64)
    table = np.column_stack((origins, addresses))
    signs = rotation_signs(form.head_dim) if rotated and not form.latent else None
    workers = pool or default_pool()
    with workers.lock:
        args = PackArguments(
            keys.data_ptr(), values.data_ptr(), values.shape[2], values.shape[1], form.head_dim,
            form.k_bits, form.v_bits, form.parts, address(signs), value_run(form.head_dim),
            form.k_scale, form.v_codes, form.v_scale, form.nbytes, table.ctypes.data, len(records),
            workers.workspace(pack_bytes(workers.threads, form)), form.latent,
        )  # fmt: skip
        workers.run(pack_job.address, args, (table, signs))


def move_tokens(
    from_: tuple[Tensor, Tensor],
    to: tuple[Tensor, Tensor],
    moves: NDArray[np.int64],
    *,
    pool: Pool | None = None,
) -> None:
    """Copy keys and values of tokens from some places to others.

    Both as `layout.heads` says, of as many KV heads and channels. moves: int64 [n, MOVE_FIELDS];
    places are multiples of 16. Within the same memory tokens move to earlier places only.
    """
    (keys, values), (to_keys, to_values) = from_, to
    _check(keys, values, keys.shape[3], values.shape[3])
    _check(to_keys, to_values, keys.shape[3], values.shape[3])
    if moves.dtype != np.int64 or moves.shape[1:] != (len(MOVE_FIELDS),):
        fail(_OP, f"moves are int64 [n, {len(MOVE_FIELDS)}], not {list(moves.shape)}")
    slot, place, tokens, to_slot, to_place = moves.T
    _check_places(slot, place, tokens, values)
    _check_places(to_slot, to_place, tokens, to_values)
    workers = pool or default_pool()
    with workers.lock:
        args = MoveArguments(
            keys.data_ptr(), values.data_ptr(), values.shape[2], to_keys.data_ptr(),
            to_values.data_ptr(), to_values.shape[2], values.shape[1], keys.shape[3],
            values.shape[3], moves.ctypes.data, len(moves),
        )  # fmt: skip
        workers.run(move_job.address, args, moves)


def _check(keys: Tensor, values: Tensor, dim: int, value_dim: int) -> None:
    slots, heads, capacity, _ = values.shape
    check_dense(_OP, "values", values, (slots, heads, capacity, value_dim))
    shape = (slots, heads, capacity // KEYS_PER_VECTOR, dim, KEYS_PER_VECTOR)
    check_dense(_OP, "keys", keys, shape)


def _check_places(
    slots: NDArray[np.int64],
    first: NDArray[np.int64],
    count: NDArray[np.int64] | int,
    values: Tensor,
) -> None:
    if not len(slots):
        return
    stop, (rows, _, capacity, _) = first + count, values.shape
    if int(slots.min()) < 0 or int(slots.max()) >= rows:
        fail(_OP, f"slots {int(slots.min())} to {int(slots.max())} of {rows}")
    if int(first.min()) < 0 or int(stop.max()) > capacity or bool((first % KEYS_PER_VECTOR).any()):
        fail(
            _OP,
            f"tokens begin at multiples of {KEYS_PER_VECTOR} and end at {capacity} at most, "
            f"not {int(first.min())} to {int(stop.max())}",
        )

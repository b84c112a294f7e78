"""Packing blocks of the KV cache on the CPU, and moving what is left unpacked."""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.operands import address, check_dense, fail
from qoff.kernels.layout.heads import KEYS_PER_VECTOR
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.rotation import rotation_signs, value_run

from .pack_job import MoveArguments, PackArguments, move_job, pack_job
from .places import Moves, Origins
from .scratch import pack_bytes

_OP = "pack_blocks"


def pack_blocks(
    keys: Tensor,
    values: Tensor,
    form: KVFormat,
    origins: Origins,
    records: Tensor,
    *,
    rotated: bool = False,
    pool: Pool | None = None,
) -> None:
    """Write the records of blocks, as `reference.kv_blocks.quantize_blocks` makes them.

    keys, values: of the unpacked tokens, as `layout.heads` says; values of a latent form are not
    read. records: uint8 [blocks, kv_heads, form.nbytes], each block contiguous. rotated: V is
    turned first, as `layout.rotation.rotate_values` does. Raises OpError for operands of another
    form.
    """
    _check(keys, values, form.head_dim, form.value_dim)
    origins.places.check(values)
    shape, dense = (values.shape[1], form.nbytes), records.stride()[1:] == (form.nbytes, 1)
    if records.dtype != torch.uint8 or records.shape[1:] != shape or not dense:
        fail(_OP, f"records are uint8 {['blocks', *shape]}, not {list(records.shape)}")
    if origins.blocks > len(records):
        fail(_OP, f"block {origins.blocks - 1} of {len(records)}")
    signs = rotation_signs(form.head_dim) if rotated and not form.latent else None
    workers = pool or default_pool()
    with workers.lock:
        args = PackArguments(
            keys.data_ptr(), values.data_ptr(), values.shape[2], values.shape[1], form.head_dim,
            form.k_bits, form.v_bits, form.parts, address(signs), value_run(form.head_dim),
            form.k_scale, form.v_codes, form.v_scale, records.data_ptr(), records.stride(0),
            form.nbytes, origins.rows.ctypes.data, len(origins.rows),
            workers.workspace(pack_bytes(workers.threads, form)), form.latent,
        )  # fmt: skip
        workers.run(pack_job.address, args, (origins, signs))


def move_tokens(
    from_: tuple[Tensor, Tensor],
    to: tuple[Tensor, Tensor],
    moves: Moves,
    *,
    pool: Pool | None = None,
) -> None:
    """Copy keys and values of tokens from some places to others.

    Both as `layout.heads` says, of as many KV heads and channels. Within the same memory tokens
    move to earlier places only. Raises OpError for operands of another form.
    """
    (keys, values), (to_keys, to_values) = from_, to
    _check(keys, values, keys.shape[3], values.shape[3])
    _check(to_keys, to_values, keys.shape[3], values.shape[3])
    moves.source.check(values)
    moves.target.check(to_values)
    workers = pool or default_pool()
    with workers.lock:
        args = MoveArguments(
            keys.data_ptr(), values.data_ptr(), values.shape[2], to_keys.data_ptr(),
            to_values.data_ptr(), to_values.shape[2], values.shape[1], keys.shape[3],
            values.shape[3], moves.rows.ctypes.data, len(moves),
        )  # fmt: skip
        workers.run(move_job.address, args, moves)


def _check(keys: Tensor, values: Tensor, dim: int, value_dim: int) -> None:
    slots, heads, capacity, _ = values.shape
    check_dense(_OP, "values", values, (slots, heads, capacity, value_dim))
    shape = (slots, heads, capacity // KEYS_PER_VECTOR, dim, KEYS_PER_VECTOR)
    check_dense(_OP, "keys", keys, shape)

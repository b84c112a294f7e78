"""Appending to the packed KV cache and merging partial attention results, as ops.

Operands that the ops of the cache share, S sequences:
    pool: uint8 [blocks, kv_heads, form.nbytes], records of (physical block, KV head).
    block_table: int32 [S, max_blocks], the physical block of tokens 64 b .. 64 b + 63.
    recent_k, recent_v: [S, W, kv_heads, D], rings; position p of a sequence is in slot p % W. They
        hold what is in no block, at most W tokens; W is 64 or more.
Numbers inside int32 tensors (lengths, rows, blocks) are not checked: that would wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.reference import kv_blocks

from .define import FLOATS, FLOATS_AND_32, INTS, Output, capability, define, require
from .elementwise import check_tables

FORM = "int head_dim, int k_bits, int v_bits, str k_form, bool rotated"


def kv_append(
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    start: Tensor,
    row_start: Tensor,
    recent_k: Tensor,
    recent_v: Tensor,
    pool: Tensor,
    block_table: Tensor,
    before: Tensor,
    after: Tensor,
    max_rows: int,
    max_new_blocks: int,
    form: KVFormat,
    interleaved: bool = False,
) -> None:
    """Turn new keys by RoPE, pack the blocks that become complete, keep the rest in the rings.

    k, v: [T, kv_heads, D] float16 or bfloat16; tokens may lie apart, a token's heads may not. Rows
    row_start[s]..row_start[s+1]-1 belong to sequence s, at positions start[s] on. cos, sin: float32
    [P, R/2] as for `rope`, or None for keys that are turned already. Tokens before[s]..after[s]-1,
    whole blocks, are packed into the pool, those from start[s] on from k and v, older ones from the
    rings; tokens from after[s] on, at most W, go into the rings. max_rows and max_new_blocks are
    the most of any sequence. K is rounded to its dtype before it is packed. Writes recent_k,
    recent_v and pool. Raises OpError.
    """
    _kv_append(
        k,
        v,
        cos,
        sin,
        start,
        row_start,
        recent_k,
        recent_v,
        pool,
        block_table,
        before,
        after,
        max_rows,
        max_new_blocks,
        *scalars(form),
        interleaved,
    )


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Join partial attention results outs [P, T, H, D] by their log-sum-exps lses [P, T, H].

    outs: float16, bfloat16 or float32, lses: float32 natural logarithms. Returns the output
    [T, H, D] and its log-sum-exp [T, H]. A part with -inf counts nothing, whatever it holds; where
    all have -inf, the output is 0 and the log-sum-exp -inf. Raises OpError.
    """
    result: tuple[Tensor, Tensor] = _merge(outs, lses)
    return result


def scalars(form: KVFormat) -> tuple[int, int, int, str, bool]:
    return form.head_dim, form.k_bits, form.v_bits, form.k_form, form.rotated


def check_cache(
    recent_k: Tensor, recent_v: Tensor, pool: Tensor, block_table: Tensor, form: KVFormat
) -> None:
    """Raise OpError unless rings, pool and block table fit each other and the form."""
    device = recent_k.device
    require("recent_k", recent_k, FLOATS, ("S", "W", "kv_heads", form.head_dim), device)
    require("recent_v", recent_v, (recent_k.dtype,), tuple(recent_k.shape), device)
    sequences, window, kv_heads, _ = recent_k.shape
    if window < BLOCK_TOKENS:
        raise OpError(f"a ring has {BLOCK_TOKENS} slots or more, not {window}")
    require("pool", pool, (torch.uint8,), ("blocks", kv_heads, form.nbytes), device)
    if pool.storage_offset() % 16:
        raise OpError("pool must start at a multiple of 16 bytes of its storage")
    require("block_table", block_table, INTS, (sequences, "max_blocks"), device)


def check_fresh(k: Tensor, v: Tensor, recent_k: Tensor) -> None:
    shape = ("T", *recent_k.shape[2:])
    require("k", k, (recent_k.dtype,), shape, recent_k.device, strided_rows=True)
    require("v", v, (k.dtype,), tuple(k.shape), k.device, strided_rows=True)


def check_counts(device: torch.device, **counts: tuple[Tensor, int]) -> None:
    for name, (tensor, size) in counts.items():
        require(name, tensor, INTS, (size,), device)


def _check_kv_append(
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    start: Tensor,
    row_start: Tensor,
    recent_k: Tensor,
    recent_v: Tensor,
    pool: Tensor,
    block_table: Tensor,
    before: Tensor,
    after: Tensor,
    max_rows: int,
    max_new_blocks: int,
    *form_and_interleaved: Any,
) -> None:
    form = KVFormat(*form_and_interleaved[:5])
    check_cache(recent_k, recent_v, pool, block_table, form)
    check_fresh(k, v, recent_k)
    if form.rotated and capability(k.device) < 80:
        raise OpError(
            "rotating K takes tensor cores of compute capability 8.0 or newer, not "
            f"{capability(k.device) / 10}; use k_form 'channel'"
        )
    s = recent_k.shape[0]
    counts = {"start": (start, s), "row_start": (row_start, s + 1)}
    check_counts(k.device, **counts, before=(before, s), after=(after, s))
    if (cos is None) != (sin is None):
        raise OpError("cos and sin are both tables or both None")
    if cos is not None and sin is not None:
        check_tables(cos, sin, form.head_dim, k.device)
    if max_rows < 0 or not 0 <= max_new_blocks <= block_table.shape[1]:
        raise OpError(
            f"max_rows is 0 or more, not {max_rows}; max_new_blocks is 0 up to the "
            f"{block_table.shape[1]} columns of block_table, not {max_new_blocks}"
        )


def _check_merge(outs: Tensor, lses: Tensor) -> tuple[Output, Output]:
    require("outs", outs, FLOATS_AND_32, ("P", "T", "H", "D"), outs.device)
    require("lses", lses, (torch.float32,), tuple(outs.shape[:3]), outs.device)
    if outs.shape[0] < 1:
        raise OpError("there is nothing to merge: outs [P, T, H, D] has no parts")
    shape = tuple(outs.shape[1:])
    return Output(outs, shape), Output(lses, shape[:2])


def _kv_append_launcher() -> Callable[..., Any]:
    from qoff.kernels.triton.attention.append import kv_append

    launch: Callable[..., None] = kv_append
    return lambda *args: launch(*args[:14], KVFormat(*args[14:19]), args[19])


def _kv_append_reference(*args: Any) -> None:
    append: Callable[..., None] = kv_blocks.append
    append(*args[:12], KVFormat(*args[14:19]), args[19])


def _merge_launcher() -> Callable[..., Any]:
    from qoff.kernels.triton.attention.merge import merge as launch

    return launch


_kv_append = define(
    "kv_append(Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor start, Tensor row_start, "
    "Tensor(a!) recent_k, Tensor(b!) recent_v, Tensor(c!) pool, Tensor block_table, "
    f"Tensor before, Tensor after, int max_rows, int max_new_blocks, {FORM}, bool interleaved) "
    "-> ()",
    check=_check_kv_append,
    cuda=_kv_append_launcher,
    cpu=_kv_append_reference,
)
_merge = define(
    "merge(Tensor outs, Tensor lses) -> (Tensor, Tensor)",
    check=_check_merge,
    cuda=_merge_launcher,
    cpu=kv_blocks.merge,
)

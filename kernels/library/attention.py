"""Attention over the packed KV cache as ops, at decode and at prefill.

Operands that they share with the other ops of the cache are those of `cache`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat

from .cache import FORM, check_cache, check_counts, check_fresh, scalars
from .define import Output, define, require

_BLOCKS = "Tensor pool, Tensor block_table, Tensor compressed"
_RINGS = "Tensor recent_k, Tensor recent_v"
_SOFTMAX = "float scale, float soft_cap, int window, Tensor? sinks"


def decode_attention(
    q: Tensor,
    pool: Tensor,
    block_table: Tensor,
    compressed: Tensor,
    length: Tensor,
    recent_k: Tensor,
    recent_v: Tensor,
    form: KVFormat,
    scale: float,
    soft_cap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    *,
    max_compressed: int,
) -> tuple[Tensor, Tensor]:
    """Attend with one query a sequence, at position length - 1, its own key already in the ring.

    q: [S, Hq, D] float16 or bfloat16, never rotated by Hadamard. compressed, length: int32 [S], the
    tokens in blocks and all tokens; max_compressed is the most that any sequence has in blocks.
    Scores are scale * q.k, then soft_cap * tanh(score / soft_cap) if soft_cap > 0; with window > 0
    only the last `window` positions count; sinks, float32 [Hq], are scores of keys without values.
    Returns the output [S, Hq, D] and the natural log-sum-exp of the scores [S, Hq] with the sinks';
    0 and -inf for a sequence of length 0. Raises OpError.
    """
    result: tuple[Tensor, Tensor] = _decode_attention(
        q,
        pool,
        block_table,
        compressed,
        length,
        recent_k,
        recent_v,
        *scalars(form),
        scale,
        soft_cap,
        window,
        sinks,
        max_compressed,
    )
    return result


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_start: Tensor,
    start: Tensor,
    pool: Tensor,
    block_table: Tensor,
    compressed: Tensor,
    recent_k: Tensor,
    recent_v: Tensor,
    form: KVFormat,
    scale: float,
    soft_cap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    *,
    max_rows: int,
    max_compressed: int,
) -> tuple[Tensor, Tensor]:
    """Attend causally with queries q [T, Hq, D] to the cache and to fresh k, v [T, kv_heads, D].

    Rows row_start[s]..row_start[s+1]-1 belong to sequence s, at positions start[s] on, of which
    max_rows is the most. Blocks hold tokens 0..compressed[s]-1, the rings compressed[s]..start[s]-1
    (not the fresh ones). k is turned by RoPE already. The rest as for `decode_attention`; returns
    the output [T, Hq, D] and the log-sum-exp [T, Hq]. Raises OpError.
    """
    result: tuple[Tensor, Tensor] = _prefill_attention(
        q,
        k,
        v,
        row_start,
        start,
        pool,
        block_table,
        compressed,
        recent_k,
        recent_v,
        *scalars(form),
        scale,
        soft_cap,
        window,
        sinks,
        max_rows,
        max_compressed,
    )
    return result


def _check_softmax(
    q: Tensor, recent_k: Tensor, soft_cap: float, window: int, sinks: Tensor | None
) -> None:
    heads, kv_heads = q.shape[1], recent_k.shape[2]
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise OpError(f"{heads} query heads are no multiple of {kv_heads} KV heads")
    if not soft_cap >= 0 or window < 0:
        raise OpError(f"soft_cap and window are 0 (none) or more, not {soft_cap} and {window}")
    if sinks is not None:
        require("sinks", sinks, (torch.float32,), (heads,), q.device)


def _check_decode_attention(
    q: Tensor,
    pool: Tensor,
    block_table: Tensor,
    compressed: Tensor,
    length: Tensor,
    recent_k: Tensor,
    recent_v: Tensor,
    head_dim: int,
    k_bits: int,
    v_bits: int,
    k_form: Any,
    rotated: bool,
    scale: float,
    soft_cap: float,
    window: int,
    sinks: Tensor | None,
    max_compressed: int,
) -> tuple[Output, Output]:
    check_cache(
        recent_k, recent_v, pool, block_table, KVFormat(head_dim, k_bits, v_bits, k_form, rotated)
    )
    s = recent_k.shape[0]
    require("q", q, (recent_k.dtype,), (s, "Hq", head_dim), recent_k.device)
    check_counts(q.device, compressed=(compressed, s), length=(length, s))
    _check_softmax(q, recent_k, soft_cap, window, sinks)
    _check_most(max_compressed, block_table)
    return Output(q, tuple(q.shape)), Output(q, tuple(q.shape[:2]), torch.float32)


def _check_prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_start: Tensor,
    start: Tensor,
    pool: Tensor,
    block_table: Tensor,
    compressed: Tensor,
    recent_k: Tensor,
    recent_v: Tensor,
    head_dim: int,
    k_bits: int,
    v_bits: int,
    k_form: Any,
    rotated: bool,
    scale: float,
    soft_cap: float,
    window: int,
    sinks: Tensor | None,
    max_rows: int,
    max_compressed: int,
) -> tuple[Output, Output]:
    check_cache(
        recent_k, recent_v, pool, block_table, KVFormat(head_dim, k_bits, v_bits, k_form, rotated)
    )
    check_fresh(k, v, recent_k)
    s = recent_k.shape[0]
    require("q", q, (recent_k.dtype,), (k.shape[0], "Hq", head_dim), recent_k.device)
    counts = {"row_start": (row_start, s + 1), "start": (start, s)}
    check_counts(q.device, **counts, compressed=(compressed, s))
    _check_softmax(q, recent_k, soft_cap, window, sinks)
    _check_most(max_compressed, block_table)
    if max_rows < 0:
        raise OpError(f"max_rows is 0 or more, not {max_rows}")
    return Output(q, tuple(q.shape)), Output(q, tuple(q.shape[:2]), torch.float32)


def _check_most(max_compressed: int, block_table: Tensor) -> None:
    room = block_table.shape[1] * BLOCK_TOKENS
    if not 0 <= max_compressed <= room:
        raise OpError(
            f"max_compressed is 0 up to the {room} tokens that block_table has room for, "
            f"not {max_compressed}"
        )


def _decode_launcher() -> Callable[..., Any]:
    from qoff.kernels.triton.attention.decode import decode_attention as launch

    return lambda *args: _call(launch, 7, args, ("max_compressed",))


def _prefill_launcher() -> Callable[..., Any]:
    from qoff.kernels.triton.attention.prefill import prefill_attention as launch

    return lambda *args: _call(launch, 10, args, ("max_rows", "max_compressed"))


def _decode_reference(*args: Any) -> Any:
    from qoff.kernels.reference.attention import decode_attention

    return _call(decode_attention, 7, args, ("max_compressed",))


def _prefill_reference(*args: Any) -> Any:
    from qoff.kernels.reference.attention import prefill_attention

    return _call(prefill_attention, 10, args, ("max_rows", "max_compressed"))


def _call(
    function: Callable[..., Any], tensors: int, args: tuple[Any, ...], most: tuple[str, ...]
) -> Any:
    """Call with a KVFormat for its five scalars after `tensors`, and the last by keyword."""
    named = dict(zip(most, args[tensors + 9 :], strict=True))
    form = KVFormat(*args[tensors : tensors + 5])
    return function(*args[:tensors], form, *args[tensors + 5 : tensors + 9], **named)


_decode_attention = define(
    f"decode_attention(Tensor q, {_BLOCKS}, Tensor length, {_RINGS}, {FORM}, {_SOFTMAX}, "
    "int max_compressed) -> (Tensor, Tensor)",
    check=_check_decode_attention,
    cuda=_decode_launcher,
    cpu=_decode_reference,
)
_prefill_attention = define(
    "prefill_attention(Tensor q, Tensor k, Tensor v, Tensor row_start, Tensor start, "
    f"{_BLOCKS}, {_RINGS}, {FORM}, {_SOFTMAX}, int max_rows, int max_compressed) "
    "-> (Tensor, Tensor)",
    check=_check_prefill_attention,
    cuda=_prefill_launcher,
    cpu=_prefill_reference,
)

"""Appending K and V to the cache on a GPU: rotation, packing of complete blocks, recent window."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.kv_format import HEAD_DIMS, KVFormat
from qoff.kernels.triton.launch import tuned
from qoff.kernels.triton.launch.variant import LAUNCH, Variant

from .pack import hadamard, load_half, load_turned, pack_channels, pack_tokens


@dataclass(frozen=True)
class KvAppendConfig:
    """Warps of a program that packs a block; `heads` of a token in a program that writes it."""

    pack_warps: int
    heads: int
    write_warps: int


@triton.jit
def pack_kernel(
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
    k_stride,  # from token to token
    v_stride,
    kv_heads,
    window,  # slots of a ring
    table_stride,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    PARTS: tl.constexpr,
    CHANNEL: tl.constexpr,
    ROTATED: tl.constexpr,
    V_CODES: tl.constexpr,
    NBYTES: tl.constexpr,
    PAIRS: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Pack one block of one KV head, from the ring up to position start - 1 and from k, v after."""
    head = tl.program_id(0)
    sequence = tl.program_id(2).to(tl.int64)
    block = tl.load(before + sequence) // 64 + tl.program_id(1)
    if block * 64 >= tl.load(after + sequence):
        return
    position = block * 64 + tl.arange(0, 64)
    first = tl.load(start + sequence)
    fresh = position >= first
    row = tl.load(row_start + sequence) + tl.where(fresh, position - first, 0)
    slot = sequence * window + position % window
    old = ~fresh
    at = (slot * kv_heads + head) * (2 * HALF)
    new_v = v + row.to(tl.int64) * v_stride + head * (2 * HALF)
    new_k = k + row.to(tl.int64) * k_stride + head * (2 * HALF)
    v_low = load_half(new_v, fresh, 0, HALF, PADDED)
    v_high = load_half(new_v, fresh, HALF, HALF, PADDED)
    turn = tl.where(fresh, position, 0)
    k_low, k_high = load_turned(new_k, fresh, turn, cos, sin, HALF, PADDED, PAIRS, ROPE)
    if block * 64 < first:
        keep = fresh[:, None]
        v_low = tl.where(keep, v_low, load_half(recent_v + at, old, 0, HALF, PADDED))
        v_high = tl.where(keep, v_high, load_half(recent_v + at, old, HALF, HALF, PADDED))
        k_low = tl.where(keep, k_low, load_half(recent_k + at, old, 0, HALF, PADDED))
        k_high = tl.where(keep, k_high, load_half(recent_k + at, old, HALF, HALF, PADDED))
    physical = tl.load(block_table + sequence * table_stride + block).to(tl.int64)
    record = pool + (physical * kv_heads + head) * NBYTES
    if CHANNEL:
        pack_channels(record, k_low, k_high, block == 0, HALF, PADDED, K_BITS)
    elif ROTATED:
        low, high = hadamard(k_low, k_high, HALF)
        pack_tokens(record, low, high, HALF, PADDED, K_BITS, PARTS)
    else:
        pack_tokens(record, k_low, k_high, HALF, PADDED, K_BITS, PARTS)
    pack_tokens(record + V_CODES, v_low, v_high, HALF, PADDED, V_BITS, PARTS)


@triton.jit
def write_kernel(
    k,
    v,
    cos,
    sin,
    start,
    row_start,
    recent_k,
    recent_v,
    after,
    k_stride,
    v_stride,
    kv_heads,
    window,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Write HEADS heads of one token that is in no block to its slot of the ring."""
    sequence = tl.program_id(2).to(tl.int64)
    first = tl.load(start + sequence)
    first_row = tl.load(row_start + sequence)
    position = tl.maximum(first, tl.load(after + sequence)) + tl.program_id(1)
    row = (first_row + position - first).to(tl.int64)
    if row >= tl.load(row_start + sequence + 1):
        return
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    inside = head < kv_heads
    new_v = v + row * v_stride + head * (2 * HALF)
    new_k = k + row * k_stride + head * (2 * HALF)
    v_low = load_half(new_v, inside, 0, HALF, PADDED)
    v_high = load_half(new_v, inside, HALF, HALF, PADDED)
    turn = position + tl.zeros((1,), tl.int32)
    k_low, k_high = load_turned(new_k, inside, turn, cos, sin, HALF, PADDED, PAIRS, ROPE)
    slot = (sequence * window + position % window) * kv_heads * (2 * HALF)
    channel = tl.arange(0, PADDED)[None, :]
    at = slot + head[:, None] * (2 * HALF) + channel
    mask = inside[:, None] & (channel < HALF)
    tl.store(recent_v + at, v_low, mask=mask)
    tl.store(recent_v + at + HALF, v_high, mask=mask)
    tl.store(recent_k + at, k_low, mask=mask)
    tl.store(recent_k + at + HALF, k_high, mask=mask)


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
    config: KvAppendConfig | None = None,
) -> None:
    """Turn new keys, pack the blocks that become complete, and keep the rest in the ring.

    k, v: [T, kv_heads, D], rows row_start[s]..row_start[s+1]-1 belong to sequence s, at positions
    start[s] on; tokens may lie apart, a token's heads may not. cos, sin: float32 [P, R/2], or
    None for keys that need no turning (see `rope`). Tokens before[s]..after[s]-1, whole blocks, go
    into pool [blocks, kv_heads, form.nbytes] where block_table [S, max_blocks] says, those from
    start[s] on from k and v, older ones from the ring; tokens from after[s] on go into the ring
    recent_k, recent_v [S, W, kv_heads, D], position p into slot p % W. At most W of them may, and
    blocks are read before the ring is written. No sequence has more than max_rows rows or
    max_new_blocks new blocks. One launch without new blocks, otherwise two.

    Values are those of `reference_kv.append`: K is turned in float32 and rounded to its dtype
    before it is packed. A code may be the neighbour where the quotient is within float32 rounding
    of a half; a Hadamard rotation is exact but for float32 sums.
    """
    sequences, window, kv_heads, head_dim = recent_k.shape
    if config is None:
        entry = tuned.lookup("kv_append", k.device, f"{kv_heads}-{head_dim}")
        config = KvAppendConfig(**entry) if entry else _heuristic(kv_heads, head_dim)
    pairs = 0 if cos is None else cos.shape[1]
    shared = _row_constants(form, pairs, interleaved)
    tables = (k if cos is None else cos, v if sin is None else sin)  # not read without cos and sin
    if max_new_blocks > 0 and sequences > 0:
        pack_kernel[(kv_heads, max_new_blocks, sequences)](
            k,
            v,
            *tables,
            start,
            row_start,
            recent_k,
            recent_v,
            pool,
            block_table,
            before,
            after,
            k.stride(0),
            v.stride(0),
            kv_heads,
            window,
            block_table.stride(0),
            **shared,
            **_pack_constants(form),
            num_warps=config.pack_warps,
            num_stages=1,
            **LAUNCH,
        )
    if max_rows > 0 and sequences > 0:
        grid = (triton.cdiv(kv_heads, config.heads), min(max_rows, window), sequences)
        write_kernel[grid](
            k,
            v,
            *tables,
            start,
            row_start,
            recent_k,
            recent_v,
            after,
            k.stride(0),
            v.stride(0),
            kv_heads,
            window,
            **shared,
            HEADS=config.heads,
            num_warps=config.write_warps,
            num_stages=1,
            **LAUNCH,
        )


def _heuristic(kv_heads: int, head_dim: int) -> KvAppendConfig:
    """A block: 64 values of K a thread at most. A token: up to 1024 values of K, 8 a thread."""
    padded = triton.next_power_of_2(head_dim)
    heads = min(triton.next_power_of_2(kv_heads), max(1, 1024 // padded))
    return KvAppendConfig(
        pack_warps=8 if head_dim > 128 else 4,
        heads=heads,
        write_warps=max(1, heads * padded // 512),
    )


def _row_constants(form: KVFormat, pairs: int, interleaved: bool) -> dict[str, Any]:
    if pairs == 0:
        rope = "none"
    elif interleaved:
        rope = "interleaved"
    else:
        rope = "halves" if pairs == form.half else "split"
    padded = triton.next_power_of_2(form.half)
    return {"HALF": form.half, "PADDED": padded, "PAIRS": pairs, "ROPE": rope}


def _pack_constants(form: KVFormat) -> dict[str, Any]:
    return {
        "K_BITS": form.k_bits,
        "V_BITS": form.v_bits,
        "PARTS": form.parts,
        "CHANNEL": form.k_form == "channel",
        "ROTATED": form.rotated,
        "V_CODES": form.v_codes,
        "NBYTES": form.nbytes,
    }


def variants(capability: int) -> Iterator[Variant]:
    """Every shipped configuration for a compute capability.

    Blocks: each head size with each form, while widths, ways to turn keys and dtypes take turns;
    the default form of head size 128 with both dtypes. Tokens: each head size with two of the four
    ways to turn keys, each way with both dtypes.
    """
    dtypes = ("fp16",) if capability == 75 else ("fp16", "bf16")
    blocks = [
        _pack_variant(dtypes[i % len(dtypes)], form, pairs, interleaved)
        for i, (form, pairs, interleaved) in enumerate(_blocks())
        # Before 8.0, Triton has no tensor cores to rotate with.
        if capability >= 80 or not form.rotated
    ]
    yield from {variant.name: variant for variant in blocks}.values()  # with one dtype, two alike
    for i, head_dim in enumerate(HEAD_DIMS):
        half, quarter = head_dim // 2, head_dim // 4
        ways = ((0, False), (quarter, False)) if i % 2 else ((half, False), (half, True))
        for j, (pairs, interleaved) in enumerate(ways):
            dtype = dtypes[(i // 2 + j) % len(dtypes)]
            yield _write_variant(dtype, KVFormat(head_dim), pairs, interleaved)


def _blocks() -> Iterator[tuple[KVFormat, int, bool]]:
    """Forms, pairs of channels that are turned, and whether pairs are neighbours."""
    yield KVFormat(64), 0, False
    yield KVFormat(64, k_bits=8, v_bits=8, k_form="token"), 32, False
    yield KVFormat(64, k_form="token", rotated=True), 16, False
    yield KVFormat(80, k_bits=8), 40, False
    yield KVFormat(80, v_bits=8, k_form="token"), 40, True
    yield KVFormat(96, v_bits=8), 24, False
    yield KVFormat(96, k_form="token"), 0, False
    yield KVFormat(128), 64, False
    yield KVFormat(128), 64, False  # with the other dtype
    yield KVFormat(128, k_form="token"), 0, False
    yield KVFormat(128, k_bits=8, k_form="token", rotated=True), 64, False
    yield KVFormat(128, k_bits=8, v_bits=8), 64, True
    yield KVFormat(256), 128, False
    yield KVFormat(256, k_form="token", rotated=True), 0, False
    yield KVFormat(256, k_bits=8, k_form="token"), 32, False


def _pack_variant(dtype: str, form: KVFormat, pairs: int, interleaved: bool) -> Variant:
    shared = _row_constants(form, pairs, interleaved)
    name = f"{dtype}-{form.head_dim}-k{form.k_bits}v{form.v_bits}-{form.k_form}"
    ints = ("k_stride", "v_stride", "kv_heads", "window", "table_stride")
    return Variant(
        op="kv_append",
        name=f"pack-{name}{'-rotated' if form.rotated else ''}-rope-{shared['ROPE']}",
        kernel=pack_kernel,
        types=_types(dtype, pairs)
        | {"pool": "*u8", "block_table": "*i32", "before": "*i32", "after": "*i32"}
        | dict.fromkeys(ints, "i32"),
        constants=shared | _pack_constants(form),
        num_warps=_heuristic(8, form.head_dim).pack_warps,
        num_stages=1,
        unaligned=frozenset({"kv_heads", "table_stride"}),
    )


def _write_variant(dtype: str, form: KVFormat, pairs: int, interleaved: bool) -> Variant:
    shared = _row_constants(form, pairs, interleaved)
    config = _heuristic(8, form.head_dim)
    return Variant(
        op="kv_append",
        name=f"write-{dtype}-{form.head_dim}-rope-{shared['ROPE']}",
        kernel=write_kernel,
        types=_types(dtype, pairs)
        | {"after": "*i32"}
        | dict.fromkeys(("k_stride", "v_stride", "kv_heads", "window"), "i32"),
        constants=shared | {"HEADS": config.heads},
        num_warps=config.write_warps,
        num_stages=1,
        unaligned=frozenset({"kv_heads"}),
    )


def _types(dtype: str, pairs: int) -> dict[str, str]:
    return (
        dict.fromkeys(("k", "v", "recent_k", "recent_v"), f"*{dtype}")
        | dict.fromkeys(("cos", "sin"), "*fp32" if pairs else f"*{dtype}")  # k and v stand in
        | dict.fromkeys(("start", "row_start"), "*i32")
    )

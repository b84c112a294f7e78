"""Attention and what goes with it, as their kernels are compiled for each architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bench.variants.variant import (
    COPIED_AHEAD,
    DTYPES,
    TENSOR_CORES,
    WIDE_CODES,
    Variant,
    empty,
    float_types,
)
from qoff.kernels.layout.device_cache import DeviceLayerCache, PassTables
from qoff.kernels.layout.heads import WIDEST, HeadShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, HEAD_DIMS, KVFormat
from qoff.kernels.layout.rotation import value_run
from qoff.kernels.triton.attention.append import kv_append
from qoff.kernels.triton.attention.decode import decode_attention
from qoff.kernels.triton.attention.merge import join
from qoff.kernels.triton.attention.new_token import NewTokens
from qoff.kernels.triton.attention.prefill import prefill_attention
from qoff.kernels.triton.attention.select_blocks import select_blocks
from qoff.kernels.triton.launch.options import WARPS_OVER_ROWS

_SEQUENCES, _KV_HEADS, _BLOCKS = 3, 8, 100  # numbers of blocks are no multiples of 16
_LONG = 2000  # blocks
_FEW, _MANY = 16, 4096  # queries of a prefill: from packed blocks, and from a scratch
_APPENDED = (  # forms
    KVFormat(64),
    KVFormat(64, k_bits=8, v_bits=8),
    KVFormat(80, k_bits=8),
    KVFormat(80, v_bits=8),
    KVFormat(96, v_bits=8),
    KVFormat(96, 3, 2),
    KVFormat(128, 2, 3),
    KVFormat(128),
    KVFormat(128),  # with the other type
    KVFormat(128, k_bits=8, v_bits=8),
    KVFormat(192),
    KVFormat(256),
    KVFormat(256, k_bits=8),
)
_WHOLE = tuple(dim for dim in HEAD_DIMS if dim <= WIDEST)  # others: see `variants.latent`


def variants(capability: int) -> Iterator[Variant]:
    """Appending, merging, decode and prefill."""
    yield from _appended(capability)
    yield from _merged(capability)
    yield from _chosen(capability)
    yield from _decode(capability)
    yield from _scratch()
    yield from _prefill(capability)


def _appended(capability: int) -> Iterator[Variant]:
    """Blocks: each head size with each form, while widths and types take turns; but heads of 512
    channels, whose packing, once in 64 tokens, spills up to 112 bytes of a thread. Tokens: each
    head size with both types."""
    types = float_types(capability)
    blocks = {}
    for i, form in enumerate(_APPENDED):
        packed = _append("pack", types[i % len(types)], form)
        blocks[packed.name] = packed  # with one type, two are alike
    yield from blocks.values()
    for head_dim in HEAD_DIMS:
        for dtype in types:
            yield _append("write", dtype, KVFormat(head_dim))


def _append(kind: str, dtype: str, form: KVFormat) -> Variant:
    k = empty(DTYPES[dtype], 7, _KV_HEADS, form.head_dim)
    launch = partial(kv_append, k, k, cache_of(form, dtype, 5, new=2))
    return Variant("kv_append", f"{kind}-{dtype}-{_kind(form)}", f"{kind}_kernel", launch)


def _merged(capability: int) -> Iterator[Variant]:
    """Each size of a tile of up to 32 parts, and more parts, with types, head sizes and rotation in
    turn."""
    types = ("fp32", *float_types(capability))
    sizes = [(64, 1), (64, 2), (80, 4), (64, 8), (64, 16), (64, 32)]
    sizes += [(128, 1), (96, 2), (128, 4), (80, 8), (96, 16), (128, 32)]
    sizes += [(256, 1), (256, 2), (256, 4), (256, 8), (256, 16), (256, 32), (512, 16)]
    sizes += [(128, 64), (80, 128)]  # of which a tile has 32
    for i, (head_dim, tile) in enumerate(sizes):
        dtype = types[i // 2 % len(types)]
        parts = tile - (tile > 2)  # no multiple of 16
        outs = empty(DTYPES[dtype], parts, 16, 32, head_dim)
        run = value_run(head_dim) if i % 3 == 0 else 1  # channels that are rotated back together
        launch = partial(join, outs, empty(torch.float32, parts, 16, 32), parts, run)
        name = f"{dtype}-{head_dim}-{parts}parts{'-rotated' * (run > 1)}"
        yield Variant("merge", name, "merge_kernel", launch)


def _chosen(capability: int) -> Iterator[Variant]:
    """The choice of blocks: bounds for each head size with the default form, types and groups in
    turn, and other codes; with windows, with blocks in host memory, and without."""
    types, groups = float_types(capability), (4, 1, 8, 16)
    forms = (*map(KVFormat, _WHOLE), KVFormat(128, 3, 2), KVFormat(128, k_bits=8))
    for i, form in enumerate(forms):
        dtype, group = types[i % len(types)], groups[i % len(groups)]
        shape = _shape(form, group, window=100 * BLOCK_TOKENS if i % 3 == 1 else None)
        older = i % 2 == 1
        cache = replace(cache_of(form, dtype, _SEQUENCES, older=older), top=0.6)
        if i == 0:  # of which a program has not all keys at a time
            table = empty(torch.int32, _SEQUENCES, _LONG)
            step = replace(cache.step, max_packed=_LONG * BLOCK_TOKENS, table=table)
            cache = replace(cache, step=step)
        q = empty(DTYPES[dtype], _SEQUENCES, shape.heads, form.head_dim)
        k = empty(DTYPES[dtype], _SEQUENCES, _KV_HEADS, form.head_dim)
        new = _new_tokens(k, form, normed=i % 2 == 0)
        launch = partial(select_blocks, q, cache, shape, new)
        name = f"{dtype}-{_kind(form)}-group{group}{'-window' * (i % 3 == 1)}{'-older' * older}"
        yield Variant("decode_attention", f"bounds-{name}", "block_bounds_kernel", launch)
        if i < 2:
            yield Variant("decode_attention", f"select-{name}", "select_blocks_kernel", launch)


def _decode(capability: int) -> Iterator[Variant]:
    """Each form with groups of 4 queries; groups of other sizes, larger ones with norms of heads,
    and bfloat16 with the default form; chosen blocks with each head size, one of them with a
    window, two with blocks in host memory; the extras together, with tokens that are in the ring.
    But Turing's head sizes over 128 and groups over 8, which spill registers."""
    for head_dim in _WHOLE:
        if capability >= 80 or head_dim <= 128:
            window = 100 * BLOCK_TOKENS if head_dim == 64 else None
            how: dict[str, Any] = {"top": 0.6, "seen": window, "older": head_dim in (64, 128)}
            yield _attention("decode", capability, "fp16", KVFormat(head_dim), **how)
    for form in (
        *map(KVFormat, _WHOLE),
        KVFormat(64, 2, 3),
        KVFormat(128, 3, 2),
        KVFormat(128, k_bits=8),
        KVFormat(128, k_bits=8, v_bits=8),
    ):
        if capability >= 80 or form.head_dim <= 128:
            yield _attention("decode", capability, "fp16", form)
    for group in (1, 8, 16) if capability >= 80 else (1, 8):
        yield _attention("decode", capability, "fp16", KVFormat(128), group=group)
    yield _attention("decode", capability, "fp16", KVFormat(128), extras=True)
    if capability >= 80:
        for head_dim in (64, 128):
            yield _attention("decode", capability, "bf16", KVFormat(head_dim))


def _prefill(capability: int) -> Iterator[Variant]:
    """Each head size with the default form, from packed blocks and from the scratch; other forms,
    the extras together and bfloat16 with head size 128. But Turing's head sizes over 128, which
    spill."""
    for head_dim in _WHOLE if capability >= 80 else filter(lambda dim: dim <= 128, _WHOLE):
        yield _attention("prefill", capability, "fp16", KVFormat(head_dim), rows=_MANY)
        older = capability == 80 and head_dim > 128 and not WARPS_OVER_ROWS
        if capability >= 80 and not older:  # others take the scratch for any number of queries
            yield _attention("prefill", capability, "fp16", KVFormat(head_dim))
    rows = _FEW if capability >= 80 else _MANY
    yield _attention("prefill", capability, "fp16", KVFormat(128), rows=rows, extras=True)
    if capability >= 80:
        yield _attention("prefill", capability, "fp16", KVFormat(128, 3, 2))
        yield _attention("prefill", capability, "fp16", KVFormat(128, k_bits=8, v_bits=8))
        for rows in (_FEW, _MANY):
            yield _attention("prefill", capability, "bf16", KVFormat(128), rows=rows)


def _scratch() -> Iterator[Variant]:
    """Each head size with the default form, one of them with the extras; other codes with head size
    128."""
    others = KVFormat(128, 3, 2), KVFormat(128, k_bits=8, v_bits=8)
    for form in (*map(KVFormat, _WHOLE), *others):
        yield _attention("scratch", 0, "fp16", form, rows=_MANY, extras=form.head_dim == 64)


def _attention(
    kind: str,
    capability: int,
    dtype: str,
    form: KVFormat,
    group: int = 4,
    rows: int = _FEW,
    extras: bool = False,
    top: float = 1.0,
    seen: int | None = None,
    older: bool = False,
) -> Variant:
    """extras: soft cap, window (of prefill a chunk), sinks and a first block. top: see
    `DeviceLayerCache`. seen: a window. older: a first block, too."""
    window = 100 if extras else seen
    shape = _shape(form, group, window, 30.0 if extras else 0.0, chunked=kind == "prefill")
    decode = kind == "decode"
    tokens = _SEQUENCES if decode else rows
    cache = replace(cache_of(form, dtype, tokens, older=extras or older), top=top)
    q = empty(DTYPES[dtype], tokens, shape.heads, form.head_dim)
    k = empty(DTYPES[dtype], tokens, _KV_HEADS, form.head_dim)
    sinks = empty(torch.float32, shape.heads) if extras else None
    if decode:
        new = None if extras else _new_tokens(k, form, normed=group > 4)
        launch = partial(decode_attention, q, cache, shape, sinks, new=new)
    else:
        launch = partial(prefill_attention, q, k, k, cache, shape, sinks)
    name = f"{kind}-{dtype}-{_kind(form)}-group{group}{'-extras' * extras}"
    name += f"{'-sparse' * (top < 1)}{'-window' * (seen is not None)}{'-older' * older}"
    name += "-from-scratch" if kind == "prefill" and rows == _MANY else ""
    kernel = "scratch_kernel" if kind == "scratch" else f"{kind}_attention_kernel"
    op = "decode_attention" if decode else "prefill_attention"
    return Variant(op, name, kernel, launch, _traits(kind, capability, form, rows))


def _shape(
    form: KVFormat, group: int, window: int | None, soft_cap: float = 0.0, chunked: bool = False
) -> HeadShape:
    return HeadShape(
        heads=_KV_HEADS * group,
        kv_heads=_KV_HEADS,
        head_dim=form.head_dim,
        scale=0.125,
        window=window,
        chunked=chunked,
        soft_cap=soft_cap,
    )


def _new_tokens(k: torch.Tensor, form: KVFormat, normed: bool) -> NewTokens:
    """V is rotated, and all channels of keys turned, or with two of the head sizes a part."""
    pairs = form.head_dim // (4 if form.head_dim in (80, 256) else 2)
    table, norm = empty(torch.float32, 9, pairs), empty(k.dtype, form.head_dim) if normed else None
    return NewTokens(k, k, (table, table), norm, norm, rotated=True)


def _traits(kind: str, capability: int, form: KVFormat, rows: int) -> frozenset[str]:
    if kind == "scratch":
        wide = form.head_dim != 80
    elif kind == "prefill":
        wide = rows == _FEW
    else:  # rows of 40 bytes are 8 apart; for Turing's products 32 are cut into pieces of 8
        wide = form.head_dim != 80 and (capability >= 80 or form.head_dim > 64)
    traits = {WIDE_CODES} if wide else set()
    if kind == "decode" and capability >= 80 and min(form.k_bits, form.v_bits) >= 4:
        traits.add(COPIED_AHEAD)
    return frozenset(traits | ({TENSOR_CORES} if capability >= 80 else set()))


def cache_of(
    form: KVFormat, dtype: str, rows: int, new: int = 0, older: bool = False
) -> DeviceLayerCache:
    """A pass of `rows` tokens of each sequence that completes `new` blocks."""

    def ints(*shape: int) -> torch.Tensor:
        return empty(torch.int32, *shape)

    step = PassTables(
        start=ints(_SEQUENCES),
        row_start=ints(_SEQUENCES + 1),
        length=ints(_SEQUENCES),
        packed=ints(_SEQUENCES),
        after=ints(_SEQUENCES),
        table=ints(_SEQUENCES, _BLOCKS),
        positions=ints(rows),
        max_rows=rows,
        max_packed=BLOCK_TOKENS * _BLOCKS,
        max_new_blocks=new,
        resident_from=ints(_SEQUENCES) if older else None,
    )
    heads = 1 if form.latent else _KV_HEADS
    recent = empty(DTYPES[dtype], _SEQUENCES, BLOCK_TOKENS, heads, form.head_dim)
    pool = empty(torch.uint8, 9, heads, form.nbytes)
    cache = DeviceLayerCache(form, pool, recent, recent[..., : form.own_value_dim], step)
    bounds = empty(torch.uint8, 9, heads, form.bound_bytes) if older else None
    return replace(cache, bounds=bounds)


def _kind(form: KVFormat) -> str:
    return f"{form.head_dim}-k{form.k_bits}-v{form.v_bits}"

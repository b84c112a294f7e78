"""Attention to latents and wide heads, as its kernels are compiled for each architecture."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from bench.variants.attention import cache_of
from bench.variants.variant import DTYPES, TENSOR_CORES, WIDE_CODES, Variant, empty, float_types
from qoff.kernels.layout.ending import Norm
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.latent import LatentShape
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.triton.attention.append import NewBlocks
from qoff.kernels.triton.latent.append import pack_latents, turn, write_latents
from qoff.kernels.triton.latent.attention import latent_attention
from qoff.kernels.triton.latent.products import absorb, expand

_FORM = KVFormat(576, latent=512)  # of DeepSeek and most others


def variants(capability: int) -> Iterator[Variant]:
    """Products, DeepSeek V3's heads and fewer at decode and of prompts, and what is appended.

    Heads of 512 channels, eight to a KV head as in Gemma 4 and one. But attention on Turing, which
    spills registers: a tile of any size takes more than there are.
    """
    types = float_types(capability)
    for kind, dtype, bits, group in (("absorb", types[-1], 8, 32), ("expand", "fp16", 4, 128)):
        yield _product(kind, capability, dtype, 1, bits, group)
        yield _product(kind, capability, dtype, 4096, 4, 64)
    for kind in ("turn", "write", "pack"):
        yield _append(kind, types[-1], _FORM)
    yield _append("pack", types[-1], KVFormat(576, 8, 8, latent=512))
    if capability >= 80:
        yield _attention("fp16", _FORM, 16, 1)
        yield _attention("fp16", KVFormat(576, 8, 8, latent=512), 128, 1)
        yield _attention(types[-1], KVFormat(320, latent=256), 32, 1)  # of Mistral Small 4
        for rows in (1, 4096):
            yield _attention(types[-1], _FORM, 128, rows)
        for form in (KVFormat(512, 8, 8), KVFormat(512)):
            yield _attention("fp16", form, 1, 1)
            for rows in (1, 4096):
                yield _attention("fp16", form, 8, rows)


def _product(kind: str, capability: int, dtype: str, tokens: int, bits: int, group: int) -> Variant:
    shape = LatentShape(128, 512, 128, 64, 128)
    codes = empty(torch.uint8, shape.rows, shape.latent * bits // 8)
    scales = empty(torch.float16, shape.latent // group, shape.rows, 2)
    weight = QTensor(codes, scales, (shape.rows, shape.latent), bits, group, "split32")
    given = DTYPES[dtype]
    if kind == "expand":
        x = empty(given, tokens, shape.heads * shape.latent)
        launch = partial(expand, x, weight, shape)
    else:
        q = empty(given, tokens, shape.heads * shape.query_dim)
        norm = Norm(empty(given, shape.latent), 1e-6, None, False)
        launch = partial(absorb, q, empty(given, tokens, shape.head_dim), weight, norm, shape)
    traits = frozenset({TENSOR_CORES} if capability >= 80 else ())
    name = f"{kind}-{dtype}-{bits}-{group}-{tokens}rows"
    return Variant("latent_attention", name, f"{kind}_kernel", launch, traits)


def _append(kind: str, dtype: str, form: KVFormat) -> Variant:
    cache = cache_of(form, dtype, 5, new=2)
    vectors = empty(DTYPES[dtype], 5, 129, form.head_dim)
    key, step, table = vectors[:, 128:], cache.step, empty(torch.float32, 9, 32)
    blocks = NewBlocks(cache.pool, step.packed, step.after, step.max_new_blocks, step.start)
    launch = {
        "turn": partial(turn, vectors, cache, (table, table), to_ring=True),
        "write": partial(write_latents, key, cache),
        "pack": partial(pack_latents, key, cache, blocks),
    }[kind]
    name = f"{kind}-{dtype}-k{form.k_bits}"
    return Variant("latent_attention", name, f"latent_{kind}_kernel", launch)


def _attention(dtype: str, form: KVFormat, group: int, rows: int) -> Variant:
    """Of few rows what is not packed and runs of blocks, of many all."""
    cache = cache_of(form, dtype, rows)
    kv_heads = cache.recent_k.shape[2]
    heads = group * kv_heads
    shape = HeadShape(heads, kv_heads, form.head_dim, 0.125, latent=form.latent)
    vectors = empty(DTYPES[dtype], rows, heads + kv_heads, form.head_dim)
    q, key = vectors.split([heads, kv_heads], 1)
    value = None if form.latent else key
    launch = partial(latent_attention, q, key, cache, shape, value=value)
    traits = frozenset({WIDE_CODES, TENSOR_CORES})
    name = f"{dtype}-{form.latent or 'wide'}-k{form.k_bits}-{group}heads-{rows}rows"
    return Variant("latent_attention", name, "latent_attention_kernel", launch, traits)

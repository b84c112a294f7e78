"""An index of keys and attention to what it chooses, as compiled for each architecture."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from bench.variants.attention import cache_of
from bench.variants.variant import DTYPES, TENSOR_CORES, Variant, empty, float_types
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.index import IndexShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.triton.indexed.attend import chosen_attention
from qoff.kernels.triton.indexed.scores import index_scores
from qoff.kernels.triton.indexed.select import index_select

_FORM = KVFormat(576, latent=512)
_MODELS = {"glm": IndexShape(32, 128, 64, 2048), "deepseek": IndexShape(64, 128, 64, 2048)}


def variants(capability: int) -> Iterator[Variant]:
    """GLM 5's and DeepSeek V3.2's sizes, at decode and of prompts."""
    types = float_types(capability)
    for name, index in _MODELS.items():
        for rows in (1, 512):
            yield _scores(name, index, types[-1], rows, capability)
    for tokens in (4096, 1 << 17):
        yield _select(tokens)
    for dtype, form, heads, rows in (
        ("fp16", KVFormat(576, 8, 8, latent=512), 128, 1),
        ("fp16", _FORM, 16, 1),
        (types[-1], _FORM, 128, 1),
        (types[-1], _FORM, 128, 512),
    ):
        yield _attention(dtype, form, heads, rows, capability)


def _scores(model: str, index: IndexShape, dtype: str, rows: int, capability: int) -> Variant:
    cache = cache_of(KVFormat(index.dim, 8, 8, latent=index.keys.latent), dtype, rows)
    qk = empty(DTYPES[dtype], rows, index.heads + 1, index.dim)
    weights = empty(DTYPES[dtype], rows, index.heads)
    scores = empty(torch.float32, rows, 1 << 15)
    launch = partial(index_scores, qk, weights, cache, index, range(rows), scores)
    name = f"scores-{dtype}-{model}-{rows}rows"
    return Variant("indexed_attention", name, "index_scores_kernel", launch, _traits(capability))


def _select(tokens: int) -> Variant:
    scores = empty(torch.float32, 4, tokens)
    chosen, positions = empty(torch.int32, 4, 2048), empty(torch.int32, 4)
    launch = partial(index_select, scores, positions, None, range(4), chosen)
    return Variant("indexed_attention", f"select-fp32-{tokens}", "index_select_kernel", launch)


def _attention(dtype: str, form: KVFormat, heads: int, rows: int, capability: int) -> Variant:
    cache = cache_of(form, dtype, rows)
    shape = HeadShape(heads, 1, form.head_dim, 0.125, latent=form.latent)
    q, key = empty(DTYPES[dtype], rows, heads + 1, form.head_dim).split([heads, 1], 1)
    launch = partial(chosen_attention, q, key, cache, shape, empty(torch.int32, rows, 2048))
    name = f"{dtype}-k{form.k_bits}-{heads}heads-{rows}rows"
    kernel = "chosen_attention_kernel"
    return Variant("indexed_attention", name, kernel, launch, _traits(capability))


def _traits(capability: int) -> frozenset[str]:
    return frozenset({TENSOR_CORES} if capability >= 80 else ())

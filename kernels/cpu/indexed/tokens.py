"""What the jobs are told of where the keys of a pass are."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from qoff.kernels.cpu.operands import address, fail
from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kernels.layout.layer_cache import RUN_TOKENS, LayerCache
from qoff.kernels.layout.ragged import ITEM_TOKENS, Ragged

from .rows import Tokens, described


def check_chosen(op: str, chosen: Tensor, rows: int) -> None:
    """Raise OpError unless these may be chosen tokens; which ones is not looked at."""
    whole = chosen.dtype == torch.int32 and chosen.is_contiguous() and chosen.dim() == 2
    if not whole or len(chosen) != rows or chosen.shape[1] < 1:
        fail(
            op,
            f"chosen must be contiguous int32 [{rows}, top], not {chosen.dtype} "
            f"{list(chosen.shape)}",
        )


def most_tokens(cache: LayerCache) -> int:
    """An upper bound of a sequence's tokens, the same for all passes that share a recording.

    So a pass that needs no choice by it leaves none out when it is replayed.
    """
    packed = sum(part.table.longest for part in cache.packed)
    return BLOCK_TOKENS * packed + (cache.longest // RUN_TOKENS + 1) * RUN_TOKENS


def tokens_of(cache: LayerCache, ragged: Ragged) -> tuple[Tokens, object]:
    """Where the keys of a layer are, and memory that this has the address of."""
    parts = described(cache.packed)
    groups = None if ragged.is_decode else ragged.items
    count, each = (ragged.tokens, 1) if groups is None else (len(groups), ITEM_TOKENS)
    *_, blocks, dim, lanes = cache.keys.shape
    bits = k_scale = 0
    for part in cache.packed:
        bits, k_scale = part.form.k_bits, part.form.k_scale
    tokens = Tokens(
        groups=address(groups), group_count=count, each=each,
        positions=ragged.positions.data_ptr(), slots=ragged.slots.data_ptr(),
        keys=cache.keys.data_ptr(), capacity=blocks * lanes, dim=dim, bits=bits, k_scale=k_scale,
        parts=ctypes.addressof(parts), part_count=len(cache.packed),
    )  # fmt: skip
    return tokens, (tokens, parts, groups)

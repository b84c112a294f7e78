"""How much of a GPU's memory a plan has for dequantized weights."""

from __future__ import annotations

from typing import NamedTuple

import torch

from qoff.kernels.triton.linear.linear import scratch_bytes, takes_scratch
from qoff.kernels.triton.linear.scratch import PIECE_MIN, piece_bytes, usable
from qoff.models.native.pass_bytes import layer_bytes
from qoff.models.spec import DecoderSpec

from .manual import Plan

_HELD_SHARE = 16  # of a GPU's memory, for dequantized weights that are kept from pass to pass
_HELD_PIECES = 8  # one of them for what has no room, where a unit has not


class ScratchSizes(NamedTuple):
    """See `kernels.triton.linear.scratch.Scratch`. nbytes: what it takes at once."""

    piece: int
    held: int
    nbytes: int


def scratch_sizes(
    plan: Plan, spec: DecoderSpec, device: torch.device, dtype: torch.dtype
) -> ScratchSizes:
    """How much a plan dequantizes at once, and keeps.

    A piece, by `piece_bytes`. Where passes of a round follow each other with the weights of one
    unit, and two or more of them are long enough to be multiplied by dequantized ones, there is
    room for all matrices of the largest unit, in a 16th of the memory that may be used (64 MiB are
    always allowed). If that is not enough, a piece is at most an eighth of it, or 64 MiB, so that
    it keeps the more.
    """
    piece = piece_bytes(device, dtype, plan.device_memory)
    products = _products(spec, plan.pass_tokens, dtype)
    dequantized = [product for product in products if takes_scratch(*product, device)]
    passes = plan.batches * sum(
        any(takes_scratch(*product, device) for product in _products(spec, tokens, dtype))
        for tokens in (plan.prefill_tokens, plan.decode_tokens)
    )
    unit = sum(rows * columns * dtype.itemsize for _, rows, columns in dequantized)
    share = max(PIECE_MIN, usable(device, plan.device_memory) // _HELD_SHARE)
    several = plan.schedule == "block" and passes > 1
    if several and unit > share:
        piece = min(piece, max(PIECE_MIN, share // _HELD_PIECES))
    head = (plan.pass_tokens, spec.vocab_size, spec.hidden_size)
    largest = max(scratch_bytes(*product, device, piece) for product in (*dequantized, head))
    held = max(largest, min(unit, share)) if several else 0
    return ScratchSizes(piece, held, held or largest)


def _products(spec: DecoderSpec, tokens: int, dtype: torch.dtype) -> list[tuple[int, int, int]]:
    """Of a layer: tokens, and rows and columns of the matrix."""
    found = list[tuple[int, int, int]]()

    def note(tokens: int, rows: int, columns: int) -> int:
        found.append((tokens, rows, columns))
        return 0

    layer_bytes(
        spec,
        tokens,
        dtype,
        linear_bytes=note,
        experts_bytes=lambda *_: 0,
        attention_bytes=0,
        states_bytes=lambda *_: 0,
    )
    return found

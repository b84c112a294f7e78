"""Codes that GPU kernels do not read as they are stored, made wider where they arrive.

A GPU reads codes of 4 and of 8 bits. Those of 2 and 3 bits take 4 there, those of 5 and 6 take 8;
files, host memory and the link have them as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .packing import quads_of
from .scales import COMPACT

_WIDER = {2: 4, 3: 4, 5: 8, 6: 8}  # by the bits of codes in packing split32
# Blocks of 32 codes that are widened at a time: temporaries stay in a CPU's cache, and a GPU, which
# starts some thirty operations for them, has enough to do in each.
_BLOCKS, _GPU_BLOCKS = 1 << 15, 1 << 18


def read_bits(bits: int, packing: str) -> int:
    """Bits of codes in memory that kernels of a packing read; see `widen` and `spread`."""
    return _WIDER.get(bits, bits) if packing == "split32" else bits


def widen(packed: Tensor, bits: int) -> Tensor:
    """Codes uint8 [..., K * bits / 8] of packing split32 in as many bits as kernels read there."""
    wide = _WIDER[bits]
    out = packed.new_empty(*packed.shape[:-1], packed.shape[-1] // bits * wide)
    _widen_blocks(packed, out.view(-1, 4 * wide), bits)
    return out


def widen_in_place(memory: Tensor, nbytes: int, bits: int) -> None:
    """Make wider codes of those at the end of `memory`, uint8, from its start on.

    nbytes: of the wider codes, whole blocks, at most those of the memory. Works in pieces of 1 MiB,
    or 8 on a GPU.
    """
    size = 4 * _WIDER[bits]
    blocks = nbytes // size
    wide = memory[:nbytes].view(blocks, size)
    packed = memory[len(memory) - 4 * bits * blocks :].view(blocks, 4 * bits)
    step = _together(memory)
    for some, out in zip(packed.split(step), wide.split(step), strict=True):
        _widen_blocks(some.clone(), out, bits)


def spread(codes: Tensor, scale_min: Tensor, bits: int) -> None:
    """Shift widened codes to their upper bits, with scales that are so much smaller.

    Compact scales are those of a span, which stays. Kernels on bytes are exact to parts of the
    middle of their range; groups whose scale cannot be divided exactly stay as they are there, so
    no value changes, and so do all whose codes have become nibbles.
    """
    wide = _WIDER[bits]
    shift = wide - bits
    if scale_min.dtype == COMPACT:
        codes.bitwise_left_shift_(shift)
    elif wide == 8:
        step = max(1, 32 * _together(codes) // codes.shape[1])
        for some, scale in zip(
            codes.split(step), scale_min[..., 0].split(step, dim=1), strict=True
        ):
            smaller = scale / (1 << shift)
            exact = smaller * (1 << shift) == scale
            scale.copy_(torch.where(exact, smaller, scale))
            by = exact.T.to(torch.uint8) * shift
            some.view(*by.shape, -1).bitwise_left_shift_(by[..., None])


def _together(x: Tensor) -> int:
    """Blocks that are worked on at a time where x is."""
    return _BLOCKS if x.device.type == "cpu" else _GPU_BLOCKS


def _widen_blocks(packed: Tensor, out: Tensor, bits: int) -> None:
    """Codes of any shape to uint8 [B, 16] or [B, 32], which starts at a word."""
    wide = out.view(torch.int32)
    for i, quad in enumerate(quads_of(packed, bits)):
        if i < wide.shape[1]:
            wide[:, i] = quad
        else:
            wide[:, i - 4] |= quad << 4

"""The block types of GGUF whose codes are taken over, decoded (`ggml-quants.c` of llama.cpp).

A row is a run of blocks along K. d and m are float16; unsigned codes q.

    Q4_0  32 elements: d, 16 bytes of nibbles;           w = d * (q - 8)
    Q4_1  32: d, m, 16 bytes of nibbles;                 w = d * q + m
    Q5_0  32: d, 32 fifth bits, 16 bytes of nibbles;     w = d * (q - 16)
    Q5_1  32: d, m, 32 fifth bits, 16 bytes of nibbles;  w = d * q + m
    Q8_0  32: d, 32 signed bytes;                        w = d * q
    Q4_K  256: d, dmin, 12 bytes with eight scales s and minima t of 6 bits, 128 bytes of nibbles
    Q5_K  256: the same with 32 bytes of fifth bits before the nibbles

Element j of 32 is in the low nibble of byte j, or in the high one of byte j - 16, which is packing
split32. In the K types a sub-block of 32 has w = (d * s) * q - dmin * t, and the nibbles of two
sub-blocks share 32 bytes; bit i of fifth byte j belongs to element j of sub-block i.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from qoff.kernels.layout.packing import pack_codes
from qoff.kernels.layout.qtensor import QTensor

from .grouped import narrowed

GROUP_SIZE = 32
_SUB_BLOCKS = 8  # of a block of 256 elements

# blocks uint8 [B, bytes] -> codes uint8 [B, elements], scale and minimum float32 [B, elements / 32]
Decoded = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class BlockType:
    """A block type: elements and bytes of a block, bits of the QTensor, and how it is decoded."""

    elements: int
    nbytes: int
    bits: int
    decode: Callable[[Tensor], Decoded]


def decode_rows(raw: Tensor, kind: str) -> QTensor:
    """Return rows of blocks, uint8 [n, bytes of a row], as a QTensor (split32, group 32).

    Codes and values are exactly those of the file; scales are float32 where float16 cannot hold all
    of them and of the minima. `kind` is one of BLOCK_TYPES.
    """
    block = BLOCK_TYPES[kind]
    n, row_bytes = raw.shape
    k = row_bytes // block.nbytes * block.elements
    codes, scale, minimum = block.decode(raw.reshape(-1, block.nbytes))
    scale_min = torch.stack((scale.reshape(n, -1).T, minimum.reshape(n, -1).T), dim=2)
    packed = pack_codes(codes.reshape(n, k), block.bits, "split32")
    return QTensor(packed, narrowed(scale_min), (n, k), block.bits, GROUP_SIZE, "split32")


def _q4_0(blocks: Tensor) -> Decoded:
    d = _halves(blocks[:, :2])
    return _nibbles(blocks[:, 2:]), d, d * -8


def _q4_1(blocks: Tensor) -> Decoded:
    d, m = _halves(blocks[:, :4]).split(1, 1)
    return _nibbles(blocks[:, 4:]), d, m


def _q5_0(blocks: Tensor) -> Decoded:
    d = _halves(blocks[:, :2])
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), d, d * -16


def _q5_1(blocks: Tensor) -> Decoded:
    d, m = _halves(blocks[:, :4]).split(1, 1)
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), d, m


def _q8_0(blocks: Tensor) -> Decoded:
    d = _halves(blocks[:, :2])
    return blocks[:, 2:] ^ 128, d, d * -128  # signed code + 128


def _q4_k(blocks: Tensor) -> Decoded:
    scale, minimum = _scales_k(blocks[:, :16])
    return _nibbles_k(blocks[:, 16:]), scale, minimum


def _q5_k(blocks: Tensor) -> Decoded:
    scale, minimum = _scales_k(blocks[:, :16])
    places = torch.arange(_SUB_BLOCKS, dtype=torch.uint8)[:, None]
    fifth = (blocks[:, 16:48, None].transpose(1, 2) >> places) & 1  # [B, sub-block, 32]
    return _nibbles_k(blocks[:, 48:]) | (fifth << 4).flatten(1), scale, minimum


def _halves(data: Tensor) -> Tensor:
    """uint8 [B, 2 n] -> float32 [B, n]."""
    return data.contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    return torch.cat((data & 15, data >> 4), dim=1)


def _fifth_bits(data: Tensor) -> Tensor:
    """Bits uint8 [B, 4], lowest first -> uint8 [B, 32], each 0 or 16."""
    places = torch.arange(8, dtype=torch.uint8)
    return (((data[..., None] >> places) & 1) << 4).flatten(1)


def _nibbles_k(data: Tensor) -> Tensor:
    """uint8 [B, 128] -> uint8 [B, 256]: of each 32 bytes the low nibbles, then the high ones."""
    pairs = data.unflatten(1, (-1, 32))
    return torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)


def _scales_k(head: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum float32 [B, 8] of the head uint8 [B, 16] of a K block.

    Of its last 12 bytes, 0..3 have in their low 6 bits the scales of sub-blocks 0..3, and 4..7
    their minima; 8..11 have scales (low) and minima (high nibble) of sub-blocks 4..7, whose upper
    two bits are the upper bits of bytes 0..3 and 4..7.
    """
    d, dmin = _halves(head[:, :4]).split(1, 1)
    first, second, third = head[:, 4:].split(4, 1)
    scale = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minimum = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return d * scale, -(dmin * minimum)


BLOCK_TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        "Q4_0": BlockType(32, 18, 4, _q4_0),
        "Q4_1": BlockType(32, 20, 4, _q4_1),
        "Q5_0": BlockType(32, 22, 8, _q5_0),
        "Q5_1": BlockType(32, 24, 8, _q5_1),
        "Q8_0": BlockType(32, 34, 8, _q8_0),
        "Q4_K": BlockType(256, 144, 4, _q4_k),
        "Q5_K": BlockType(256, 176, 8, _q5_k),
    }
)

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

Of four types the values of 32 elements are evenly spaced, whatever table they come from, so that
codes of 4 bits hold those of IQ3_S, and of 2 bits those of the others:

    IQ3_S         256: d, ..., eight nibbles s;  w = d * (1 + 2 s) * q, q odd, from -15 to 15
    IQ1_S         256: d, ..., eight words with three bits s and a sign;
                  w = d * (1 + 2 s) * (q +- 1/8), q from -1 to 1
    TQ1_0, TQ2_0  256: ..., d;                   w = d * q, q from -1 to 1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qoff.kernels.layout.packing import pack_codes
from qoff.kernels.layout.qtensor import QTensor

from .grouped import narrowed

GROUP_SIZE = 32
_SUB_BLOCKS = 8  # of a block of 256 elements

# blocks uint8 [B, bytes] -> codes uint8 [B, elements], scale and minimum float32 [B, elements / 32]
Decoder = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


def decode_rows(raw: Tensor, kind: str) -> QTensor:
    """Return rows of blocks, uint8 [n, bytes of a row], as a QTensor (split32, group 32).

    Codes and values are exactly those of the file; scales are float32 where float16 cannot hold all
    of them and of the minima. `kind` is one of BLOCK_TYPES.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    bits, decode = BLOCK_TYPES[kind]
    elements, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    n, row_bytes = raw.shape
    k = row_bytes // nbytes * elements
    codes, scale, minimum = decode(raw.reshape(-1, nbytes))
    scale_min = torch.stack((scale.reshape(n, -1).T, minimum.reshape(n, -1).T), dim=2)
    packed = pack_codes(codes.reshape(n, k), bits, "split32")
    return QTensor(packed, narrowed(scale_min), (n, k), bits, GROUP_SIZE, "split32")


def dequantized(raw: NDArray[np.uint8], kind: str) -> NDArray[np.float32]:
    """The values of rows of blocks, as `gguf` reads them: float32 [n, elements of a row]."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # of damaged scales, whose values are looked at later
        return np.asarray(dequantize(raw, GGMLQuantizationType[kind]), dtype=np.float32)


def _plain(blocks: Tensor, has_minimum: bool, has_fifth: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Q4_0, Q4_1, Q5_0 and Q5_1."""
    head = 4 if has_minimum else 2
    scales, rest = _halves(blocks[:, :head]), blocks[:, head:]
    codes = _nibbles(rest[:, -16:])
    if has_fifth:
        codes |= _fifth_bits(rest[:, :4])
    d = scales[:, :1]
    return codes, d, scales[:, 1:] if has_minimum else d * (-16 if has_fifth else -8)


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d = _halves(blocks[:, :2])
    return blocks[:, 2:] ^ 128, d, d * -128  # signed code + 128


def _k(blocks: Tensor, has_fifth: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Q4_K and Q5_K."""
    pairs = blocks[:, -128:].unflatten(1, (-1, 32))  # of each 32 bytes the low nibbles come first
    codes = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)
    if has_fifth:
        places = torch.arange(_SUB_BLOCKS, dtype=torch.uint8)[:, None]
        fifth = (blocks[:, 16:48, None].transpose(1, 2) >> places) & 1  # [B, sub-block, 32]
        codes |= (fifth << 4).flatten(1)
    return codes, *_scales_k(blocks[:, :16])


def _halves(data: Tensor) -> Tensor:
    """uint8 [B, 2 n] -> float32 [B, n]."""
    return data.contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    return torch.cat((data & 15, data >> 4), dim=1)


def _fifth_bits(data: Tensor) -> Tensor:
    """Bits uint8 [B, 4], lowest first -> uint8 [B, 32], each 0 or 16."""
    places = torch.arange(8, dtype=torch.uint8)
    return (((data[..., None] >> places) & 1) << 4).flatten(1)


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


def _even(
    blocks: Tensor, kind: str, steps: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of values that are evenly spaced; steps: scale and minimum of every 32."""
    scale, minimum = steps(blocks)
    values = torch.from_numpy(dequantized(blocks.numpy(), kind)).unflatten(1, (-1, GROUP_SIZE))
    steps_up = (values - minimum[..., None]) / scale[..., None]
    return steps_up.nan_to_num(0, 0, 0).round().clamp(0, 15).byte().flatten(1), scale, minimum


def _iq3_s(blocks: Tensor) -> tuple[Tensor, Tensor]:
    nibbles = torch.stack((blocks[:, -4:] & 15, blocks[:, -4:] >> 4), dim=2).flatten(1)
    d = _halves(blocks[:, :2]) * (1 + 2 * nibbles)
    return 2 * d, -15 * d


def _iq1_s(blocks: Tensor) -> tuple[Tensor, Tensor]:
    high = blocks[:, -16:].unflatten(1, (-1, 2))[..., 1]  # of words of 16 bits, lowest byte first
    d = _halves(blocks[:, :2]) * (1 + 2 * ((high >> 4) & 7))
    return d, d * torch.where(high >> 7 == 1, -1.125, -0.875)


def _ternary(blocks: Tensor) -> tuple[Tensor, Tensor]:
    d = _halves(blocks[:, -2:]).expand(-1, _SUB_BLOCKS).contiguous()
    return d, -d


# Bits of the QTensor, and what decodes blocks.
BLOCK_TYPES: Mapping[str, tuple[int, Decoder]] = {
    "Q4_0": (4, partial(_plain, has_minimum=False, has_fifth=False)),
    "Q4_1": (4, partial(_plain, has_minimum=True, has_fifth=False)),
    "Q5_0": (5, partial(_plain, has_minimum=False, has_fifth=True)),
    "Q5_1": (5, partial(_plain, has_minimum=True, has_fifth=True)),
    "Q8_0": (8, _q8_0),
    "Q4_K": (4, partial(_k, has_fifth=False)),
    "Q5_K": (5, partial(_k, has_fifth=True)),
    "IQ3_S": (4, partial(_even, kind="IQ3_S", steps=_iq3_s)),
    "IQ1_S": (2, partial(_even, kind="IQ1_S", steps=_iq1_s)),
    "TQ1_0": (2, partial(_even, kind="TQ1_0", steps=_ternary)),
    "TQ2_0": (2, partial(_even, kind="TQ2_0", steps=_ternary)),
}

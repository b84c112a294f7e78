"""The layouts ("packings") of quantized matrices: pack, unpack, and move between them.

A matrix has N rows (outputs) and K columns (inputs), a code of 2, 3, 4, 5, 6 or 8 bits for each
element, and a scale and a minimum for each run of `group_size` columns of a row: two floats, or two
bytes that stand for them (`scales`). Codes of 32 columns are a block of `bits` words of 4 bytes.
Elements 4q to 4q+3 are quad q: each of the four bytes of a word has the code of one of them, or
some of its bits, and other words have the others. `QUADS` says where.

split32, the layout on disk and on a GPU; its blocks are those of GGUF Q4_0 and Q4_1:
    codes[N, K * bits / 8]: a row's blocks of 32 columns, one after the other.
    4 bit  byte j of 16 holds element j in the low nibble and element j+16 in the high nibble.
    others by `QUADS`. Of 5 and 6 bits byte j holds element j in its low bits, of 3 bits two
           elements; the last elements are in what is left of the upper bits. Of 2 bits it holds
           four elements, of 8 bits element j.
    scale_min[K/g, N, 2]: [..., 0] is the scale, [..., 1] the minimum.

rows16, rows in blocks of 16 so that one vector register holds a word of every row of a block:
    codes[Np/16, K * bits / 32, 16, 4]: [b, s, r] is word s of row 16b+r, all by `QUADS`.
    4 bit  byte (b, s, r, j) holds element (16b+r, 8s+j) in the low nibble and element
           (16b+r, 8s+4+j) in the high nibble. Other bits have the words of split32.
    scale_min[Np/16, K/g, 2, 16]: [..., 0, :] the scales of the 16 rows, [..., 1, :] their minima.
    Np is N rounded up to 16; padding rows have code 0, scale 0 and minimum 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from itertools import accumulate
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import pad

from qoff.errors import OpError

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
PACKINGS: Mapping[str, int] = MappingProxyType({"split32": 1, "rows16": 1})  # name -> version
ROW_BLOCK = 16  # rows that rows16 keeps together

Part = tuple[int, int, int]  # a word of a block, the first bit in each of its bytes, how many
# Of each quad of 32 columns: the parts that its codes are made of, their lowest bits first.
QUADS: Mapping[int, tuple[tuple[Part, ...], ...]] = MappingProxyType(
    {
        2: tuple(((i // 4, i % 4 * 2, 2),) for i in range(8)),
        3: (
            *(((i // 2, i % 2 * 3, 3),) for i in range(6)),
            ((0, 6, 2), (1, 6, 1)),
            ((2, 6, 2), (1, 7, 1)),
        ),
        4: tuple(((i // 2, i % 2 * 4, 4),) for i in range(8)),
        5: (
            *(((i, 0, 5),) for i in range(5)),
            ((0, 5, 3), (1, 5, 2)),
            ((2, 5, 3), (3, 5, 2)),
            ((4, 5, 3), (1, 7, 1), (3, 7, 1)),
        ),
        6: (
            *(((i, 0, 6),) for i in range(6)),
            ((0, 6, 2), (2, 6, 2), (4, 6, 2)),
            ((1, 6, 2), (3, 6, 2), (5, 6, 2)),
        ),
        8: tuple(((i, 0, 8),) for i in range(8)),
    }
)

EACH_BYTE = 0x01010101
_LOW64 = 0x0F0F0F0F0F0F0F0F  # the low nibbles of the eight bytes of an int64
_PIECE = 1 << 16  # words that a repack moves at a time, so that temporaries stay in cache


def reads(bits: int) -> tuple[tuple[Part, ...], ...]:
    """Of each quad the parts that it is the or of: (word, bits to the right, mask of a byte)."""
    found = []
    for parts in QUADS[bits]:
        places = accumulate((width for _, _, width in parts), initial=0)
        found.append(
            tuple(
                (word, first - at, (1 << width) - 1 << at)
                for (word, first, width), at in zip(parts, places, strict=False)
            )
        )
    return tuple(found)


def check_format(shape: tuple[int, int], bits: int, group_size: int, packing: str) -> None:
    """Refuse a description that no packed matrix can have.

    Raises OpError for an unknown packing, bit width or group size, or a group not dividing K.
    """
    if packing not in PACKINGS:
        raise OpError(f"unknown packing {packing!r}; known are {', '.join(PACKINGS)}")
    if bits not in BITS:
        options = ", ".join(map(str, BITS))
        raise OpError(f"codes of {bits!r} bits are not supported; use one of {options}")
    if group_size not in GROUP_SIZES:
        raise OpError(f"group size {group_size!r} is not supported; use 32, 64 or 128")
    if len(shape) != 2 or min(shape) < 1:
        raise OpError(f"a quantized matrix has a shape (rows, columns) of ones up, not {shape}")
    if shape[1] % group_size:
        raise OpError(
            f"group size {group_size} does not divide the {shape[1]} columns of shape {shape}; "
            "use a smaller group, or keep this matrix unquantized"
        )


def packed_shapes(
    shape: tuple[int, int], bits: int, group_size: int, packing: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of `codes` (uint8) and `scale_min` of a matrix of `shape` (N, K).

    Raises OpError as `check_format` does.
    """
    check_format(shape, bits, group_size, packing)
    n, k = shape
    if packing == "split32":
        return (n, k * bits // 8), (k // group_size, n, 2)
    blocks = -(-n // ROW_BLOCK)
    return (blocks, k * bits // 32, ROW_BLOCK, 4), (blocks, k // group_size, 2, ROW_BLOCK)


def pack_codes(codes: Tensor, bits: int, packing: str) -> Tensor:
    """Pack codes uint8 [N, K], each below 2**bits, K a multiple of 32. Returns uint8."""
    if codes.dtype != torch.uint8 or codes.ndim != 2:
        raise OpError(f"codes are uint8 [N, K], not {codes.dtype} {tuple(codes.shape)}")
    check_format((codes.shape[0], codes.shape[1]), bits, 32, packing)
    n, k = codes.shape
    if packing == "split32":
        if bits == 8:
            return codes.contiguous()
        if bits != 4:
            return _by_quads(codes, bits)
        halves = codes.reshape(n, k // 32, 2, 16)
        return (halves[:, :, 0] | (halves[:, :, 1] << 4)).view(n, k // 2)
    padded = _pad_rows(codes if bits in (4, 8) else _by_quads(codes, bits))
    if bits == 4:
        pairs = padded.reshape(-1, k // 8, 2, 4)
        padded = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).view(-1, k // 2)
    return _interleave_rows(padded.contiguous().view(torch.int32))


def unpack_codes(packed: Tensor, shape: tuple[int, int], bits: int, packing: str) -> Tensor:
    """Undo `pack_codes`: returns uint8 [N, K] (for 8-bit split32 the same memory)."""
    n, k = shape
    if packing == "split32":
        if bits == 4:
            block = packed.view(n, k // 32, 16)
            return torch.stack((block & 15, block >> 4), dim=2).view(n, k)
        rows = packed
    else:
        rows = _separate_rows(packed)[:n].view(torch.uint8)  # [N, K * bits / 8]
        if bits == 4:
            pair = rows.view(n, k // 8, 4)
            return torch.stack((pair & 15, pair >> 4), dim=2).view(n, k)
    return rows if bits == 8 else _elements(rows, bits).view(n, k)


def pack_scale_min(scale: Tensor, minimum: Tensor, packing: str) -> Tensor:
    """Pack scale and minimum, both [N, K/g] of one dtype, into one contiguous tensor."""
    if packing == "split32":
        return torch.stack((scale.T, minimum.T), dim=2)
    both = torch.stack((_pad_rows(scale), _pad_rows(minimum)), dim=2)  # [Np, K/g, 2]
    blocks = both.view(-1, ROW_BLOCK, *both.shape[1:])
    return blocks.permute(0, 2, 3, 1).contiguous()


def unpack_scale_min(packed: Tensor, shape: tuple[int, int], packing: str) -> tuple[Tensor, Tensor]:
    """Undo `pack_scale_min`: returns scale and minimum, contiguous [N, K/g] each."""
    n = shape[0]
    if packing == "split32":
        return packed[..., 0].T.contiguous(), packed[..., 1].T.contiguous()
    both = packed.permute(2, 0, 3, 1).reshape(2, -1, packed.shape[1])  # [2, Np, K/g]
    return both[0, :n].contiguous(), both[1, :n].contiguous()


def _by_quads(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [N, K] as bytes [N, K * bits / 8] of packing split32."""
    quads = codes.contiguous().view(torch.int32).view(-1, 8)
    words = quads.new_zeros(len(quads), bits)
    for quad, parts in zip(quads.unbind(1), reads(bits), strict=True):
        for word, right, mask in parts:
            words[:, word] |= (quad & (mask * EACH_BYTE)) << right
    return words.view(torch.uint8).view(len(codes), -1)


def _elements(packed: Tensor, bits: int) -> Tensor:
    """Undo `_by_quads`, for bytes of any shape: uint8, of one dimension."""
    return torch.stack([*quads_of(packed, bits)], dim=1).view(torch.uint8).view(-1)


def quads_of(packed: Tensor, bits: int) -> Iterator[Tensor]:
    """The eight quads of each block of bytes of packing split32, int32 [B]; not of 4 or 8 bits."""
    aligned = packed.clone() if packed.storage_offset() % 4 else packed
    words = aligned.reshape(-1, 4 * bits).view(torch.int32)
    for parts in reads(bits):
        found = [(words[:, word] >> right) & (mask * EACH_BYTE) for word, right, mask in parts]
        yield reduce(torch.bitwise_or, found)


def _pad_rows(x: Tensor) -> Tensor:
    missing = -x.shape[0] % ROW_BLOCK
    return pad(x, (0, 0, 0, missing)) if missing else x


def _interleave_rows(rows: Tensor) -> Tensor:
    """int32 [Np, S] -> uint8 [Np/16, S, 16, 4]."""
    blocks = rows.view(-1, ROW_BLOCK, rows.shape[1]).transpose(1, 2).contiguous()
    return blocks.view(torch.uint8).view(*blocks.shape, 4)


def _separate_rows(packed: Tensor) -> Tensor:
    """uint8 [Np/16, S, 16, 4] -> int32 [Np, S]."""
    words = packed.view(torch.int32).view(packed.shape[:3])
    return words.transpose(1, 2).contiguous().view(-1, packed.shape[1])


def same_scale_min(half: Tensor, cpu: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views [K/g, rows..., 2] of scale_min in split32 and in rows16 onto the same rows."""
    n = half.shape[1]
    full = n // ROW_BLOCK
    blocks = torch.unflatten(half[:, : full * ROW_BLOCK], 1, (full, ROW_BLOCK))
    yield blocks, cpu[:full].permute(1, 0, 3, 2)
    if rest := n % ROW_BLOCK:
        yield half[:, -rest:], cpu[full, ..., :rest].transpose(1, 2)


def same_words(half: Tensor, cpu: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views int32 [rows..., S] of codes in split32 and in rows16 onto the same rows, by pieces."""
    n = half.shape[0]
    rows = half.view(torch.int32)  # [N, S]
    blocks = cpu.view(torch.int32).squeeze(3).transpose(1, 2)  # [Np/16, 16, S]
    full, words = n // ROW_BLOCK, rows.shape[1]
    step = max(1, _PIECE // (ROW_BLOCK * words))
    for start in range(0, full, step):
        stop = min(start + step, full)
        piece = rows[start * ROW_BLOCK : stop * ROW_BLOCK]
        yield piece.view(stop - start, ROW_BLOCK, words), blocks[start:stop]
    if rest := n % ROW_BLOCK:
        yield rows[-rest:], blocks[full, :rest]


def split32_to_rows16(half: Tensor) -> Tensor:
    """The 4-bit codes of int32 words [..., S] in the other order, without unpacking them.

    A split32 block is four words h0..h3, h_i with elements 4i.. low and 16+4i.. high; the words of
    rows16 hold elements 8s.. low and 8s+4.. high. Two words are handled as one int64, h0 | h1 <<
    32.
    """
    words = half.view(torch.int64)  # [..., 2 * K/32]
    block = half.new_empty(half.shape)
    low_high = torch.unflatten(block, -1, (-1, 2, 2)).unbind(-2)  # two of [..., K/32, pair]
    for nibbles, out in zip((words, words >> 4), low_high, strict=True):
        nibbles = nibbles & _LOW64
        nibbles |= nibbles >> 28  # the second word's nibbles beside the first's
        out.copy_(torch.unflatten(nibbles.view(torch.int32), -1, (-1, 2, 2))[..., 0])
    return block


def rows16_to_split32(cpu: Tensor, half: Tensor) -> None:
    """The inverse of `split32_to_rows16`, written to `half`."""
    words = cpu.contiguous().view(torch.int64)
    low, high = torch.unflatten(words, -1, (-1, 2)).unbind(-1)  # [..., K/32], two words each
    even, odd = torch.unflatten(half, -1, (-1, 2, 2)).unbind(-1)  # [..., K/32, pair]
    evens = (high & _LOW64).bitwise_left_shift_(4).bitwise_or_(low & _LOW64)
    even.copy_(torch.unflatten(evens.view(torch.int32), -1, (-1, 2)))
    odds = (low >> 4).bitwise_and_(_LOW64).bitwise_or_(high & ~_LOW64)
    odd.copy_(torch.unflatten(odds.view(torch.int32), -1, (-1, 2)))

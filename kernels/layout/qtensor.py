"""QTensor: a matrix in packed integer codes with a scale and a minimum per group."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qoff.errors import OpError

from .packing import (
    ROW_BLOCK,
    pack_scale_min,
    packed_shapes,
    rows16_to_split32,
    same_scale_min,
    same_words,
    split32_to_rows16,
    unpack_codes,
    unpack_scale_min,
)
from .scales import COMPACT, SCALE_DTYPES, expanded
from .widening import read_bits, spread, widen


@dataclass(frozen=True, eq=False)
class QTensor:
    """A quantized matrix: w[n, k] = code[n, k] * scale[n, k // g] + minimum[n, k // g].

    The value is computed in float32 as float32(code) * float32(scale) + float32(minimum), whatever
    the packing; scale and minimum may be stored as compact ones, see `scales`. Raises OpError when
    the parts do not fit each other.
    """

    codes: Tensor  # uint8, laid out by `packing`
    scale_min: Tensor  # float16, float32 or, compact, uint8; laid out by `packing`
    shape: tuple[int, int]  # (N, K): outputs (rows), inputs (columns)
    bits: int  # one of `packing.BITS`
    group_size: int  # elements along K that share a scale and a minimum: 32, 64 or 128
    packing: str  # "split32" or "rows16", see `packing`

    def __post_init__(self) -> None:
        codes_shape, scale_min_shape = packed_shapes(
            self.shape, self.bits, self.group_size, self.packing
        )
        what = f"{self.bits}-bit {self.packing} matrix {self.shape} of group {self.group_size}"
        if self.codes.dtype != torch.uint8 or tuple(self.codes.shape) != codes_shape:
            raise OpError(
                f"codes of a {what} are uint8 {codes_shape}, "
                f"not {self.codes.dtype} {tuple(self.codes.shape)}"
            )
        if self.scale_min.dtype not in SCALE_DTYPES:
            raise OpError(f"scales are uint8, float16 or float32, not {self.scale_min.dtype}")
        if tuple(self.scale_min.shape) != scale_min_shape:
            raise OpError(
                f"scale_min of a {what} is {scale_min_shape}, not {tuple(self.scale_min.shape)}"
            )
        if not (self.codes.is_contiguous() and self.scale_min.is_contiguous()):
            raise OpError(f"codes and scale_min of a {what} must be contiguous")
        if self.codes.device != self.scale_min.device:
            raise OpError(f"codes on {self.codes.device}, scale_min on {self.scale_min.device}")

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and minima."""
        return self.codes.nbytes + self.scale_min.nbytes

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the matrix [N, K], computed in float32 and rounded once to `dtype`."""
        codes = unpack_codes(self.codes, self.shape, self.bits, self.packing)
        scale, minimum = self.scales()
        values = codes.view(*scale.shape, self.group_size).float()  # [N, K/g, g]
        values.mul_(scale[..., None]).add_(minimum[..., None])
        return values.view(self.shape).to(dtype)

    def scales(self) -> tuple[Tensor, Tensor]:
        """Scale and minimum of each group, float32 [N, K/g]."""
        scale, minimum = unpack_scale_min(self.scale_min, self.shape, self.packing)
        if scale.dtype == COMPACT:
            return expanded(scale, minimum, self.bits)
        return scale.float(), minimum.float()

    def with_scales(self, dtype: torch.dtype) -> QTensor:
        """Return the same matrix with scales stored as `dtype`, for which float32 is always exact.

        Raises OpError for compact ones, which only a solver makes.
        """
        if dtype == self.scale_min.dtype:
            return self
        if dtype == COMPACT:
            raise OpError(f"scales of {self.scale_min.dtype} are not made compact")
        if self.scale_min.dtype != COMPACT:
            return replace(self, scale_min=self.scale_min.to(dtype))
        scale, minimum = (part.to(dtype) for part in self.scales())
        return replace(self, scale_min=pack_scale_min(scale, minimum, self.packing))

    def to_packing(self, name: str) -> QTensor:
        """Return the same matrix in packing `name`, bit for bit (self if it has it already).

        Raises OpError for an unknown packing.
        """
        if name == self.packing:
            return self
        codes, scale_min = packed_shapes(self.shape, self.bits, self.group_size, name)
        out = replace(
            self,
            codes=self.codes.new_empty(codes),
            scale_min=self.scale_min.new_empty(scale_min),
            packing=name,
        )
        repack_into(self, out)
        return out

    def for_kernels(self, packing: str) -> QTensor:
        """Return the same matrix as kernels of a packing read it (self if it is so already).

        For a GPU's, codes may be wider (`widening`). Raises OpError for an unknown packing.
        """
        found = self.to_packing(packing)
        bits = read_bits(self.bits, packing)
        if bits == self.bits:
            return found
        codes, scale_min = widen(found.codes, self.bits), found.scale_min.clone()
        spread(codes, scale_min, self.bits)
        return replace(found, codes=codes, scale_min=scale_min, bits=bits)

    def rows(self, start: int, stop: int) -> QTensor:
        """Return rows start..stop-1; the codes share this tensor's memory.

        Raises OpError for rows that are not there, and in rows16 for a start, or a stop other than
        N, that is not a multiple of 16.
        """
        n, k = self.shape
        if not 0 <= start < stop <= n:
            raise OpError(f"rows {start}..{stop} of a matrix of {n} rows")
        shape = (stop - start, k)
        if self.packing == "split32":
            scale_min = self.scale_min[:, start:stop].contiguous()
            return replace(self, codes=self.codes[start:stop], scale_min=scale_min, shape=shape)
        if start % ROW_BLOCK or (stop % ROW_BLOCK and stop != n):
            raise OpError(
                f"rows {start}..{stop} cut through a block of {ROW_BLOCK} rows of packing rows16; "
                "use multiples of 16, or repack to split32"
            )
        blocks = slice(start // ROW_BLOCK, -(-stop // ROW_BLOCK))
        return replace(
            self, codes=self.codes[blocks], scale_min=self.scale_min[blocks], shape=shape
        )


def repack_into(q: QTensor, out: QTensor) -> None:
    """Write the matrix `q` into the memory of `out`, which has another packing, in small pieces.

    Besides `out` it needs temporaries of about 1 MiB, and a copy of codes that do not start at a
    multiple of 8 bytes of their storage. Raises OpError if the two differ in anything but the
    packing, or if the codes of `out` start elsewhere.
    """
    for what in ("shape", "bits", "group_size"):
        if getattr(q, what) != getattr(out, what):
            raise OpError(f"cannot repack: {what} {getattr(q, what)} into {getattr(out, what)}")
    if q.scale_min.dtype != out.scale_min.dtype or q.packing == out.packing:
        raise OpError(
            f"cannot repack {q.packing} with {q.scale_min.dtype} scales "
            f"into {out.packing} with {out.scale_min.dtype} scales"
        )
    if out.codes.storage_offset() % 8:
        raise OpError("the codes to repack into must start at a multiple of 8 bytes")
    codes = q.codes.clone() if q.codes.storage_offset() % 8 else q.codes
    if out.packing == "rows16":
        if q.shape[0] % ROW_BLOCK:
            out.codes[-1].zero_()
            out.scale_min[-1].zero_()
        for source, target in same_scale_min(q.scale_min, out.scale_min):
            target.copy_(source)
        for source, target in same_words(codes, out.codes):
            target.copy_(split32_to_rows16(source) if q.bits == 4 else source)
    else:
        for target, source in same_scale_min(out.scale_min, q.scale_min):
            target.copy_(source)
        for target, source in same_words(out.codes, codes):
            if q.bits == 4:
                rows16_to_split32(source, target)
            else:
                target.copy_(source)

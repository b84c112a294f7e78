"""Integer codes with a scale and a zero point per group of columns, as qoff's own format.

Formats of others have w = (code - zero) * scale; a QTensor has w = code * scale + minimum, so
minimum = -zero * scale. With scales of 16 bits both give exactly the same values. Codes of 2 to 8
bits fit a form of as many or more, and a group that is a multiple of 32, 64 or 128 columns falls
into groups of that size which share its scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import pad

from qoff.errors import QuantizationError
from qoff.kernels.layout.packing import BITS, GROUP_SIZES, pack_codes, pack_scale_min, unpack_codes
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.scales import COMPACT

from .stored import TensorInfo


@dataclass(frozen=True)
class Grouping:
    """The shape [N, K] of a matrix, the bits of its codes, and the group of each column."""

    shape: tuple[int, int]
    bits: int  # 2 to 8
    groups: Tensor  # int64 [K]
    order: str = ""  # what says that columns of a group are no neighbours

    def target(self) -> tuple[int, int] | None:
        """Return bits and group size of the QTensor that holds these codes, None if none does."""
        for size in sorted(GROUP_SIZES, reverse=True):
            if self.shape[1] % size == 0:
                runs = self.groups.view(-1, size)
                if bool((runs == runs[:, :1]).all()):
                    return next(bits for bits in BITS if bits >= self.bits), size
        return None

    def info(self) -> TensorInfo:
        """Describe the matrix, with what is in the way where no QTensor holds it."""
        if target := self.target():
            return TensorInfo(self.shape, target)
        size = int((self.groups == self.groups[0]).sum())
        obstacle = f"has group_size {size}, not a multiple of 32, 64 or 128"
        if not torch.equal(self.groups, torch.arange(self.shape[1]) // size):
            obstacle = f"has its inputs in another order ({self.order})"
        return TensorInfo(self.shape, None, obstacle)

    def pieces(
        self, rows: int, codes: Callable[[slice], Tensor], scales: Tensor, zeros: Tensor
    ) -> Iterator[QTensor | Tensor]:
        """Pieces of `rows` rows: QTensors (split32) if there is a target, else float32 [n, K].

        codes: gives those of some rows, uint8 [n, K]. scales: of any float dtype, zeros: of any
        integer dtype, [N, G]. Scale and minimum are float16 where that holds all of a piece
        exactly, else float32.
        """
        target = self.target()
        for start in range(0, self.shape[0], rows):
            part = slice(start, min(start + rows, self.shape[0]))
            found, scale, zero = codes(part), scales[part].float(), zeros[part].float()
            if target is None:
                yield (found.float() - zero[:, self.groups]).mul_(scale[:, self.groups])
                continue
            bits, size = target
            chosen = self.groups[::size]
            scale_min = pack_scale_min(scale[:, chosen], (scale * -zero)[:, chosen], "split32")
            packed, shape = pack_codes(found, bits, "split32"), (len(found), self.shape[1])
            yield QTensor(packed, narrowed(scale_min), shape, bits, size, "split32")


def narrowed(scale_min: Tensor) -> Tensor:
    """Return float32 scales and minima as float16 if that is exact, else as they are."""
    narrow = scale_min.half()
    return narrow if bool(torch.equal(narrow.float(), scale_min)) else scale_min


def unpack_bits(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the first `count` codes of each row, uint8 [R, count], of int32 words [R, W].

    Code i is the bits from i * bits on, lowest bit of the first word first, across words.
    """
    shared = gcd(bits, 32)
    period, codes = bits // shared, 32 // shared  # words and codes after which it starts anew
    words = pad(words, (0, -words.shape[1] % period)).unflatten(1, (-1, period))
    out = torch.empty(*words.shape[:2], codes, dtype=torch.uint8)
    for i in range(codes):
        word, shift = divmod(i * bits, 32)
        value = words[..., word] >> shift
        if (missing := shift + bits - 32) > 0:
            low = bits - missing
            value = (value & ((1 << low) - 1)) | (words[..., word + 1] << low)
        out[..., i] = value & ((1 << bits) - 1)
    return out.flatten(1)[:, :count]


def widened(q: QTensor, bits: int, group_size: int) -> QTensor:
    """Return the same values with wider codes and smaller groups, in the same packing.

    Raises QuantizationError for narrower codes, or groups that do not divide those of `q`.
    """
    if bits < q.bits or q.group_size % group_size:
        raise QuantizationError(
            f"a matrix of {q.bits} bits and group {q.group_size} cannot be stored with {bits} bits "
            f"and group {group_size} without quantizing it again"
        )
    if (bits, group_size) == (q.bits, q.group_size):
        return q
    half = q.to_packing("split32")
    codes, scale_min = half.codes, half.scale_min
    if bits != q.bits:
        wide = unpack_codes(codes, q.shape, q.bits, "split32")
        if scale_min.dtype == COMPACT:
            wide = wide << (bits - q.bits)  # of the same span
        codes = pack_codes(wide, bits, "split32")
    if group_size != q.group_size:
        scale_min = scale_min.repeat_interleave(q.group_size // group_size, dim=0)
    found = replace(half, codes=codes, scale_min=scale_min, bits=bits, group_size=group_size)
    return found.to_packing(q.packing)

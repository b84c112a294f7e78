"""Compact scales: two bytes for each group of columns, instead of two floats.

The first byte is the group's span s = (1 + m / 8) * 2**(e - 20), with e in its upper five bits and
m in the lower three; the second one is the zero point z, in 256ths of the span. Codes of `bits`
then have

    scale = s / 2**bits        minimum = -z * s / 256

both exact in float32. Every byte is a finite number, and wider codes of the same values (times a
power of two) have the same two bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

COMPACT = torch.uint8
SCALE_DTYPES = (COMPACT, torch.float16, torch.float32)
EXPONENT = 127 - 20  # of a float32 that has the exponent of byte 0
MANTISSA = 3  # bits of a span's mantissa
SHIFT = 23 - MANTISSA  # of the byte in a float32
STEPS = 256  # of a zero point in a span
SPAN_MAX = 1.875 * 2.0**11


def expanded(span: Tensor, zero: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale and minimum, float32, of compact ones: uint8, of any one shape."""
    scale = ((span.to(torch.int32) << SHIFT) + ((EXPONENT - bits) << 23)).view(torch.float32)
    return scale, zero.float() * (scale * (-(2.0**bits) / STEPS))


def span_below(span: Tensor) -> Tensor:
    """The byte of the largest span that is not above float32 `span`, int32; 0 if there is none."""
    return ((span.view(torch.int32) >> SHIFT) - (EXPONENT << MANTISSA)).clamp_(0, 255)


def zero_for(minimum: Tensor, span: Tensor) -> Tensor:
    """The zero point that brings a span's minimum closest to `minimum`, both float32: uint8."""
    return (minimum * -STEPS / span).round_().clamp_(0, STEPS - 1).to(torch.uint8)


def common(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """A way to store scales that holds those of all of these ways exactly."""
    found = {*dtypes}
    return found.pop() if len(found) == 1 else torch.float32

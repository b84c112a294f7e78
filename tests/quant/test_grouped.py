"""Bit strings of any width, and codes made wider without a change of value."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qoff.errors import QuantizationError
from qoff.kernels.layout.packing import unpack_codes
from qoff.kernels.layout.scales import COMPACT
from qoff.quant import quantize, widened
from qoff.quant.grouped import unpack_bits
from tests.quant.packed_matrices import bit_strings


@given(bits=st.integers(2, 8), rows=st.integers(1, 5), count=st.integers(1, 100))
def test_bit_strings_come_back(bits: int, rows: int, count: int) -> None:
    codes = torch.randint(1 << bits, (rows, count))
    assert torch.equal(unpack_bits(bit_strings(codes, bits), bits, count).long(), codes)


@pytest.mark.parametrize("packing", ["split32", "rows16"])
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("scales", [torch.float16, COMPACT])
def test_wider_codes_and_smaller_groups_have_the_same_values(
    scales: torch.dtype, packing: str, bits: int, group: int
) -> None:
    q = quantize(torch.randn(37, 256), 4, 128, "rtn", packing, scales)
    wide = widened(q, bits, group)
    assert (wide.bits, wide.group_size, wide.packing) == (bits, group, packing)
    assert torch.equal(wide.dequantize(), q.dequantize())
    shift = bits - 4 if scales == COMPACT else 0  # of the same span
    assert torch.equal(
        unpack_codes(wide.codes, wide.shape, bits, packing),
        unpack_codes(q.codes, q.shape, 4, packing) << shift,
    )


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 128)])
def test_narrower_codes_and_larger_groups_are_refused(bits: int, group: int) -> None:
    q = quantize(torch.randn(16, 128), 8, 64, "rtn")
    with pytest.raises(QuantizationError, match="8 bits and group 64 cannot be stored"):
        widened(q, bits, group)

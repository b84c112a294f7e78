"""Kernels that leave their operands fail in Triton's interpreter, see `tests.bounds`."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton interprets kernels only where there is no GPU"
)


@triton.jit
def copy_kernel(x, y, first, count, behind, SIZE: tl.constexpr):
    """y = x[first : first + SIZE], of which `count`; y is written `behind` further on."""
    i = tl.arange(0, SIZE)
    there = i < count
    tl.store(y + behind + i, tl.load(x + first + i, mask=there, other=0.0), mask=there)


@pytest.mark.parametrize(("first", "count"), [(0, 8), (4, 4), (-100, 0), (10**9, 0)])
def test_masked_elements_may_be_anywhere(first: int, count: int) -> None:
    x, y = torch.arange(8.0), torch.zeros(8)
    copy_kernel[(1,)](x, y, first, count, 0, SIZE=8)
    assert torch.equal(y[:count], x[first:][:count])


@pytest.mark.parametrize(
    ("first", "behind", "message"),
    [
        (1, 0, "copy_kernel reads 4 bytes at byte 32 of x, which has 32"),
        (-1, 0, "copy_kernel reads 4 bytes at byte -4 of x, which has 32"),
        (0, 1, "copy_kernel writes 4 bytes at byte 32 of y, which has 32"),
        (0, -1, "copy_kernel writes 4 bytes at byte -4 of y, which has 32"),
    ],
)
def test_one_element_too_far(first: int, behind: int, message: str) -> None:
    memory = torch.zeros(3, 3, 8)  # what is beside the operands is there
    x, y = memory[0, 1], memory[2, 1]
    with pytest.raises(Exception, match=message):
        copy_kernel[(1,)](x, y, first, 8, behind, SIZE=8)


def test_gaps_between_rows_belong_to_an_operand() -> None:
    x = torch.arange(32.0).view(4, 8)[:2, :3]
    y = torch.zeros(8)
    copy_kernel[(1,)](x, y, 3, 8, 0, SIZE=8)
    assert torch.equal(y, torch.arange(3.0, 11.0))
    with pytest.raises(Exception, match="at byte 44 of x, which has 44"):
        copy_kernel[(1,)](x, y, 4, 8, 0, SIZE=8)

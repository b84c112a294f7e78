"""What `tests.interpreter` repeats is what Triton's interpreter does."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton interprets kernels only where there is no GPU"
)
N = 8


@triton.jit
def sums_kernel(x, y, out, STEP: tl.constexpr, N: tl.constexpr):
    """Operands that are one tensor or two, a constant, a program's number, a reduction."""
    i = tl.program_id(0) * N + tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i, mask=i % 2 == 0, other=1)
    pair = tl.reshape(tl.join(a + a, a + b), [2 * N])
    both, alone = tl.split(tl.reshape(pair, [N, 2]))
    tl.store(out + i, tl.where(alone > STEP, both + STEP, alone - tl.max(b, axis=0)))


def sums(x: Tensor, y: Tensor, step: float) -> Tensor:
    b = torch.where(torch.arange(len(y)) % 2 == 0, y, 1)
    most = b.view(-1, N).amax(1).repeat_interleave(N)
    return torch.where(x + b > step, x + x + step, x + b - most)


@pytest.mark.parametrize(
    ("dtype", "step"),
    [
        *[(dtype, step) for dtype in (torch.int32, torch.int64) for step in (1, 2, True)],
        *[(dtype, step) for dtype in (torch.float16, torch.float32) for step in (1, 1.0, 1.5)],
    ],
)
def test_steps_are_repeated_for_other_values(dtype: torch.dtype, step: float) -> None:
    for _ in range(3):
        x, y = torch.randint(-9, 9, (2, 3 * N)).to(dtype)
        out = torch.empty_like(x)
        sums_kernel[(3,)](x, y, out, step, N)
        assert torch.equal(out, sums(x, y, step))


@triton.jit
def product_kernel(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) * tl.load(y + i) + 1)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.int32, 32), (torch.int16, 16)])
def test_integers_that_overflow_are_refused(dtype: torch.dtype, bits: int) -> None:
    x, out = torch.full((N,), 2 ** (bits // 2 - 1), dtype=dtype), torch.empty(N, dtype=dtype)
    product_kernel[(1,)](x, x, out, N)
    y = torch.where(torch.arange(N) == 5, 2 * x, x)
    with pytest.raises(Exception, match=f"int{bits} overflow detected for operation mul"):
        product_kernel[(1,)](x, y, out, N)
    top = torch.full((N,), 2 ** (bits - 1) - 1, dtype=dtype)
    with pytest.raises(Exception, match=f"int{bits} overflow detected for operation add"):
        product_kernel[(1,)](top, torch.ones_like(x), out, N)


@triton.jit
def cast_kernel(x, out, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


def test_bfloat16_is_half_of_float32() -> None:
    """Every one; of what does not fit, the interpreter cuts off the rest."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    wide = torch.empty(len(every))
    cast_kernel[(16,)](every, wide, 1 << 12)
    assert torch.equal(wide.view(torch.int32), every.float().view(torch.int32))
    ends = torch.tensor([0, 1, 0x7FFF, 0x8000, 0xFFFF], dtype=torch.int32)
    for end in ends:
        narrow = torch.empty_like(every)
        cast_kernel[(16,)]((wide.view(torch.int32) + end).view(torch.float32), narrow, 1 << 12)
        assert torch.equal(narrow.view(torch.int16), every.view(torch.int16))

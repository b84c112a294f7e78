"""Dense matrices of the kernels are those of the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from qoff.errors import OpError
from qoff.kernels.cpu.linear.dequantize import DTYPES
from qoff.kernels.cpu.linear.dequantize import dequantize as kernel
from qoff.kernels.dequantize import dequantize, times_matrix
from qoff.kernels.layout.scales import SCALE_DTYPES
from tests.kernels.operands import random_weight
from tests.tolerances import assert_close


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize(("n", "k", "group"), [(1, 96, 32), (33, 128, 64), (160, 256, 128)])
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_equals_reference(n: int, k: int, group: int, bits: int, scale_dtype: torch.dtype) -> None:
    weight = random_weight(n, k, bits, group, scale_dtype=scale_dtype)
    for dtype in (*DTYPES, torch.float16):
        assert torch.equal(dequantize(weight, dtype), weight.dequantize(dtype))


@pytest.mark.parametrize(("n", "k"), [(80, 96), (50, 64)])
def test_products_with_it_are_those_of_the_dense_matrix(
    n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qoff.kernels.dequantize._PIECE_BYTES", 32 * k * DTYPES[-1].itemsize)
    weight, x = random_weight(n, k, group_size=32), torch.randn(7, n)
    expected = x @ weight.dequantize()
    assert_close(times_matrix(x, weight), expected, dtype=DTYPES[-1])
    assert times_matrix(x[:0], weight).shape == (0, k)


@pytest.mark.parametrize("bits", [4, 8])
def test_products_by_tritons_pieces(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU computes in a backward pass: pieces by its kernel, products by torch."""
    launch = pytest.importorskip("qoff.kernels.triton.linear.dequantize").dequantize
    monkeypatch.setattr(
        "qoff.kernels.dequantize.dequantize", lambda weight, dtype, kept: launch(weight, dtype)
    )
    monkeypatch.setattr("qoff.kernels.cpu.linear.dequantize.DTYPES", (torch.bfloat16,))
    monkeypatch.setattr("qoff.kernels.dequantize._PIECE_BYTES", 32 * 64 * 2)
    weight = random_weight(50, 64, bits, group_size=32, packing="split32")
    x = torch.randn(7, 50, dtype=torch.bfloat16)
    expected = x.float() @ weight.dequantize()
    assert_close(times_matrix(x, weight), expected, dtype=torch.bfloat16)


def test_places_that_do_not_fit_are_refused() -> None:
    weight = random_weight(33, 64)
    with pytest.raises(OpError, match=r"out must be contiguous float32 or bfloat16 \[48, 64\]"):
        kernel(weight, torch.empty(33, 64))
    with pytest.raises(OpError, match="packing rows16 on the CPU, not split32"):
        kernel(random_weight(33, 64, packing="split32"), torch.empty(48, 64))

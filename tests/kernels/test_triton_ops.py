"""The decoder's linear op on Triton kernels against the reference; `test_device` has attention."""

from __future__ import annotations

import pytest
import torch

from qoff.errors import OpError
from qoff.kernels.layout.ending import GATED_SILU, PLAIN, Ending, Norm, Xielu
from qoff.kernels.reference import ops as reference_ops
from tests.kernels.packed import quantized
from tests.tolerances import RELATIVE_RMS, assert_close
from tests.triton_module import triton_module

triton_ops = triton_module("ops")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton interprets kernels only where there is no GPU"
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "end",
    [PLAIN, GATED_SILU, Ending("xielu", xielu=Xielu(1.3, 0.8, 0.5, -1e-6))],
    ids=["plain", "gated", "xielu"],
)
@pytest.mark.parametrize("tokens", [1, 20, 70])  # gemv, skinny, through the scratch
def test_norm_bias_gate_and_residual(tokens: int, end: Ending, dtype: torch.dtype) -> None:
    weight = quantized(64, 96, 4, 32)
    x = torch.randn(tokens, 96).to(dtype)
    residual = torch.randn(tokens, 32 if end.gated else 64).to(dtype)
    options = {"norm": Norm(torch.rand(96) + 0.5, 1e-5, scale=0.7), "bias": torch.randn(64)}
    expected = reference_ops.w4_linear(
        x.float(), weight, residual=residual.float(), end=end, **options
    )
    found = triton_ops.w4_linear(x, weight, residual=residual, end=end, out=residual, **options)
    assert found is residual
    # Four steps are rounded: the norm, the product, the gated product and the sum.
    assert_close(found.float(), expected, tolerance=4 * RELATIVE_RMS[dtype])


def test_a_result_goes_where_it_is_told() -> None:
    weight, x = quantized(32, 64, 8, 32), torch.randn(3, 64).half()
    out = torch.empty(3, 32).half()
    assert triton_ops.w4_linear(x, weight, out=out) is out
    assert torch.equal(out, triton_ops.w4_linear(x, weight))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"x": torch.zeros(3, 64)}, "float16 or bfloat16"),
        ({"x": torch.zeros(3, 96).half()}, "64"),
        ({"x": torch.zeros(64, 3).half().T}, "contiguous"),
        ({"weight": quantized(48, 64, 4, 32), "end": GATED_SILU}, "multiple of 32"),
        ({"weight": quantized(32, 64, 4, 32).to_packing("rows16")}, "packing split32"),
        ({"residual": torch.zeros(3, 32)}, "residual"),
        ({"out": torch.zeros(3, 31).half()}, "out"),
    ],
)
def test_wrong_operands_are_refused(change: dict, complaint: str) -> None:
    operands = {"x": torch.zeros(3, 64).half(), "weight": quantized(32, 64, 4, 32), **change}
    with pytest.raises(OpError, match=complaint):
        triton_ops.w4_linear(**operands)

"""The Triton dequantization against the packed matrix's own definition, bit for bit."""

import pytest
import torch

from qoff.errors import OpError
from qoff.kernels.layout.scales import SCALE_DTYPES
from qoff.kernels.triton.linear.dequantize import DequantizeConfig, dequantize, dequantize_into
from tests.kernels.packed import quantized
from tests.tolerances import assert_close

FORMATS = [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128)]


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize(("bits", "group"), FORMATS)
@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (3, 5), (17, 3)])
def test_equals_the_reference(rows, groups, bits, group, scale_dtype):
    q = quantized(rows, groups * group, bits, group, scale_dtype)
    config = DequantizeConfig(block=512)
    y = dequantize(q, torch.float16, config)
    # A fused multiply-add may round a rare value the other way.
    assert bool((y - q.dequantize(torch.float16)).abs().le(2.0**-10 * y.abs()).all())
    assert_close(
        dequantize(q, torch.bfloat16, config),
        q.dequantize(),
        dtype=torch.bfloat16,
    )


def test_rows_of_a_larger_matrix():
    q = quantized(20, 128, 4, 32)
    out = torch.full((7, 128), torch.nan).half()
    dequantize_into(q.codes[5:12], q.scale_min[:, 5:12], 4, 32, out)
    assert torch.equal(out, q.dequantize(torch.float16)[5:12])


@pytest.mark.parametrize(
    ("packing", "dtype"), [("rows16", torch.float16), ("split32", torch.float32)]
)
def test_another_packing_or_dtype_is_refused(packing, dtype):
    with pytest.raises(OpError, match=f"not packing {packing} to {dtype}"):
        dequantize(quantized(16, 64, 4, 32).to_packing(packing), dtype)

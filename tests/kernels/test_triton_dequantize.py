"""The Triton dequantization against the packed matrix's own definition, bit for bit."""

import pytest
import torch

from qoff.errors import OpError
from qoff.kernels.library.weights import dequantize as registered
from qoff.kernels.triton.linear.dequantize import DequantizeConfig, dequantize, dequantize_into
from tests.kernels.packed import quantized
from tests.tolerances import assert_close

FORMATS = [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128)]


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("bits", "group"), FORMATS)
@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (3, 5), (17, 3)])
def test_equals_the_reference(rows, groups, bits, group, scale_dtype):
    q = quantized(rows, groups * group, bits, group, scale_dtype)
    config = DequantizeConfig(block=512)
    y = dequantize(q.codes, q.scale_min, bits, group, torch.float16, config)
    # A fused multiply-add may round a rare value the other way.
    assert bool((y - q.dequantize(torch.float16)).abs().le(2.0**-10 * y.abs()).all())
    assert_close(
        dequantize(q.codes, q.scale_min, bits, group, torch.bfloat16, config),
        q.dequantize(),
        dtype=torch.bfloat16,
    )


def test_rows_of_a_larger_matrix():
    q = quantized(20, 128, 4, 32)
    out = torch.full((7, 128), torch.nan).half()
    dequantize_into(q.codes[5:12], q.scale_min[:, 5:12], 4, 32, out)
    assert torch.equal(out, q.dequantize(torch.float16)[5:12])


@pytest.mark.parametrize(
    ("codes", "scale_min", "bits", "group", "dtype", "message"),
    [
        (torch.zeros(4, 32), (2, 4, 2), 4, 32, torch.float16, "codes is uint8"),
        (torch.zeros(4, 32).byte(), (1, 4, 2), 4, 32, torch.float16, "scale_min is"),
        (torch.zeros(4, 32).byte(), (2, 4, 2), 4, 32, torch.float32, "float32 is not supported"),
        (torch.zeros(4, 32).byte(), (2, 4, 2), 3, 32, torch.float16, "3 is not supported"),
        (torch.zeros(4, 16).byte(), (1, 4, 2), 4, 64, torch.float16, "does not divide"),
    ],
)
def test_wrong_operands_are_refused(codes, scale_min, bits, group, dtype, message):
    with pytest.raises(OpError, match=message):
        registered(codes, torch.zeros(scale_min).half(), bits, group, dtype)


def test_the_op_on_a_cpu_and_on_meta_tensors():
    q = quantized(4, 64, 4, 32)
    y = registered(q.codes, q.scale_min, 4, 32, torch.bfloat16)
    assert torch.equal(y, q.dequantize(torch.bfloat16))
    meta = registered(q.codes.to("meta"), q.scale_min.to("meta"), 4, 32, torch.bfloat16)
    assert meta.shape == (4, 64)
    assert meta.dtype == torch.bfloat16

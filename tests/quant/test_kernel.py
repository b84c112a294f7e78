"""Quantizing by the Triton kernel gives the bits of the solver on a CPU, for any matrix."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qoff.errors import QuantizationError
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.quant import QuantConfig, matrix, quantize
from tests.quant.test_solvers import weights
from tests.triton_module import triton_module

triton_module("linear.quantize")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton interprets kernels only where there is no GPU"
)


def by_kernel(w, config, rows=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix, "_has_kernel", lambda *_: True)
        return matrix._quantize(w, config, rows, torch.device("cpu"))


@settings(deadline=None, max_examples=25)
@given(
    weights(),
    st.sampled_from([4, 8]),
    st.sampled_from(["split32", "rows16"]),
    st.sampled_from(DTYPES),
    st.sampled_from([torch.float16, torch.float32]),
)
def test_the_kernel_has_the_bits_of_the_solver(weight, bits, packing, dtype, scale_dtype):
    w, group = weight[0].to(dtype), weight[1]
    config = QuantConfig(bits, group, "rtn", packing=packing, scale_dtype=scale_dtype)
    found = by_kernel(w, config, 16)
    expected = quantize(w, bits, group, "rtn", packing, scale_dtype)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scale_min, expected.scale_min)


def test_bfloat16_is_quantized_on_a_gpu_whose_kernels_refuse_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = torch.randn(20, 64).bfloat16()
    config = QuantConfig(4, 32, "rtn", packing="split32", scale_dtype=torch.float16)
    monkeypatch.setattr(Gpu, "of", lambda device: Gpu(75, 4))
    found, expected = by_kernel(w, config), matrix._solved(w, config)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scale_min, expected.scale_min)


@pytest.mark.parametrize(("bad", "reason"), [(torch.nan, "NaN"), (9e9, "overflow")])
def test_what_the_kernel_marks_is_refused_with_the_reason(bad, reason):
    w = torch.randn(20, 64)
    w[17, 3] = bad
    with pytest.raises(QuantizationError, match=reason):
        by_kernel(w, QuantConfig(4, 32, "rtn", scale_dtype=torch.float16))


def test_codes_can_be_buffers_of_a_module_that_is_trained() -> None:
    weight = quantize(torch.randn(32, 64), 4, 32, "rtn")
    assert not weight.codes.is_inference()
    assert not weight.scale_min.is_inference()

"""The reference ops: what rounding to nearest promises, and linear against its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qoff.errors import OpError, QuantizationError
from qoff.kernels.layout.packing import pack_codes, pack_scale_min
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.reference import quantization

ROUNDING = {torch.float16: 2.0**-11, torch.float32: 2.0**-24}  # relative, half a unit
SMALLEST = {torch.float16: 2.0**-25, torch.float32: 0.0}  # half the smallest subnormal


@st.composite
def weights(draw):
    """Float32 [N, K] of magnitudes that fp16 scales hold, with offsets, outliers, constants."""
    n, group = draw(st.integers(1, 20)), draw(st.sampled_from([32, 64, 128]))
    k = group * draw(st.integers(1, 3))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    w = torch.randn(n, k, generator=random) * 10.0 ** draw(st.integers(-6, 2))
    w += draw(st.sampled_from([0.0, 0.0, 1.0, -30.0]))
    if draw(st.booleans()):
        w[:, ::17] *= 20
    if draw(st.booleans()):
        w[0] = w[0, 0]
    return w, group


@settings(deadline=None, max_examples=60)
@given(weights(), st.sampled_from([2, 3, 4, 5, 6, 8]), st.sampled_from(list(ROUNDING)))
def test_rounding_error_is_half_a_step_plus_that_of_the_stored_numbers(weight, bits, dtype):
    w, group = weight
    top = 2**bits - 1
    codes, scale, minimum = quantization.quantize(w, bits, group, dtype)
    q = _packed(codes, scale, minimum, bits, group)
    step, low = (x.float().repeat_interleave(group, 1) for x in (scale, minimum))
    stored = (top * step + low.abs()) * ROUNDING[dtype] + (top + 1) * SMALLEST[dtype]
    arithmetic = (top * step + low.abs()) * 2.0**-22
    assert bool(((q.dequantize() - w).abs() <= step / 2 + stored * 1.01 + arithmetic).all())


@settings(deadline=None, max_examples=30)
@given(weights(), st.sampled_from([torch.float16, torch.float32]))
def test_no_other_code_is_nearer(weight, dtype):
    w, group = weight
    codes, scale, minimum = quantization.quantize(w, 4, group, dtype)
    step, low = (x.double().repeat_interleave(group, 1)[..., None] for x in (scale, minimum))
    levels = torch.arange(16) * step + low
    distance = (levels - w.double()[..., None]).abs()
    chosen = distance.gather(2, codes.long()[..., None])[..., 0]
    slack = (low.abs() + step)[..., 0] * 2.0**-22
    assert bool((chosen <= distance.amin(2) + slack).all())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_numbers_are_refused(bad):
    w = torch.randn(4, 64)
    w[2, 40] = bad
    with pytest.raises(QuantizationError, match="1 of 256 weights are NaN or infinite"):
        quantization.quantize(w, 4, 32)


def test_ranges_that_the_scales_cannot_hold_are_refused():
    w = torch.randn(2, 64) * 1e5
    with pytest.raises(QuantizationError, match="use float32 scales"):
        quantization.quantize(w, 4, 32)
    assert torch.isfinite(quantization.quantize(w, 4, 32, torch.float32)[1]).all()
    with pytest.raises(QuantizationError, match="scale the weights down"):
        quantization.quantize(torch.tensor([[-3e38, 3e38] * 16]), 4, 32, torch.float32)


def test_formats_that_do_not_exist_are_refused():
    with pytest.raises(OpError, match="does not divide"):
        quantization.quantize(torch.zeros(2, 96), 4, 64)
    with pytest.raises(OpError, match="7 bits"):
        quantization.quantize(torch.zeros(2, 64), 7, 64)


def _packed(codes, scale, minimum, bits, group):
    return QTensor(
        pack_codes(codes, bits, "split32"),
        pack_scale_min(scale, minimum, "split32"),
        tuple(codes.shape),
        bits,
        group,
        "split32",
    )

"""The Triton quantization against the reference, bit for bit."""

import pytest
import torch

from qoff.errors import OpError
from qoff.kernels.layout.packing import pack_codes, pack_scale_min
from qoff.kernels.reference import quantization as reference
from qoff.kernels.triton.linear.quantize import QuantizeConfig, quantize

FORMATS = [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128)]
SMALL = QuantizeConfig(block=512)


def assert_same(w, bits, group, scale_dtype, config=SMALL):
    found = quantize(w, bits, group, scale_dtype, config)
    codes, scale, minimum = reference.quantize(w, bits, group, scale_dtype)
    expected = pack_scale_min(scale, minimum, "split32")
    assert torch.equal(found.scale_min, expected)
    assert torch.equal(found.scale_min.signbit(), expected.signbit())
    assert torch.equal(found.codes, pack_codes(codes, bits, "split32"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("bits", "group"), FORMATS)
@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (3, 5), (17, 3)])
def test_equals_the_reference(rows, groups, bits, group, dtype):
    w = (torch.randn(rows, groups * group) * 3 - 1).to(dtype)
    assert_same(w, bits, group, torch.float16)
    assert_same(w, bits, group, torch.float32)


@pytest.mark.parametrize("magnitude", [1e-42, 1e-38, 1e-30, 1e-6, 1e3, 1e30])
def test_magnitudes(magnitude):
    assert_same(torch.randn(4, 64) * magnitude, 4, 32, torch.float32)


def test_halves_between_levels_and_zeros_of_both_signs():
    steps = torch.arange(32) / 2
    assert_same(
        torch.stack((steps, -steps, steps.clamp(max=15), steps * 0, -steps * 0)),
        4,
        32,
        torch.float32,
    )


def test_constant_groups_have_scale_and_codes_zero():
    w = torch.full((2, 64), 3.0)
    found = quantize(w, 4, 32, torch.float16, SMALL)
    assert not found.codes.any()
    assert torch.equal(found.scale_min, torch.tensor([0.0, 3.0]).half().expand(2, 2, 2))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_only_the_group_with_a_non_finite_weight_is_poisoned(bad):
    w = torch.randn(3, 128)
    w[1, 70] = bad
    scale_min = quantize(w, 4, 64, torch.float32, SMALL).scale_min
    finite = torch.isfinite(scale_min)
    assert not finite[1, 1].any()
    assert int(finite.sum()) == finite.numel() - 2


def test_a_range_that_the_scales_cannot_hold_is_infinite():
    w = torch.tensor([[-9e5, 9e5] * 16])
    scale_min = quantize(w, 4, 32, torch.float16, SMALL).scale_min
    assert not torch.isfinite(scale_min).any()


@pytest.mark.parametrize(
    ("w", "bits", "group", "scale_dtype", "message"),
    [
        (torch.zeros(2, 64).double(), 4, 32, torch.float16, "w is float16"),
        (torch.zeros(64), 4, 32, torch.float16, "w is float16"),
        (torch.zeros(64, 2).T, 4, 32, torch.float16, "contiguous"),
        (torch.zeros(2, 96), 4, 64, torch.float16, "does not divide"),
        (torch.zeros(2, 64), 6, 32, torch.float16, "6 bits"),
        (torch.zeros(2, 64), 4, 32, torch.bfloat16, "not torch.bfloat16"),
    ],
)
def test_wrong_operands_are_refused(w, bits, group, scale_dtype, message):
    with pytest.raises(OpError, match=message):
        quantize(w, bits, group, scale_dtype)

"""The Triton quantization against the reference: same scales, same codes."""

import pytest
import torch

from qoff.errors import OpError, QuantizationError
from qoff.kernels.layout.packing import pack_codes, pack_scale_min, unpack_codes
from qoff.kernels.library.weights import quantize as registered
from qoff.kernels.reference import quantization as reference
from qoff.kernels.triton.linear.quantize import QuantizeConfig, quantize

FORMATS = [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128)]
SMALL = QuantizeConfig(block=512)


def assert_same(w, bits, group, scale_dtype, config=SMALL):
    packed, scale_min = quantize(w, bits, group, scale_dtype, config)
    codes, scale, minimum = reference.quantize(w, bits, group, scale_dtype)
    assert torch.equal(scale_min, pack_scale_min(scale, minimum, "split32"))
    actual = unpack_codes(packed, tuple(w.shape), bits, "split32").int()
    wide, low = (x.double().repeat_interleave(group, 1) for x in (scale, minimum))
    level = (w.double() - low) / wide
    near_half = ((level - level.floor()) - 0.5).abs() < 1e-4  # where float32 may round either way
    difference = (actual - codes.int()).abs()
    assert bool((difference <= near_half.int()).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("bits", "group"), FORMATS)
@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (3, 5), (17, 3)])
def test_equals_the_reference(rows, groups, bits, group, dtype):
    w = (torch.randn(rows, groups * group) * 3 - 1).to(dtype)
    assert_same(w, bits, group, torch.float16)
    assert_same(w, bits, group, torch.float32)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e3, 1e30])
def test_magnitudes(magnitude):
    assert_same(torch.randn(4, 64) * magnitude, 4, 32, torch.float32)


def test_constant_groups_have_scale_and_codes_zero():
    w = torch.full((2, 64), 3.0)
    codes, scale_min = quantize(w, 4, 32, torch.float16, SMALL)
    assert not codes.any()
    assert torch.equal(scale_min, torch.tensor([0.0, 3.0]).half().expand(2, 2, 2))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_only_the_group_with_a_non_finite_weight_is_poisoned(bad):
    w = torch.randn(3, 128)
    w[1, 70] = bad
    _, scale_min = quantize(w, 4, 64, torch.float32, SMALL)
    finite = torch.isfinite(scale_min)
    assert not finite[1, 1].any()
    assert int(finite.sum()) == finite.numel() - 2


def test_a_range_that_the_scales_cannot_hold_is_infinite():
    _, scale_min = quantize(torch.tensor([[-9e5, 9e5] * 16]), 4, 32, torch.float16, SMALL)
    assert not torch.isfinite(scale_min).any()


@pytest.mark.parametrize(
    ("w", "bits", "group", "scale_dtype", "message"),
    [
        (torch.zeros(2, 64).double(), 4, 32, torch.float16, "w is float16"),
        (torch.zeros(64), 4, 32, torch.float16, "w is float16"),
        (torch.zeros(64, 2).T, 4, 32, torch.float16, "contiguous"),
        (torch.zeros(2, 96), 4, 64, torch.float16, "does not divide"),
        (torch.zeros(2, 64), 6, 32, torch.float16, "6 bits"),
        (torch.zeros(2, 64), 4, 32, torch.bfloat16, "bfloat16 is not supported"),
    ],
)
def test_wrong_operands_are_refused(w, bits, group, scale_dtype, message):
    with pytest.raises(OpError, match=message):
        registered(w, bits, group, scale_dtype)


def test_the_op_on_a_cpu_and_on_meta_tensors():
    w = torch.randn(4, 64)
    codes, scale_min = registered(w, 4, 32)
    expected = reference.quantize(w, 4, 32)
    assert torch.equal(codes, pack_codes(expected[0], 4, "split32"))
    assert torch.equal(scale_min, pack_scale_min(*expected[1:], "split32"))
    meta = registered(w.to("meta"), 4, 32)
    assert [(tuple(m.shape), m.dtype) for m in meta] == [
        ((4, 32), torch.uint8),
        ((2, 4, 2), torch.float16),
    ]
    with pytest.raises(QuantizationError):
        registered(w * torch.nan, 4, 32)

"""Solvers: none worse than rounding to nearest in its norm, none dependent on chunks or packing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qoff.errors import QuantizationError
from qoff.kernels.layout.packing import unpack_codes
from qoff.kernels.layout.scales import COMPACT
from qoff.kernels.reference import quantization
from qoff.quant import QuantConfig, quantize
from qoff.quant.solvers import HQQ_NORM, SOLVERS

NORMS = {"mse": 2.0, "hqq": HQQ_NORM}
SOLVER, BITS = st.sampled_from(list(SOLVERS)), st.sampled_from([2, 3, 4, 5, 6, 8])
SCALES = st.sampled_from([torch.float16, COMPACT])


@st.composite
def weights(draw):
    """Float32 [N, K] and a group: normal, heavy-tailed, shifted, on a grid, or partly constant."""
    n, group = draw(st.integers(1, 20)), draw(st.sampled_from([32, 64, 128]))
    k = group * draw(st.integers(1, 3))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    w = torch.randn(n, k, generator=random)
    shape = draw(st.sampled_from(["normal", "heavy", "shifted", "grid", "constant"]))
    if shape == "heavy":
        w = w.pow(3)
    elif shape == "shifted":
        w += 50
    elif shape == "grid":
        w = w.mul(2).round().clamp(-8, 7)
    elif shape == "constant":
        w[n // 2] = w[0, 0]
    return w * 10.0 ** draw(st.integers(-7, 1)), group


@settings(deadline=None, max_examples=60)
@given(
    weights(),
    st.sampled_from(list(NORMS)),
    st.sampled_from([2, 3, 4, 5, 6, 8]),
    st.sampled_from([torch.float16, torch.float32]),
)
def test_no_group_is_worse_than_rounding_to_nearest(weight, solver, bits, dtype):
    w, group = weight
    kept, other = (
        _errors(w, quantize(w, bits, group, name, scale_dtype=dtype), NORMS[solver])
        for name in ("rtn", solver)
    )
    assert bool((other <= kept * (1 + 1e-4)).all())


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("solver", list(NORMS))
def test_solvers_gain_on_normal_weights(solver, group, bits):
    w = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)) * 0.02
    norm = NORMS[solver]
    rtn, solved = (
        _errors(w, quantize(w, bits, group, name, scale_dtype=torch.float16), norm).sum()
        for name in ("rtn", solver)
    )
    assert solved < 0.99 * rtn


@settings(deadline=None, max_examples=30)
@given(weights(), SOLVER, BITS, SCALES, st.integers(1, 40))
def test_result_does_not_depend_on_chunks_or_packing(weight, solver, bits, scales, rows):
    w, group = weight
    w = w.repeat(3, 1)
    whole = quantize(w, bits, group, solver, "split32", scales, 64)
    parts = quantize(w, bits, group, solver, "split32", scales, rows)
    packed = quantize(w, bits, group, solver, "rows16", scales, rows).to_packing("split32")
    for q in (parts, packed):
        assert torch.equal(q.codes, whole.codes)
        assert torch.equal(q.scale_min, whole.scale_min)


@settings(deadline=None, max_examples=30)
@given(
    weights(), st.sampled_from([2, 3, 4, 5, 6, 8]), st.sampled_from([torch.float32, torch.bfloat16])
)
def test_rtn_is_the_reference(weight, bits, dtype):
    w, group = weight[0].to(dtype), weight[1]
    q = quantize(w, bits, group, "rtn", scale_dtype=torch.float16)
    codes, scale, minimum = quantization.quantize(w, bits, group)
    assert torch.equal(unpack_codes(q.codes, q.shape, bits, "split32"), codes)
    assert torch.equal(q.scale_min, torch.stack((scale.T, minimum.T), 2))


@settings(deadline=None, max_examples=30)
@given(weights(), SOLVER, BITS, SCALES)
def test_codes_are_the_nearest_for_the_stored_scales(weight, solver, bits, scales):
    w, group = weight
    q = quantize(w, bits, group, solver, scale_dtype=scales)
    codes = unpack_codes(q.codes, q.shape, bits, "split32").long()
    scale, minimum = (part.double().repeat_interleave(group, 1) for part in q.scales())
    distance = [
        (w.double() - (c.clamp(0, 2**bits - 1) * scale + minimum)).abs()
        for c in (codes, codes - 1, codes + 1)
    ]
    slack = (minimum.abs() + scale) * 2.0**-22
    assert bool((distance[0] <= torch.minimum(*distance[1:]) + slack).all())


@pytest.mark.parametrize("solver", list(SOLVERS))
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_numbers_are_refused_by_name(solver, bad):
    w = torch.randn(40, 128)
    w[37, 100] = bad
    with pytest.raises(QuantizationError, match=r"layer\.7: 1 of .* NaN or infinite"):
        quantize(w, solver=solver, name="layer.7")


@pytest.mark.parametrize("solver", list(SOLVERS))
def test_fp16_overflow_asks_for_float32_scales(solver):
    w = torch.linspace(-1e5, 1e5, 256).view(2, 128)
    with pytest.raises(QuantizationError, match=r"weight: .* use float32 scales"):
        quantize(w, solver=solver, scale_dtype=torch.float16)
    q = quantize(w, solver=solver, scale_dtype=torch.float32)
    assert bool(((q.dequantize() - w).abs() <= 0.1 * w.abs().max()).all())


@pytest.mark.parametrize("solver", list(SOLVERS))
def test_solved_ranges_stay_finite_at_the_edge_of_fp16(solver):
    w = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    w *= 65000 / w.abs().max()
    found = quantize(w, solver=solver, scale_dtype=torch.float16)
    assert torch.isfinite(found.dequantize()).all()


@pytest.mark.parametrize(
    ("w", "options", "message"),
    [
        (torch.zeros(2, 80), {}, "x: group size 32 does not divide the 80 columns"),
        (torch.zeros(2, 64), {"bits": 7}, "bits 7"),
        (torch.zeros(2, 64), {"group_size": 16}, "group_size 16"),
        (torch.zeros(2, 64), {"solver": "gptq"}, "solver 'gptq' .* hqq, mse, rtn"),
        (torch.zeros(2, 64), {"packing": "tiles"}, "packing 'tiles'"),
        (torch.zeros(2, 64), {"scale_dtype": torch.bfloat16}, "scale_dtype"),
        (torch.zeros(64), {}, "only a matrix of floats"),
        (torch.zeros(2, 64, dtype=torch.int8), {}, "only a matrix of floats"),
        (torch.zeros(0, 64), {}, "x: .* ones up"),
        (torch.zeros(2, 0), {}, "x: .* ones up"),
    ],
)
def test_bad_requests_are_refused(w, options, message):
    with pytest.raises(QuantizationError, match=message):
        quantize(w, name="x", **options)


def test_config_refuses_what_quantize_refuses():
    assert QuantConfig().solver == "hqq"
    with pytest.raises(
        QuantizationError, match="head_bits 7 is not supported; use one of 2, 3, 4, 5, 6, 8"
    ):
        QuantConfig(head_bits=7)


def _errors(w, q, norm):
    """Sum over each group of |w - dequantized| ** norm, in float64."""
    error = (w.double() - q.dequantize().double()).abs().pow(norm)
    return error.view(w.shape[0], -1, q.group_size).sum(2)

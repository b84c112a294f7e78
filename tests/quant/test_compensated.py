"""Compensated rounding: errors of outputs shrink where inputs are alike, and nowhere grow much."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qoff.errors import QuantizationError
from qoff.kernels.layout.packing import unpack_codes
from qoff.quant import Format, quantize
from qoff.quant import compensated as compensated_module
from qoff.quant.compensated import AIM, DAMPING, aimed, compensated
from qoff.quant.compensated import moments as second_moments

FORMATS = [Format(4, 32), Format(4, 64), Format(8, 32)]


def alike(k: int, rank: int, seed: int = 0) -> Tensor:
    """Second moments of inputs that mostly vary together, float32 [k, k]."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * k, rank, generator=random) @ torch.randn(rank, k, generator=random)
    x += 0.3 * torch.randn(4 * k, k, generator=random)
    x *= 1 + torch.arange(k) % 7  # some columns are stronger than others
    return x.T @ x / len(x)


def output_error(w: Tensor, found: Tensor, moments: Tensor) -> float:
    """Mean square error of the outputs, for inputs of these second moments."""
    error = (found - w).double()
    return float((error @ moments.double() * error).sum())


def weights(n: int, k: int, seed: int = 1) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("k", [128, 192])  # a block of columns, and a block and a half
@pytest.mark.parametrize("scales", [torch.float16, torch.uint8])
def test_outputs_are_closer_than_those_of_other_solvers(
    form: Format, k: int, scales: torch.dtype
) -> None:
    w, moments = weights(48, k), alike(k, 8)
    q = compensated(w, moments, form, scale_dtype=scales)
    found = output_error(w, q.dequantize(), moments)
    for solver in ("rtn", "mse", "hqq"):
        other = quantize(w, form.bits, form.group_size, solver, scale_dtype=scales)
        assert found < 0.5 * output_error(w, other.dequantize(), moments)


@pytest.mark.parametrize("form", FORMATS)
def test_inputs_that_vary_alone_leave_nothing_to_make_up_for(form: Format) -> None:
    w, strength = weights(20, 64), torch.linspace(0.5, 4, 64)
    q = compensated(w, strength.diag(), form)
    codes = unpack_codes(q.codes, q.shape, q.bits, q.packing).double()
    scale, minimum = (
        q.scale_min[..., i].T.double().repeat_interleave(form.group_size, 1) for i in (0, 1)
    )
    distance = (w.double() - (codes * scale + minimum)).abs()
    for other in (codes - 1, codes + 1):
        there = other.clamp(0, 2**form.bits - 1) * scale + minimum
        assert bool((distance <= (w.double() - there).abs() + 1e-6).all())


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31), st.floats(1e-6, 1e6))
def test_the_unit_of_the_inputs_does_not_matter(seed: int, factor: float) -> None:
    w, moments = weights(24, 64, seed), alike(64, 4, seed)
    found, scaled = (
        output_error(w, compensated(w, m, Format(4, 32)).dequantize(), moments)
        for m in (moments, moments * factor)
    )
    assert scaled == pytest.approx(found, rel=0.05)


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    w, moments = weights(24, 128), alike(128, 8)
    dead = torch.arange(128) % 64 < 40  # a part of each group
    moments[dead], moments[:, dead] = 0, 0
    moments[64:], moments[:, 64:] = 0, 0  # and one group as a whole
    found = compensated(w, moments, Format(4, 64)).dequantize()
    rounded = quantize(w, 4, 64, "mse", scale_dtype=torch.float16).dequantize()
    assert output_error(w, found, moments) < output_error(w, rounded, moments)
    assert float((found - w)[:, 64:].square().mean()) < 1.1 * float(
        (rounded - w)[:, 64:].square().mean()
    )


def test_a_matrix_on_a_grid_stays_as_it_is() -> None:
    codes = torch.randint(16, (24, 128), generator=torch.Generator().manual_seed(0))
    codes[:, ::32], codes[:, 1::32] = 0, 15
    w = codes.float() * 0.25 - 1
    assert torch.equal(compensated(w, alike(128, 8), Format(4, 32)).dequantize(), w)


def test_what_is_given_stays_as_it_is() -> None:
    w, moments = weights(24, 64), alike(64, 4)
    before = w.clone(), moments.clone()
    compensated(w, moments, Format(4, 32))
    assert torch.equal(w, before[0])
    assert torch.equal(moments, before[1])


@pytest.mark.parametrize(
    ("w", "moments", "form", "message"),
    [
        (weights(4, 96), torch.eye(96), Format(4, 64), r"x: group size 64 .* 96 columns"),
        (weights(4, 64) * torch.nan, torch.eye(64), Format(), "x: .* NaN or infinite"),
        (weights(4, 64) * 1e7, torch.eye(64), Format(), "x: .* use float32 scales"),
        (weights(4, 64), torch.eye(64) * torch.nan, Format(), "x: the second moments"),
    ],
)
def test_what_cannot_be_done_is_refused(
    w: Tensor, moments: Tensor, form: Format, message: str
) -> None:
    with pytest.raises(QuantizationError, match=message):
        compensated(w, moments, form, name="x")


def test_moments_are_sums_over_inputs() -> None:
    x = weights(300, 64)
    found = second_moments(x)
    assert torch.equal(found, found.T)
    torch.testing.assert_close(found, (x.double().T @ x.double()).float(), rtol=1e-4, atol=1e-4)


def test_an_aimed_matrix_is_part_of_the_way_to_a_ridge_regression() -> None:
    w, x, wanted = weights(24, 64), weights(300, 64, 2), weights(300, 24, 3)
    hessian = second_moments(x)
    found = aimed(w, hessian, (wanted - x @ w.T).T @ x, len(x))
    # The ridge as inputs of their own, whose outputs are those of w.
    ridge = (DAMPING * hessian.diagonal().mean()).sqrt() * torch.eye(64)
    inputs, outputs = torch.cat((x, ridge)).double(), torch.cat((wanted, ridge @ w.T)).double()
    best = torch.linalg.lstsq(inputs, outputs).solution.T
    torch.testing.assert_close(
        found.double(), w + AIM * 300 / 364 * (best - w), rtol=1e-3, atol=1e-4
    )


def test_a_matrix_without_moments_is_not_aimed() -> None:
    w = weights(24, 64)
    nothing = torch.full((64, 64), float("nan"))
    assert torch.equal(aimed(w, nothing, weights(24, 64, 2), 300), w)
    with pytest.raises(QuantizationError, match="no such matrix"):
        compensated(w, nothing, Format(4, 32))


def test_codes_are_those_of_gptq_before_they_are_refined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qoff.quant.compensated.refined", lambda w, hessian, *found: found[:3])
    w, moments, k = weights(32, 192), alike(192, 8), 192
    found = compensated(w, moments, Format(4, 32)).dequantize().double()
    # As the paper has it, in double precision: with the inverse, and all columns behind updated.
    wide = moments.double()
    order = wide.diagonal().argsort(descending=True)
    wide += DAMPING * wide.diagonal().mean() * torch.eye(k, dtype=torch.float64)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(wide[order][:, order]))
    factor = torch.linalg.cholesky(inverse, upper=True)
    columns, nearest = w.double()[:, order], 0
    for i, place in enumerate(order.tolist()):
        error = columns[:, i] - found[:, place]
        levels = found.view(32, -1, 32)[:, place // 32]  # that the group takes
        others = (columns[:, i, None] - levels).abs()
        nearest += int((error.abs()[:, None] <= others + 1e-6).all(1).sum())
        columns[:, i:] -= (error / factor[i, i])[:, None] * factor[i, i:]
    assert nearest >= 0.999 * w.numel()  # but for ties


def test_everything_is_computed_on_the_device_of_the_matrix() -> None:
    """What is created elsewhere would be on the meta device here, and mixed with others."""
    w, moments, form = weights(48, 192), alike(192, 8), Format(4, 32)
    for scales in (torch.float16, torch.uint8):
        wanted = compensated(w, moments, form, scale_dtype=scales)
        with torch.device("meta"):
            found = compensated(w, moments, form, scale_dtype=scales, device=w.device)
        assert torch.equal(found.codes, wanted.codes)
        assert torch.equal(found.scale_min, wanted.scale_min)


def test_a_gpu_without_room_leaves_a_matrix_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    w, moments, form = weights(16, 64), alike(64, 8), Format(4, 32)
    wanted, own = compensated(w, moments, form), compensated_module._compensated

    def full(w: Tensor, *operands: Any) -> Any:
        if w.device.type == "meta":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return own(w, *operands)

    monkeypatch.setattr(compensated_module, "_compensated", full)
    found = compensated(w, moments, form, device=torch.device("meta"))
    assert torch.equal(found.codes, wanted.codes)

"""Compact scales: a byte each for the span and the zero point of a group."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.scales import COMPACT, SPAN_MAX, common, expanded, span_below
from qoff.quant import Format, QTensor, quantize
from qoff.quant.compensated import compensated
from qoff.quant.rows import concat_rows
from qoff.quant.solvers import SOLVERS

BITS = st.sampled_from([2, 3, 4, 5, 6, 8])


def drawn(seed: int, spread: float = 0.05) -> Tensor:
    return torch.randn(24, 128, generator=torch.Generator().manual_seed(seed)) * spread


def test_spans_are_every_byte_in_order() -> None:
    span = torch.arange(256, dtype=torch.uint8)
    scale, minimum = expanded(span, span, 4)
    found = scale * 16
    assert bool((found.diff() > 0).all())
    assert float(found[-1]) == SPAN_MAX
    assert torch.equal(span_below(found), span.int())
    assert torch.equal(span_below(found * (1 + 2.0**-23)), span.int())
    assert torch.equal(span_below(found * (1 - 2.0**-23))[1:], span.int()[:-1])
    assert torch.equal(minimum, -found * span / 256)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), st.floats(1e-4, 100), BITS, st.sampled_from(list(SOLVERS)))
def test_little_is_lost_to_ranges_of_floats(
    seed: int, spread: float, bits: int, solver: str
) -> None:
    w = drawn(seed, spread)
    floats = quantize(w, bits, 32, solver, scale_dtype=torch.float32)
    found = quantize(w, bits, 32, solver, scale_dtype=COMPACT)
    lost, best = (float((q.dequantize() - w).square().mean()) for q in (found, floats))
    # Zero points are 256ths: of 2,500 draws at most 1.12 with 4 bits, 1.46 with 6, 1.51 with 8.
    assert lost < (1.2 if bits == 4 else 1.6) * best
    assert found.nbytes * 8 == w.numel() * (bits + 0.5)


@pytest.mark.parametrize("shift", [-3.0, -0.2, 0.2, 3.0])
def test_groups_without_zero_have_a_span_that_reaches_to_it(shift: float) -> None:
    w = drawn(0) + shift
    found = quantize(w, 4, 32, "mse", scale_dtype=COMPACT).dequantize()
    assert float((found - w).abs().max()) < float(w.abs().max()) * 1.125 / 15


def test_zero_is_zero() -> None:
    assert not quantize(torch.zeros(5, 64), 4, 32, scale_dtype=COMPACT).dequantize().any()


@pytest.mark.parametrize("solver", [*SOLVERS, "gptq"])
@pytest.mark.parametrize(("factor", "wider"), [(1e5, torch.float16), (1e8, torch.float32)])
def test_weights_beyond_the_largest_span_get_wider_scales(
    factor: float, wider: torch.dtype, solver: str, caplog: pytest.LogCaptureFixture
) -> None:
    w, name = drawn(0) * factor, f"{solver} {factor}"

    def found(scales: torch.dtype) -> QTensor:
        if solver == "gptq":
            return compensated(w, torch.eye(128), Format(4, 32), scale_dtype=scales, name=name)
        return quantize(w, 4, 32, solver, scale_dtype=scales, name=name)

    assert found(COMPACT).scale_min.dtype == wider
    assert torch.equal(found(COMPACT).dequantize(), found(wider).dequantize())
    (said,) = caplog.messages
    assert "overflow compact scales, so its scales are stored as floats" in said


def test_rows_with_other_scales_are_joined_in_float32() -> None:
    parts = [
        quantize(drawn(seed), 4, 32, scale_dtype=dtype)
        for seed, dtype in enumerate((torch.float16, COMPACT))
    ]
    joined = concat_rows(parts)
    assert joined.scale_min.dtype == torch.float32 == common((COMPACT, torch.float16))
    assert torch.equal(joined.dequantize(), torch.cat([q.dequantize() for q in parts]))
    assert concat_rows(parts[1:] * 2).scale_min.dtype == COMPACT
    with pytest.raises(OpError, match="not made compact"):
        parts[0].with_scales(COMPACT)

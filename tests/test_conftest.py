"""The shared fixtures and the comparison do what the tests rely on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tolerances import RELATIVE_RMS, assert_close, relative_rms


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_fresh_memory_is_nan(dtype: torch.dtype) -> None:
    assert torch.isnan(torch.empty(65, 3, dtype=dtype)).all()
    assert torch.isnan(torch.empty_like(torch.zeros(7, dtype=dtype))).all()


def test_fresh_bytes_are_not_zero() -> None:
    assert (torch.empty(100, dtype=torch.uint8) == 255).all()


@given(exponent=st.integers(-20, 20), n=st.integers(1, 300))
def test_relative_rms_is_the_size_of_the_error_at_any_scale(exponent: int, n: int) -> None:
    expected = (torch.rand(n, dtype=torch.float64) + 0.5) * 2.0**exponent
    assert relative_rms(expected * 1.25, expected) == pytest.approx(0.25)


@pytest.mark.parametrize("dtype", list(RELATIVE_RMS))
def test_assert_close_takes_rounding_to_the_dtype_and_no_more(dtype: torch.dtype) -> None:
    expected = torch.randn(1000, dtype=torch.float64)
    assert_close(expected.to(dtype), expected)
    with pytest.raises(AssertionError, match="relative RMS"):
        assert_close(expected.to(dtype) * (1 + 3 * RELATIVE_RMS[dtype]), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_assert_close_refuses_a_value_that_is_not_finite(value: float) -> None:
    actual = torch.ones(5)
    actual[2] = value
    with pytest.raises(AssertionError, match="not finite"):
        assert_close(actual, torch.ones(5), tolerance=1e9)


def test_assert_close_refuses_broadcasting() -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.ones(5), torch.ones(1, 5))

"""The Triton RMS norm against the reference in float64."""

import pytest
import torch

from qoff.kernels.reference import elementwise as reference
from qoff.kernels.triton.elementwise.rms_norm import rms_norm
from tests.tolerances import assert_close

DTYPES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize("columns", [1, 64, 80, 130, 2048])
def test_equals_the_reference(tokens, columns, dtype):
    x = (torch.randn(tokens, columns) * 3).to(dtype)
    weight = (1 + torch.randn(columns) / 4).to(dtype)
    y, same = rms_norm(x, weight, 1e-5)
    assert same is x
    assert_close(y, reference.rms_norm(x.double(), weight.double(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "columns"), [(1, 96), (5, 65), (3, 1024)])
def test_norms_the_unrounded_sum_and_returns_the_rounded_one(tokens, columns, dtype):
    x, residual = (
        torch.randn(tokens, columns).to(dtype),
        (40 * torch.randn(tokens, columns)).to(dtype),
    )
    weight = torch.rand(columns).to(dtype)
    y, total = rms_norm(x, weight, 1e-6, residual)
    exact = x.double() + residual.double()
    assert_close(total, exact.to(dtype))  # the interpreter cuts bfloat16 off instead of rounding
    if dtype == torch.float16:
        assert torch.equal(total, exact.to(dtype))
    assert_close(y, reference.rms_norm(exact, weight.double(), 1e-6))


def test_eps_and_rows_of_zeros():
    x = torch.zeros(2, 64, dtype=torch.float16)
    x[1] = 1e-3
    y, _ = rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-4)
    assert torch.equal(y[0], torch.zeros(64, dtype=torch.float16))
    assert_close(y[1], torch.full((64,), 1e-3 / (1e-6 + 1e-4) ** 0.5))


def test_no_tokens():
    y, _ = rms_norm(torch.empty(0, 64).half(), torch.ones(64).half(), 1e-5)
    assert y.shape == (0, 64)

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
    y = rms_norm(x, weight, 1e-5)
    assert_close(y, reference.rms_norm(x.double(), weight.double(), 1e-5))


def test_eps_and_rows_of_zeros():
    x = torch.zeros(2, 64, dtype=torch.float16)
    x[1] = 1e-3
    y = rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-4)
    assert torch.equal(y[0], torch.zeros(64, dtype=torch.float16))
    assert_close(y[1], torch.full((64,), 1e-3 / (1e-6 + 1e-4) ** 0.5))


def test_no_tokens():
    y = rms_norm(torch.empty(0, 64).half(), torch.ones(64).half(), 1e-5)
    assert y.shape == (0, 64)

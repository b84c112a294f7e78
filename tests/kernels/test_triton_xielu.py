"""The Triton xIELU against the reference in float64."""

import pytest
import torch

from qoff.kernels.layout.ending import Xielu
from qoff.kernels.reference.linear import xielu as reference
from qoff.kernels.triton.elementwise.xielu import xielu
from tests.tolerances import assert_close

BY = Xielu(1.3, 0.8, 0.5, -1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 16), (1, 1520), (3, 64), (17, 48)])
def test_equals_the_reference(tokens, columns, dtype):
    z = (torch.randn(tokens, columns) * 4).to(dtype)
    assert_close(xielu(z, BY), reference(z.double(), BY), dtype=dtype)


def test_next_to_0_and_far_from_it():
    z = torch.cat([torch.logspace(-9, 2, 64) * sign for sign in (-1, 1)])[None]
    torch.testing.assert_close(
        xielu(z, BY).double(), reference(z.double(), BY), rtol=1e-5, atol=0.0
    )


def test_no_tokens():
    assert xielu(torch.empty(0, 64).half(), BY).shape == (0, 64)

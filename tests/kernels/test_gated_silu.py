"""The Triton gated SiLU over interleaved columns against the reference in float64."""

import pytest
import torch

from qoff.kernels.reference.experts import activate
from qoff.kernels.triton.elementwise.gated_silu import gated_silu
from tests.tolerances import assert_close


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 16), (1, 1520), (3, 64), (17, 48)])
def test_equals_the_reference(tokens, columns, dtype):
    z = (torch.randn(tokens, 2 * columns) * 4).to(dtype)
    assert_close(gated_silu(z), activate(z.double(), "silu"), dtype=dtype)


def test_no_tokens():
    assert gated_silu(torch.empty(0, 64).half()).shape == (0, 32)

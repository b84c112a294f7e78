"""The Triton gated SiLU against the reference in float64."""

import pytest
import torch

from qoff.kernels.reference import elementwise as reference
from qoff.kernels.triton.elementwise.silu_mul import SiluMulConfig, silu_mul
from tests.tolerances import assert_close


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 1), (1, 1500), (3, 64), (17, 40), (65, 3)])
def test_equals_the_reference(tokens, columns, dtype):
    gate_up = (torch.randn(tokens, 2 * columns) * 4).to(dtype)
    assert_close(silu_mul(gate_up), reference.silu_mul(gate_up.double()), dtype=dtype)


@pytest.mark.parametrize("block", [16, 64])
def test_any_block_gives_the_same(block):
    gate_up = torch.randn(3, 2 * 70).half()
    assert torch.equal(silu_mul(gate_up, SiluMulConfig(block, 1)), silu_mul(gate_up))


def test_large_gates_neither_overflow_nor_vanish():
    gate_up = torch.tensor([[-3e4, -90.0, 3e4, 20.0, 2.0, 2.0, 2.0, 0.5]]).half()
    assert_close(silu_mul(gate_up), torch.tensor([[0.0, 0.0, 6e4, 10.0]]))


def test_no_tokens():
    assert silu_mul(torch.empty(0, 64).half()).shape == (0, 32)

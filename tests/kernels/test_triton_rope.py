"""The Triton RoPE against the reference in float64, and that against complex numbers."""

import pytest
import torch

from qoff.kernels.reference import elementwise as reference
from qoff.kernels.triton.elementwise.rope import rope
from tests.tolerances import assert_close


def tables(positions, rotary):
    """float32 cos and sin [positions, rotary / 2] of base 10000."""
    frequencies = 10000.0 ** -(torch.arange(0, rotary, 2) / rotary)
    angles = torch.arange(positions)[:, None] * frequencies
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "rotary"),
    [
        (1, 1, 64, 64),
        (3, 5, 80, 80),
        (4, 3, 80, 32),
        (17, 2, 96, 96),
        (2, 4, 128, 64),
        (2, 1, 256, 2),
    ],
)
def test_equals_the_reference(tokens, heads, head_dim, rotary, dtype):
    x = torch.randn(tokens, heads, head_dim).to(dtype)
    positions = torch.randint(0, 50, (tokens,))
    cos, sin = tables(50, rotary)
    y = rope(x, positions, cos, sin)
    expected = reference.rope(x.double(), positions, cos.double(), sin.double())
    assert_close(y, expected, dtype=dtype)
    assert torch.equal(y[..., rotary:], x[..., rotary:])


def test_tokens_that_lie_apart_and_int32_positions():
    qkv = torch.randn(5, 3 * 64 * 3).half()
    x = qkv.view(5, 9, 64)[:, 3:6]
    cos, sin = tables(9, 64)
    positions = torch.tensor([8, 0, 3, 3, 1], dtype=torch.int32)
    y = rope(x, positions, cos, sin)
    assert y.is_contiguous()
    assert_close(y, reference.rope(x, positions, cos, sin))


def test_the_reference_turns_complex_numbers():
    x, positions = torch.randn(3, 2, 64).double(), torch.tensor([5, 0, 2])
    cos, sin = (t.double() for t in tables(6, 64))
    y = reference.rope(x, positions, cos, sin)

    def as_complex(z):
        return torch.view_as_complex(z.unflatten(-1, (2, 32)).mT.contiguous())

    turned = as_complex(x) * torch.complex(cos, sin)[positions][:, None]
    assert_close(torch.view_as_real(as_complex(y)), torch.view_as_real(turned))


def test_no_tokens():
    cos, sin = tables(1, 64)
    assert rope(torch.empty(0, 2, 64).half(), torch.empty(0).long(), cos, sin).shape == (0, 2, 64)

"""The Triton merge against attention over all keys, and its reference in float64."""

import pytest
import torch

from qoff.kernels.reference import kv_blocks as reference
from qoff.kernels.triton.attention.merge import merge
from tests.tolerances import assert_close


def parts_of(parts, tokens, heads, head_dim, dtype):
    """Partial results of attention, some of them without keys."""
    outs = torch.randn(parts, tokens, heads, head_dim).to(dtype)
    lses = torch.randn(parts, tokens, heads) * 4
    lses[torch.rand(lses.shape) < 0.2] = -torch.inf
    return outs, lses


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("parts", "tokens", "heads", "head_dim"),
    [(1, 1, 1, 64), (2, 3, 5, 80), (3, 1, 4, 128), (9, 2, 3, 96), (5, 1, 2, 256), (70, 1, 3, 64)],
)
def test_equals_the_reference(parts, tokens, heads, head_dim, dtype):
    outs, lses = parts_of(parts, tokens, heads, head_dim, dtype)
    out, lse = merge(outs, lses)
    expected, expected_lse = reference.merge(outs.double(), lses.double())
    assert out.dtype == dtype
    assert_close(out, expected, dtype=dtype)
    assert_close(lse, expected_lse, dtype=torch.float32)


def test_the_reference_is_attention_over_all_keys():
    q, k, v = torch.randn(3, 16).double(), torch.randn(40, 16).double(), torch.randn(40, 8).double()
    scores = q @ k.T
    outs, lses = [], []
    for keys in (slice(0, 7), slice(7, 8), slice(8, 40)):
        outs.append(scores[:, keys].softmax(-1) @ v[keys])
        lses.append(scores[:, keys].logsumexp(-1))
    out, lse = reference.merge(torch.stack(outs)[:, None], torch.stack(lses)[:, None])
    assert_close(out[0], scores.softmax(-1) @ v)
    assert_close(lse[0], scores.logsumexp(-1))


@pytest.mark.parametrize("implementation", [merge, reference.merge])
def test_parts_without_keys_count_nothing_whatever_they_hold(implementation):
    outs, lses = torch.randn(4, 2, 3, 64).half(), torch.randn(4, 2, 3)
    expected, expected_lse = implementation(outs[1:3].contiguous(), lses[1:3].contiguous())
    outs[0], lses[0] = torch.nan, -torch.inf
    outs[3], lses[3] = torch.inf, -torch.inf
    out, lse = implementation(outs, lses)
    assert_close(out, expected)
    assert_close(lse, expected_lse)


@pytest.mark.parametrize("implementation", [merge, reference.merge])
def test_no_keys_at_all(implementation):
    outs, lses = torch.full((3, 2, 2, 64), torch.nan).half(), torch.full((3, 2, 2), -torch.inf)
    lses[1, 0, 1] = 2.0
    outs[1, 0, 1] = 7.0
    out, lse = implementation(outs, lses)
    expected, expected_lse = torch.zeros(2, 2, 64), torch.full((2, 2), -torch.inf)
    expected[0, 1], expected_lse[0, 1] = 7.0, 2.0
    assert torch.equal(out, expected.half())
    assert_close(lse, expected_lse)
    assert bool((lse.isneginf() == expected_lse.isneginf()).all())


def test_log_sum_exps_far_apart():
    outs = torch.stack((torch.full((1, 1, 64), 3.0), torch.full((1, 1, 64), 5.0)))
    out, lse = merge(outs, torch.tensor([-1e4, 1e4]).view(2, 1, 1))
    assert_close(out, torch.full((1, 1, 64), 5.0))
    assert_close(lse, torch.full((1, 1), 1e4))

"""What adapters add to a packed matrix: the compiled job against the reference, and its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.layout.ending import GATED_SILU, Norm
from qoff.kernels.layout.low_rank import LowRank, LowRanks
from qoff.kernels.reference import ops as reference
from qoff.quant import quantize
from tests.tolerances import INT16_ACTIVATIONS, assert_close

N, K = 96, 64


def adapter(ranks: list[int], rows: int = N, dtype: torch.dtype = torch.float32) -> LowRank:
    """Random factors of a matrix whose parts take blocks of 16 rows in turn."""
    down, up, first, times = (torch.randn(shape) for shape in LowRank.shapes(rows, K, ranks))
    down[sum(ranks) :] = 0
    for block in range(rows // 16):
        part = block % len(ranks)
        up[block, ranks[part] :] = 0
        first[block] = sum(ranks[:part])
    return LowRank(down.to(dtype), up.to(dtype), first.long(), times)


def widened(one: LowRank | None) -> LowRank | None:
    """The same in float32, with what blocks are multiplied by in them."""
    if one is None:
        return None
    up = one.up.float() * one.times[:, None, None]
    return LowRank(one.down.float(), up, one.first, torch.ones(len(up)))


@pytest.fixture(scope="module")
def ranks() -> LowRanks:
    torch.manual_seed(0)
    half, short = torch.float16, torch.bfloat16
    each = [adapter([8]), None, adapter([3, 5], dtype=half), adapter([1, 0, 7], dtype=short)]
    return LowRanks(each)


@pytest.mark.parametrize("tokens", [1, 2, 5, 64])
@pytest.mark.parametrize("rows", [slice(0, N), slice(32, 80)])
def test_each_row_has_its_adapter(ranks: LowRanks, tokens: int, rows: slice) -> None:
    x, which = torch.randn(tokens, K), torch.arange(tokens) % 5 - 1
    norm, bias = Norm(torch.rand(K), 1e-5, scale=0.7), torch.randn(rows.stop - rows.start)
    both: list[dict[str, Any]] = [{}, {"norm": norm, "bias": bias}]
    for more in both:
        found = cpu.low_rank(x, ranks, which, rows, **more)
        assert_close(found, reference.low_rank(x, ranks, which, rows, **more))
        wide = LowRanks([widened(one) for one in ranks.each])
        assert torch.equal(found, cpu.low_rank(x, wide, which, rows, **more))
        alone = found[(which < 0) | (which == 1)]
        assert torch.equal(alone, more.get("bias", torch.zeros(1)).expand_as(alone))


@pytest.mark.parametrize("gated", [False, True])
def test_a_bias_of_each_row_goes_into_the_product(gated: bool) -> None:
    torch.manual_seed(1)
    packed = quantize(torch.randn(N, K), 4, 32, "rtn", "rows16")
    x, bias = torch.randn(5, K), torch.randn(5, N)
    bias[2] = 0
    end: dict[str, Any] = {"end": GATED_SILU} if gated else {"residual": torch.randn(5, N)}
    found = cpu.w4_linear(x, packed, bias=bias, **end)
    wanted = reference.w4_linear(x, packed, bias=bias, **end)
    assert_close(found, wanted, tolerance=INT16_ACTIVATIONS)
    assert torch.equal(found[2], cpu.w4_linear(x, packed, **end)[2])


@pytest.mark.parametrize(
    ("x", "which", "rows", "message"),
    [
        (torch.zeros(2, K), torch.zeros(3, dtype=torch.int64), slice(0, N), "which must be"),
        (torch.zeros(2, K), torch.zeros(2, dtype=torch.int64), slice(8, N), "whole blocks of 16"),
        (torch.zeros(2, 32), torch.zeros(2, dtype=torch.int64), slice(0, N), "down must be"),
    ],
)
def test_operands_that_do_not_fit_are_refused(
    ranks: LowRanks, x: Tensor, which: Tensor, rows: slice, message: str
) -> None:
    with pytest.raises(OpError, match=message):
        cpu.low_rank(x, ranks, which, rows)

"""Gathered rows are the dequantized rows, bit for bit."""

from __future__ import annotations

import pytest
import torch

from qoff.errors import OpError
from qoff.kernels.embedding import embedding
from qoff.kernels.layout.scales import SCALE_DTYPES
from tests.kernels.operands import random_weight


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("n", [1, 33, 160])
@pytest.mark.parametrize("packing", ["rows16", "split32"])
def test_equals_reference(n: int, bits: int, packing: str) -> None:
    weight = random_weight(n, 96, bits, 32, packing=packing)
    ids = torch.randint(0, n, (20,))
    assert torch.equal(embedding(ids, weight), weight.dequantize()[ids])


@pytest.mark.parametrize("packing", ["rows16", "split32"])
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_scaled_rows_are_added_in_place(scale_dtype: torch.dtype, packing: str) -> None:
    weight = random_weight(33, 96, 4, 32, scale_dtype=scale_dtype, packing=packing)
    ids, hidden = torch.randint(0, 30, (5,)), torch.randn(5, 200)[:, :96]
    expected = hidden + weight.dequantize()[ids + 3] * 1.7
    embedding(ids, weight, offset=3, scale=1.7, residual=hidden, out=hidden)
    assert torch.equal(hidden, expected)


@pytest.mark.parametrize("ids", [[-1], [0, 33]])
def test_ids_out_of_range_are_refused(ids: list[int]) -> None:
    with pytest.raises(OpError, match="rows 0 to 32"):
        embedding(torch.tensor(ids), random_weight(33, 64))


@pytest.mark.parametrize("packing", ["rows16", "split32"])
def test_several_rows_of_each(packing: str) -> None:
    weight = random_weight(35, 64, 6, 32, packing=packing)
    ids = torch.tensor([4, 0, 6, 7])  # the last one is beyond the matrix, and read as 0
    wanted = weight.dequantize().view(7, 5, 64)[ids % 7].flatten(0, 1) * 1.5
    assert torch.equal(embedding(ids, weight, scale=1.5, rows_each=5), wanted)
    with pytest.raises(OpError, match="rows 0 to 34"):
        embedding(torch.tensor([-1]), weight, rows_each=5)

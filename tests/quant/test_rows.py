"""Row moves of quantized matrices: the same moves of their values, code for code."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qoff.errors import QuantizationError
from qoff.kernels.layout.packing import PACKINGS
from qoff.quant import concat_rows, quantize
from qoff.quant.rows import reordered, whole_blocks

packings = st.sampled_from(list(PACKINGS))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 40), packings, st.booleans()), min_size=1, max_size=4))
def test_joined_rows_have_the_values_of_their_parts(parts):
    made = [
        quantize(
            torch.randn(n, 64), 4, 32, "rtn", packing, torch.float32 if wide else torch.float16
        )
        for n, packing, wide in parts
    ]
    joined = concat_rows(made)
    assert joined.packing == made[0].packing
    assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in made]))
    wide = any(part[2] for part in parts)
    assert joined.scale_min.dtype == (torch.float32 if wide else torch.float16)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 70), st.data())
def test_whole_blocks_are_moved_as_they_are(n, data):
    w = torch.randn(n, 32)
    q = quantize(w, 4, 32, "rtn", "rows16")
    blocks = data.draw(st.permutations(range(-(-n // 16))))[: data.draw(st.integers(1, 4))]
    order = torch.cat([torch.arange(16 * b, min(n, 16 * b + 16)) for b in blocks])
    short = n % 16 and n // 16 in blocks[:-1]  # a block that is not full stands before others
    found = whole_blocks(q, order)
    assert (found is None) == bool(short)
    assert found is None or found.tolist() == list(blocks)
    got, expected = reordered(q, order), quantize(w[order], 4, 32, "rtn", "rows16")
    assert torch.equal(got.codes, expected.codes)
    assert torch.equal(got.scale_min, expected.scale_min)


@pytest.mark.parametrize("order", [[1], [0, 2], [*range(8, 24)], [*range(16, 0, -1)], [*range(15)]])
def test_rows_that_are_no_blocks_are_moved_one_by_one(order):
    w = torch.randn(40, 32)
    q = quantize(w, 4, 32, "rtn", "rows16")
    rows = torch.tensor(order)
    assert whole_blocks(q, rows) is None
    got, expected = reordered(q, rows), quantize(w[rows], 4, 32, "rtn", "rows16")
    assert torch.equal(got.codes, expected.codes)
    assert torch.equal(got.scale_min, expected.scale_min)


def test_bad_requests_are_refused():
    q = quantize(torch.randn(12, 64), solver="rtn")
    with pytest.raises(QuantizationError, match="can be joined"):
        concat_rows([q, quantize(torch.randn(12, 128), solver="rtn")])
    with pytest.raises(QuantizationError, match="can be joined"):
        concat_rows([q, quantize(torch.randn(12, 64), bits=8, solver="rtn")])
    with pytest.raises(QuantizationError, match="at least one"):
        concat_rows([])

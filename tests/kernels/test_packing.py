"""Packings: layouts as documented, round trips, and one matrix whatever the packing."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qoff.errors import OpError
from qoff.kernels.layout.packing import (
    BITS,
    PACKINGS,
    pack_codes,
    pack_scale_min,
    packed_shapes,
    unpack_codes,
    unpack_scale_min,
)
from qoff.kernels.layout.qtensor import QTensor, repack_into
from qoff.kernels.layout.scales import SCALE_DTYPES
from qoff.quant import widened

packings = st.sampled_from(list(PACKINGS))


@st.composite
def matrices(draw, packing="split32"):
    """A QTensor of any format with random codes and scales, N not a multiple of 16 as a rule."""
    n, bits = draw(st.integers(1, 50)), draw(st.sampled_from([2, 3, 4, 5, 6, 8]))
    group = draw(st.sampled_from([32, 64, 128]))
    k = group * draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(SCALE_DTYPES))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, generator=random)
    scale, minimum = torch.randn(2, n, k // group, generator=random).to(dtype)
    if dtype == torch.uint8:
        scale, minimum = torch.randint(256, (2, n, k // group), generator=random).to(dtype)
    packed = pack_codes(codes, bits, packing), pack_scale_min(scale, minimum, packing)
    return QTensor(*packed, (n, k), bits, group, packing), codes, scale, minimum


@settings(deadline=None, max_examples=40)
@given(matrices(), packings)
def test_packing_round_trips(matrix, packing):
    q, codes, scale, minimum = matrix
    packed = pack_codes(codes, q.bits, packing)
    pairs = pack_scale_min(scale, minimum, packing)
    shapes = packed_shapes(q.shape, q.bits, q.group_size, packing)
    assert (tuple(packed.shape), tuple(pairs.shape)) == shapes
    assert torch.equal(unpack_codes(packed, q.shape, q.bits, packing), codes)
    for got, want in zip(unpack_scale_min(pairs, q.shape, packing), (scale, minimum), strict=True):
        assert torch.equal(got, want)


@settings(deadline=None, max_examples=40)
@given(matrices(), st.data())
def test_every_element_is_where_the_layout_says(matrix, data):
    q, codes, scale, minimum = matrix
    row, col = (data.draw(st.integers(0, size - 1)) for size in q.shape)
    group, block, lane = col // q.group_size, row // 16, row % 16
    cpu = q.to_packing("rows16")
    if q.bits == 8:
        half_byte, cpu_byte = q.codes[row, col], cpu.codes[block, col // 4, lane, col % 4]
        got = [half_byte, cpu_byte]
    elif q.bits != 4:
        of_bits = {2: _two_bits, 3: _three_bits, 5: _five_bits, 6: _six_bits}[q.bits]
        got = [of_bits(q.codes[row], col), of_bits(cpu.codes[block, :, lane].flatten(), col)]
    else:
        half_byte = q.codes[row, col // 32 * 16 + col % 16]
        cpu_byte = cpu.codes[block, col // 8, lane, col % 4]
        got = [half_byte >> 4 * (col % 32 // 16) & 15, cpu_byte >> 4 * (col % 8 // 4) & 15]
    assert [int(code) for code in got] == [int(codes[row, col])] * 2
    for i, values in enumerate((scale, minimum)):
        assert q.scale_min[group, row, i] == values[row, group]
        assert cpu.scale_min[block, group, i, lane] == values[row, group]


@settings(deadline=None, max_examples=40)
@given(matrices())
def test_repacking_equals_packing_and_comes_back(matrix):
    q, codes, scale, minimum = matrix
    cpu = q.to_packing("rows16")
    assert torch.equal(cpu.codes, pack_codes(codes, q.bits, "rows16"))
    assert torch.equal(cpu.scale_min, pack_scale_min(scale, minimum, "rows16"))
    back = cpu.to_packing("split32")
    assert torch.equal(back.codes, q.codes)
    assert torch.equal(back.scale_min, q.scale_min)
    assert q.to_packing("split32") is q


@settings(deadline=None, max_examples=40)
@given(matrices())
def test_padding_rows_are_zero_even_in_used_memory(matrix):
    q, *_ = matrix
    used = q.to_packing("rows16")
    used.codes.fill_(255)
    used.scale_min.view(torch.uint8).fill_(255)  # floats are NaN
    repack_into(q, used)
    rows = (
        used.codes.transpose(1, 2).flatten(0, 1),
        used.scale_min.permute(0, 3, 1, 2).flatten(0, 1),
    )
    assert not any(bool(part[q.shape[0] :].any()) for part in rows)
    assert torch.equal(used.dequantize(), q.dequantize())


@settings(deadline=None, max_examples=40)
@given(matrices(), packings)
def test_values_are_those_of_the_formula_in_every_packing(matrix, packing):
    q, codes, scale, minimum = matrix
    if scale.dtype == torch.uint8:
        span = (1 + scale % 8 / 8) * 2.0 ** (scale.float().div(8).floor() - 20)
        scale, minimum = span / 2**q.bits, -span * minimum / 256
    step, low = (x.float().repeat_interleave(q.group_size, 1) for x in (scale, minimum))
    expected = codes.float() * step + low
    assert torch.equal(q.to_packing(packing).dequantize(), expected)
    half = q.to_packing(packing).dequantize(torch.bfloat16)
    assert torch.equal(half, expected.bfloat16())


@settings(deadline=None, max_examples=20)
@given(matrices(), packings, packings)
def test_kernels_read_the_same_values(matrix, packing, wanted):
    q = matrix[0].to_packing(packing)
    found = q.for_kernels(wanted)
    wider = {2: 4, 3: 4, 5: 8, 6: 8} if wanted == "split32" else {}
    assert (found.packing, found.bits) == (wanted, wider.get(q.bits, q.bits))
    assert torch.equal(found.dequantize(), q.dequantize())


@settings(deadline=None, max_examples=20)
@given(matrices(), packings, st.integers(0, 5), st.sampled_from([1, 2]))
def test_wider_codes_smaller_groups_and_float32_scales_keep_values(matrix, packing, more, parts):
    q = matrix[0].to_packing(packing)
    bits = min(bits for bits in [2, 3, 4, 5, 6, 8] if bits >= min(8, q.bits + more))
    group = max(32, q.group_size // parts)
    expected = q.dequantize()
    assert torch.equal(widened(q, bits, group).dequantize(), expected)
    assert torch.equal(q.with_scales(torch.float32).dequantize(), expected)


@settings(deadline=None, max_examples=40)
@given(matrices(), packings, st.data())
def test_rows_of_a_matrix_are_rows_of_its_values(matrix, packing, data):
    q = matrix[0].to_packing(packing)
    n, step = q.shape[0], 16 if packing == "rows16" else 1
    start = data.draw(st.integers(0, (n - 1) // step)) * step
    stop = data.draw(st.sampled_from([*range(start + step, n, step), n]))
    assert torch.equal(q.rows(start, stop).dequantize(), q.dequantize()[start:stop])


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("offset", [0, 4, 6])
def test_codes_may_lie_anywhere_in_the_memory_they_are_read_from(bits, offset):
    memory = torch.randint(0, 256, (offset + 20 * 8 * bits,), dtype=torch.uint8)
    codes = memory[offset:].view(20, 8 * bits)
    q = QTensor(codes, torch.randn(2, 20, 2), (20, 64), bits, 32, "split32")
    assert torch.equal(q.to_packing("rows16").dequantize(), q.dequantize())


def test_large_matrices_repack_in_pieces():
    """Shapes for which a repack takes several pieces and a rest, at all code widths."""
    for bits in BITS:
        codes = torch.randint(0, 2**bits, (309, 2048), dtype=torch.uint8)
        scales = torch.randn(2, 309, 16)
        made = {
            name: QTensor(
                pack_codes(codes, bits, name),
                pack_scale_min(scales[0], scales[1], name),
                (309, 2048),
                bits,
                128,
                name,
            )
            for name in PACKINGS
        }
        for source in made.values():
            for name, want in made.items():
                got = source.to_packing(name)
                assert torch.equal(got.codes, want.codes)
                assert torch.equal(got.scale_min, want.scale_min)


@pytest.mark.parametrize(("group", "dtype"), [(64, torch.float16), (32, torch.uint8)])
def test_four_bits_cost_four_and_a_half(group, dtype):
    q = _zeros(48, 256, 4, group, dtype)
    for name in PACKINGS:
        assert q.to_packing(name).nbytes * 8 == 4.5 * 48 * 256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packing": "tiles"}, "unknown packing 'tiles'"),
        ({"bits": 7}, "codes of 7 bits"),
        ({"group_size": 48}, "group size 48"),
        ({"group_size": 128}, "does not divide the 192 columns"),
        ({"shape": (5, 128)}, "codes of a 4-bit split32"),
        ({"shape": (0, 192)}, "of ones up"),
        ({"codes": torch.zeros(4, 96)}, "float32"),
        ({"scale_min": torch.zeros(3, 4, 2, dtype=torch.bfloat16)}, "bfloat16"),
        ({"scale_min": torch.zeros(4, 3, 2)}, "scale_min of a"),
        ({"codes": torch.zeros(96, 4, dtype=torch.uint8).T}, "contiguous"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, message):
    with pytest.raises(OpError, match=message):
        replace(_zeros(4, 192, 4, 64), **change)


def test_bad_uses_are_refused():
    q = _zeros(40, 64, 4, 32)
    with pytest.raises(OpError, match="cut through a block"):
        q.to_packing("rows16").rows(8, 32)
    with pytest.raises(OpError, match="cut through a block"):
        q.to_packing("rows16").rows(16, 39)
    with pytest.raises(OpError, match=r"rows 8\.\.41 of a matrix of 40"):
        q.rows(8, 41)
    with pytest.raises(OpError, match="unknown packing"):
        q.to_packing("tiles")
    with pytest.raises(OpError, match="shape"):
        repack_into(q, _zeros(16, 64, 4, 32).to_packing("rows16"))
    with pytest.raises(OpError, match="cannot repack split32"):
        repack_into(q, _zeros(40, 64, 4, 32))
    shifted = replace(q, codes=torch.zeros(40 * 32 + 4, dtype=torch.uint8)[4:].view(40, 32))
    with pytest.raises(OpError, match="multiple of 8 bytes"):
        repack_into(q.to_packing("rows16"), shifted)
    with pytest.raises(OpError, match="uint8"):
        pack_codes(torch.zeros(4, 32), 4, "split32")


def _two_bits(row, col):
    """Code `col` of a row of bytes, as the layout says."""
    block, j = row[col // 32 * 8 :][:8].tolist(), col % 32
    return block[j // 16 * 4 + j % 4] >> 2 * (j % 16 // 4) & 3


def _three_bits(row, col):
    block, j = row[col // 32 * 12 :][:12].tolist(), col % 32
    if j < 24:
        return block[j // 8 * 4 + j % 4] >> (3 if j % 8 > 3 else 0) & 7
    first, last = block[j % 4 + (0 if j < 28 else 8)], block[j % 4 + 4]
    return first >> 6 | (last >> (6 if j < 28 else 7) & 1) << 2


def _five_bits(row, col):
    block, j = row[col // 32 * 20 :][:20].tolist(), col % 32
    if j < 20:
        return block[j] & 31
    word = [block[j % 4 + 4 * i] for i in range(5)]
    if j < 24:
        return word[0] >> 5 | (word[1] >> 5 & 3) << 3
    if j < 28:
        return word[2] >> 5 | (word[3] >> 5 & 3) << 3
    return word[4] >> 5 | word[1] >> 7 << 3 | word[3] >> 7 << 4


def _six_bits(row, col):
    block, j = row[col // 32 * 24 :][:24].tolist(), col % 32
    if j < 24:
        return block[j] & 63
    return sum(block[j - 24 + 8 * i] >> 6 << 2 * i for i in range(3))


def _zeros(n: int, k: int, bits: int, group: int, dtype=torch.float16) -> QTensor:
    codes = torch.zeros(n, k * bits // 8, dtype=torch.uint8)
    scale_min = torch.zeros(k // group, n, 2, dtype=dtype)
    return QTensor(codes, scale_min, (n, k), bits, group, "split32")

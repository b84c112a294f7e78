"""The record of a block: where its parts lie, and what packing keeps of K and V."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qoff.errors import OpError
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, CLIPPED, HEAD_DIMS, KV_BITS, KVFormat
from qoff.kernels.layout.rotation import hadamard
from qoff.kernels.reference.kv_blocks import dequantize_blocks, quantize_blocks
from tests.tolerances import assert_close


@st.composite
def forms(draw):
    head_dim, bits = draw(st.sampled_from(HEAD_DIMS)), st.sampled_from(KV_BITS)
    return KVFormat(head_dim, draw(bits), draw(bits))


@st.composite
def blocks(draw):
    """A form, and K and V [heads, 64, D] with offsets, outlier channels, and constant tokens."""
    form, heads = draw(forms()), draw(st.integers(1, 3))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    k, v = torch.randn(2, heads, BLOCK_TOKENS, form.head_dim, generator=random)
    k = k * 10.0 ** draw(st.integers(-3, 2)) + draw(st.sampled_from([0.0, 3.0, -40.0]))
    if draw(st.booleans()):
        k[..., ::13] *= 20
    if draw(st.booleans()):
        v[:, 5], k[..., 2] = 1.5, -0.25
    return form, k, v


def steps(record, form):
    """The scale and minimum of every element of K and V, float32 [heads, 64, D] each."""
    _, k_scale, k_min, _, v_scale, v_min = form.views(record)

    def per_token(params):
        parts = params.float().unflatten(-1, (form.parts, BLOCK_TOKENS))
        return parts.mT.repeat_interleave(form.head_dim // form.parts, -1)

    def per_channel(params):
        return params.float()[:, None].expand(-1, BLOCK_TOKENS, -1)

    return (per_channel(k_scale), per_channel(k_min)), (per_token(v_scale), per_token(v_min))


def within(x, scale, low, bits):
    """x, or the nearest level of the clipped range."""
    return x.clamp(low, low + (2**bits - 1) * scale) if bits in CLIPPED else x


@given(blocks())
def test_rounding_error_is_half_a_step_plus_that_of_float16(block):
    form, k, v = block
    record = quantize_blocks(k, v, form)
    unpacked = dequantize_blocks(record, form)
    bits = form.k_bits, form.v_bits
    for x, y, (scale, low), width in zip((k, v), unpacked, steps(record, form), bits, strict=True):
        top = 2**width - 1
        stored = (top * scale + low.abs()) * 2.0**-11 + (top + 1) * 2.0**-25
        arithmetic = (top * scale + low.abs()) * 2.0**-21
        near = within(x, scale, low, width)
        assert bool(((near - y).abs() <= scale / 2 + stored * 1.01 + arithmetic).all())


@given(blocks())
def test_the_first_token_of_a_sequence_is_kept_to_float16(block):
    form, k, v = block
    opening = torch.arange(len(k)) == 0
    record, plain = quantize_blocks(k, v, form, opening), quantize_blocks(k, v, form)
    assert torch.equal(record[~opening], plain[~opening])
    (scale, low), values = steps(record, form)[0], steps(record, form)[1]
    assert all(map(torch.equal, values, steps(plain, form)[1]))
    bits, near = form.k_bits, k.clone()
    near[0, 1:] = within(k[0], scale[0], low[0], bits)[1:]
    error, top = (near - dequantize_blocks(record, form)[0])[0].abs(), 2**bits - 1
    stored = (top * scale + low.abs())[0] * 2.0**-11 + (top + 1) * 2.0**-25
    arithmetic = (top * scale + low.abs())[0] * 2.0**-21
    rounded = low[0, 0].abs() * 2.0**-11 + 2.0**-25  # of the minimum, to float16
    assert bool((error[0] <= rounded * 1.01 + arithmetic[0]).all())
    assert bool((error <= scale[0] * (1 / 2 + 1 / 64) + stored * 1.01 + arithmetic).all())
    widest = (top / (top // 2)) * steps(plain, form)[0][0] / (1 - 2 * CLIPPED.get(bits, 0))
    assert bool((scale <= widest * (1 + 2.0**-9) + 2.0**-24).all())


@given(blocks())
def test_packing_again_what_was_unpacked_changes_little(block):
    form, k, v = block
    first = dequantize_blocks(quantize_blocks(k, v, form), form)
    second = dequantize_blocks(quantize_blocks(*first, form), form)
    for x, y, (scale, low) in zip(
        first, second, steps(quantize_blocks(*first, form), form), strict=True
    ):
        assert bool(((x - y).abs() <= scale * 0.6 + low.abs() * 2.0**-10 + 1e-6).all())


@given(blocks())
def test_equal_values_are_kept_to_float16(block):
    form, k, _ = block
    v = torch.full_like(k, 0.3)
    record = quantize_blocks(k, v, form)
    assert not form.views(record)[3].any()
    assert torch.equal(dequantize_blocks(record, form)[1], v.half().float())


@given(forms())
def test_parts_lie_one_after_another_and_fill_the_record(form):
    record = torch.zeros(form.nbytes, dtype=torch.uint8)
    sizes = []
    for number, part in enumerate(form.views(record), start=1):
        assert not part.view(torch.uint8).any(), "parts overlap"
        part.view(torch.uint8).fill_(number)
        sizes.append(part.nbytes)
    assert bool((record.diff() >= 0).all() and record[0] == 1 and record[-1] == 6)
    offsets = form.k_scale, form.v_codes, form.v_scale, form.nbytes
    assert offsets == (sizes[0], sum(sizes[:3]), sum(sizes[:4]), sum(sizes))
    assert all(offset % 16 == 0 for offset in offsets)
    assert form.nbytes % 64 == 0


@pytest.mark.parametrize(
    ("form", "nbytes"),
    [
        (KVFormat(64), 64 * 64 + 4 * (64 + 64)),
        (KVFormat(128), 64 * 128 + 4 * (128 + 2 * 64)),
        (KVFormat(80, k_bits=8), 64 * (80 + 40) + 4 * (80 + 2 * 64)),
        (KVFormat(96, v_bits=8), 64 * (48 + 96) + 4 * (96 + 2 * 64)),
        (KVFormat(256), 64 * 256 + 4 * (256 + 2 * 64)),
        (KVFormat(64, v_bits=2), 64 * (32 + 16) + 4 * (64 + 64)),
        (KVFormat(80, 3, 2), 64 * (30 + 20) + 4 * (80 + 2 * 64)),
    ],
)
def test_sizes_of_records(form, nbytes):
    assert form.nbytes == nbytes


def test_a_byte_holds_a_channel_and_that_half_a_head_on():
    form = KVFormat(64)
    k = torch.zeros(BLOCK_TOKENS, 64)
    k[0], k[1] = 15.0, 0.0  # every channel from 0 to 15: scale 1, minimum 0
    k[2, 3], k[2, 35] = 5.0, 9.0
    codes = form.views(quantize_blocks(k, k, form))[0]
    assert int(codes[2, 3]) == 5 | 9 << 4
    assert int(codes[0, 0]) == 255
    assert not codes[1].any()


@pytest.mark.parametrize(
    ("bits", "byte", "where"),
    [(2, 1 | 2 << 2 | 3 << 4, [(5, 1), (37, 2), (5, 35, 3)]),
     (3, 1 | 1 << 3 | 1 << 4, [(5, 4), (53, 4), (5, 35, 4)])],
)  # fmt: skip
def test_a_byte_of_few_bits_holds_tokens_that_are_apart(bits, byte, where):
    """Scale 1 and minimum 0, of a range of which some is left off at either end."""
    form, off = KVFormat(64, bits, bits), CLIPPED[bits]
    top = 2**bits - 1
    k = torch.zeros(BLOCK_TOKENS, 64)
    k[0], k[1] = -top * off / (1 - 2 * off), top + top * off / (1 - 2 * off)
    for token, *channel, value in where:
        k[token, (channel or [3])[0]] = value
    record = quantize_blocks(k, k, form)
    assert torch.equal(form.views(record)[1], torch.ones(64).half())
    row = 5 if bits == 2 else 32 + 5
    assert int(form.views(record)[0][row, 3]) == byte


def test_hadamard_is_orthonormal_and_symmetric():
    h = hadamard(64, torch.float64)
    assert_close(h @ h, torch.eye(64, dtype=torch.float64))
    assert torch.equal(h, h.T)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((72,), "heads of 72 channels"),
        ((64, 5), "2, 3, 4 or 8 bits, not 5 and 4"),
        ((64, 4, 16), "2, 3, 4 or 8 bits, not 4 and 16"),
    ],
)
def test_formats_that_do_not_exist_are_refused(arguments, message):
    with pytest.raises(OpError, match=message):
        KVFormat(*arguments)


@pytest.mark.parametrize("records", [torch.zeros(2, 10).byte(), torch.zeros(2, 4608)])
def test_records_of_another_size_or_dtype_are_refused(records):
    with pytest.raises(OpError, match="uint8"):
        KVFormat(64).views(records)

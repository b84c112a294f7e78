"""Blocks packed by the CPU's job are the reference's, bit for bit; what is left over is moved."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.cpu.packed_attention.pack import move_tokens, pack_blocks
from qoff.kernels.cpu.packed_attention.places import Moves, Origins
from qoff.kernels.layout.heads import HeadShape, cache_shapes, read_keys
from qoff.kernels.layout.kv_format import HEAD_DIMS, KVFormat
from qoff.kernels.layout.rotation import rotate_values, rotation_signs, value_run
from qoff.kernels.reference.kv_blocks import quantize_blocks
from tests.tolerances import assert_close

SLOTS, HEADS, CAPACITY = 3, 2, 192
# Slot, place of the first token, whether the block opens a sequence.
ORIGINS = [(2, 0, 1), (0, 64, 0), (0, 128, 0), (1, 16, 1)]


def tokens(dim: int, capacity: int = CAPACITY) -> tuple[Tensor, Tensor]:
    """K and V as a cache has them: with offsets, outlier channels, and equal numbers in groups."""
    keys, values = map(torch.randn, cache_shapes(SLOTS, HeadShape(2, HEADS, dim, 1.0), capacity))
    keys = keys * 3 - 40
    keys[..., ::13, :] *= 20
    keys[:, :, :, 2] = -0.25
    keys[:, :, :, 5] = 0.0
    values[:, :, 70] = 1.5
    values[:, :, 71] = 0.0
    values[:, :, 72] *= 1e-7
    return keys, values


def narrowed(both: tuple[Tensor, Tensor], dim: int) -> tuple[Tensor, Tensor]:
    """The same keys with values of the first channels alone."""
    return both[0], both[1][..., :dim].contiguous()


def numbered(origins: list[tuple[int, int, int]]) -> Origins:
    """Blocks one after another in the memory of records."""
    return Origins(np.array([(*origin, i) for i, origin in enumerate(origins)]))


def rotated(v: Tensor) -> Tensor:
    """As `rotate_values`, the sums in order: so are torch's up to runs of 128 channels."""
    run, signs = value_run(v.shape[-1]), rotation_signs(v.shape[-1])
    runs = v.unflatten(-1, (-1, run))
    total = torch.zeros_like(runs)
    for i in range(run):
        total += runs[..., i : i + 1] * signs[i]
    assert_close(total.flatten(-2), rotate_values(v))
    return total.flatten(-2)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("bits", [(4, 4), (8, 8), (8, 4), (4, 8), (3, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_records_are_the_references_bit_for_bit(
    dim: int, bits: tuple[int, int], turned: bool
) -> None:
    form, (keys, values) = KVFormat(dim, *bits), tokens(dim)
    found = torch.zeros(len(ORIGINS), HEADS, form.nbytes, dtype=torch.uint8)
    pack_blocks(keys, values, form, numbered(ORIGINS), found, rotated=turned)
    k, v = (
        torch.stack([x[slot][:, place : place + 64] for slot, place, _ in ORIGINS])
        for x in ([read_keys(keys, slot, CAPACITY) for slot in range(SLOTS)], values)
    )
    opening = torch.tensor([[opens == 1] for *_, opens in ORIGINS])
    expected = quantize_blocks(k, rotated(v) if turned else v, form, opening)
    for mine, theirs in zip(form.views(found), form.views(expected), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_latent_records_are_the_references_and_hold_keys_alone(bits: int) -> None:
    form = KVFormat(96, bits, bits, latent=64)
    shape = HeadShape(2, HEADS, 96, 1.0, latent=64)
    keys, values = map(torch.randn, cache_shapes(SLOTS, shape, CAPACITY))
    found = torch.zeros(len(ORIGINS), HEADS, form.nbytes, dtype=torch.uint8)
    pack_blocks(keys, values, form, numbered(ORIGINS), found, rotated=True)
    k = torch.stack(
        [read_keys(keys, slot, CAPACITY)[:, place : place + 64] for slot, place, _ in ORIGINS]
    )
    opening = torch.tensor([[opens == 1] for *_, opens in ORIGINS])
    assert torch.equal(found, quantize_blocks(k, k, form, opening))
    assert form.nbytes == 64 * 96 * bits // 8 + 4 * 96


def test_a_number_that_is_none_shows_in_its_channel_and_its_token() -> None:
    form, (keys, values) = KVFormat(64), tokens(64)
    keys[2, 0, 1, 7, 3] = values[2, 0, 9, 60] = torch.nan
    found = torch.zeros(1, HEADS, form.nbytes, dtype=torch.uint8)
    pack_blocks(keys, values, form, numbered([(2, 0, 0)]), found)
    _, k_scale, _, _, v_scale, _ = form.views(found)
    for scales, there in ((k_scale, 7), (v_scale, 9)):
        assert scales.isnan().nonzero().tolist() == [[0, 0, there]]


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("value_dim", [80, 48])
def test_tokens_move_whole_and_in_order(value_dim: int, same: bool) -> None:
    keys, values = narrowed(tokens(80), value_dim)
    to = (keys, values) if same else narrowed(tokens(80, 144), value_dim)
    old = [(read_keys(keys, slot, CAPACITY), values[slot].clone()) for slot in range(SLOTS)]
    moves = [(0, 64, 128, 0, 0), (1, 128, 37, 1, 96)] if same else [(2, 64, 128, 1, 16)]
    move_tokens((keys, values), to, Moves(np.array(moves)))
    for slot, place, count, to_slot, to_place in moves:
        after = slice(to_place, to_place + count)
        for found, known in zip(
            (read_keys(to[0], to_slot, to_place + count), to[1][to_slot]), old[slot], strict=True
        ):
            assert torch.equal(found[:, after], known[:, place : place + count])


@pytest.mark.parametrize("origin", [(3, 0, 0), (-1, 0, 0), (0, 144, 0), (0, 8, 0)], ids=str)
def test_blocks_outside_of_the_cache_are_refused(origin: tuple[int, int, int]) -> None:
    form, (keys, values) = KVFormat(64), tokens(64)
    records = torch.zeros(1, HEADS, form.nbytes, dtype=torch.uint8)
    with pytest.raises(OpError, match="pack_blocks: "):
        pack_blocks(keys, values, form, numbered([origin]), records)

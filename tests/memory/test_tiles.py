"""A unit in tiles: every row is served once, bit for bit, in less memory than the whole takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qoff.checkpoint import Checkpoint, QuantEntry
from qoff.errors import BudgetError
from qoff.kernels.layout.qtensor import QTensor
from qoff.memory import (
    HEAD,
    Residency,
    WeightStore,
    plan_residency,
    residency_of,
)
from qoff.memory.plan import EMBEDDING, LM_HEAD, streamed_images
from qoff.memory.plan.tiles import TILE_ROWS, slot_bytes, split_rows
from tests.instruments import POISON
from tests.memory.checkpoints import Truth, check_pass, same_bits, write_checkpoint
from tests.memory.kinds import racing_transfers

LAYERS = 3
KINDS = [(p, t) for p in ("rows16", "split32") for t in (True, False)]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    packing, tied = request.param
    path = tmp_path_factory.mktemp("ck") / "model"
    return write_checkpoint(path, LAYERS, packing, tied, scale=3, odd=tied)


@pytest.fixture(scope="module")
def truth(checkpoint: Checkpoint) -> dict[str, Truth]:
    return {packing: Truth(checkpoint, packing) for packing in ("rows16", "split32")}


@settings(max_examples=8)
@given(
    tile_bytes=st.integers(1, 60_000),
    slots=st.sampled_from([2, 3]),
    packing=st.sampled_from(["rows16", "split32"]),
    resident=st.sets(st.sampled_from(["model.layers.1.mlp.down_proj", "model.norm.weight"])),
)
def test_tiles_of_any_size_serve_every_row_once(
    tile_bytes: int,
    slots: int,
    packing: str,
    resident: set[str],
    checkpoint: Checkpoint,
    truth: dict[str, Truth],
) -> None:
    plan = residency_of(checkpoint, resident, slots, packing=packing, tile_bytes=tile_bytes)
    with WeightStore(
        checkpoint,
        plan,
        transfers=racing_transfers(),
        instrumentation=POISON,
    ) as store:
        for _ in range(2):
            check_pass(store, truth[packing])
        assert store.stats.arena_peak == plan.device_bytes


@given(nbytes=st.integers(0, 200_000), packing=st.sampled_from(["rows16", "split32"]))
def test_as_few_tiles_as_fit_and_none_larger_than_told(
    nbytes: int, packing: str, checkpoint: Checkpoint
) -> None:
    for entry in (e for f in checkpoint.files for e in f.weights.values()):
        if isinstance(entry, QuantEntry):
            rows = split_rows(entry, packing, nbytes)
            assert rows % TILE_ROWS == 0
            tiles = -(-entry.shape[0] // rows)
            assert rows == TILE_ROWS or slot_bytes(entry, packing, rows) <= nbytes
            if tiles > 1:
                wider = -(-entry.shape[0] // (tiles - 1))
                wider = -(-wider // TILE_ROWS) * TILE_ROWS
                assert slot_bytes(entry, packing, wider) > nbytes


@given(tile_bytes=st.integers(1, 60_000), packing=st.sampled_from(["rows16", "split32"]))
def test_no_tile_takes_more_than_its_slot(
    tile_bytes: int, packing: str, checkpoint: Checkpoint
) -> None:
    plan = residency_of(checkpoint, [], packing=packing, tile_bytes=tile_bytes)
    images = streamed_images(checkpoint, plan)
    assert {unit: image.nbytes for unit, image in images.items()} == plan.streamed
    for image in images.values():
        assert image.nbytes <= plan.slot_bytes
        if image.repacked:
            assert image.raw_bytes <= plan.staging_bytes


def least(checkpoint: Checkpoint) -> int:
    with pytest.raises(BudgetError) as refused:
        plan_residency(checkpoint, 0)
    found = re.search(r"at least ([\d,]+)", str(refused.value))
    assert found is not None
    return int(found[1].replace(",", ""))


def untiled_least(checkpoint: Checkpoint) -> int:
    """The budget from which on whole units fit."""
    names = [n for f in checkpoint.files for n in f.weights]
    head = [n for n in checkpoint.outer.weights if n != EMBEDDING or LM_HEAD not in names]
    return min(residency_of(checkpoint, kept).device_bytes for kept in (names, head, []))


def test_two_tiles_are_enough(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "large", 2, scale=40)
    minimum = least(checkpoint)
    assert minimum < untiled_least(checkpoint) / 4
    plan = plan_residency(checkpoint, minimum)
    assert plan.tiled == {0, 1}  # the head is smaller than a tile
    assert plan.slot_bytes * 2 + plan.resident_bytes == plan.device_bytes <= minimum


def test_tiles_are_used_only_where_whole_units_do_not_fit(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "large", 2, scale=40)
    enough = untiled_least(checkpoint)
    assert not plan_residency(checkpoint, enough).tiles
    plans = [plan_residency(checkpoint, b) for b in range(least(checkpoint), enough, 60_000)]
    assert all(plan.tiles for plan in plans)
    counts = [len(plan.tiles) for plan in plans]
    assert counts == sorted(counts, reverse=True)


@pytest.fixture(scope="module")
def large_head(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A model of which the head is most."""
    return write_checkpoint(tmp_path_factory.mktemp("ck") / "model", 3, vocab=40_000)


def test_beside_a_large_head_layers_stay_whole(large_head: Checkpoint) -> None:
    whole = residency_of(large_head, []).slot_bytes
    plan = plan_residency(large_head, whole // 2)
    assert plan.tiled == {HEAD}
    assert 2 <= len(plan.tiles) <= 9
    assert {n for file in large_head.layers for n in file.weights} <= plan.resident


def test_less_than_that_leaves_the_head_in_more_tiles(large_head: Checkpoint) -> None:
    plans = [plan_residency(large_head, 2**20 // divisor) for divisor in (1, 2, 4)]
    counts = [len(plan.tiles) for plan in plans]
    assert counts == sorted(counts)
    for plan, divisor in zip(plans, (1, 2, 4), strict=True):
        assert plan.device_bytes <= 2**20 // divisor


@pytest.mark.parametrize("host", [False, True])
def test_rows_of_a_tied_embedding_in_tiles(tmp_path: Path, host: bool) -> None:
    for packing in ("rows16", "split32"):
        checkpoint = write_checkpoint(tmp_path / packing, 1, packing, vocab=1000)
        expected = Truth(checkpoint, "split32").units[HEAD][EMBEDDING]
        assert isinstance(expected, QTensor)
        ids = torch.tensor([999, 0, 17, 500, 17, 998, 31, 32])
        budget = residency_of(checkpoint, [], tile_bytes=9000).device_bytes
        plan: Residency = plan_residency(checkpoint, budget, host_memory=40_000 if host else None)
        assert HEAD in plan.tiled
        assert bool(plan.host) == host
        with WeightStore(checkpoint, plan) as store:
            assert same_bits(store.gather_rows(EMBEDDING, ids), expected.dequantize()[ids])


def test_a_flipped_bit_in_a_tiled_file_is_found_when_the_store_is_opened(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", 2)
    path = checkpoint.layers[1].path
    content = bytearray(path.read_bytes())
    content[-200] ^= 1
    path.write_bytes(content)
    plan = residency_of(checkpoint, [], tile_bytes=8192)
    with pytest.raises(Exception, match=path.name):
        WeightStore(checkpoint, plan)

"""What packed layers beside adapters get of a GPU, and of host memory."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qoff import train
from qoff.budgets import CPU
from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError, BudgetError
from qoff.memory.arena import PAGE
from qoff.train.boundaries import STAGES, STAGES_WITHOUT_COLUMN
from qoff.train.choice import _beside, training_plan
from qoff.train.finetune import Lora, Recipe, loaded
from qoff.train.heap import GAPS
from qoff.train.placement import placed
from qoff.train.planned import planned
from qoff.train.room import Room, room_beside, room_of
from tests.plan.machines import machine
from tests.tiny_families import TINY
from tests.tiny_models import tiny_checkpoint

LORA, TOKENS, HOST = Lora(4, 8), 64, 1 << 30
HIDDEN = 4 * TOKENS * 64  # bytes of the hidden states of a micro-batch, a multiple of pages


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama", "split32")


@pytest.fixture
def room(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Room]:
    """What training of a tiny packed model is told for so many bytes of a GPU."""
    monkeypatch.setattr("qoff.train.room.resolve_dtype", lambda *_: torch.bfloat16)

    def found(device_memory: int, micro_batches: int = 2, swapped: int = 0) -> Room:
        recipe = Recipe(str(path), LORA, TOKENS, micro_batches, 1e-4, None, 0)
        device = torch.device("cuda", 1)
        return room_of(path, LORA, recipe, device, device_memory, HOST, activation_disk=swapped)

    return found


def refused(room: Callable[..., Room], device_memory: int, *more: int) -> tuple[int, int, int]:
    """Bytes that are missing, of a training, and of packed weights."""
    with pytest.raises(BudgetError, match=r"too few by .* training takes .*, packed") as no:
        room(device_memory, *more)
    numbers = re.findall(r"(?:by|takes|weights) ([\d,]+\d)", str(no.value))
    missing, training, packed = (int(x.replace(",", "")) for x in numbers)
    return missing, training, packed


def test_packed_layers_get_the_room_that_training_leaves(room: Callable[..., Room]) -> None:
    missing, training, packed = refused(room, 1000)
    assert 1000 + missing == training + packed
    found = room(1000 + missing)
    assert found.options["max_memory"][1] == packed
    assert 0 < HOST - found.options["max_memory"]["cpu"] < 1 << 24
    assert found.options["dtype"] == torch.bfloat16
    assert 0 < (found.device_memory or 0) < training


def test_activations_on_disk_take_staging_buffers_of_host_memory(
    room: Callable[..., Room],
) -> None:
    without, with_them = (room(1 << 30, 2, n).options["max_memory"]["cpu"] for n in (0, 1 << 30))
    assert 0 < without - with_them < 1 << 26


def test_where_packed_layers_need_it_hidden_states_have_no_column(
    room: Callable[..., Room], path: Path
) -> None:
    many = 20
    missing, _, packed = refused(room, 0, many)
    column = (many + STAGES - STAGES_WITHOUT_COLUMN) * HIDDEN
    for more in (0, column - 1):
        found = room(missing + more, many)
        assert found.options["max_memory"][1] == packed + more
    with_it = room(missing + column, many)
    assert with_it.options["max_memory"][1] == packed
    job = planned(
        Checkpoint.open(path).config,
        train.AdamW(),
        lora=LORA,
        packed=Checkpoint.open(path),
        tokens=TOKENS,
        micro_batches=many,
        device="cuda",
    )
    for bound, states in ((with_it.device_memory, many * HIDDEN), (found.device_memory, 0)):
        # `offload` may count a little more, of what does not learn and is not packed.
        placement = placed(job.sizes, (bound or 0) - 2 * PAGE, HOST, True, apart=True)
        assert placement.device["hidden states"] == states
        assert not placement.near
    every = room(1 << 30, many).device_memory
    assert placed(job.sizes, every, HOST, True, apart=True).near  # with all packed layers there
    beside = sum(_beside(job).values())
    whole = sum(placed(job.sizes, None, HOST, True, apart=True).device.values()) + beside
    for total, states in ((whole, many * HIDDEN), (whole - 1, 0), (whole - column, 0)):
        plan = training_plan(job, machine(on_gpu=True, device=total, host=HOST))
        assert sum(plan.bytes_by_tier()["device"].values()) <= total
        assert plan.placement.device["hidden states"] == states
    with pytest.raises(BudgetError, match="device memory: slots of weights"):
        training_plan(job, machine(on_gpu=True, device=whole - column - 1, host=HOST))


def test_gradients_of_float16_wait_for_all_in_host_memory(
    room: Callable[..., Room], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = room(1 << 30).options["max_memory"]["cpu"]
    monkeypatch.setattr("qoff.train.room.resolve_dtype", lambda *_: torch.float16)
    checkpoint = Checkpoint.open(path)
    job = planned(
        {**checkpoint.config, "dtype": "float16"},
        train.AdamW(),
        lora=LORA,
        packed=checkpoint,
        tokens=TOKENS,
        micro_batches=2,
        device="cuda",
    )
    assert job.sizes.clips
    gradients = sum(4 * unit.count for unit in job.sizes.units)
    assert wide - room(1 << 30).options["max_memory"]["cpu"] >= gradients > 0


def test_a_cpu_computes_in_float32_whatever_the_checkpoint_has(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama"), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    recipe = Recipe(str(path), LORA, TOKENS, 2, 1e-4, None, 0)
    device = torch.device("cpu")
    found = loaded(path, recipe, "auto", room_of(path, LORA, recipe, device, None, None).options)
    assert {p.dtype for p in found.parameters() if p.is_floating_point()} == {torch.float32}
    with pytest.raises(ArgumentError, match="a CPU computes in float32; use dtype='auto'"):
        room_of(path, LORA, recipe, device, None, None, dtype="float16")


@pytest.mark.parametrize("packed", [True, False])
def test_a_bound_of_a_cpu_is_of_all_that_a_step_takes(path: Path, packed: bool) -> None:
    lora = LORA if packed else None
    recipe = Recipe(str(path), lora, TOKENS, 2, 1e-4, None, 0)
    config = {**TINY, "model_type": "llama"}

    def found(memory: int) -> int | None:
        if packed:
            return room_of(path, LORA, recipe, CPU, memory, 0).device_memory
        return room_beside(config, None, recipe, memory, 0).device_memory

    with pytest.raises(BudgetError, match=r"1,000 bytes are too few by [\d,]+: what a step") as no:
        found(1000)
    assert str(no.value).count("\n") == 0
    assert ("packed weights" in str(no.value)) == packed
    numbers = re.findall(r"(?:by|takes) ([\d,]+\d)", str(no.value))
    missing, arenas = (int(x.replace(",", "")) for x in numbers)
    least = 1000 + missing
    assert found(least) == arenas
    with pytest.raises(BudgetError, match="by 1: "):
        found(least - 1)
    assert least - arenas > GAPS  # and a layer beside them

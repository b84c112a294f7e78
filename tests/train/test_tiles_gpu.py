"""Tiles on a GPU, simulated: losses and weights are those of the CPU's tiles, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qoff import train
from qoff.errors import BudgetError
from qoff.plan.profile import Link
from qoff.train import placement
from qoff.train.choice import _beside, training_plan
from qoff.train.forecast import forecast
from tests.plan.machines import MIB, machine

from .gpu import on_meta, simulated
from .test_gpu import assert_same, run
from .test_planned import job_of
from .test_tiles import TILE
from .test_training import LOSSES, LR, TOKENS, batch, model_of


def cut(patch: pytest.MonkeyPatch, part: str) -> None:
    patch.setattr(placement, "TILES", (TILE,))
    patch.setattr(placement, "PARTS", (part,))


def too_small(model: Any, **options: Any) -> int:
    """Bytes of a device that whole matrices do not fit into."""
    whole = train.offload(model, tokens=TOKENS, micro_batches=2, **options).placement
    return sum(whole.device.values()) - 1


@pytest.mark.parametrize(
    ("name", "part", "dtype", "options"),
    [
        ("llama", "layers", torch.float32, {}),
        ("tied", "all", torch.float32, {"max_norm": 0.1}),
        ("llama", "all", torch.bfloat16, {"delayed": True}),
        ("llama", "outside", torch.bfloat16, {}),
        ("llama", "all", torch.float32, {"optimizer": train.Adafactor()}),
    ],
)
def test_training_is_that_of_the_cpu(
    name: str,
    part: str,
    dtype: torch.dtype,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut(monkeypatch, part)
    given = {"optimizer": train.AdamW(lr=LR), **options}
    whole = run(model_of(name, dtype), "host", tmp_path, **given)
    room = too_small(model_of(name, dtype), **given)
    wanted = run(model_of(name, dtype), "host", tmp_path, device_memory=room, **given)
    near = LOSSES if dtype == torch.float32 else 0.02
    assert wanted[0] == pytest.approx(whole[0], abs=near)
    simulated(monkeypatch)
    room = too_small(model_of(name, dtype), **given)
    for place in ("host", "disk"):
        found = run(model_of(name, dtype), place, tmp_path, device_memory=room, **given)
        assert found[2].placement.device["tiles of weights"] > 0
        assert bool(found[2].placement.disk["weights in tiles"]) == (place == "disk")
        assert_same(found, wanted)


@pytest.mark.parametrize("part", ["layers", "all"])
def test_nothing_is_computed_of_two_devices(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, part)
    with on_meta(monkeypatch):

        def made() -> Any:
            with torch.device("meta"):
                return model_of("llama", torch.bfloat16)

        room = too_small(made(), max_norm=1.0)
        options: dict[str, Any] = {"max_norm": 1.0, "device_memory": room}
        training = train.offload(made(), tokens=TOKENS, micro_batches=2, **options)
        assert training.placement.device["tiles of weights"] > 0
        for _ in range(2):
            assert training.step([batch(0), batch(1)]) == 2.0


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_a_plan_counts_what_lies_and_moves(
    clips: bool, on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles, and with inputs of layers on the GPU where that has room."""
    cut(monkeypatch, "all")
    simulated(monkeypatch)
    job = job_of("llama", train.AdamW(lr=LR), clips=clips, dtype="auto")  # its files are mapped
    one: Any = Link(1.0)  # a byte a second: seconds are bytes
    whole = placement.placed(job.sizes, None, None, True, apart=True).totals[0]
    beside = sum(_beside(job).values())
    host = 0
    if on_disk:
        sizes = job.cut(TILE, "all")
        host = placement.placed(sizes, None, 0, True, apart=True).totals[1]
    here = machine(on_gpu=True, device=whole + beside - 1, host=host or 64 * MIB)
    links = dict.fromkeys(("disk_read", "disk_write", "to_device", "from_device"), one)
    here = replace(here, **links)
    found = training_plan(job, here)
    assert found.placement.device["tiles of weights"] > 0
    training = train.offload(
        model_of("llama"),
        train.AdamW(lr=LR),
        tokens=TOKENS,
        micro_batches=2,
        device_memory=found.device_memory,
        host_memory=found.host_memory,
        disk=tmp_path,
        max_norm=1.0 if clips else None,
    )
    assert training.placement == found.placement
    training.step([batch(0), batch(1)])  # which looks at embeddings, too
    before = training.stats.moved
    training.step([batch(0), batch(1)])
    moved = {what: n - before.get(what, 0) for what, n in training.stats.moved.items()}
    expected = forecast(found.job, here, training.placement).by_resource
    ways = {"read": "disk read", "written": "disk write"}
    ways |= {"to the GPU": "to device", "from the GPU": "from device"}
    for way, link in ways.items():
        assert expected.get(link, 0) == sum(n for what, n in moved.items() if what.endswith(way)), (
            way
        )


def test_what_no_tile_is_small_enough_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, "all")
    simulated(monkeypatch)
    with pytest.raises(
        BudgetError, match=r"device memory: 65,536 .* too few by .*tiles of weights"
    ):
        train.offload(model_of("llama"), tokens=TOKENS, disk=tmp_path, device_memory=1 << 16)

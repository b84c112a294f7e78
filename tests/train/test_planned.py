"""Trainings that are planned of a config alone take the bytes that a training counts."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from qoff import train
from qoff.checkpoint import Checkpoint
from qoff.errors import BudgetError
from qoff.plan.profile import Link, MachineProfile
from qoff.train import costs, placement
from qoff.train import planned as planning
from qoff.train.activations import Cost
from qoff.train.choice import TrainingPlan, _beside, training_plan
from qoff.train.finetune import Lora, adapted
from qoff.train.forecast import forecast
from qoff.train.placement import placed
from qoff.train.planned import Planned, _head_dim, planned
from qoff.train.room import arenas_within
from tests.module_models import module_checkpoint
from tests.plan.machines import MIB, machine
from tests.tiny_families import FAMILIES, TINY
from tests.tiny_models import tiny_checkpoint

from .test_tiles import TILE
from .test_training import CONFIGS, LAYERS, LR, OPTIMIZERS, TOKENS, batch, model_of

MANY = 8  # layers, of which few fit
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def with_disk(link: Link, **memory: int) -> MachineProfile:
    return replace(machine(False, **memory), disk_read=link, disk_write=link)


def job_of(name: str, optimizer: train.Optimizer, layers: int = LAYERS, **options: Any) -> Planned:
    config = {**TINY, "num_hidden_layers": layers, **CONFIGS[name]}
    given = {"dtype": "float32", "tokens": TOKENS, "micro_batches": 2, **options}
    return planned(config, optimizer, **given)


@pytest.mark.parametrize(
    ("name", "dtype", "optimizer"),
    [
        ("llama", "bfloat16", "adamw"),
        ("tied", "float32", "adamw, 8 bits"),
        ("gemma2", "float32", "lion"),
        ("gpt2", "float32", "adafactor"),
        ("mixtral", "float32", "adamw"),
    ],
)
def test_planned_bytes_are_counted_bytes(
    name: str, dtype: str, optimizer: str, tmp_path: Path
) -> None:
    job = job_of(name, OPTIMIZERS[optimizer](), dtype=dtype, clips=True)
    model = model_of(name, DTYPES[dtype])
    training = train.offload(
        model,
        OPTIMIZERS[optimizer](),
        host_memory=200_000,
        disk=tmp_path,
        activation_memory="1GiB",
        tokens=TOKENS,
        micro_batches=2,
        max_norm=1.0,
    )
    assert placed(job.sizes, None, 200_000, True) == training.placement
    assert job.parameters == sum(p.numel() for p in model.parameters())
    training.step([batch(0, rows=1)])
    training.step([batch(1, rows=1)])
    assert sum(cost.nbytes for cost in job.costs) == training.stats.activations_peak


@pytest.mark.parametrize(
    ("checkpoint", "family"),
    [(tiny_checkpoint, "llama"), (tiny_checkpoint, "mixtral"), (module_checkpoint, "stablelm")],
)
def test_planned_adapters_are_counted_adapters(
    checkpoint: Callable[[Path, str], Path],
    family: str,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
) -> None:
    path = checkpoint(tmp_path_factory.getbasetemp(), family)
    config, there = json.loads((path / "config.json").read_text()), Checkpoint.open(path)
    lora = Lora(4, 8)
    job = planned(
        config, train.AdamW(lr=LR), lora=lora, packed=there, tokens=TOKENS, micro_batches=2
    )
    model = AutoModelForCausalLM.from_pretrained(path, device_map="disk")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing for a user to mend
        model = adapted(model, lora)
    training = train.offload(
        model,
        train.AdamW(lr=LR),
        tokens=TOKENS,
        micro_batches=2,
        host_memory=20_000,
        disk=tmp_path,
        activation_memory="1GiB",
    )
    assert placed(job.sizes, None, 20_000, True) == training.placement
    assert job.frozen is not None
    before = training.stats.frozen_read
    for _ in range(2):
        training.step([batch(0, rows=1)])
    read = (training.stats.frozen_read - before) / 4  # of a pass; some of it is read ahead
    assert read == pytest.approx(sum(job.frozen.layers), rel=0.25)
    assert sum(cost.nbytes for cost in job.costs) == training.stats.activations_peak


@pytest.mark.parametrize(
    ("clips", "column", "dtype"),
    [(False, True, "float32"), (True, True, "bfloat16"), (False, False, "float32")],
)
def test_forecast_bytes_are_those_that_move(
    clips: bool, column: bool, dtype: str, tmp_path: Path
) -> None:
    count = 2 if column else 8
    job = job_of("llama", train.AdamW(lr=LR), clips=clips, micro_batches=count, dtype=dtype)
    device = None if column else sum(placed(job.sizes, None, 0, True).device.values()) - 1
    training = train.offload(
        model_of("llama", DTYPES[dtype]),
        train.AdamW(lr=LR),
        tokens=TOKENS,
        micro_batches=count,
        device_memory=device,
        host_memory=0,
        disk=tmp_path,
        max_norm=1.0 if clips else None,
    )
    assert bool(training.placement.device["hidden states"]) is column
    training.step([batch(i, rows=1) for i in range(count)])
    each = Link(1.0)  # a byte a second: seconds are bytes
    found = forecast(job, with_disk(each), training.placement).by_resource
    moved = training.stats.moved
    for way, link in (("read", "disk read"), ("written", "disk write")):
        assert found[link] == sum(n for what, n in moved.items() if what.endswith(way))


@pytest.mark.parametrize("memory", [6 * MIB, 5 * MIB // 2])
def test_a_plan_fits_and_is_what_the_trainer_takes(memory: int, tmp_path: Path) -> None:
    job = job_of("llama", train.AdamW(lr=LR), MANY)
    found = training_plan(job, with_disk(Link(1e8), device=memory))
    used = found.bytes_by_tier()
    assert sum(used["device"].values()) + sum(used["host"].values()) <= memory
    options = found.options()
    training = train.offload(
        model_of("llama", num_hidden_layers=MANY),
        train.AdamW(lr=LR),
        tokens=TOKENS,
        micro_batches=2,
        host_memory=found.host_memory,
        activation_memory=found.activation_memory,
        activation_disk=found.activation_disk,
        disk=tmp_path if "--disk" in options else None,
    )
    assert training.placement == found.placement
    assert (found.host_memory is None) == (memory == 6 * MIB)
    assert 0 < found.step.seconds < 1e3


@pytest.mark.parametrize(
    ("clips", "part", "name", "rule"),
    [
        (False, "layers", "llama", train.AdamW(lr=LR)),
        (True, "all", "llama", train.AdamW(lr=LR)),
        (False, "all", "tied", train.AdamW(lr=LR)),
        (False, "all", "tied", train.Adafactor(lr=LR)),
    ],
)
def test_what_a_machine_is_too_small_for_is_planned_in_tiles(
    clips: bool,
    part: str,
    name: str,
    rule: train.Optimizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "TILES", (TILE,))
    monkeypatch.setattr(placement, "PARTS", (part,))
    job = job_of(name, rule, clips=clips)
    whole = sum(placed(job.sizes, None, 0, True).device.values()) + sum(_beside(job).values())
    found = training_plan(job, with_disk(Link(1.0), device=whole - 1))  # a byte a second
    assert found.job.learned == job.learned
    training = train.offload(
        model_of(name),
        rule,
        tokens=TOKENS,
        micro_batches=2,
        device_memory=found.device_memory,
        host_memory=found.host_memory,
        disk=tmp_path,
        max_norm=1.0 if clips else None,
    )
    assert training.placement == found.placement
    assert found.placement.device["tiles of weights"] > 0
    bounds = int(found.options()["--device-memory"]), found.host_memory  # of `qoff finetune`
    assert arenas_within(*bounds, job) == found.device_memory
    training.step([batch(i, rows=1) for i in range(2)])  # the first looks at embeddings, too
    before = training.stats.moved
    training.step([batch(i, rows=1) for i in range(2)])
    moved = {what: n - before[what] for what, n in training.stats.moved.items()}
    for way, link in (("read", "disk read"), ("written", "disk write")):
        found_bytes = sum(n for what, n in moved.items() if what.endswith(way))
        assert found.step.by_resource[link] == found_bytes


def test_activations_are_kept_where_there_is_room() -> None:
    job = job_of("llama", train.AdamW(lr=LR), MANY)

    def plan(**memory: int) -> TrainingPlan:
        return training_plan(job, with_disk(Link(1e3), **memory))  # a slow disk

    all_of_it = plan(device=8 * MIB)
    assert len(all_of_it.kept) == 2 * MANY
    assert all_of_it.host_memory is None
    slow = plan(device=5 * MIB // 2)
    assert len(slow.kept) < 2 * MANY  # memory is for what would move else


def test_experts_in_a_loop_are_planned_as_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planning._model

    def looping(*asked: Any) -> Any:
        model = made(*asked)
        model.set_experts_implementation("eager")
        return model

    rule = train.AdamW(lr=LR)
    plan = training_plan(job_of("mixtral", rule), machine(device=8 * MIB))
    assert len(plan.kept) == 2 * LAYERS
    monkeypatch.setattr(planning, "_model", looping)
    plan = training_plan(job_of("mixtral", rule), machine(device=8 * MIB))
    assert not plan.kept
    assert any("depends on values" in warning for warning in plan.warnings())


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_long_sequences_save_what_shorter_ones_tell(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saved(tokens: int) -> list[Cost]:
        config = {**TINY, **FAMILIES[family]}
        job = planned(config, train.AdamW(lr=LR), tokens=tokens, micro_batches=1)
        return list(job.costs)

    whole = saved(1024)
    assert len(saved(10**8)) == len(whole)  # a mask of so many tokens would fit nowhere
    monkeypatch.setattr(costs, "_counted", lambda config: 512)
    assert saved(1024) == whole


def test_what_does_not_fit_is_said_by_how_much() -> None:
    job = job_of("llama", train.AdamW(lr=LR), MANY)
    with pytest.raises(BudgetError, match=r"device memory: .* taken apart .* the 300.0 KiB there"):
        training_plan(job, machine(device=300 << 10))
    with pytest.raises(BudgetError, match=r"disk memory: .* states \(.* more than the 0 B there"):
        training_plan(job, machine(device=5 * MIB // 2, disk=0))
    with pytest.raises(BudgetError, match=r"device memory: .* slots of weights"):
        training_plan(job, machine(on_gpu=True, device=100 << 10))
    with pytest.raises(BudgetError, match=r"device memory: .* on their way"):
        training_plan(job, machine(device=3 * MIB // 2))


def test_what_is_mapped_takes_no_memory_before() -> None:
    """Weights in the dtype of their files; experts, which are put together, do."""
    rule = train.AdamW(lr=LR)
    whole = job_of("llama", rule)
    mapped = job_of("llama", rule, dtype="auto")
    assert (mapped.loaded, whole.loaded) == (0, 4 * whole.parameters)
    assert 0 < job_of("mixtral", rule, dtype="auto").loaded < job_of("mixtral", rule).loaded
    small = machine(device=whole.loaded // 2)
    with pytest.raises(BudgetError, match="taken apart"):
        training_plan(whole, small)
    with pytest.raises(BudgetError) as refused:
        training_plan(mapped, small)
    assert "taken apart" not in str(refused.value)


def test_heads_have_the_channels_of_their_products() -> None:
    text = SimpleNamespace(
        num_attention_heads=128, hidden_size=7168, head_dim=64,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    )  # fmt: skip
    assert _head_dim(text) == (192 + 128) / 2
    assert _head_dim(SimpleNamespace(num_attention_heads=32, hidden_size=4096)) == 128
    narrow = SimpleNamespace(num_attention_heads=64, hidden_size=4096, head_dim=192, v_head_dim=128)
    assert _head_dim(narrow) == (192 + 128) / 2


def test_layers_whose_heads_differ_are_planned() -> None:
    config = {**TINY, **FAMILIES["gemma4-moe"]}
    job = planned(config, train.AdamW(lr=LR), tokens=TOKENS, micro_batches=1)
    assert job.heads == (16 + 32) / 2 * config["num_attention_heads"]


def test_on_a_gpu_what_is_in_host_memory_moves() -> None:
    job = job_of("llama", train.AdamW(lr=LR))
    found = training_plan(job, machine(on_gpu=True, device=8 * MIB, host=16 * MIB))
    layers = sum(found.placement.host[what] for what in ("weights",))
    one = layers // LAYERS
    to_device = sum(busy["to device"] for busy in found.step.busy.values())
    link = found.machine.to_device
    weights = (2 * LAYERS - 1) * (one / link.bytes_per_s + link.request_s)
    assert to_device >= weights
    assert "training ran on one kind of GPU, an H200" in list(found.warnings())[-1]

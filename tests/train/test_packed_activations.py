"""What packed layers that stream keep for their backward: as planned, and without a changed bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from qoff import train
from qoff.checkpoint import Checkpoint
from qoff.train.choice import training_plan
from qoff.train.finetune import Lora, adapted
from qoff.train.planned import planned
from tests.plan.machines import machine
from tests.tiny_models import tiny_checkpoint, tiny_model

from .gpu import simulated
from .test_training import LR, TOKENS, batch

pytest.importorskip("peft")
Found = tuple[list[float], dict[str, Tensor], train.Training]


def steps(path: Path, folder: Path, **options: Any) -> Found:
    torch.manual_seed(0)
    model = adapted(AutoModelForCausalLM.from_pretrained(path, device_map="disk"), Lora(4, 8.0))
    given = {"tokens": TOKENS, "micro_batches": 2, "disk": folder, **options}
    training = train.offload(model, train.AdamW(lr=LR), **given)
    losses = [training.step([batch(step, rows=1), batch(9, rows=1)]) for step in range(3)]
    return losses, training.state_dict(), training


@pytest.mark.parametrize(
    ("family", "device"), [("llama", "cpu"), ("qwen3-moe", "cpu"), ("llama", "gpu")]
)
def test_what_packed_layers_keep_changes_no_bit(
    family: str,
    device: str,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qoff.train.swaps.Swaps._measured", lambda _: 1e12)  # a fast disk
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), family)
    wanted, weights, training = steps(path, tmp_path)
    assert training.stats.activations_peak == 0
    if device == "gpu":
        simulated(monkeypatch)
    whole = 1 << 30
    for share, swapped in ((1.0, 0), (0.5, 0), (0.6, 1 << 26)):
        bound = int(share * whole)
        options = {"activation_memory": bound, "activation_disk": swapped}
        losses, found, training = steps(path, tmp_path, **options)
        assert losses == wanted
        assert found.keys() == weights.keys()
        assert all(torch.equal(x, weights[name]) for name, x in found.items())
        stats = training.stats
        assert 0 < stats.activations_peak == stats.activations_planned <= bound
        assert bool(stats.moved.get("activations read")) == bool(swapped)
        if share == 1:
            whole = stats.activations_planned  # of all layers
    assert training.stats.frozen_read > 0


def test_experts_that_compute_as_their_module_does_find_their_matrices_again(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a layer that kept its activations lie elsewhere at its backward pass."""
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "nemotron-h-moe")
    monkeypatch.setattr("qoff.hf.plugin.experts_form.form_of", lambda *_: None)
    wanted, weights, _ = steps(path, tmp_path)
    losses, found, training = steps(path, tmp_path, activation_memory=1 << 30)
    assert training.stats.activations_peak > 0
    assert losses == wanted
    assert all(torch.equal(x, weights[name]) for name, x in found.items())


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("lora", [Lora(4, 8.0), Lora(8, 8.0, 0.1)])
def test_planned_bytes_beside_adapters_are_counted_bytes(
    lora: Lora, packed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.getbasetemp()
    path = tiny_checkpoint(base, "llama") if packed else tiny_model(base, "llama")
    job = planned(
        json.loads((path / "config.json").read_text()),
        train.AdamW(lr=LR),
        lora=lora,
        packed=Checkpoint.open(path) if packed else None,
        tokens=TOKENS,
        micro_batches=1,
    )
    options = {"device_map": "disk"} if packed else {}
    model = adapted(AutoModelForCausalLM.from_pretrained(path, **options), lora)
    training = train.offload(
        model, train.AdamW(lr=LR), tokens=TOKENS, activation_memory=sum(c.nbytes for c in job.costs)
    )
    for step in range(2):
        training.step([batch(step, rows=1)])
    assert sum(cost.nbytes for cost in job.costs) == training.stats.activations_peak
    plan = training_plan(job, machine(device=64 << 20))
    assert plan.activations == training.stats.activations_peak  # all, where there is room

"""Mixtures whose experts have no gate, or compute in a narrower space, as Nemotron 3 has both."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from qoff.checkpoint import Checkpoint, QuantEntry
from qoff.errors import UnsupportedModelError
from qoff.memory.plan.units import is_expert
from qoff.models.convert.convert import convert
from qoff.models.runtime import Runtime
from qoff.models.spec import DecoderSpec
from qoff.plan import Memory
from qoff.plan.native_sizes import NativeSizes
from tests.engine.test_allocations import PLAN, of_checkpoint
from tests.engine.test_scratch import asked
from tests.models.cpu_experts import HOOKS, Model, logits_of, opened
from tests.models.test_calibrate import by_layers, check_second_half, texts
from tests.models.test_expert_jobs import opened as opened_in_part
from tests.models.test_expert_jobs import replayed, tokens
from tests.models.test_triton_decoder import KV8
from tests.tiny_models import QUANT, budgets, save_model
from tests.tolerances import DECODER_LOGITS, FLOAT16_LOGITS, assert_close

__all__ = ["asked"]  # a fixture

CHANGES: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 512,  # experts are whole blocks of their files
    "layers_block_type": ["moe", "linear_attention", "moe", "full_attention", "moe"],
}


@pytest.fixture(scope="module", params=[None, 64], ids=["whole", "narrower"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ungated") / "model"
    save_model(folder, "nemotron-h-latent", **CHANGES, moe_latent_size=request.param)
    return folder


@pytest.fixture(scope="module")
def checkpoint(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(source, tmp_path_factory.mktemp("checkpoint") / "cpu", quant=QUANT, for_cpu=True)


@torch.no_grad()
def test_a_conversion_runs_what_transformers_runs(source: Path) -> None:
    """Layer by layer, as it solves matrices and measures what they lose."""
    model, ids = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), texts(2, 20)
    assert_close(by_layers(source, ids), model(ids).logits, tolerance=DECODER_LOGITS)


def test_experts_are_found_in_one_tensor_and_apart(
    source: Path, checkpoint: Path, tmp_path: Path
) -> None:
    tensors, apart = dict[str, Tensor](), dict[str, list[Tensor]]()
    for name, value in sorted(load_file(source / "model.safetensors").items()):
        found = re.fullmatch(r"(.*\.experts)\.\d\.(\w+)\.weight", name)
        if found is None:
            tensors[name] = value
        else:
            apart.setdefault(f"{found[1]}.{found[2]}", []).append(value)
    tensors |= {name: torch.stack(matrices) for name, matrices in apart.items()}
    shutil.copytree(source, tmp_path / "stacked")
    save_file(tensors, tmp_path / "stacked" / "model.safetensors", {"format": "pt"})
    path = convert(tmp_path / "stacked", tmp_path / "checkpoint", quant=QUANT, for_cpu=True)
    both = [Checkpoint.open(one).layers for one in (path, checkpoint)]
    assert "model.layers.0.mlp.experts.7.up_proj" in both[0][0].weights
    for mine, other in zip(*both, strict=True):
        assert mine.path.read_bytes() == other.path.read_bytes()


def test_what_solves_matrices_is_given_what_the_source_gives(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_second_half(source, texts(2, 40), monkeypatch)


def test_a_pass_whose_experts_come_by_jobs_has_the_same_tokens(checkpoint: Path) -> None:
    with Runtime(checkpoint) as runtime:
        expected = tokens(runtime)
    with opened_in_part(checkpoint, 0.5) as runtime:
        assert tokens(runtime) == expected
        assert replayed(runtime)
        assert runtime.store.stats.experts.misses


# One of the devices is marked pytest.mark.gpu.
def test_the_cpu_computes_them_beside_a_gpu(
    source: Path, tmp_path: Path, device: str, few_programs: None
) -> None:
    path = convert(source, tmp_path / "gpu", quant=QUANT)
    how: dict[str, Any] = {"device": device, "dtype": torch.float16, "instrumentation": HOOKS}
    with Runtime(path, kv=KV8, **how) as runtime:
        model = Model(path, device, logits_of(runtime), runtime.residency.device_bytes)
    for options in ({}, {"passing_from": 2}):  # a prompt's pass through the device
        with opened(model, 2, **options) as runtime:
            assert_close(logits_of(runtime), model.logits, tolerance=FLOAT16_LOGITS[0])
            assert runtime.store.stats.experts.on_cpu


def test_plans_count_the_memory_that_passes_take(checkpoint: Path) -> None:
    bytes_, taken = of_checkpoint(checkpoint, PLAN)
    assert taken <= bytes_ <= 2 * taken
    sizes = NativeSizes.of_checkpoint(Checkpoint.open(checkpoint))
    beside = Memory.of(PLAN, sizes.spec, sizes.shapes, tiled=True).total("device")
    memory = beside + budgets(checkpoint)[0] + 3 * sizes.expert_bytes  # of 16 experts
    bytes_, taken = of_checkpoint(checkpoint, replace(PLAN, device_memory=memory))
    assert taken <= bytes_ <= 2 * taken


def test_plans_count_the_products_of_what_there_is(source: Path, checkpoint: Path) -> None:
    opened_one = Checkpoint.open(checkpoint)
    sizes = NativeSizes.of_checkpoint(opened_one)
    entries = [e for file in opened_one.layers for e in file.weights.values()]
    matrices = [e for e in entries if isinstance(e, QuantEntry)]
    columns = {e.name: e.shape[0] * e.shape[1] for e in matrices}
    experts = sum(count for name, count in columns.items() if is_expert(name))
    count = sizes.spec.experts.count  # type: ignore[union-attr]
    assert sizes.expert_columns * count == experts
    routers = 3 * count * sizes.spec.hidden_size
    assert sizes.layer_columns == sum(columns.values()) - experts - routers
    planned = NativeSizes.of(json.loads((source / "config.json").read_text()), QUANT)
    assert planned.expert_bytes == sizes.expert_bytes


def test_what_experts_cannot_be_is_refused(checkpoint: Path) -> None:
    experts = DecoderSpec.from_config(Checkpoint.open(checkpoint).config).experts
    assert experts is not None
    with pytest.raises(UnsupportedModelError, match="hidden_act is 'clamped_swiglu'; supported"):
        replace(experts, activation="clamped_swiglu")
    with pytest.raises(UnsupportedModelError, match="moe_latent_size is -1; supported"):
        replace(experts, latent_size=-1)

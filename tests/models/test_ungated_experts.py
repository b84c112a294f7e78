"""Mixtures whose experts have no gate, or compute in a narrower space, wherever they are.

As transformers computes them, where Nemotron H has both.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE

from qoff.checkpoint import Checkpoint, QuantEntry
from qoff.engine import LLM
from qoff.errors import UnsupportedModelError
from qoff.kernels.layout.ragged import Ragged
from qoff.memory.plan.units import is_expert
from qoff.models import families
from qoff.models.convert.convert import convert
from qoff.models.families.corrected import FAMILIES, NAMES
from qoff.models.families.family import Family
from qoff.models.forward_pass import ForwardPass
from qoff.models.runtime import Runtime
from qoff.models.spec import DecoderSpec
from qoff.plan import Memory
from qoff.plan.sizes import ModelSizes
from tests.engine.test_allocations import PLAN, of_checkpoint
from tests.engine.test_scratch import PLAN as ASKING
from tests.engine.test_scratch import answered, asked, counted
from tests.models.cpu_experts import HOOKS, Model, logits_of, opened
from tests.models.test_calibrate import by_layers, check_second_half, texts
from tests.models.test_expert_jobs import opened as opened_in_part
from tests.models.test_expert_jobs import replayed, tokens
from tests.models.test_runtime import logits_of as logits_of_batch
from tests.models.test_streamed_experts import resident_logits
from tests.models.test_triton_decoder import KV8
from tests.tiny_families import TINY
from tests.tiny_models import QUANT, _state, budgets
from tests.tolerances import DECODER_LOGITS, FLOAT16_LOGITS, assert_close

__all__ = ["asked"]  # a fixture

CONFIG: dict[str, Any] = TINY | {
    "model_type": "solar_open",
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 512,  # experts are whole blocks of their files
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}


@pytest.fixture(autouse=True, scope="module", params=[0, 64], ids=["whole", "narrower"])
def latent(request: pytest.FixtureRequest) -> Iterator[int]:
    """What transformers calls Solar Open is a family with other experts; their `latent_size`."""

    def mixed(config: Any) -> dict[str, Any]:
        fields, other = FAMILIES["solar_open"].fields(config), {"activation": "relu2"}
        fields |= {**other, "gated": False}
        experts = replace(fields["experts"], **other, gated=False, latent_size=request.param)
        return {**fields, "experts": experts}

    modules = {"mlp.latent_in": "mlp.fc1_latent_proj", "mlp.latent_out": "mlp.fc2_latent_proj"}
    modules |= NAMES.modules
    names = replace(NAMES, modules=modules, stacked_experts="bare-halves")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "_family", lambda *_: Family("of tests", mixed, names))
        yield request.param


def transformers_model(latent: int) -> Any:
    """That of transformers, with the mixtures of Nemotron H."""
    config = AutoConfig.for_model(**CONFIG)
    model = AutoModelForCausalLM.from_config(config)
    of_mixture = SimpleNamespace(
        **{key: getattr(config, key) for key in CONFIG if hasattr(config, key)},
        num_local_experts=config.n_routed_experts,
        norm_topk_prob=config.norm_topk_prob,
        moe_shared_expert_intermediate_size=config.moe_intermediate_size,
        moe_latent_size=latent or None,
        mlp_hidden_act="relu2",
        mlp_bias=False,
        _experts_implementation="eager",
    )
    for layer in model.model.layers:
        layer.mlp = NemotronHMoE(of_mixture)
    return model.float().eval()


@pytest.fixture(scope="module")
def source(latent: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ungated")
    torch.manual_seed(0)
    model = transformers_model(latent)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name), std=0.1)
        for name, buffer in model.named_buffers():
            if "correction" in name:
                buffer.normal_(std=0.1)
    save_file(dict(model.state_dict()), folder / "model.safetensors", {"format": "pt"})
    config = {**CONFIG, "architectures": ["SolarOpenForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def checkpoint(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(source, tmp_path_factory.mktemp("checkpoint") / "cpu", quant=QUANT, for_cpu=True)


def test_the_logits_are_those_of_transformers(checkpoint: Path, latent: int) -> None:
    model = transformers_model(latent)
    model.load_state_dict(dict(_state(Checkpoint.open(checkpoint))))
    ids = torch.arange(5, 22)[None]
    with torch.no_grad(), Runtime(checkpoint) as runtime:
        wanted = model(ids).logits[0]
        cache = runtime.new_cache(1)
        ragged = Ragged.of([ids.shape[1]], cache.lengths)
        found = runtime.forward(ForwardPass(ids[0], ragged, cache, torch.arange(ids.shape[1])))
    assert_close(found, wanted, tolerance=DECODER_LOGITS)


@torch.no_grad()
def test_a_conversion_runs_what_transformers_runs(source: Path, latent: int) -> None:
    """Layer by layer, as it solves matrices and measures what they lose."""
    model, ids = transformers_model(latent), texts(2, 20)
    model.load_state_dict(load_file(source / "model.safetensors"))
    assert_close(by_layers(source, ids), model(ids).logits, tolerance=DECODER_LOGITS)


def test_experts_are_found_in_one_tensor_and_apart(
    source: Path, checkpoint: Path, tmp_path: Path
) -> None:
    tensors = dict[str, Tensor]()
    for name, value in load_file(source / "model.safetensors").items():
        module, _, leaf = name.partition(".experts.")
        if leaf in ("up_proj", "down_proj"):
            apart = ((f"{module}.experts.{e}.{leaf}.weight", value[e]) for e in range(len(value)))
            tensors |= {one: matrix.clone() for one, matrix in apart}
        else:
            tensors[name] = value
    shutil.copytree(source, tmp_path / "apart")
    save_file(tensors, tmp_path / "apart" / "model.safetensors", {"format": "pt"})
    path = convert(tmp_path / "apart", tmp_path / "checkpoint", quant=QUANT, for_cpu=True)
    found = Checkpoint.open(path)
    wanted = Checkpoint.open(checkpoint)
    for mine, other in zip(found.layers, wanted.layers, strict=True):
        assert "model.layers.0.mlp.experts.7.up_proj" in found.layers[0].weights
        assert mine.path.read_bytes() == other.path.read_bytes()


def test_what_solves_matrices_is_given_what_the_source_gives(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_second_half(source, texts(2, 40), monkeypatch)


@pytest.mark.parametrize("packing", ["rows16", "split32"])
def test_the_logits_do_not_depend_on_the_budget(
    source: Path, checkpoint: Path, packing: str, tmp_path: Path
) -> None:
    path = checkpoint if packing == "rows16" else convert(source, tmp_path / "gpu", quant=QUANT)
    expected = resident_logits(path)
    for part in (0, 0.5, 0.99):
        with opened_in_part(path, part) as runtime:
            assert torch.equal(logits_of_batch(runtime), expected)
            assert runtime.store.stats.experts.misses


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
    sizes = ModelSizes.of_checkpoint(Checkpoint.open(checkpoint))
    beside = Memory.of(PLAN, sizes.spec, sizes.shapes, tiled=True).total("device")
    memory = beside + budgets(checkpoint)[0] + 3 * sizes.expert_bytes  # of 16 experts
    bytes_, taken = of_checkpoint(checkpoint, replace(PLAN, device_memory=memory))
    assert taken <= bytes_ <= 2 * taken


def test_no_op_asks_for_more_than_a_plan_counts(checkpoint: Path, asked: list[int]) -> None:
    with LLM(checkpoint, ASKING, device="cpu") as llm:
        answered(llm)
        whole = counted(llm)
        assert max(asked) <= whole <= 2 * max(asked)


def test_plans_count_the_products_of_what_there_is(checkpoint: Path) -> None:
    opened_one = Checkpoint.open(checkpoint)
    sizes = ModelSizes.of_checkpoint(opened_one)
    entries = [e for file in opened_one.layers for e in file.weights.values()]
    matrices = [e for e in entries if isinstance(e, QuantEntry)]
    columns = {e.name: e.shape[0] * e.shape[1] for e in matrices}
    experts = sum(count for name, count in columns.items() if is_expert(name))
    assert sizes.expert_columns * CONFIG["n_routed_experts"] == experts
    routers = CONFIG["num_hidden_layers"] * CONFIG["n_routed_experts"] * CONFIG["hidden_size"]
    assert sizes.layer_columns == sum(columns.values()) - experts - routers
    planned = ModelSizes.of({**CONFIG, "architectures": ["SolarOpenForCausalLM"]}, QUANT)
    assert planned.expert_bytes == sizes.expert_bytes


def test_what_experts_cannot_be_is_refused(checkpoint: Path) -> None:
    experts = DecoderSpec.from_config(Checkpoint.open(checkpoint).config).experts
    assert experts is not None
    with pytest.raises(UnsupportedModelError, match="hidden_act is 'clamped_swiglu'; supported"):
        replace(experts, activation="clamped_swiglu")
    with pytest.raises(UnsupportedModelError, match="moe_latent_size is -1; supported"):
        replace(experts, latent_size=-1)

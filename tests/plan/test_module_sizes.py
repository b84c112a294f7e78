"""What plans know of models of transformers' modules, without their weights and with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from qoff import LLM, Plan, SamplingParams
from qoff.budgets import CPU
from qoff.checkpoint import Checkpoint, QuantEntry, WeightEntry
from qoff.errors import ArgumentError, BudgetError, UnsupportedModelError
from qoff.plan.manual import Memory
from qoff.plan.model_sizes import known_sizes, planned_sizes
from qoff.plan.module_sizes import ModuleSizes
from qoff.plan.search import find_plan
from qoff.plan.workload import Lengths, Workload
from tests.module_models import MODULES, OWN_CACHES, module_checkpoint, module_source
from tests.plan.machines import GIB, MIB, machine
from tests.tiny_models import QUANT

MIXTURE = "deepseek_v4"
ROWS = replace(QUANT, packing="rows16")
WORK = Workload(Lengths.of(24), Lengths.of(8), requests=8)


def _form(entry: WeightEntry) -> tuple[object, ...]:
    quantized = isinstance(entry, QuantEntry)
    return entry.name, entry.shape, (entry.bits, entry.group_size) if quantized else None


# With heads of 64 channels, whose K and V are packed.
_PACKED = {
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
}


def _config(base: Path, name: str, **changes: Any) -> dict[str, Any]:
    config = json.loads((module_source(base, name) / "config.json").read_text())
    return {**config, **changes}


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.mark.parametrize("name", [*MODULES, *OWN_CACHES])
def test_every_byte_is_known_from_the_config(base: Path, name: str) -> None:
    """And what a plan takes is what an `LLM` counts."""
    path = module_checkpoint(base, name)
    config = _config(base, name)
    planned, stored = ModuleSizes.of(config, ROWS), Checkpoint.open(path)
    for file, there in zip(planned.checkpoint.files, stored.files, strict=True):
        assert set(map(_form, file.weights.values())) == set(map(_form, there.weights.values()))
        bytes_, own = (sum(e.nbytes for e in f.weights.values()) for f in (file, there))
        assert bytes_ >= own  # of float32; conversion narrows what it can
    plan = Plan(batch_size=2, batches=2, context=64, prefill_tokens=32)
    with LLM(path, plan=plan) as llm:
        counted = llm.memory
    found = planned.memory_of(plan, False, CPU, torch.float32)
    assert isinstance(found, Memory)
    assert found.purposes == counted.purposes


@pytest.mark.parametrize(
    ("name", "changes", "least"),
    [
        ("stablelm", _PACKED | {"num_hidden_layers": 24}, 3.9),
        (MIXTURE, {"n_routed_experts": 96}, 1.9),
    ],
)
def test_more_memory_is_never_slower(
    base: Path, name: str, changes: dict[str, Any], least: float
) -> None:
    """Each plan within the memory that it was searched for, of weights that nobody has."""
    sizes = planned_sizes(_config(base, name, **changes), ROWS)
    seconds = list[float]()
    for memory in (least, least + 0.6, 8, 1024):
        on = machine(device=int(memory * MIB))
        found = find_plan(sizes, on, WORK)
        assert sum(found.bytes_by_tier()["device"].values()) <= on.usable["device"]
        assert found.plan.prefill_tokens >= 24 or not sizes.whole_prompts
        assert (found.hits is None) == (name != MIXTURE or not found.weights["disk"])
        seconds.append(found.seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_packed_caches_go_where_there_is_room(base: Path, on_gpu: bool) -> None:
    """As those of native families; on a GPU they are counted for one that is not here."""
    sizes = planned_sizes(_config(base, "stablelm", **_PACKED), ROWS)
    assert [(s.kv_heads, s.head_dim) for s in sizes.shapes] == [(1, 64)] * 3
    assert sizes.readers == (1, 1, 1)
    work = Workload(Lengths.of(2048), Lengths.of(1024), requests=4)
    roomy = find_plan(sizes, machine(on_gpu, device=64 * GIB), work)
    assert roomy.plan.kv_placement.device_fraction == 1
    kv = roomy.memory.purposes["device"]["KV blocks"]
    assert kv > 0
    least = sum(roomy.bytes_by_tier()["device"].values()) - kv // 4
    tight = find_plan(sizes, machine(on_gpu, device=least), work)
    assert sum(tight.bytes_by_tier()["device"].values()) <= least


@pytest.mark.parametrize("name", ["jamba", "stablelm", MIXTURE])
def test_the_best_plan_runs(base: Path, name: str) -> None:
    path = module_checkpoint(base, name)
    found = find_plan(known_sizes(Checkpoint.open(path)), machine(device=GIB), WORK)
    prompts = [torch.randint(20, (24,)).tolist() for _ in range(3)]
    with LLM(path, plan=found.plan) as llm:
        assert llm.memory.purposes == found.memory.purposes
        answers = llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
    assert [len(one.token_ids) for one in answers] == [8] * 3


def test_a_mixture_is_known_from_its_modules(base: Path) -> None:
    config = _config(base, MIXTURE)
    experts = planned_sizes(config, ROWS).experts
    assert experts is not None
    assert (experts.count, experts.top_k) == (
        config["n_routed_experts"],
        config["num_experts_per_tok"],
    )
    assert experts.layers == (True,) * config["num_hidden_layers"]
    assert experts.intermediate_size == config["moe_intermediate_size"]


def test_what_modules_do_not_have_is_refused(base: Path) -> None:
    sizes = known_sizes(Checkpoint.open(module_checkpoint(base, "bloom")))
    with pytest.raises(ArgumentError, match="draft no tokens"):
        find_plan(sizes, machine(), replace(WORK, acceptance=0.5))
    with pytest.raises(BudgetError, match=r"device memory: one sequence of 64 tokens takes about"):
        find_plan(sizes, machine(device=MIB // 8), WORK)
    with pytest.raises(UnsupportedModelError, match="of its own"):
        planned_sizes({"model_type": "unknown", "auto_map": {"AutoModelForCausalLM": "m.Model"}})


def test_experts_that_are_not_quantized_are_weights_like_others() -> None:
    """LongCat's, some of which are no matrices."""
    config = AutoConfig.for_model("longcat_flash", num_layers=1, n_routed_experts=4).to_dict()
    sizes = planned_sizes(config, ROWS)
    assert sizes.experts is None
    names = [name for name in sizes.checkpoint.layers[0].weights if ".experts." in name]
    assert names
    assert not any(name in sizes.checkpoint.layers[0].quantized for name in names)


def test_a_model_without_layers_is_refused(base: Path) -> None:
    config = json.loads((module_source(base, "stablelm") / "config.json").read_text())
    with pytest.raises(UnsupportedModelError, match="no decoder layers"):
        planned_sizes({**config, "num_hidden_layers": 0})


def test_dequantized_pieces_are_as_large_as_a_gpu_has_them(base: Path) -> None:
    """By the memory of the plan, as the engine takes them."""
    wide = {"hidden_size": 8192, "intermediate_size": 8192, "num_hidden_layers": 1}
    sizes = planned_sizes(_config(base, "stablelm", **wide), ROWS)
    small, large = (
        sizes.memory_of(Plan(context=64, device_memory=n * GIB), True, CPU, torch.float16)
        for n in (1, 24)
    )
    assert large.total("device") - small.total("device") == 2 * 8192 * 8192 - 64 * MIB

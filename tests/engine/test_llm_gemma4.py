"""Gemma 4 in batches: heads of two sizes, packed, and experts that come one by one."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import qoff
from qoff.checkpoint import Checkpoint
from qoff.engine import LLM, SamplingParams
from qoff.errors import ArgumentError
from qoff.kvcache import KVQuant
from qoff.kvcache.store.placement import KVPlacement
from qoff.models.convert.convert import convert
from qoff.models.modules.configs import is_native
from qoff.models.native.decoder import check_on_gpu
from qoff.models.spec import DecoderSpec
from qoff.plan import Plan
from tests.tiny_models import QUANT, reference_model, save_model, save_tokenizer

LETTERS = random.Random(6)
PROMPTS = [[LETTERS.randrange(4, 128) for _ in range(n)] for n in (150, 3, 70)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PLAN = Plan(batch_size=1, context=200, kv=KVQuant(8, 8, window=16))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma4")
    save_model(path / "model", "gemma4-moe", head_dim=64, global_head_dim=128, sliding_window=90)
    save_tokenizer(path / "model")
    return convert(path / "model", path / "converted", quant=QUANT)


def answers(checkpoint: Path, plan: Plan) -> list[tuple[int, ...]]:
    with LLM(checkpoint, plan) as llm:
        return [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]


def test_the_answers_do_not_depend_on_the_plan(checkpoint: Path) -> None:
    moved = KVPlacement(0.3, 0.4)
    batches = replace(PLAN, batch_size=2, batches=2, kv_placement=moved, activations="disk")
    assert answers(checkpoint, batches) == answers(checkpoint, PLAN)


def test_generates_what_transformers_does(checkpoint: Path) -> None:
    ids = torch.tensor([PROMPTS[2]])
    wanted = reference_model(checkpoint).generate(ids, max_new_tokens=12, do_sample=False)
    model, _ = qoff.load(checkpoint, kv=None)
    with model:
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), wanted)


def test_a_gpu_is_refused_in_a_line(checkpoint: Path) -> None:
    spec = DecoderSpec.from_config(Checkpoint.open(checkpoint).config)
    with pytest.raises(ArgumentError, match="no kernel for a GPU yet; use device"):
        check_on_gpu(spec)


def test_embeddings_of_layers_go_through_modules() -> None:
    config = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0}
    assert is_native(config)
    assert is_native({"model_type": "gemma4", "text_config": config})
    for key, value in (("hidden_size_per_layer_input", 256), ("num_kv_shared_layers", 2)):
        assert not is_native({**config, key: value})
        assert not is_native({"model_type": "gemma4", "text_config": {**config, key: value}})

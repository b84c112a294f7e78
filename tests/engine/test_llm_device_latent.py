"""Latent attention on the ops of a GPU: the same answers wherever blocks are.

Without a GPU everything is in CPU tensors, and Triton interprets the kernels of attention.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qoff.engine import LLM, SamplingParams
from qoff.errors import ArgumentError
from qoff.kvcache import KVPlacement, KVQuant
from qoff.models.convert.convert import convert
from qoff.plan import Plan
from tests.engine.test_llm_device import assert_nothing_held, few_programs
from tests.instruments import POISON
from tests.tiny_models import QUANT, save_model
from tests.triton_module import triton_module

triton_ops = triton_module("ops")

ON_GPU = torch.cuda.is_available()
PROMPTS = [[3 + (7 * i + length) % 29 for i in range(length)] for length in (62, 130)]
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
PLAN = Plan(batch_size=2, context=134, prefill_tokens=100, kv=KVQuant(8, 8, window=0))
few_programs = few_programs


@pytest.fixture(scope="module", params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "gpu":
        return {"device": "cuda", "_instrumentation": POISON}
    if ON_GPU:
        pytest.skip("Triton interprets kernels only where there is no GPU")
    record = importlib.import_module("tests.tape").record
    return {"_instrumentation": replace(POISON, ops=triton_ops, record=record)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latent")
    sizes = {"num_hidden_layers": 1, "intermediate_size": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    save_model(folder / "model", "deepseek-v3", vocab_size=32, **sizes)
    convert(folder / "model", folder / "checkpoint", quant=QUANT)
    return folder / "checkpoint"


def test_the_answers_do_not_depend_on_where_blocks_are(
    checkpoint: Path, where: dict[str, Any]
) -> None:
    """On the device, where steps are replayed; moved there; attended to on the CPU."""
    with LLM(checkpoint, PLAN, **where) as llm:
        expected = [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS)]
        replays = llm.runtime.decoder.replays
        assert replays is not None
        assert replays.replayed
        assert not replays.failed
    placement = KVPlacement(0, 0.5)
    for way in ("never", "always"):
        plan = replace(PLAN, kv_placement=placement, cpu_attention=way)
        with LLM(checkpoint, plan, **where) as llm:
            assert [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS)] == expected
            assert_nothing_held(llm)


def test_an_index_chooses_as_on_a_cpu(tmp_path: Path, where: dict[str, Any]) -> None:
    """At prefill and decode, in layers that choose and that go by an earlier choice."""
    sizes = {"num_hidden_layers": 2, "first_k_dense_replace": 2, "index_topk": 40}
    sizes |= {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    save_model(tmp_path / "model", "glm-5", vocab_size=32, **sizes)
    convert(tmp_path / "model", tmp_path / "checkpoint", quant=QUANT)
    prompts = [PROMPTS[0][:12], [3 + (7 * i + 90) % 29 for i in range(86)]]
    with LLM(tmp_path / "checkpoint", PLAN, device="cpu") as llm:
        expected = [answer.token_ids for answer in llm.generate(prompts, PARAMS)]
    with LLM(tmp_path / "checkpoint", PLAN, **where) as llm:
        assert [answer.token_ids for answer in llm.generate(prompts, PARAMS)] == expected
        replays = llm.runtime.decoder.replays
        assert replays is not None
        assert replays.replayed
        assert not replays.failed
    plan = replace(PLAN, kv_placement=KVPlacement(0, 0.5))
    with LLM(tmp_path / "checkpoint", plan, **where) as llm:
        assert llm.plan.cpu_attention == "never"  # blocks come to where they are chosen from
        assert [answer.token_ids for answer in llm.generate(prompts, PARAMS)] == expected
        assert_nothing_held(llm)
    with pytest.raises(ArgumentError, match="among tokens that are on the GPU"):
        LLM(tmp_path / "checkpoint", replace(plan, cpu_attention="always"), **where)

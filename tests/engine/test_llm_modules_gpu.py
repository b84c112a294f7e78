"""The engine on transformers' modules and the ops of a GPU: the same answers wherever blocks are.

Without a GPU everything is in CPU tensors, and Triton interprets the kernels.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qoff.engine import LLM, SamplingParams
from qoff.engine.gpu_module_executor import GpuModuleExecutor
from qoff.engine.module_executor import ModuleExecutor
from qoff.errors import ArgumentError
from qoff.kernels.torch_threads import one_torch_thread
from qoff.kvcache import KVPlacement, KVQuant
from qoff.kvcache.store.placement import DEVICE, DISK, HOST
from qoff.plan import Plan
from tests.engine.test_llm_device import w4_linear
from tests.instruments import POISON
from tests.module_models import module_checkpoint
from tests.triton_module import interpret_few, triton_module

triton_ops = triton_module("ops")

ON_GPU = torch.cuda.is_available()
LETTERS = random.Random(3)
PROMPTS = [[LETTERS.randrange(3, 32) for _ in range(length)] for length in (20, 200)]
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
KV = KVQuant(8, 8, window=0)
PLAN = Plan(batch_size=2, context=208, prefill_tokens=220, kv=KV)
THIRDS = replace(PLAN, kv_placement=KVPlacement(0.34, 0.33))


@pytest.fixture(scope="module", params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of an `LLM` on the ops of a GPU."""
    if request.param == "gpu":
        return {"device": "cuda", "dtype": torch.float16, "_instrumentation": POISON}
    if ON_GPU:
        pytest.skip("Triton interprets kernels only where there is no GPU")
    return {"_instrumentation": replace(POISON, ops=triton_ops)}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the interpreter only attention and cache are Triton's, and torch has one thread."""
    if not ON_GPU:
        interpret_few(monkeypatch, w4_linear)
    with one_torch_thread():
        yield


def answers(llm: LLM) -> list[Any]:
    return [one.token_ids for one in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("name", ["stablelm-head64", "falcon_h1", "bloom"])
def test_answers_are_those_of_a_cpu(base: Path, name: str, where: dict[str, Any]) -> None:
    with LLM(module_checkpoint(base, name), PLAN) as llm:
        wanted = answers(llm)
    with LLM(module_checkpoint(base, name, "split32"), PLAN, **where) as llm:
        assert answers(llm) == wanted
        packs = name.endswith("-head64")
        kind = GpuModuleExecutor if packs else ModuleExecutor
        assert type(llm._rounds.current.opened.executor) is kind
        assert (llm.memory_by_tier()[DEVICE]["KV blocks"] > 0) == packs
        assert (llm.memory_by_tier()[DEVICE]["states"] > 0) != packs


def test_blocks_on_any_tier_change_no_answer(base: Path, where: dict[str, Any]) -> None:
    path = module_checkpoint(base, "jamba-head64", "split32")  # with states beside them
    sparse = replace(KV, attention_top=0.4)
    for kv, ways in ((KV, ("never", "always")), (sparse, ("auto",))):
        with LLM(path, replace(PLAN, kv=kv), **where) as llm:
            wanted = answers(llm)
        for attends in ways:
            with LLM(path, replace(THIRDS, kv=kv, cpu_attention=attends), **where) as llm:
                assert answers(llm) == wanted
                tiers = llm.memory_by_tier()
                assert all(tiers[tier]["KV blocks"] > 0 for tier in (DEVICE, HOST, DISK))


def test_plans_that_a_gpu_does_not_have_are_refused(base: Path, where: dict[str, Any]) -> None:
    path = module_checkpoint(base, "stablelm-head64", "split32")
    with pytest.raises(ArgumentError, match="use sinks=0"):
        LLM(path, replace(PLAN, kv=replace(KV, sinks=16)), **where)

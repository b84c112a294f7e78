"""Answers are the same bits whatever the plan, of families whose layers are not like Llama's."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qoff.engine import LLM, SamplingParams
from qoff.kvcache import KVQuant
from qoff.kvcache.store.placement import KVPlacement
from qoff.models.native.caches import head_shapes
from qoff.plan import Plan
from qoff.plan.manual import Memory
from tests.instruments import POISON
from tests.tiny_models import tiny_checkpoint

LETTERS = random.Random(5)
PROMPTS = [[LETTERS.randrange(4, 128) for _ in range(n)] for n in (150, 1, 64, 97)]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
QUANT = KVQuant(window=16)
PLAN = Plan(batch_size=1, context=200, kv=QUANT)
BATCHES = replace(PLAN, batch_size=2, batches=2)
HALF = {"kv_placement": KVPlacement(0.3, 0.4), "activations": "disk"}
ON_DISK = {"kv_placement": KVPlacement(0, 0), "cpu_attention": "never", "schedule": "sequential"}
IN_HOST = {"kv_placement": KVPlacement(0, 1)}
# What each may have beside these: drafts are for what can go back to an earlier token.
FAMILIES: dict[str, list[dict[str, Any]]] = {
    "qwen3-next-head64": [HALF, ON_DISK, IN_HOST | {"batch_size": 3, "batches": 1}],
    "kimi-linear": [HALF, ON_DISK, IN_HOST | {"cpu_attention": "never", "prefill_tokens": 170}],
    "ling3": [HALF, ON_DISK, IN_HOST | {"cpu_attention": "never", "prefill_tokens": 170}],
    "olmo-hybrid": [HALF, ON_DISK, IN_HOST | {"prefill_tokens": 170}],
    "lfm2": [HALF, ON_DISK, IN_HOST | {"prefill_tokens": 170}],
    "nemotron-h-moe": [HALF, ON_DISK, IN_HOST],  # layers without a mixer, and without an MLP
    "falcon-h1": [HALF, ON_DISK, IN_HOST | {"prefill_tokens": 170}],  # both in all layers
    "deepseek-v3": [
        HALF | {"draft_tokens": 3},
        ON_DISK,
        IN_HOST | {"cpu_attention": "never", "prefill_tokens": 170},
    ],
    "glm-5": [
        HALF | {"draft_tokens": 3},
        ON_DISK,
        IN_HOST | {"cpu_attention": "never", "prefill_tokens": 170},
    ],
}

Answers = list[tuple[int, ...]]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), family)


def answers(checkpoint: Path, plan: Plan, prompts: list[list[int]] = PROMPTS) -> Answers:
    with LLM(checkpoint, plan, _instrumentation=POISON) as llm:
        return [result.token_ids for result in llm.generate(prompts, PARAMS)]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Answers:
    """The answers when everything is resident, one sequence at a time."""
    return answers(checkpoint, PLAN)


@pytest.mark.parametrize("number", range(3))
def test_the_answers_do_not_depend_on_the_plan(
    family: str, checkpoint: Path, expected: Answers, number: int
) -> None:
    assert answers(checkpoint, replace(BATCHES, **FAMILIES[family][number])) == expected


def test_weights_stream_and_change_no_bit(checkpoint: Path, expected: Answers) -> None:
    plan = replace(BATCHES, prefill_tokens=2)  # more take more than all weights of these models
    with LLM(checkpoint, plan) as llm:
        spec, weights = llm.runtime.spec, llm.runtime.residency.device_bytes
    beside = Memory.of(plan, spec, head_shapes(spec), tiled=True).total("device")
    plan = replace(plan, device_memory=beside + weights // 2)
    with LLM(checkpoint, plan) as llm:
        assert not llm.runtime.store.all_resident
    assert answers(checkpoint, plan, PROMPTS[1:3]) == expected[1:3]


def test_a_prompt_of_several_answers_is_read_once(checkpoint: Path, expected: Answers) -> None:
    """The others go on from copies of its states, or share its blocks."""
    params = replace(PARAMS, n=2)
    with LLM(checkpoint, replace(BATCHES, batch_size=4, batches=1)) as llm:
        found = [result.token_ids for result in llm.generate(PROMPTS[2:], params)]
    assert found == [expected[2]] * 2 + [expected[3]] * 2

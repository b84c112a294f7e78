"""Models whose layers differ in batches: heads of two sizes, or numbers of heads, packed; experts;
layers with others' keys and values.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qoff.engine import LLM, SamplingParams
from qoff.kvcache import KVQuant
from qoff.kvcache.store.placement import KVPlacement
from qoff.memory.plan import PER_LAYER, plan_residency
from qoff.models.convert.convert import convert
from qoff.plan import Plan
from qoff.plan.native_sizes import NativeSizes
from tests.tiny_models import QUANT, save_model, save_tokenizer

LETTERS = random.Random(6)
PROMPTS = [[LETTERS.randrange(4, 128) for _ in range(n)] for n in (150, 3, 70)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PLAN = Plan(batch_size=1, context=200, kv=KVQuant(8, 8, window=16))


FAMILIES: dict[str, dict[str, Any]] = {
    "gemma4-moe": {"global_head_dim": 128},
    "gemma4-small": {"global_head_dim": 128},
    "laguna": {},
    "step-3.5": {},
    "mimo-v2": {
        "v_head_dim": 32,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.25}
            for kind, theta in (("full_attention", 1e5), ("sliding_attention", 1e3))
        },
    },
}


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    changes = FAMILIES[request.param]
    save_model(path / "model", request.param, head_dim=64, sliding_window=90, **changes)
    save_tokenizer(path / "model")
    return convert(path / "model", path / "converted", quant=QUANT)


def answers(checkpoint: Path, plan: Plan) -> list[tuple[int, ...]]:
    with LLM(checkpoint, plan) as llm:
        return [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]


def test_the_answers_do_not_depend_on_the_plan(checkpoint: Path) -> None:
    moved = KVPlacement(0.3, 0.4)
    batches = replace(PLAN, batch_size=2, batches=2, kv_placement=moved, activations="disk")
    assert answers(checkpoint, batches) == answers(checkpoint, PLAN)


def test_plans_count_layers_with_keys_of_their_own_and_no_table() -> None:
    """Gemma 4 E2B and E4B, by the numbers of their config.json: nothing is read of a checkpoint."""
    e2b = {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35}
    config = {
        "model_type": "gemma4_text",
        **e2b,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    }
    sizes = NativeSizes.of(config)
    assert len(sizes.shapes) == 15
    assert sizes.spec.kv_layers == (*range(15), *([13] * 4 + [14]) * 4)
    table = sizes.checkpoint.outer.weights[PER_LAYER]
    assert table.shape == (262144 * 35, 256)
    plan = plan_residency(sizes.checkpoint, sizes.nbytes - table.nbytes // 2)
    assert table.nbytes > sizes.nbytes // 4
    assert PER_LAYER not in plan.resident
    assert not plan.streamed  # all that computes stays
    plan = plan_residency(sizes.checkpoint, sizes.nbytes - table.nbytes // 2, host_memory=4 << 30)
    assert plan.host == {PER_LAYER}
    assert plan.host_weight_bytes >= table.nbytes

"""Steps on the ops of a GPU follow each other without Python: the answers of `LLM` and `generate`
do not depend on it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qoff.engine import LLM, SamplingParams
from qoff.hf.load import open_model
from qoff.kvcache import KVQuant
from qoff.models.native import following
from qoff.models.native.following import Following
from qoff.plan import Plan
from tests.engine.test_llm_device import ON_GPU, checkpoint, few_programs, where
from tests.models import test_graph_steps
from tests.models.test_graph_steps import Recorder, triton_ops

__all__ = ["checkpoint", "few_programs", "where"]  # fixtures, the last with pytest.mark.gpu
PROMPTS = [[5, 9, 3, 7, 8], [4] * 9, [6, 3]]
PARAMS = SamplingParams(temperature=0, max_tokens=24)
DRAWN = replace(PARAMS, temperature=1.0, seed=3)
KV = KVQuant(8, 8, window=16)
PLAN = Plan(batch_size=3, batches=1, context=100, prefill_tokens=16, kv=KV)


@pytest.fixture
def at_once(few_programs: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps were done at once, each time; attention is torch's."""
    found, tokens = list[int](), Following.tokens

    def counted(*given: Any) -> list[list[int]]:
        steps = tokens(*given)
        found.append(len(steps))
        return steps

    monkeypatch.setattr(following, "HEARD_S", 1e9)
    monkeypatch.setattr(Following, "tokens", counted)
    if not ON_GPU:
        attend = triton_ops.attention

        def attention(qkv: Any, shape: Any, cache: Any, *given: Any, **options: Any) -> Any:
            decodes = cache.step.max_rows == 1 and cache.step.order is None
            op = test_graph_steps.attention if decodes else attend
            return op(qkv, shape, cache, *given, **options)

        monkeypatch.setattr(triton_ops, "attention", attention)
    return found


@pytest.fixture
def recorded(where: dict[str, Any]) -> dict[str, Any]:
    """The same, whose steps are recorded."""
    if ON_GPU:
        return where
    return {"_instrumentation": replace(where["_instrumentation"], record=Recorder())}


def test_an_engine_does_several_steps_in_a_round(
    checkpoint: Path,
    where: dict[str, Any],
    recorded: dict[str, Any],
    at_once: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of sequences that end at other times; drawn tokens come one by one."""

    def answers(**options: Any) -> list[list[int]]:
        with LLM(checkpoint, PLAN, **options) as llm:
            found = llm.generate(PROMPTS, [PARAMS, PARAMS, replace(PARAMS, max_tokens=11)])
            found += llm.generate(PROMPTS, DRAWN)
            return [one.token_ids for one in found]

    with monkeypatch.context() as patched:
        patched.setenv("QOFF_CUDA_GRAPHS", "0")
        wanted = answers(**where)
    assert not sum(at_once)
    assert answers(**recorded) == wanted
    assert max(at_once) > 4


def test_generate_does_several_steps_at_once(
    checkpoint: Path,
    where: dict[str, Any],
    recorded: dict[str, Any],
    at_once: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A token that ends a row may be in the middle of them."""
    ids = torch.tensor([[5, 9, 3], [4, 4, 4]])

    def generated(record: bool, **changes: Any) -> torch.Tensor:
        options = recorded if record else where
        device = options.get("device", "cpu")
        hooks = options["_instrumentation"]
        with open_model(checkpoint, device=device, kv=KV, instrumentation=hooks) as model:
            found: torch.Tensor = model.generate(ids, do_sample=False, **changes)
        return found

    plain: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None}
    monkeypatch.setenv("QOFF_CUDA_GRAPHS", "0")
    wanted = generated(False, **plain)
    ends = {**plain, "eos_token_id": int(wanted[0, 15]), "pad_token_id": 0}
    ended = generated(False, **ends)
    assert not sum(at_once)
    monkeypatch.delenv("QOFF_CUDA_GRAPHS")
    assert torch.equal(generated(True, **plain), wanted)
    assert torch.equal(generated(True, **ends), ended)
    assert max(at_once) > 4

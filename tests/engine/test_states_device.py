"""States of recurrent layers on the ops of a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qoff.engine import LLM
from qoff.kvcache import KVQuant
from qoff.kvcache.store.placement import DEVICE, HOST
from qoff.plan import Plan
from tests.engine.test_llm_device import PARAMS, PROMPTS, few_programs, where
from tests.known_drafts import KnownDrafts, counts
from tests.models.test_triton_decoder import checkpoint as checkpoint_of

__all__ = ["few_programs", "where"]  # fixtures, the second with pytest.mark.gpu


@pytest.mark.parametrize(
    "family",
    [
        "qwen3-next-head64",
        "kimi-linear",
        "olmo-hybrid",
        "ling3",
        "lfm2",
        "nemotron-h-latent",
        "falcon-h1",
    ],
)
def test_states_are_beside_packed_blocks(
    family: str, tmp_path: Path, where: dict[str, Any]
) -> None:
    """A prompt of two chunks is read while another sequence decodes."""
    path, prompts = checkpoint_of(tmp_path, family), [PROMPTS[1], PROMPTS[0][:70]]
    plan = Plan(batch_size=2, context=90, prefill_tokens=75, kv=KVQuant(8, 8, window=16))
    with LLM(path, plan) as on_cpu, LLM(path, plan, dtype="float16", **where) as llm:
        both = [[a.token_ids for a in x.generate(prompts, PARAMS)] for x in (llm, on_cpu)]
        assert both[0] == both[1]
        assert len({x.memory.purposes[DEVICE]["states"] for x in (llm, on_cpu)} - {0}) == 1


@pytest.mark.parametrize("family", ["qwen3-next-head64", "lfm2", "nemotron-h-latent"])
def test_rejected_drafts_leave_nothing_in_states(
    family: str, tmp_path: Path, where: dict[str, Any]
) -> None:
    path, prompts = checkpoint_of(tmp_path, family), [PROMPTS[1], PROMPTS[0][:70]]
    plan = Plan(batch_size=2, context=100, prefill_tokens=75, kv=KVQuant(8, 8, window=16))
    params = replace(PARAMS, max_tokens=14)
    with LLM(path, plan, **where) as llm:
        wanted = [one.token_ids for one in llm.generate(prompts, params)]
    drafts = KnownDrafts(dict(zip(map(tuple, prompts), wanted, strict=True)))
    with LLM(path, replace(plan, draft_tokens=2), **where) as llm:
        drafts.draft_for(llm)
        assert [one.token_ids for one in llm.generate(prompts, params)] == wanted
        drafted, accepted = counts(llm)
        assert 0 < accepted < drafted
        states = llm._rounds.current.opened.batches[0].cache.states  # type: ignore[attr-defined]
        assert llm.memory.purposes[DEVICE]["states"] == states.nbytes


def test_states_that_are_kept_lie_in_host_memory(tmp_path: Path, where: dict[str, Any]) -> None:
    """A prompt goes on from those of another one, which were copied there and back."""
    path = checkpoint_of(tmp_path, "qwen3-next-head64")
    prompts = [PROMPTS[0][:70], [*PROMPTS[0][:66], 7, 8]]
    plan = Plan(batch_size=2, context=90, prefill_tokens=64, kv=KVQuant(8, 8, window=0))
    found, read = list[list[tuple[int, ...]]](), list[int]()
    for share in (False, True):
        with LLM(path, replace(plan, share_prefixes=share), **where) as llm:
            found.append([one.token_ids for one in llm.generate(prompts, PARAMS)])
            read.append(sum(one.read for one in llm.rounds))
            purposes = llm.memory.purposes
            assert purposes[HOST]["states"] == purposes[DEVICE]["states"] / 2 * 3 * share
    assert found[0] == found[1]
    assert read == [138, 74]

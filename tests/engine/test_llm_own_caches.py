"""`qoff.LLM` on models of which only transformers' modules know what they remember.

Each sequence has a cache of transformers, and is computed alone; the weights come once for all.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import qoff
from qoff.engine import LLM
from qoff.errors import UnsupportedModelError
from qoff.kvcache.quant import UnpackableError
from qoff.models.modules import probe
from qoff.models.modules.own_caches import OwnCachesPass
from qoff.models.modules.sequence_memory import extrapolated, tensors
from tests.engine.test_llm_modules import KV, PARAMS, PLAN, alone, answers, prompts
from tests.instruments import POISON
from tests.module_models import MODULES, OWN_CACHES, SEEING, changed, module_checkpoint

OF_OTHERS: dict[str, dict[str, Any]] = {
    "bart": {  # which counts padding among its positions
        "d_model": 64,
        "decoder_layers": 3,
        "decoder_ffn_dim": 96,
        "decoder_attention_heads": 4,
        "is_decoder": True,
        "is_encoder_decoder": False,
    },
    "moshi": {  # whose cache forgets tokens that its mask shows
        "ffn_dim": 128,
        "audio_vocab_size": 64,
        "sliding_window": 90,
    },
}


def held(llm: LLM) -> Any:
    executor: Any = llm._rounds.current.opened.executor
    return executor._held


@pytest.mark.parametrize("name", [*OWN_CACHES, *SEEING, "inkling2_loop_text"])
def test_the_answers_are_those_of_generate(base: Path, name: str) -> None:
    path = module_checkpoint(base, name)
    assert answers(path, PLAN) == alone(path, None)
    assert len(set(alone(path, None))) > 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bart", "it counts padding among positions"),
        (
            "moshi",
            "the cache of layer 0 keeps the newest 90 tokens of a sequence, and its mask shows all",
        ),
    ],
)
def test_models_whose_rows_say_something_else_in_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    monkeypatch.setitem(MODULES, name, {"model_type": name, **OF_OTHERS[name]})
    path = module_checkpoint(tmp_path, name)
    with LLM(path, PLAN, device="cpu") as llm:
        assert held(llm).reason == why
    assert answers(path, PLAN) == alone(path, None)


def test_a_window_as_long_as_all_sequences_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODULES, "moshi", {"model_type": "moshi", **OF_OTHERS["moshi"]})
    path = module_checkpoint(tmp_path, "moshi")
    with pytest.raises(UnpackableError, match="newest 90 tokens of a sequence, and its mask shows"):
        qoff.load(path, kv=KV)
    changed(path, sliding_window=256)
    with LLM(path, PLAN, device="cpu") as llm:
        assert not held(llm).alone
    assert answers(path, PLAN) == alone(path, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"batches": 1, "batch_size": 5, "prefill_tokens": 150},
        {"batches": 3, "schedule": "sequential"},
    ],
)
def test_the_answers_do_not_depend_on_the_plan(base: Path, changes: dict[str, Any]) -> None:
    path = module_checkpoint(base, "deepseek_v4")
    assert answers(path, replace(PLAN, **changes)) == alone(path, None)


def test_sequences_take_what_is_counted_for_them(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows are cut from the tokens of a prompt, and do not keep them."""
    path, taken = module_checkpoint(base, "deepseek_v4"), list[int]()
    own_end = OwnCachesPass.end

    def end(self: OwnCachesPass) -> None:
        own_end(self)
        parts = [x for states in self.states for one in states.layers for x in tensors(vars(one))]
        memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in parts}
        taken.append(sum(memory.values()))
        assert taken[-1] == self._cache.nbytes

    monkeypatch.setattr(OwnCachesPass, "end", end)
    with LLM(path, replace(PLAN, batches=1), device="cpu") as llm:
        longest = replace(PARAMS, max_tokens=PLAN.context - 97)
        llm.generate(prompts()[4:], longest)
        counted = held(llm).nbytes(PLAN.context)
    assert len(taken) > 20
    assert 0.8 * counted < max(taken) <= counted


def test_answers_of_one_prompt_go_on_from_the_same_cache(base: Path) -> None:
    path = module_checkpoint(base, "deepseek_v4")
    with LLM(path, PLAN, device="cpu", _instrumentation=POISON) as llm:
        found = llm.generate(prompts()[4:], replace(PARAMS, n=2))
    assert [one.token_ids for one in found] == 2 * [alone(path, None)[4]]


def test_a_model_that_no_trial_tells_about_is_refused(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("it looks at values")

    monkeypatch.setattr(probe, "_try", fails)
    path = module_checkpoint(base, "axk2")
    with pytest.raises(UnsupportedModelError, match=r"AXK2.* remembers: .*at values.*qoff\.load"):
        LLM(path, PLAN, device="cpu")


def test_bytes_of_many_tokens_follow_from_those_of_some() -> None:
    """Of a layer that keeps all tokens, a window, states, and blocks of 4 with the rest."""

    def trial(tokens: int) -> list[int]:
        assert tokens < 512
        return of(tokens)

    def of(tokens: int) -> list[int]:
        return [5 * tokens, 3 * min(tokens, 100), 700, 8 * (tokens // 4) + 9 * (tokens % 4)]

    for tokens in (1, 3, 120, 511, 512, 1000, 4095, 70_001):
        found = extrapolated(trial, tokens)
        wanted = [max(of_layer) for of_layer in zip(*map(of, range(1, tokens + 1)), strict=True)]
        assert found[:3] == wanted[:3]
        assert wanted[3] <= found[3] <= wanted[3] + 9 * 4

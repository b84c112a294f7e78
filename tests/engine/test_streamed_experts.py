"""Experts that come one by one change no answer, and each is read once a round for all batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qoff.engine import LLM, SamplingParams
from qoff.kvcache import KVQuant
from qoff.kvcache.store.placement import KVPlacement
from qoff.memory import plan_residency
from qoff.memory.experts import ExpertCache
from qoff.memory.plan import ChosenExperts
from qoff.memory.store import StoreStats
from qoff.models.convert.convert import convert
from qoff.models.native.experts import Experts
from qoff.plan import Plan
from tests.instruments import POISON
from tests.tiny_models import QUANT, budgets, save_model

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [list(range(5, 45)), [99], list(range(60, 40, -1)), [7, 8, 9]]


@pytest.fixture(scope="module")
def packable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture whose heads can be packed."""
    folder = tmp_path_factory.mktemp("mixture")
    save_model(folder / "model", "qwen3-moe", head_dim=64)
    convert(folder / "model", folder / "checkpoint", quant=QUANT, for_cpu=True)
    return folder / "checkpoint"


@pytest.fixture(scope="module")
def expected(packable: Path) -> list[tuple[int, ...]]:
    """The answers when all weights are there."""
    return answers(packable, PLAN)[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"schedule": "sequential"},
        {"activations": "host", "kv_placement": KVPlacement(0.3, 0.7)},
        {"activations": "disk", "batches": 4, "batch_size": 1},
    ],
    ids=["block", "sequential", "parked", "on disk"],
)
@pytest.mark.parametrize("part", [0.0, 0.7])
def test_the_answers_of_many_sequences_do_not_depend_on_it(
    packable: Path,
    expected: list[tuple[int, ...]],
    changes: dict[str, Any],
    part: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_weights(packable, part, monkeypatch)
    found, stats = answers(packable, replace(PLAN, **changes))
    assert found == expected
    assert stats.experts.misses


PLAN = Plan(batch_size=2, batches=2, context=80, kv=KVQuant(window=16))


def give_weights(path: Path, part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weights have the least budget and a part of what would take all of them."""
    least, everything = budgets(path)
    budget = least + int(part * (everything - least))
    monkeypatch.setattr(
        "qoff.models.runtime.plan_residency",
        lambda path, _, *args, **kw: plan_residency(path, budget, *args, **kw),
    )


def answers(path: Path, plan: Plan) -> tuple[list[tuple[int, ...]], StoreStats]:
    with LLM(path, plan, _instrumentation=POISON) as llm:
        found = [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]
        return found, llm.runtime.store.stats


def test_an_expert_is_read_once_a_round_for_all_batches(
    packable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_weights(packable, 0.0, monkeypatch)
    monkeypatch.setattr(ExpertCache, "_guesses", lambda cache, _: cache.now.guesses[:0])
    read = {}
    for schedule in ("block", "sequential"):
        plan = replace(PLAN, batch_size=1, batches=4, schedule=schedule)
        with LLM(packable, plan) as llm:
            llm.generate(PROMPTS, PARAMS)
            rounds, cache = len(llm.rounds), llm.runtime.store.experts
        assert cache is not None
        read[schedule] = cache.stats.misses
        assert schedule == "sequential" or read[schedule] <= rounds * sum(cache.counts)
    assert read["block"] < read["sequential"]


def test_a_wave_is_computed_once_for_all_batches(
    packable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_weights(packable, 0.0, monkeypatch)
    acquire, compute = ExpertCache.acquire, Experts._compute_wave
    waves, choices = list[int](), list[int]()  # experts of each, and what was computed with it

    def acquired(cache: ExpertCache, chosen: ChosenExperts) -> Any:
        wave = acquire(cache, chosen)
        waves.append(len(wave.numbers))
        return wave

    def computed(experts: Experts, waiting: list[Any], *wave: Any) -> None:
        choices.append(len(waiting))
        compute(experts, waiting, *wave)

    monkeypatch.setattr(ExpertCache, "acquire", acquired)
    monkeypatch.setattr(Experts, "_compute_wave", computed)
    with LLM(packable, replace(PLAN, batch_size=1, batches=4)) as llm:
        llm.generate(PROMPTS, PARAMS)
    assert len(choices) == len(waves) > 0
    assert max(choices) == 4

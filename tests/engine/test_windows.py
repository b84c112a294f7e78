"""Many sequences through models whose layers have windows: bounded memory, the same answers."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from qoff.engine import LLM, SamplingParams
from qoff.kvcache import KVPlacement, KVQuant
from qoff.kvcache.host.packed import PackedPass
from qoff.kvcache.store.placement import DISK, TIERS
from qoff.kvcache.store.tiered import TieredBlocks
from qoff.memory.arena import PAGE
from qoff.models.convert.convert import convert
from qoff.models.native.caches import head_shapes
from qoff.plan import Plan
from tests.instruments import POISON
from tests.tiny_models import QUANT, save_model

LETTERS = random.Random(4)
PROMPTS = [[LETTERS.randrange(4, 128) for _ in range(n)] for n in (640, 60, 333, 500)]
# Each answer completes a block, after 3 to 28 tokens.
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PLAN = Plan(batch_size=2, batches=2, context=700, prefill_tokens=256, kv=KVQuant(window=16))
KINDS = {
    "gemma3": {"sliding_window": 100},
    "llama4": {"attention_chunk_size": 128},
    "mistral-window": {"sliding_window": 150},
}


@pytest.fixture(scope="module", params=KINDS)
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints whose prompts are of several windows."""
    folder = tmp_path_factory.mktemp("windowed")
    longer = {"head_dim": 64, "max_position_embeddings": 1024}
    save_model(folder / "model", request.param, **longer, **KINDS[request.param])
    convert(folder / "model", folder / "checkpoint", quant=QUANT)
    return folder / "checkpoint"


@cache
def with_all_blocks(path: Path, prefill_tokens: int) -> list[tuple[int, ...]]:
    """Answers of sequences that keep them; prompts in other parts may round otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "frees", lambda *_: False)
        plan = replace(PLAN, prefill_tokens=prefill_tokens)
        with LLM(path, plan, _instrumentation=POISON, device="cpu") as llm:
            assert len(llm._executor.stores) == 1
            return [x.token_ids for x in llm.generate(PROMPTS, PARAMS)]


def blocks_used(llm: LLM) -> int:
    used = 0
    for store in llm._executor.stores:
        assert isinstance(store, TieredBlocks)
        used += sum(store.used(tier) for tier in TIERS)
    return used


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_placement": KVPlacement(0.3, 0.4), "cpu_attention": "never"},
        {"kv_placement": KVPlacement(0, 0.5), "schedule": "sequential"},
        {"kv_placement": KVPlacement(0, 0), "batch_size": 1, "prefill_tokens": 70},
        {"draft_tokens": 6, "prefill_tokens": 1000},
        {"share_prefixes": True},
    ],
    ids=["device", "all-tiers", "off-device", "disk", "drafts", "shared"],
)
def test_answers_are_those_with_all_blocks(
    changes: dict[str, object],
    windowed: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = replace(PLAN, **changes)  # type: ignore[arg-type]
    expected = with_all_blocks(windowed, plan.prefill_tokens)
    most = dict[tuple[int, str], int]()
    end = PackedPass.end

    def ended(self: PackedPass) -> None:
        for number, store in enumerate(self._cache.stores):
            assert isinstance(store, TieredBlocks)
            for tier in TIERS:
                most[number, tier] = max(most.get((number, tier), 0), store.used(tier))
        end(self)

    monkeypatch.setattr(PackedPass, "end", ended)
    with LLM(windowed, plan, _instrumentation=POISON, device="cpu") as llm:
        assert [x.token_ids for x in llm.generate(PROMPTS, PARAMS)] == expected
        assert blocks_used(llm) == 0
        memory, arenas, spill = llm.memory, llm._executor.arenas, llm._executor._spill
        for tier, arena in arenas.items():
            assert arena.capacity == memory.purposes[tier]["KV blocks"]
            assert arena.capacity - arena.used < PAGE
        assert (0 if spill is None else spill.nbytes) == memory.purposes[DISK]["KV blocks"]
        first = memory.blocks.groups[0][1]  # the server says what these are
        assert llm.kv_blocks == {tier: first.blocks[tier] for tier in TIERS}
        for number, (group, one) in enumerate(memory.blocks.groups):
            assert all(most[number, tier] <= one.blocks[tier] for tier in TIERS)
            if group.reach:
                assert max(most[number, tier] for tier in TIERS) > 0
        shapes, forms = llm._executor.shapes, llm._executor.forms
    keeps = replace(plan, share_prefixes=True).block_plans(shapes, forms)
    here, all_kept = (sum(x.tier_bytes().values()) for x in (memory.blocks, keeps))
    assert here == all_kept if plan.share_prefixes else here < 0.95 * all_kept


def test_answers_that_begin_alike_go_on_from_the_same_blocks(windowed: Path) -> None:
    params = SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=40, ignore_eos=True)

    def answers(plan: Plan) -> list[tuple[int, ...]]:
        with LLM(windowed, plan, _instrumentation=POISON, device="cpu") as llm:
            found = [x.token_ids for x in llm.generate(PROMPTS[:3], params)]
            assert blocks_used(llm) == 0
        return found

    kept = answers(replace(PLAN, share_prefixes=True))
    assert answers(PLAN) == kept
    assert answers(replace(PLAN, kv_placement=KVPlacement(0.5, 0.2))) == kept


def test_a_small_model_that_drafts_frees_blocks_too(windowed: Path) -> None:
    from tests.tiny_models import save_tokenizer

    save_tokenizer(windowed)
    plan = replace(PLAN, draft_model=str(windowed), draft_tokens=4)
    with LLM(windowed, plan, device="cpu") as llm:
        found = [x.token_ids for x in llm.generate(PROMPTS, PARAMS)]
        assert found == with_all_blocks(windowed, PLAN.prefill_tokens)
        assert sum(one.accepted for one in llm.rounds) > 0


def test_memory_of_long_sequences_is_that_of_layers_that_see_them(windowed: Path) -> None:
    from qoff.checkpoint import Checkpoint
    from qoff.models.spec import DecoderSpec

    spec = DecoderSpec.from_config(Checkpoint.open(windowed).config)
    shapes = head_shapes(spec)
    forms = PLAN.kv.packed_forms(shapes)

    def pool(context: int) -> list[int]:
        plans = replace(PLAN, context=context).block_plans(shapes, forms)
        return [plan.pool_bytes("device") for group, plan in plans.groups if group.reach]

    assert pool(1000) == pool(1_000_000) != []

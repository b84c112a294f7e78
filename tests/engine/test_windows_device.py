"""Layers with windows on a GPU: they keep what they read, there, and answers stay the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qoff.engine import LLM
from qoff.kvcache import KVQuant
from qoff.kvcache.device.blocks import DeviceBlocks
from qoff.kvcache.store.placement import DEVICE, HOST
from qoff.memory.arena import PAGE
from qoff.models.convert.convert import convert
from qoff.plan import Plan
from tests.engine.test_llm_device import CHANGES, PLAN, THIRDS, answers, few_programs, where
from tests.tiny_models import QUANT, save_model

__all__ = ["few_programs", "where"]  # fixtures, the second with pytest.mark.gpu
KV = KVQuant(4, 4, window=0)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a layer that sees all tokens and one that does not."""
    folder = tmp_path_factory.mktemp("windowed")
    changes = {"hidden_size": 64, "num_hidden_layers": 2, "sliding_window": 40}
    save_model(folder / "model", "qwen2-window", **{**CHANGES, **changes})
    convert(folder / "model", folder / "checkpoint", quant=QUANT)
    return folder / "checkpoint"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_placement": THIRDS},
        {"kv": replace(KV, attention_top=0.3)},
        {"kv": replace(KV, attention_top=0.3), "kv_placement": THIRDS},
    ],
    ids=["device", "thirds", "a part of the blocks", "a part of the thirds"],
)
def test_answers_are_those_with_all_blocks(
    changes: dict[str, Any],
    windowed: Path,
    where: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = replace(PLAN, **{"kv": KV, "prefill_tokens": 100, **changes})
    with LLM(windowed, plan, **where) as llm:
        found, memory = [x.token_ids for x in answers(llm)], llm.memory
        pools = list[int]()
        for store in llm._executor.stores:
            assert isinstance(store, DeviceBlocks)
            assert store.pool.used == 0
            pools += [layer.nbytes for layer in store.pool.layers]
        assert memory.on_gpu is not None
        _, (group, part) = memory.on_gpu.groups
        assert group.layers == (1,)
        assert group.reach == 40
        # A window has one whole block at most; a pass makes one more each, two have a spare one.
        assert part.resident == 2 * (2 * 1 + 2 + 2)
        for tier in (DEVICE, HOST):
            arena = llm._executor.arenas[tier]
            names = ("KV blocks", "KV on the move")
            assert arena.capacity == sum(memory.purposes[tier][name] for name in names)
            assert arena.capacity - arena.used < PAGE
    monkeypatch.setattr(Plan, "frees", lambda *_: False)
    with LLM(windowed, plan, **where) as llm:
        assert len(llm._executor.stores) == 1
        assert [x.token_ids for x in answers(llm)] == found
    assert 0 <= part.pool_bytes - pools[1] < PAGE

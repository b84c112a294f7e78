"""Gemma 4 E2B and 3n in small on the ops of a GPU: the same answers wherever blocks and tables are.

Without a GPU everything is in CPU tensors, and Triton interprets the kernels of attention.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qoff.engine import LLM
from qoff.kvcache import KVPlacement, KVQuant
from qoff.kvcache.device.blocks import DeviceBlocks
from qoff.kvcache.store.placement import DEVICE
from qoff.memory.plan import PER_LAYER
from qoff.models.convert.convert import convert
from qoff.models.native.decoder import Decoder
from qoff.plan import Plan
from tests.engine.test_llm_device_latent import PARAMS, PROMPTS, few_programs, where
from tests.tiny_models import QUANT, save_model

__all__ = ["few_programs", "where"]  # fixtures, the second with pytest.mark.gpu
PLAN = Plan(batch_size=1, context=134, prefill_tokens=100, kv=KVQuant(8, 8, window=0))


SIZES: dict[str, dict[str, Any]] = {
    "gemma4-small": {
        "num_global_key_value_heads": 1,
        "global_head_dim": 128,
        "intermediate_size": 32,
    },
    "gemma3n": {"intermediate_size": [32] * 3, "activation_sparsity_pattern": [0.0, 0.8, 0.0]},
}


@pytest.fixture(scope="module", params=SIZES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last layer attends to K and V of the first one."""
    folder = tmp_path_factory.mktemp("gemma4")
    save_model(
        folder / "model",
        request.param,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        num_hidden_layers=3,
        num_kv_shared_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        sliding_window=40,
        vocab_size=32,
        vocab_size_per_layer_input=32,
        **SIZES[request.param],
    )
    convert(folder / "model", folder / "checkpoint", quant=QUANT)
    return folder / "checkpoint"


def answers(llm: LLM) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in llm.generate(PROMPTS[1:], PARAMS)]


def test_the_answers_do_not_depend_on_where_blocks_and_tables_are(
    checkpoint: Path, where: dict[str, Any]
) -> None:
    """On the device, where steps are replayed; moved there or attended to on the CPU; streamed."""
    with LLM(checkpoint, PLAN, **where) as llm:
        expected = answers(llm)
        all_near = llm.memory.total(DEVICE) + llm.memory_by_tier()["device"]["weights"]
        decoder = llm.runtime.decoder
        assert isinstance(decoder, Decoder)
        assert decoder.replays is not None
        assert decoder.replays.replayed
        assert not decoder.replays.failed
        assert llm.runtime.store.holds(PER_LAYER)
    plan = replace(PLAN, kv_placement=KVPlacement(0, 0.5))
    for way in ("never", "always"):
        with LLM(checkpoint, replace(plan, cpu_attention=way), **where) as llm:
            assert answers(llm) == expected
            for store in llm._executor.stores:
                assert isinstance(store, DeviceBlocks)
                assert store.pool.used == 0
                if store.write_back is not None:
                    assert not store.write_back._taken
                    assert not store.write_back._sent
    with LLM(checkpoint, replace(PLAN, device_memory=all_near - 1), **where) as llm:
        assert not llm.runtime.store.holds(PER_LAYER)
        assert answers(llm) == expected

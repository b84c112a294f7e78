"""What a GPU does not have, or has too little of, is refused before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qoff.engine import LLM
from qoff.errors import ArgumentError, BudgetError, OpError
from qoff.kvcache import KVPlacement, KVQuant
from qoff.kvcache.store.placement import DEVICE, HOST
from tests.engine.test_llm_device import ON_GPU, PLAN, SPARSE, THIRDS, checkpoint, where

__all__ = ["checkpoint", "where"]  # fixtures, the second with pytest.mark.gpu


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv": KVQuant(sinks=16)}, "on a GPU: sink tokens"),
        (
            {"kv": SPARSE, "kv_placement": THIRDS, "cpu_attention": "never"},
            r"'never' with attention to a part of offloaded blocks \(use 'auto'",
        ),
        ({"activation_bits": 8}, "no 8-bit activations"),
        (
            {
                "kv": KVQuant(sinks=16, attention_top=0.5),
                "kv_placement": THIRDS,
                "cpu_attention": "never",
            },
            "sink tokens.*; cpu_attention='never' with",
        ),
    ],
)
def test_options_that_a_gpu_does_not_have_are_refused(
    changes: dict[str, Any], message: str, checkpoint: Path, where: dict[str, Any]
) -> None:
    with pytest.raises(ArgumentError, match=message):
        LLM(checkpoint, replace(PLAN, **changes), **where)


@pytest.mark.parametrize("tier", [DEVICE, HOST])
def test_too_much_is_refused_before_anything_is_loaded(
    tier: str, checkpoint: Path, where: dict[str, Any]
) -> None:
    changes: dict[str, Any] = {f"{tier}_memory": 1 << 14}
    plan = replace(PLAN, kv_placement=KVPlacement(0.5, 0.5), activations="host", **changes)
    with pytest.raises(BudgetError, match=rf"{tier} memory: [\d,]+ bytes are needed .*KV blocks"):
        LLM(checkpoint, plan, **where)


def test_types_and_devices_that_are_not_there_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ArgumentError, match="a CPU computes in float32"):
        LLM(checkpoint, PLAN, device="cpu", dtype="bfloat16")
    if not ON_GPU:
        with pytest.raises(OpError, match="no GPU that torch can use"):
            LLM(checkpoint, PLAN, device="cuda")

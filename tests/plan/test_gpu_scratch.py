"""How much of a GPU a plan has for dequantized weights."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from qoff.kernels.triton.launch.gpu import Gpu
from qoff.models.native.caches import head_shapes
from qoff.models.spec import DecoderSpec
from qoff.plan import Plan
from tests.plan.machines import GIB, LLAMA_405B, MIB
from tests.triton_module import triton_module

triton_module("ops")
gpu = importlib.import_module("qoff.plan.gpu")
SPEC = DecoderSpec.from_config(
    LLAMA_405B
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
    }
)
CPU, HALF = torch.device("cpu"), torch.float16
UNIT = 2 * 4096 * (6144 + 4096 + 3 * 14336)  # bytes of the matrices of a layer
PLAN = Plan(batch_size=8, batches=2, prefill_tokens=2048, device_memory=16 * GIB)


@pytest.mark.parametrize(
    ("changes", "piece", "held"),
    [
        ({}, 256, UNIT),
        ({"device_memory": 4 * GIB}, 64, 256 * MIB),  # a 16th, of which an eighth is too small
        ({"batches": 1}, 256, 0),
        ({"batches": 1, "batch_size": 65}, 256, UNIT),  # a step and a prompt
        ({"schedule": "sequential"}, 256, 0),
        ({"prefill_tokens": 64}, 256, 0),  # nothing is dequantized
        ({"prefill_tokens": 64, "batch_size": 65}, 256, UNIT),
    ],
)
def test_the_rule(
    changes: dict[str, Any], piece: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = Gpu(89, 128)
    monkeypatch.setattr(Gpu, "of", staticmethod(lambda device: ada))
    plan = replace(PLAN, **changes)
    sizes = gpu.scratch_sizes(plan, SPEC, CPU, HALF)
    assert (sizes.piece, sizes.held) == (piece * MIB, held)
    # The head is dequantized for a prompt whose logits are wanted.
    dequantizes = plan.pass_tokens > 64
    assert sizes.nbytes == (held or dequantizes * piece * MIB)
    shapes = head_shapes(SPEC)
    with_it = gpu.memory_on_gpu(plan, SPEC, shapes, CPU, HALF).total("device")
    monkeypatch.setattr(gpu, "scratch_sizes", lambda *_: sizes._replace(nbytes=0))
    without = gpu.memory_on_gpu(plan, SPEC, shapes, CPU, HALF).total("device")
    assert with_it - without == sizes.nbytes

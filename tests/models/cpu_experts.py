"""Mixtures of which a CPU has experts beside a GPU; without one Triton is interpreted."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qoff.checkpoint import Checkpoint
from qoff.engine import SamplingParams
from qoff.errors import BudgetError
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.reference.experts import activate
from qoff.kvcache import KVQuant
from qoff.memory import plan_residency
from qoff.memory.instrumentation import Instrumentation
from qoff.memory.plan import Layouts
from qoff.models.convert.convert import convert
from qoff.models.forward_pass import ForwardPass
from qoff.models.runtime import Runtime
from tests.engine.test_llm_device import ON_GPU
from tests.instruments import POISON
from tests.models.test_triton_decoder import KV8, triton_ops
from tests.tiny_models import QUANT, save_model

HOOKS = POISON if ON_GPU else Instrumentation(poison=True, ops=triton_ops)
SMALL: dict[str, Any] = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL |= {"num_hidden_layers": 2, "vocab_size": 32, "intermediate_size": 32}
READ = [5, 9, 11, 3, 30, 17, 8], [12]
TOKENS = sum(map(len, READ))
PROMPTS = [[5, 9, 11, 3], [30, 17], [8, 12, 4, 21, 6], [7, 7], [19, 25, 10]]
PLAIN_KV = KVQuant(8, 8, window=16)
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
# Without biases, with them, beside a shared expert or an MLP, and with weights of inputs.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"decoder_sparse_step": 1, "num_experts": 32},
    "gpt-oss": {},
    "qwen2-moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "gemma4-moe": {
        "num_global_key_value_heads": 1,
        "global_head_dim": 512,
        "sliding_window": 40,
        "moe_intermediate_size": 32,
    },
    "step-3.5": {
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["sparse", "sparse"],
        "swiglu_limits": [None, 0.03],
        "swiglu_limits_shared": [0.05, 0.0],
        "num_sliding_attention_heads": 3,
        "share_expert_dim": 32,
        "sliding_window": 40,
    },
    "llama4": {"no_rope_layer_interval": 2, "attention_chunk_size": 40},
}


def w4_linear(x: Tensor, weight: QTensor, bias: Tensor | None, end: Any, scratch: Any) -> Tensor:
    """`kernels.triton.linear.linear.w4_linear` in torch."""
    y = x.float() @ weight.dequantize().T
    y = (y if bias is None else y + bias).to(x.dtype)
    y = activate(y, "silu") if end.silu_mul else y
    y = y if end.residual is None else y + end.residual
    return y if end.out is None else end.out.copy_(y)


@dataclass(frozen=True, eq=False)
class Model:
    """A mixture, its logits where all of it is on the device, and the bytes that this takes."""

    path: Path
    device: str
    logits: Tensor
    nbytes: int


@cache
def made(folder: Path, family: str, device: str) -> Model:
    """The model of a family, under `folder`; made once."""
    save_model(folder / "model", family, **SMALL, **FAMILIES[family])
    path = convert(folder / "model", folder / "checkpoint", quant=QUANT)
    with Runtime(
        path, kv=KV8, device=device, dtype=torch.float16, instrumentation=HOOKS
    ) as runtime:
        return Model(path, device, logits_of(runtime), runtime.residency.device_bytes)


def logits_of(runtime: Runtime) -> Tensor:
    """Those of a prompt and of a token after it."""
    cache, found = runtime.new_cache(1), list[Tensor]()
    for tokens in READ:
        ragged = Ragged.of([len(tokens)], cache.lengths)
        run = ForwardPass(torch.tensor(tokens), ragged, cache, None)
        found.append(runtime.forward(run).cpu().clone())
    return torch.cat(found)


@cache
def slots_of(model: Model, passing: bool = False) -> dict[int, int]:
    """A budget for each number of slots that the device may have for experts.

    passing: with room for one that passes through it.
    """
    checkpoint, found = Checkpoint.open(model.path), dict[int, int]()
    how: dict[str, Any] = {"packing": "split32", "layouts": Layouts(checkpoint, "split32")}
    how |= {"cpu_experts": True, "passing_from": 0} if passing else {}
    with contextlib.suppress(BudgetError):
        for budget in range(model.nbytes, 0, -1024):
            slots = plan_residency(checkpoint, budget, **how).expert_slots
            found[slots] = budget
    return {slots: found[slots] for slots in sorted(found) if slots}


def opened(model: Model, slots: int, **options: Any) -> Runtime:
    """With so many slots for experts on the device."""
    given: dict[str, Any] = {"host_memory": 1 << 30, "cpu_experts": True, **options}
    budget = slots_of(model, "passing_from" in options)[slots]
    given = {"device": model.device, "dtype": torch.float16, "device_memory": budget, **given}
    return Runtime(model.path, kv=KV8, instrumentation=HOOKS, **given)

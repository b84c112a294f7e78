"""Machines of round numbers, and a small model."""

from __future__ import annotations

from functools import cache
from typing import Any

from qoff.plan.native_sizes import NativeSizes
from qoff.plan.processor import Processor
from qoff.plan.profile import Link, MachineProfile
from qoff.quant import QuantConfig

GIB, MIB = 1 << 30, 1 << 20
LLAMA_405B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16384,
    "num_hidden_layers": 126,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
GEMMA_27B: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 5376,
    "num_hidden_layers": 62,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "query_pre_attn_scalar": 168,
    "sliding_window": 1024,
    "vocab_size": 262208,
}
SMALL: dict[str, Any] = LLAMA_405B | {
    "hidden_size": 256,
    "num_hidden_layers": 12,
    "intermediate_size": 704,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
MIXTURE: dict[str, Any] = SMALL | {
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "num_hidden_layers": 10,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}


@cache
def mixture(on_gpu: bool = False) -> NativeSizes:
    """Of a small mixture of experts."""
    return NativeSizes.of(MIXTURE, QuantConfig(packing="split32" if on_gpu else "rows16"))


@cache
def sizes(on_gpu: bool = False) -> NativeSizes:
    """Of the small model."""
    return NativeSizes.of(SMALL, QuantConfig(packing="split32" if on_gpu else "rows16"))


def machine(on_gpu: bool = False, **memory: int) -> MachineProfile:
    """A machine whose memory is "device", "host" and "disk" in bytes."""
    usable = {"device": 4 * MIB, "host": 2 * MIB if on_gpu else 0, "disk": GIB} | memory
    host = Processor.of(1e10, 1e11, 1e-5)
    disk = Link(1e8, 1e-4, 1e-10)
    return MachineProfile(
        "made up",
        on_gpu,
        4,
        Processor.of(1e11, 1e13, 1e-5) if on_gpu else host,
        host,
        disk,
        disk,
        Link(1e9, 1e-5),
        Link(1e9, 1e-5),
        usable,
    )

"""What is measured, in order of worth: models, budgets, plans and peers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from bench.random_model import LLAMA_8B

PROMPT, NEW = 512, 32  # tokens of a sequence
Config = Mapping[str, Any]


def opt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    """A config of OPT in float16."""
    return {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "ffn_dim": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "dtype": "float16",
    }


_LLAMA = LLAMA_8B | {"dtype": "bfloat16"}
_MIXTRAL = _LLAMA | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "vocab_size": 102400,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
MODELS: Mapping[str, Config] = MappingProxyType(
    {
        "llama-8b": _LLAMA,
        "opt-30b": opt(7168, 48, 56),
        "opt-6.7b": opt(4096, 32, 32),
        "mixtral-8x7b": _MIXTRAL,
        "deepseek-v2-lite": _DEEPSEEK,
    }
)


@dataclass(frozen=True)
class Row:
    """One measurement in a process of its own.

    budget: of device memory; "": all there is. plan: options of `qoff.Plan` beside batches.
    weights: where those that stream come from, "host" or "disk". flags: of FlexGen, which runs with
    them, and qoff with the plan they mean. new: tokens of an answer; cut: of which so many are
    generated, and the time of all is projected.
    """

    model: str
    system: str  # a key of `measure.SYSTEMS`
    budget: str = ""
    batch_size: int = 1
    batches: int = 1
    plan: Mapping[str, Any] = field(default_factory=dict)
    weights: str = "host"
    flags: str = ""
    label: str = ""
    prompt: int = PROMPT
    new: int = NEW
    cut: int = 0
    limit_s: float = 120.0

    @property
    def key(self) -> str:
        """Its name among all rows."""
        shape = f"{self.batch_size} x {self.batches}"
        parts = (self.model, self.budget or "everything", self.system, shape, self.label)
        return ", ".join(part for part in parts if part)

    @property
    def sequences(self) -> int:
        return self.batch_size * self.batches


def _flexgen(percent: str, size: int, batches: int, rest: str) -> str:
    return (
        f"--percent {percent} --gpu-batch-size {size} --num-gpu-batches {batches} "
        f"--prompt-len {PROMPT} --gen-len {NEW} {rest}"
    ).strip()


_COMPRESS = "--compress-weight --compress-cache"
_30B = _flexgen("0 100 0 100 0 100", 48, 2, _COMPRESS)
_6B = _flexgen("100 0 100 0 100 0", 72, 1, f"{_COMPRESS} --overlap False")
_6B_16 = _flexgen("100 0 100 0 100 0", 2, 1, "--overlap False")
_30B_16 = _flexgen("20 80 0 100 0 100", 16, 2, "--cpu-cache-compute")
_LONG = {"prefill_tokens": 4096}

ROWS: tuple[Row, ...] = (
    Row("llama-8b", "qoff"),
    Row("llama-8b", "qoff", "2GB", label="weights from the host"),
    Row("llama-8b", "qoff", "2GB", weights="disk", label="weights from disk"),
    Row("llama-8b", "qoff", "16GB", 64, 2, _LONG),
    Row("llama-8b", "qoff", "8GB", 32, 1, _LONG),
    Row("llama-8b", "transformers"),
    Row("llama-8b", "transformers", "", 32),
    Row("llama-8b", "accelerate", "8GB", cut=4),
    Row("opt-30b", "qoff", "16GB", 32, 1, _LONG | {"window": 0}, label="KV on the device"),
    Row("opt-30b", "qoff", "16GB", 48, 2, flags=_30B, label="FlexGen's flags, compressed"),
    Row("opt-30b", "qoff", "8GB"),
    Row("opt-30b", "flexgen", "16GB", 48, 2, flags=_30B, label="compressed", limit_s=180.0),
    Row("opt-30b", "qoff", "8GB", 16, 1, {"prefill_tokens": 2048, "window": 0}),
    Row("opt-6.7b", "qoff", "16GB", 72, 1, flags=_6B, label="FlexGen's flags, compressed"),
    Row("opt-6.7b", "flexgen", "16GB", 72, 1, flags=_6B, label="compressed"),
    Row("opt-6.7b", "flexgen", "16GB", 2, 1, flags=_6B_16),
    Row("opt-6.7b", "qoff", "", 2),
    Row("opt-6.7b", "transformers", "", 2),
    Row("mixtral-8x7b", "qoff", "16GB", 32, 1, _LONG),
    Row("mixtral-8x7b", "qoff", "8GB"),
    Row("mixtral-8x7b", "qoff", "", 32, 1, _LONG),
    Row("deepseek-v2-lite", "qoff", "16GB", 32, 1, _LONG),
    Row("deepseek-v2-lite", "qoff", "8GB"),
    Row("opt-30b", "flexgen", "16GB", 16, 2, flags=_30B_16, limit_s=240.0),
    Row("opt-30b", "accelerate", "16GB", cut=2, limit_s=240.0),
)


def rehearsed() -> tuple[Mapping[str, Config], tuple[Row, ...]]:
    """Tiny models, one of each kind, and rows of every kind; one hangs."""
    tiny = {"num_hidden_layers": 6, "num_attention_heads": 2, "vocab_size": 128}
    gated = tiny | {"hidden_size": 128, "intermediate_size": 64, "num_key_value_heads": 1}
    models: dict[str, Config] = {
        "llama-8b": _LLAMA | gated,
        "opt-30b": opt(128, 6, 2) | tiny,
        "mixtral-8x7b": _MIXTRAL | gated,
        "deepseek-v2-lite": _DEEPSEEK
        | tiny
        | {"hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 128}
        | {"num_key_value_heads": 2, "n_routed_experts": 16, "num_experts_per_tok": 2},
    }
    size: dict[str, Any] = {"prompt": 96, "new": 4, "limit_s": 30.0}
    flags = _30B.replace("size 48", "size 2").replace("512", "96").replace("len 32", "len 4")
    rows = (
        Row("llama-8b", "qoff", **size),
        Row("llama-8b", "qoff", "2GB", weights="disk", label="weights from disk", **size),
        Row("llama-8b", "transformers", **size),
        Row("llama-8b", "accelerate", "8GB", cut=2, **size),
        Row("llama-8b", "hang", prompt=96, new=4, limit_s=0.5),
        Row("opt-30b", "qoff", "16GB", 2, 2, flags=flags, label="FlexGen's flags", **size),
        Row("opt-30b", "flexgen", "16GB", 2, 2, flags=flags, label="compressed", **size),
        Row("mixtral-8x7b", "qoff", "16GB", 2, 1, **size),
        Row("deepseek-v2-lite", "qoff", "16GB", 2, 1, **size),
    )
    return models, rows

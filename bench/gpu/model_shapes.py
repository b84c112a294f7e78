"""The shapes of the models that the GPU bench times, from their config.json on the hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TOKENS = (1, 4, 16, 64, 256, 1024, 4096)  # rows of a matmul


@dataclass(frozen=True)
class ModelShape:
    """One decoder. `intermediate` is that of an expert where there are experts."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    gated: bool = True
    experts: int = 0
    per_token: int = 0  # experts of a token

    @property
    def group(self) -> int:
        """Query heads for a KV head."""
        return self.heads // self.kv_heads

    def linears(self) -> Mapping[str, tuple[int, int]]:
        """Rows (outputs) and columns (inputs) of the matrices of a layer, and of the head."""
        queries = self.heads * self.head_dim
        up = "gate/up" if self.gated else "up"
        return {
            "qkv": (queries + 2 * self.kv_heads * self.head_dim, self.hidden),
            "o": (self.hidden, queries),
            up: ((1 + self.gated) * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocabulary, self.hidden),
        }


LLAMA_8B = ModelShape("Llama-8B", 4096, 32, 8, 128, 14336, 128256)
LLAMA_70B = ModelShape("Llama-70B", 8192, 64, 8, 128, 28672, 128256)
QWEN3_30B = ModelShape("Qwen3-30B-A3B", 2048, 32, 4, 128, 768, 151936, experts=128, per_token=8)
OPT_30B = ModelShape("OPT-30B", 7168, 56, 56, 128, 28672, 50272, gated=False)
MODELS = (LLAMA_8B, LLAMA_70B, QWEN3_30B, OPT_30B)
QUICK_MODELS = (LLAMA_8B, OPT_30B, QWEN3_30B)


def shapes(quick: bool) -> tuple[ModelShape, ...]:
    """All models, or one with grouped queries, one without and one with experts."""
    return QUICK_MODELS if quick else MODELS

"""What the native decoder has to know of a model: numbers and switches, no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from qoff.errors import UnsupportedModelError

ACTIVATIONS = ("silu",)
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding over the whole head: its kind, base and scaling parameters.

    `scaling` holds the remaining keys of transformers' `rope_parameters` (factor, beta_fast, ...),
    sorted. Raises UnsupportedModelError for a kind that is not in ROPE_KINDS.
    """

    kind: str
    theta: float
    scaling: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise unsupported("rope_parameters.rope_type", self.kind, ", ".join(ROPE_KINDS))
        if not self.theta > 0:
            raise unsupported("rope_parameters.rope_theta", self.theta, "a number above 0")
        partial = dict(self.scaling).get("partial_rotary_factor", 1.0)
        if partial != 1.0:
            raise unsupported("rope_parameters.partial_rotary_factor", partial, "1.0")

    def parameters(self) -> dict[str, Any]:
        """Return the `rope_parameters` dict that transformers calls the same thing."""
        return {"rope_type": self.kind, "rope_theta": self.theta, **dict(self.scaling)}


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder with pre-norm RMSNorm, rotary attention and a gated MLP, and its switches.

    Raises UnsupportedModelError, naming the key of `config.json`, for numbers that do not fit each
    other and for switches without an implementation.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeSpec
    rope_layers: tuple[bool, ...]  # per layer: whether it rotates queries and keys
    sliding_window: tuple[int | None, ...]  # per layer: tokens attended to, itself included
    activation: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim of each query and key head, before RoPE
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for field, key in _SIZES.items():
            if getattr(self, field) < 1:
                raise unsupported(key, getattr(self, field), "a whole number above 0")
        if self.num_heads % self.num_kv_heads:
            raise unsupported(
                "num_key_value_heads", self.num_kv_heads, f"a divisor of {self.num_heads} heads"
            )
        if self.head_dim % 2:
            raise unsupported("head_dim", self.head_dim, "an even number")
        if self.activation not in ACTIVATIONS:
            raise unsupported("hidden_act", self.activation, ", ".join(ACTIVATIONS))
        for key, per_layer in (
            ("no_rope_layers", self.rope_layers),
            ("layer_types", self.sliding_window),
        ):
            if len(per_layer) != self.num_layers:
                raise unsupported(
                    key, f"{len(per_layer)} entries", f"one for each of {self.num_layers} layers"
                )
        for window in self.sliding_window:
            if window is not None and window < 1:
                raise unsupported("sliding_window", window, "null or a whole number above 0")

    @property
    def q_rows(self) -> int:
        """Outputs of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Outputs of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read the spec from a Hugging Face `config.json`, of transformers 4 or 5.

        Raises UnsupportedModelError naming the key, what was found and what is supported.
        """
        from .llama import read_spec  # below this module in the file tree, above it in meaning

        return cls(**read_spec(config))


def unsupported(key: str, found: object, supported: str) -> UnsupportedModelError:
    """Return the error for a key of `config.json`."""
    return UnsupportedModelError(f"config.json: {key} is {found!r}; supported: {supported}")


_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
}

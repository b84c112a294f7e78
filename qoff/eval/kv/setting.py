"""The form of a KV cache that a model is evaluated with."""

from __future__ import annotations

from dataclasses import dataclass

from qoff.errors import ArgumentError
from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kvcache import KVQuant
from qoff.models.spec import DecoderSpec

from .every_token import RoundTrip, ggml, ggml_bits, packed


@dataclass(frozen=True)
class KVSetting:
    """How K and V are packed: `quant`, or None for float32.

    every_token: see the module of that name; otherwise a real cache, whose newest tokens are not
    packed. ggml: a cache type of llama.cpp in place of `quant`, with every_token only.
    """

    quant: KVQuant | None = None
    every_token: bool = False
    ggml: str | None = None

    def __post_init__(self) -> None:
        if self.ggml and not self.every_token:
            raise ArgumentError("types of llama.cpp are evaluated with every token packed")

    @property
    def round_trip(self) -> RoundTrip | None:
        """What every token goes through; None for a real cache, and for float32."""
        if self.ggml is not None:
            return ggml(self.ggml)
        return packed(self.quant) if self.every_token and self.quant is not None else None

    @property
    def name(self) -> str:
        """Like "4,4, every token"."""
        if self.ggml is not None:
            return f"llama.cpp {self.ggml}, every token"
        if self.quant is None:
            return "float32"
        quant = self.quant
        parts = [f"{quant.k_bits},{quant.v_bits}"]
        parts += [f"{len(quant.layers)} layers otherwise"] if quant.layers else []
        parts += ["every token"] if self.every_token else [f"window {quant.window}"]
        parts += [f"{quant.sinks} sinks"] if quant.sinks and not self.every_token else []
        parts += [f"top {quant.attention_top:g}"] if quant.attention_top < 1 else []
        return ", ".join(parts)

    def bytes_per_token(self, spec: DecoderSpec) -> float:
        """Of an old token, in all layers; those in the window take what float32 takes."""
        layers = range(spec.num_layers)
        if self.ggml is not None:
            each = [2 * spec.head_dim * ggml_bits(self.ggml) / 8 for _ in layers]
        else:
            forms = [self.quant and self.quant.form(spec.head_dim, layer) for layer in layers]
            each = [form.nbytes / BLOCK_TOKENS if form else 8 * spec.head_dim for form in forms]
        return spec.num_kv_heads * sum(each)

"""The native decoder: five ops a layer, and a forward pass that pauses before every layer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import Tensor

from qoff.kernels.heads import HeadShape
from qoff.kernels.ops import Ops
from qoff.kernels.qtensor import QTensor
from qoff.kernels.ragged import Ragged
from qoff.kvcache import KVCache, KVQuant, PackedCache, PlainCache
from qoff.memory import HEAD, Unit

from . import names
from .rope import RotaryTable
from .spec import DecoderSpec

Weights = Mapping[str, QTensor | Tensor]
Steps = Generator[Unit, Weights, Tensor]

_MLP_TOKENS = 512  # tokens that go through the MLP together: bounds working space at prefill


class Activations(Protocol):
    """Where the hidden states of a batch are between two units."""

    def load(self) -> Tensor:
        """Return the hidden states, float32 [M, hidden_size], on the device."""

    def store(self, hidden: Tensor) -> None:
        """Take the hidden states; what `load` returned is not used any more."""


class Kept:
    """Hidden states that stay on the device."""

    def __init__(self) -> None:
        self._hidden: Tensor | None = None

    def load(self) -> Tensor:
        assert self._hidden is not None
        return self._hidden

    def store(self, hidden: Tensor) -> None:
        self._hidden = hidden


@dataclass(frozen=True)
class Scratch:
    """What a layer leaves between its ops, for up to `qkv.shape[0]` tokens; not between units."""

    qkv: Tensor  # [M, (heads + 2 kv_heads) * head_dim]
    attended: Tensor  # [M, heads * head_dim]
    gated: Tensor  # [at most _MLP_TOKENS, intermediate_size]

    @classmethod
    def of(cls, spec: DecoderSpec, tokens: int) -> Scratch:
        return cls(
            torch.empty(tokens, spec.q_rows + 2 * spec.kv_rows),
            torch.empty(tokens, spec.q_rows),
            torch.empty(min(tokens, _MLP_TOKENS), spec.intermediate_size),
        )

    @staticmethod
    def nbytes(spec: DecoderSpec, tokens: int) -> int:
        """Bytes of `of(spec, tokens)`."""
        attention = tokens * (2 * spec.q_rows + 2 * spec.kv_rows)
        return 4 * (attention + min(tokens, _MLP_TOKENS) * spec.intermediate_size)

    def upto(self, tokens: int) -> Scratch:
        """The part for this many tokens."""
        return Scratch(self.qkv[:tokens], self.attended[:tokens], self.gated)


@dataclass(frozen=True)
class Batch:
    """One forward pass: new tokens of some sequences, and the cache that remembers the old."""

    tokens: Tensor  # int64 [M]
    ragged: Ragged
    cache: KVCache
    logit_rows: Tensor  # int64 [R], rows whose logits are wanted
    activations: Activations = field(default_factory=Kept)
    scratch: Scratch | None = None  # for at least M tokens; None: its own


class Decoder:
    """A decoder of the Llama family, computed by `ops` on weights that it is handed step by step.

    `embed` turns token ids, int64 [M], into float32 [M, hidden_size]. activation_bits: of the
    inputs of each layer's matmuls, 16 or 8; the head's are always 16.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        ops: Ops,
        embed: Callable[[Tensor], Tensor],
        activation_bits: int = 16,
    ) -> None:
        self.spec = spec
        self._ops = ops
        self._activation_bits = activation_bits
        self._embed = embed
        self._rotary = RotaryTable(spec)
        self.head_shapes = tuple(
            HeadShape(
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_dim,
                spec.head_dim**-0.5,
                spec.sliding_window[layer],
                spec.norm_eps,
            )
            for layer in range(spec.num_layers)
        )

    def new_cache(self, sequences: int, capacity: int = 0, kv: KVQuant | None = None) -> KVCache:
        """An empty cache for this many sequences: float32, or packed as `kv` says.

        A float32 cache has room for `capacity` tokens each at once. Raises OpError for a head size
        that cannot be packed.
        """
        if kv is None:
            return PlainCache(self.head_shapes, sequences, capacity)
        forms = [kv.form(shape.head_dim) for shape in self.head_shapes]
        return PackedCache(self.head_shapes, forms, sequences, window=kv.window)

    def steps(self, batch: Batch) -> Steps:
        """One forward pass, as a generator over its units.

        It yields the unit it needs next (0, 1, ..., HEAD) and is sent that unit's weights, by
        their names inside the layer, which it uses until it yields again. A tied embedding comes
        as "lm_head". It returns the logits, float32 [R, vocab_size]; the new tokens
        are then in the cache.
        """
        cache, ragged = batch.cache, batch.ragged
        cache.begin(ragged)
        rotary = self._rotary.upto(ragged.longest + 1)
        activations = batch.activations
        activations.store(self._embed(batch.tokens))
        scratch = (batch.scratch or Scratch.of(self.spec, ragged.tokens)).upto(ragged.tokens)
        for layer in range(self.spec.num_layers):
            weights = yield layer
            hidden = activations.load()
            self._attention(layer, weights, hidden, scratch, batch, rotary)
            self._mlp(weights, hidden, scratch)
            activations.store(hidden)
        weights = yield HEAD
        hidden = activations.load()
        cache.end(ragged)
        return self._ops.w4_linear(
            hidden[batch.logit_rows],
            _matrix(weights, names.HEAD),
            norm=_vector(weights, names.NORM),
            eps=self.spec.norm_eps,
        )

    def _attention(
        self,
        layer: int,
        weights: Weights,
        hidden: Tensor,
        scratch: Scratch,
        batch: Batch,
        rotary: tuple[Tensor, Tensor],
    ) -> None:
        """hidden += attention(norm(hidden))."""
        spec = self.spec
        qkv = self._ops.w4_linear(
            hidden,
            _matrix(weights, "self_attn.qkv_proj"),
            norm=_vector(weights, "input_layernorm.weight"),
            eps=spec.norm_eps,
            bias=_vector(weights, "self_attn.qkv_proj.bias"),
            activation_bits=self._activation_bits,
            out=scratch.qkv,
        )
        attended = self._ops.attention(
            qkv,
            self.head_shapes[layer],
            batch.cache.open(layer),
            batch.ragged,
            rotary=rotary if spec.rope_layers[layer] else None,
            q_norm=_vector(weights, "self_attn.q_norm.weight"),
            k_norm=_vector(weights, "self_attn.k_norm.weight"),
            out=scratch.attended,
        )
        batch.cache.close(layer)
        self._ops.w4_linear(
            attended,
            _matrix(weights, "self_attn.o_proj"),
            bias=_vector(weights, "self_attn.o_proj.bias"),
            residual=hidden,
            activation_bits=self._activation_bits,
            out=hidden,
        )

    def _mlp(self, weights: Weights, hidden: Tensor, scratch: Scratch) -> None:
        """hidden += down(silu(gate(norm(hidden))) * up(norm(hidden)))."""
        parts = (hidden,) if len(hidden) <= _MLP_TOKENS else hidden.split(_MLP_TOKENS)
        for part in parts:
            gated = self._ops.w4_linear(
                part,
                _matrix(weights, "mlp.gate_up_proj"),
                norm=_vector(weights, "post_attention_layernorm.weight"),
                eps=self.spec.norm_eps,
                bias=_vector(weights, "mlp.gate_up_proj.bias"),
                silu_mul=True,
                activation_bits=self._activation_bits,
                out=scratch.gated[: len(part)],
            )
            self._ops.w4_linear(
                gated,
                _matrix(weights, "mlp.down_proj"),
                bias=_vector(weights, "mlp.down_proj.bias"),
                residual=part,
                activation_bits=self._activation_bits,
                out=part,
            )


def _matrix(weights: Weights, name: str) -> QTensor:
    return cast(QTensor, weights[name])


def _vector(weights: Weights, name: str) -> Tensor | None:
    """A dense weight, None where this model has none of that name."""
    return cast("Tensor | None", weights.get(name))

"""What the native decoder has to know of a model: numbers and switches, no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any, Literal, Self

from qoff.errors import ContextLengthError
from qoff.kernels.layout.ending import ACTIVATIONS, XIELU
from qoff.kernels.layout.heads import QueryScale
from qoff.kernels.layout.states import StateShape

from .families import read_spec
from .families.mtp import mtp_fields
from .recurrent_spec import RecurrentSpec
from .spec_parts import (
    ExpertsSpec,
    HeadsSpec,
    IndexSpec,
    LatentSpec,
    PerLayerSpec,
    RopeSpec,
    StreamsSpec,
    unsupported,
)


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder layer by layer: attention and MLP, each added to the hidden states; its switches.

    With `pre_norm` the input of both is normalized, with `post_norm` their output is, before it is
    added, with `norm_after_add` the sum. parallel: both compute from the same hidden states. Raises
    UnsupportedModelError, naming the key of `config.json`, for numbers that do not fit each other
    and for switches without an implementation.
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
    rope: RopeSpec | None
    rope_layers: tuple[bool, ...]  # per layer: whether it rotates queries and keys
    sliding_window: tuple[int | None, ...]  # per layer: tokens attended to, itself included
    chunked: bool = False  # windows begin at multiples of their size
    activation: str = "silu"
    gated: bool = True  # the MLP is down(act(gate(x)) * up(x)), or else down(act(up(x)))
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norm: Literal["rms", "layer"] = "rms"  # RMSNorm, or LayerNorm
    norm_bias: bool = True  # of LayerNorms
    pre_norm: bool = True
    post_norm: bool = False
    norm_after_add: bool = False
    states_pre_norm: bool = False  # layers with states have norms before in place of after
    final_norm: bool = True
    parallel: bool = False
    # RMSNorm before RoPE: of each query and key head ("unweighted": without weights, in layers that
    # rotate; "rotated": after it), or of all queries and of all keys of a token.
    qk_norm: Literal["none", "head", "unweighted", "rotated", "all"] = "none"
    value_norm: bool = False  # RMSNorm without weights of each value head
    local_rope: RopeSpec | None = None  # of layers with a sliding window, where it differs
    full_heads: HeadsSpec | None = None  # head_dim and num_kv_heads are of windows then
    value_dim: int = 0  # channels of a value head, with zeros behind in a cache; 0: as many as keys
    layer_heads: tuple[int, ...] | None = None  # per layer: its query heads; None: num_heads
    learned_positions: int = 0  # rows of a table of which one is added to each embedding
    position_offset: int = 0  # the row of position 0
    attention_scale: float | None = None  # of scores; None: head_dim ** -0.5
    query_scale: QueryScale | None = None  # by position
    scaled_layers: tuple[bool, ...] | None = None  # whose queries are; None: all
    attention_soft_cap: float = 0.0  # scores become cap * tanh(score / cap); 0: they do not
    sinks: Literal["none", "all", "windows"] = "none"  # layers whose heads have an attention sink
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    attention_output_scale: float = 1.0  # of what attention adds, beside
    mlp_input_scale: float = 1.0  # of what the norm before it gives
    mlp_output_scale: float = 1.0  # of what the MLP adds, beside
    layer_scale: bool = False  # what a layer returns is multiplied by a number of its own
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0
    tie_word_embeddings: bool = False
    head_bias: bool = False
    experts: ExpertsSpec | None = None
    latent: LatentSpec | None = None  # head_dim is of queries then, and there is one KV head
    index: IndexSpec | None = None  # of layers with latent attention whose queries are compressed
    gated_attention: bool = False  # times a projection's activation, before that of the output
    gate_activation: Literal["sigmoid", "softplus"] = "sigmoid"
    head_gates: bool = False  # such a gate is of a head; otherwise of each of its channels
    recurrent: RecurrentSpec | None = None  # what some layers have in place of attention, or beside
    # Per layer, whether it has attention or what is in its place; an MLP or experts. None: all do.
    mixers: tuple[bool, ...] | None = None
    mlps: tuple[bool, ...] | None = None
    # The last layers that attend to K and V of an earlier one: the last before them of their kind,
    # with a sliding window or without; and how wide their MLPs are (0: as others).
    shared_kv: int = 0
    shared_intermediate_size: int = 0
    per_layer: PerLayerSpec | None = None
    streams: StreamsSpec | None = None
    mtp: bool = False  # its only layer predicts further ahead: see `families.mtp`
    # Per layer: the share of an MLP's gate that becomes 0, as if it were distributed normally.
    sparsity: tuple[float, ...] | None = None
    # Per layer: what gate and up of its MLP, or of its shared experts, are limited to: see
    # `layout.ending.Ending`; 0: nothing.
    limits: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for field, key in _SIZES.items():
            if type(size := getattr(self, field)) is not int or size < 1:
                raise unsupported(key, size, "a whole number above 0")
        for kv_heads, head_dim in self._heads:
            for heads in self.layer_heads or (self.num_heads,):
                if type(heads) is not int or heads < 1 or heads % kv_heads:
                    raise unsupported(
                        "num_key_value_heads", kv_heads, f"a divisor of {heads} heads"
                    )
            if head_dim % 2:
                raise unsupported("head_dim", head_dim, "an even number")
        for rope, dim in ((self.rope, self._heads[-1][1]), (self.local_rope, self.head_dim)):
            if rope is not None and rope.dim > dim:
                raise unsupported("partial_rotary_factor", rope.dim, f"up to {dim}")
        self._check_values()
        numbered = not (self.gated or self.experts or self.per_layer)  # what xIELU has may be
        activations = (*ACTIVATIONS, XIELU) if numbered else ACTIVATIONS
        if self.activation not in activations:
            raise unsupported("hidden_act", self.activation, ", ".join(activations))
        for key, per_layer in (
            ("no_rope_layers", self.rope_layers),
            ("layer_types", self.sliding_window),
            ("no_rope_layers", self.scaled_layers or self.rope_layers),
            ("mlp_only_layers", self.experts.layers if self.experts else self.rope_layers),
            ("layer_types", self.recurrent.layers if self.recurrent else self.rope_layers),
            ("layer_types", self.mixers or self.rope_layers),
            ("layer_types", self.mlps or self.rope_layers),
            ("activation_sparsity_pattern", self.sparsity or self.rope_layers),
            ("num_attention_heads_per_layer", self.layer_heads or self.rope_layers),
            ("swiglu_limits_shared", self.limits or self.rope_layers),
            ("swiglu_limits", (self.experts and self.experts.limits) or self.rope_layers),
            ("indexer_types", self.index.layers if self.index else self.rope_layers),
        ):
            if len(per_layer) != self.num_layers:
                raise unsupported(
                    key, f"{len(per_layer)} entries", f"one for each of {self.num_layers} layers"
                )
        for window in self.sliding_window:
            if window is not None and window < 1:
                raise unsupported("sliding_window", window, "null or a whole number above 0")
        own = self.num_layers - self.shared_kv
        kinds = [window is None for window in self.sliding_window]
        if self.shared_kv < 0 or not set(kinds[max(own, 0) :]) <= set(kinds[: max(own, 0)]):
            raise unsupported(
                "num_kv_shared_layers", self.shared_kv, "layers with others of their kind before"
            )
        for share in self.sparsity or ():
            if not 0 <= share < 1:
                raise unsupported("activation_sparsity_pattern", share, "0 and more, below 1")

    def _check_values(self) -> None:
        """Raise UnsupportedModelError for value heads that do not fit."""
        if not self.value_dim:
            return
        most = min(head_dim for _, head_dim in self._heads)
        if type(self.value_dim) is not int or not 1 <= self.value_dim <= most:
            raise unsupported("v_head_dim", self.value_dim, f"1 to {most}, the channels of keys")
        if self.latent is not None or self.gated_attention or self.shared_kv or self.value_norm:
            raise unsupported("v_head_dim", self.value_dim, "that of keys, in this family")

    @property
    def _heads(self) -> tuple[tuple[int, int], ...]:
        """KV heads and channels of a head, of each kind of layer; those without a window last."""
        own, full = (self.num_kv_heads, self.head_dim), self.full_heads
        return (own,) if full is None else (own, (full.kv_heads, full.head_dim))

    def heads(self, layer: int) -> tuple[int, int]:
        """KV heads, and channels of a head."""
        return self._heads[0 if self.sliding_window[layer] is not None else -1]

    def query_heads(self, layer: int) -> int:
        """Heads that attend."""
        return self.num_heads if self.layer_heads is None else self.layer_heads[layer]

    def values(self, layer: int) -> int:
        """Channels of a value head, of attention that is not latent."""
        return self.value_dim or self.heads(layer)[1]

    def has_sinks(self, layer: int) -> bool:
        """Whether each head of a layer has a score for a key without a value."""
        windowed = self.sliding_window[layer] is not None
        return self.sinks == "all" or (self.sinks == "windows" and windowed)

    def gates(self, layer: int) -> int:
        """Numbers of a token that gates of attention come of."""
        each = 1 if self.head_gates else self.heads(layer)[1]
        return self.query_heads(layer) * each * self.gated_attention

    @property
    def q_rows(self) -> int:
        """Outputs of the query projection; where layers differ, the most, as of the following."""
        return max(self.query_heads(i) * self.heads(i)[1] for i in range(self.num_layers))

    @property
    def kv_rows(self) -> int:
        """Outputs of the key projection, and of the value projection."""
        return max(kv_heads * dim for kv_heads, dim in self._heads)

    @property
    def rope_head_dim(self) -> int:
        """Channels that RoPE may rotate: of latent attention those that it does."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def qkv_rows(self) -> int:
        """Outputs of the first projection: queries, keys, values, gates, or what these come of."""
        if self.latent is None:
            return max(self._given(i, self.values(i)) for i in range(self.num_layers))
        first = self.latent.query_latent or self.q_rows
        return first + self.latent.latent + self.latent.rope_dim + self.gates(0)

    def _given(self, layer: int, values: int) -> int:
        """Queries, keys, values of so many channels a head, and gates of a token in a layer."""
        queries, (kv_heads, dim) = self.query_heads(layer), self.heads(layer)
        return (queries + kv_heads) * dim + kv_heads * values + self.gates(layer)

    @property
    def projected_rows(self) -> int:
        """Numbers of a token that latent attention comes of, or makes of it."""
        if self.latent is None:
            return 0
        queries = self.q_rows if self.latent.query_latent else 0
        index = 0 if self.index is None else self.index.columns  # before there are queries
        return max(self.qkv_rows + max(queries, index), self.o_columns)

    @property
    def o_columns(self) -> int:
        """Inputs of the output projection."""
        if self.latent is not None:
            return self.num_heads * self.latent.value_dim
        return max(self.query_heads(i) * self.values(i) for i in range(self.num_layers))

    @property
    def attention_width(self) -> int:
        """Numbers of a token that attention is given, with its gates, or a recurrent layer's op."""
        states = 0 if self.state_shape is None else sum(self.state_shape.projections)
        if self.latent is None:
            return max(states, *(self._given(i, self.heads(i)[1]) for i in range(self.num_layers)))
        return max((self.num_heads + 1) * (self.latent.latent + self.latent.rope_dim), states)

    @property
    def heads_width(self) -> int:
        """Numbers of a token that attention returns: latents, where it is latent."""
        return self.q_rows if self.latent is None else self.num_heads * self.latent.latent

    @property
    def attended_width(self) -> int:
        """Numbers of a token that attention, a recurrent layer's op, or both return."""
        if self.state_shape is None:
            return self.heads_width
        both = self.heads_width, self.state_shape.values
        return sum(both) if self.has_both else max(both)

    def rope_of(self, layer: int) -> RopeSpec | None:
        """How a layer rotates queries and keys; None: it does not."""
        if not self.rope_layers[layer]:
            return None
        local = self.sliding_window[layer] is not None and self.local_rope is not None
        return self.local_rope if local else self.rope

    @property
    def embedded_tokens(self) -> int:
        """Rows of the embedding: as many as the head has."""
        return self.vocab_size

    @property
    def position_limit(self) -> int | None:
        """Tokens that a sequence may have; None: as many as there is memory for.

        Beyond it a learned table ends, or the frequencies of a kind of RoPE would change.
        """
        limits = [self.learned_positions - self.position_offset] if self.learned_positions else []
        for rope in (self.rope, self.local_rope):
            if rope is not None and rope.kind == "dynamic":
                limits.append(self.max_position_embeddings)
            elif rope is not None and rope.kind == "longrope":
                limits.append(int(dict(rope.scaling)["original_max_position_embeddings"]))
        return min(limits, default=None)

    def check_positions(self, tokens: int) -> None:
        """Raise ContextLengthError for a sequence of more tokens than `position_limit`."""
        check_length(tokens, self.position_limit, self.model_type)

    def query_scale_of(self, layer: int) -> QueryScale | None:
        """How a layer scales its queries by position."""
        return self.query_scale if (self.scaled_layers or self.rope_layers)[layer] else None

    @cached_property
    def state_shape(self) -> StateShape | None:
        """What each recurrent layer computes and remembers."""
        return None if self.recurrent is None else self.recurrent.shape(self.norm_eps)

    @property
    def has_both(self) -> bool:
        """Whether layers with states attend, too."""
        return self.recurrent is not None and self.recurrent.beside

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer has states, in place of K and V or beside them."""
        return self.recurrent is not None and self.recurrent.layers[layer]

    def norms_before(self, layer: int) -> bool:
        """Whether the inputs of a layer's attention and MLP are normalized."""
        return self.pre_norm or (self.states_pre_norm and self.is_recurrent(layer))

    def norms_after(self, layer: int) -> bool:
        """Whether what a layer's attention and MLP add is."""
        return self.post_norm and not (self.states_pre_norm and self.is_recurrent(layer))

    def has_mixer(self, layer: int) -> bool:
        """Whether a layer has attention, or what is in its place."""
        return self.mixers is None or self.mixers[layer]

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP, or experts."""
        return self.mlps is None or self.mlps[layer]

    def attends(self, layer: int) -> bool:
        """Whether a layer has attention."""
        return self.has_mixer(layer) and (self.has_both or not self.is_recurrent(layer))

    @cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """Those that attend to K and V of their own, and have a KV cache."""
        return tuple(i for i in range(self.num_layers - self.shared_kv) if self.attends(i))

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """The layer whose K and V each attends to: itself, or an earlier one."""
        own = self.num_layers - self.shared_kv
        last = {self.sliding_window[i] is None: i for i in range(own)}
        shared = (last[self.sliding_window[i] is None] for i in range(own, self.num_layers))
        return (*range(own), *shared)

    @cached_property
    def cache_places(self) -> tuple[tuple[int, ...], ...]:
        """What each layer opens of a KV cache, one after the other; the last is its K and V.

        Or its states, which come first where there are both. An index, which comes before K and V,
        is a layer of the cache of its own. A layer without a mixer has none.
        """
        if self.index is None and self.mixers is None and not self.has_both:
            return tuple((layer,) for layer in self.kv_layers)
        found, count = [], 0
        for layer in range(self.num_layers):
            indexes = self.index is not None and self.index.layers[layer]
            own = self.is_recurrent(layer) + self.attends(layer) * (1 + indexes)
            found.append(tuple(range(count, count + own)))
            count += own
        return tuple(found)

    @cached_property
    def cached_layers(self) -> tuple[int, ...]:
        """The layers of a KV cache that K and V, or keys of an index, are in."""
        places = ((layer, self.cache_places[layer]) for layer in self.attention_layers)
        return tuple(x for layer, own in places for x in own[self.is_recurrent(layer) :])

    @cached_property
    def state_places(self) -> tuple[bool, ...]:
        """Of each layer of a KV cache, whether states are in it."""
        cached, places = set(self.cached_layers), {x for own in self.cache_places for x in own}
        return tuple(place not in cached for place in sorted(places))

    @cached_property
    def lent_layers(self) -> frozenset[int]:
        """Layers whose K and V later ones attend to, too."""
        return frozenset(self.kv_layers[self.num_layers - self.shared_kv :])

    def intermediate(self, layer: int) -> int:
        """How wide a layer's MLP is."""
        shared = self.kv_layers[layer] != layer
        return (self.shared_intermediate_size if shared else 0) or self.intermediate_size

    @property
    def widest_mlp(self) -> int:
        """How wide the widest MLP is."""
        return max(self.intermediate_size, self.shared_intermediate_size)

    @property
    def stream_count(self) -> int:
        """Streams of hidden states."""
        return 1 if self.streams is None else self.streams.count

    @property
    def hidden_width(self) -> int:
        """Numbers of a token between two layers."""
        return self.stream_count * self.hidden_size

    def deviations(self, layer: int) -> float | None:
        """Where the gate of a layer's MLP is cut off: above its mean, in standard deviations."""
        share = self.sparsity[layer] if self.sparsity else 0.0
        return NormalDist().inv_cdf(share) if share else None

    def limit(self, layer: int) -> float:
        """What gate and up of a layer's MLP, or of its shared experts, are limited to; 0: none."""
        return self.limits[layer] if self.limits else 0.0

    @property
    def per_layer_width(self) -> int:
        """Numbers of a token that layers are given beside hidden states, of all layers together."""
        return 0 if self.per_layer is None else self.num_layers * self.per_layer.width

    @property
    def chosen_width(self) -> int:
        """Numbers of a token, int32, that an index leaves for attention."""
        return 0 if self.index is None else self.index.top

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """Those of the recurrent layers."""
        found, shape = self.recurrent, self.state_shape
        return () if found is None or shape is None else (shape,) * sum(found.layers)

    @property
    def sums_experts(self) -> bool:
        """Whether outputs of experts are added up by themselves, as the MLP's norm is of them."""
        return self.experts is not None and (self.experts.beside or self.post_norm)

    @property
    def expert_width(self) -> int:
        """Numbers of a token that experts are given, and give."""
        return self.latent_width or self.hidden_size

    @property
    def latent_width(self) -> int:
        """Numbers of a token between hidden states and experts; 0: there is no matrix between."""
        return 0 if self.experts is None else self.experts.latent_size

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in place of its MLP."""
        return self.experts is not None and self.experts.layers[layer]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read the spec from a Hugging Face `config.json`, of transformers 4 or 5.

        Raises UnsupportedModelError naming the key, what was found and what is supported.
        """
        return cls(**{**read_spec(config), **mtp_fields(config)})


def check_length(tokens: int, limit: int | None, model_type: str) -> None:
    """Raise ContextLengthError for a sequence of more tokens than a limit; None: there is none."""
    if limit is not None and tokens > limit:
        raise ContextLengthError(
            f"this {model_type} model is run up to {limit} tokens a sequence, prompt and answer, "
            f"not {tokens}; use a shorter one"
        )


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

"""Parts of a spec: rotary position embedding, experts, and the error for what is not supported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from qoff.errors import OpError, UnsupportedModelError
from qoff.kernels.layout.index import IndexShape
from qoff.kernels.layout.latent import LatentShape
from qoff.kernels.layout.qexperts import ACTIVATIONS as EXPERT_ACTIVATIONS
from qoff.kernels.layout.qexperts import CLAMPED_SWIGLU, ExpertsMlp, QExperts
from qoff.kernels.layout.routing import Routing
from qoff.memory.plan.experts import matrices
from qoff.schema import is_number, shown

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: its kind, base and scaling parameters.

    `scaling` holds the remaining keys of transformers' `rope_parameters` (factor, beta_fast, ...),
    sorted. dim: so many channels of each head turn, the first ones. Raises UnsupportedModelError
    for a kind that is not in ROPE_KINDS.
    """

    kind: str
    theta: float
    dim: int
    scaling: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise unsupported("rope_parameters.rope_type", self.kind, ", ".join(ROPE_KINDS))
        if not (is_number(self.theta) and self.theta > 0):
            raise unsupported("rope_parameters.rope_theta", self.theta, "a number above 0")
        for key, value in self.scaling:
            for one in value if isinstance(value, tuple) else (value,):
                if not (is_number(one) or isinstance(one, bool)):
                    raise unsupported(f"rope_parameters.{key}", value, "finite numbers")
        if self.dim < 2 or self.dim % 2:
            raise unsupported(
                "rope_parameters.partial_rotary_factor",
                f"of {self.dim} channels",
                "an even number of channels",
            )

    def parameters(self) -> dict[str, Any]:
        """Return the `rope_parameters` dict that transformers calls the same thing."""
        scaling = {key: list(x) if isinstance(x, tuple) else x for key, x in self.scaling}
        return {"rope_type": self.kind, "rope_theta": self.theta, **scaling}


@dataclass(frozen=True)
class HeadsSpec:
    """Heads of layers without a sliding window, where others have others.

    values_are_keys: V comes of the matrix of keys; what is done to either differs.
    """

    head_dim: int
    kv_heads: int
    values_are_keys: bool = False

    def __post_init__(self) -> None:
        for key, size in (
            ("global_head_dim", self.head_dim),
            ("num_global_key_value_heads", self.kv_heads),
        ):
            if type(size) is not int or size < 1:
                raise unsupported(key, size, "a whole number above 0")


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts in place of the MLP, in some layers.

    A linear router scores all experts for each token; the `top_k` best of them compute, and their
    outputs are added up, weighted as `Routing` has it. beside: layers have their MLP, too. Router,
    experts and MLP are given the hidden states with a norm each, that of the router divided by the
    root of the hidden size; the outputs of MLP and experts are normalized, added, and normalized.
    latent_size: a matrix projects what the router is given to what experts are (LatentMoE), and
    another one projects the sum of their outputs back.
    """

    count: int
    top_k: int  # experts of a token
    intermediate_size: int
    layers: tuple[bool, ...]  # per layer: whether it has experts; otherwise it has an MLP
    shares: Literal["all", "topk", "sigmoid", "mixer"] = "all"
    jitter: float = 0.0  # of SparseMixer
    normalized: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    group_best: int = 2
    correction: bool = False  # of the shares as experts are chosen
    gains: bool = False  # weights are multiplied by a number of each expert
    beside: bool = False
    weighs_input: bool = False  # weights multiply inputs of experts in place of outputs
    activation: str = "silu"
    gated: bool = True  # an expert is down(act(gate(x)) * up(x)), or else down(act(up(x)))
    router_bias: bool = False
    score_cap: float = 0.0  # scores become cap * tanh(score / cap); 0: they do not
    # Per layer: what gate and up are limited to: see `layout.ending.Ending`; 0: nothing.
    limits: tuple[float, ...] | None = None
    bias: bool = False  # of the experts' matrices
    latent_size: int = 0  # experts are given, and give, so many numbers of a token; 0: hidden_size
    shared_size: int = 0  # intermediate size of an MLP that all tokens go through too; 0: none
    shared_gate: bool = False  # its output is scaled by the sigmoid of a score

    def __post_init__(self) -> None:
        for key, size in (
            ("num_experts", self.count),
            ("num_experts_per_tok", self.top_k),
            ("moe_intermediate_size", self.intermediate_size),
        ):
            if type(size) is not int:
                raise unsupported(key, size, "a whole number above 0")
        if not 1 <= self.top_k <= self.count:
            raise unsupported("num_experts_per_tok", self.top_k, f"1 to {self.count} experts")
        if self.intermediate_size < 1:
            raise unsupported(
                "intermediate_size of experts", self.intermediate_size, "a whole number above 0"
            )
        if type(self.latent_size) is not int or self.latent_size < 0:
            raise unsupported("moe_latent_size", self.latent_size, "null or a whole number above 0")
        if self.activation not in EXPERT_ACTIVATIONS:
            raise unsupported("hidden_act", self.activation, ", ".join(EXPERT_ACTIVATIONS))
        if self.activation == CLAMPED_SWIGLU and not self.gated:
            raise unsupported("hidden_act", self.activation, "one of experts without a gate")
        for limit in self.limits or ():
            if limit < 0 or (limit and (self.activation == CLAMPED_SWIGLU or not self.gated)):
                raise unsupported("swiglu_limits", limit, "0 and more, of gate and up")
        try:
            self.routing.check(self.count)
        except OpError as error:
            raise UnsupportedModelError(f"config.json: {error}; correct n_group") from error

    @property
    def matrices(self) -> tuple[str, str]:
        """The names of those of an expert."""
        return matrices(self.gated)

    def limit(self, layer: int) -> float:
        """What gate and up of a layer's experts are limited to; 0: nothing."""
        return self.limits[layer] if self.limits else 0.0

    def mlp(
        self,
        layer: int,
        gate_up: QExperts,
        down: QExperts,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> ExpertsMlp:
        """How experts of a layer with these matrices and biases compute."""
        return ExpertsMlp(
            gate_up,
            down,
            self.activation,
            gate_up_bias,
            down_bias,
            weighs_input=self.weighs_input,
            gated=self.gated,
            limit=self.limit(layer),
        )

    @property
    def routing(self) -> Routing:
        """How the router's scores choose experts."""
        groups = (self.groups, self.top_groups, self.scale, self.group_best)
        return Routing(self.top_k, self.shares, self.normalized, *groups, jitter=self.jitter)

    @property
    def judged(self) -> bool:
        """Whether experts are chosen by other numbers than the router's scores."""
        return self.routing.judged(self.correction)


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention: sizes as `layout.latent.LatentShape` has them.

    query_latent: queries are compressed, too, to so many channels; 0: they are not. norm_eps: of
    the norms of what is compressed, the default of transformers' RMSNorm there, not `rms_norm_eps`
    (llama.cpp takes that). Raises UnsupportedModelError for sizes without a kernel.
    """

    latent: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_latent: int = 0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        try:
            self.shape(1)
        except OpError as error:
            raise UnsupportedModelError(f"config.json: {error}") from error

    def shape(self, heads: int) -> LatentShape:
        """The same of so many heads."""
        return LatentShape(heads, self.latent, self.nope_dim, self.rope_dim, self.value_dim)


@dataclass(frozen=True)
class IndexSpec:
    """An index of keys that chooses the tokens latent attention goes to: `layout.index`.

    layers: per layer, whether it has one; the others attend to what the last one before them chose.
    Raises UnsupportedModelError for sizes without a kernel.
    """

    heads: int
    dim: int
    rope_dim: int
    top: int
    layers: tuple[bool, ...]
    norm_eps: float = 1e-6  # of the LayerNorm of its keys

    def __post_init__(self) -> None:
        if not self.layers or not self.layers[0]:
            raise unsupported("indexer_types", "shared in layer 0", "full there")
        try:
            self.shape.keys  # noqa: B018 - raises, too
        except OpError as error:
            raise UnsupportedModelError(f"config.json: {error}") from error

    @property
    def shape(self) -> IndexShape:
        """The same of one layer."""
        return IndexShape(self.heads, self.dim, self.rope_dim, self.top)

    @property
    def columns(self) -> int:
        """Numbers of a token that it computes: queries, key, the key before its norm, weights."""
        return self.shape.width + self.dim + self.heads


@dataclass(frozen=True)
class PerLayerSpec:
    """Embeddings of layers (Gemma 3n and 4): a second table has `width` numbers for each layer.

    They are added to a projection of what the first layer is given; what a layer returns is
    projected to so many numbers, multiplied by its own, and the product is projected back.
    """

    width: int
    vocab_size: int

    def __post_init__(self) -> None:
        for key, size, unit in (
            ("hidden_size_per_layer_input", self.width, 32),
            ("vocab_size_per_layer_input", self.vocab_size, 1),
        ):
            if type(size) is not int or size < 1 or size % unit:
                raise unsupported(key, size, f"a multiple of {unit}")


@dataclass(frozen=True)
class StreamsSpec:
    """Hidden states of several streams (Gemma 3n): AltUp (arXiv 2301.13310), with LAuReL beside.

    A layer computes from the first of `count` streams, each of the hidden size. It mixes all of
    them before, and adds what it found to each after, by factors of a router. Beside its attention
    is a product of two matrices of `rank` (arXiv 2411.07501).
    """

    count: int
    rank: int

    def __post_init__(self) -> None:
        if type(self.count) is not int or not 2 <= self.count <= 16:
            raise unsupported("altup_num_inputs", self.count, "2 to 16")
        if type(self.rank) is not int or self.rank < 1 or self.rank % 32:
            raise unsupported("laurel_rank", self.rank, "a multiple of 32")


def unsupported(key: str, found: object, supported: str) -> UnsupportedModelError:
    """Return the error for a key of `config.json`."""
    return UnsupportedModelError(f"config.json: {key} is {shown(found)}; supported: {supported}")

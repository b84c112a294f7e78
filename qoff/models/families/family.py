"""A family, its names of tensors, and the fields of a spec that are read alike for all of them.

transformers' own config classes fill in defaults and bring the keys of old files (`rope_theta`,
`rope_scaling`, `max_window_layers`) into their present form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from qoff.dynamo import import_configurations
from qoff.errors import UnsupportedModelError, raised_as
from qoff.kernels.layout.heads import QueryScale
from qoff.models.spec_parts import ExpertsSpec, RopeSpec, unsupported
from qoff.schema import is_number, shown

from .config_fields import check_counts

Fields = dict[str, Any]  # fields of DecoderSpec by name

_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"}
_KINDS = {"full_attention", "sliding_attention"}
_FIRST = 64  # layers, among which there is one of each kind
_OPTIONAL_ROPE = {"olmo_hybrid"}  # models that rotate nothing where `rope_theta` is null
_UNLISTED = {"mistral4": "Mistral4ForCausalLM"}  # which transformers' AutoModel does not find
Config = Mapping[str, Any]
Has = Callable[[str], bool]  # whether a source has a tensor of this name


@dataclass(frozen=True)
class TensorNames:
    """What a family calls its tensors in a checkpoint, and how it fuses them; by default Llama's.

    modules: from Llama's name of a module inside a layer, or the beginning of it, to the family's.
    leaves: the same for the last part of a module's name.
    modules_of_transformers: what transformers calls modules otherwise than tensors are called, by
    parts of their names; adapters of PEFT do as well.
    fused_qkv: one tensor has the rows of queries, keys and values ("rows"), or those of one head
    after the other ("heads"). split_gates: gates of attention have a tensor; otherwise each
    head's follow its queries. fused_gate_up: one has the rows of gate above those of up.
    stacked_experts: one tensor has all experts. "columns": [experts, columns, rows], its rows of
    gate and up in turn; "column-halves": the same, gate before up; "rows": [experts, rows,
    columns], gate and up apart; "halves": the same, gate above up; "bare-halves": the same, called
    without ".weight".
    split_linear: linear attention has matrices for queries, keys and values together and for z,
    otherwise one for both, key head by key head; "all": for b and for a, too, which else are one,
    key head by key head. linear_of_ggml: what forgets is stored as minus its exponential, and the
    convolution as a matrix. split_conv: queries, keys and values have a convolution each.
    rope_pairs: neighbouring channels of queries and keys turn together. index_pairs: those of an
    index.
    correction_in_row: the correction of a router is stored as [1, experts].
    per_layer: the table of embeddings of layers, what is added to them, and the norm of that.
    streams: the matrices that make other streams of the first one and what they become at the end,
    by number; one tensor for all where that is not in the name.
    mtp: what a layer for multi-token prediction calls its own modules, by their last name.
    norm_offset: what norm weights are stored less. times: from EMBEDDING or LM_HEAD to a matrix
    that it is multiplied by from the right, and whether that is stored transposed.
    """

    layer: str = "model.layers.{}."
    modules: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    leaves: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    modules_of_transformers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    embedding: str = "model.embed_tokens.weight"
    positions: str = ""
    per_layer: tuple[str, str, str] = (
        "model.embed_tokens_per_layer.weight",
        "model.per_layer_model_projection.weight",
        "model.per_layer_projection_norm.weight",
    )
    streams: tuple[str, str] = (
        "model.altup_projections.{}.weight",
        "model.altup_unembed_projections.{}.weight",
    )
    mtp: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    norm: str = "model.norm"
    head: str = "lm_head.weight"
    fused_qkv: Literal["", "rows", "heads"] = ""
    split_gates: bool = False
    fused_gate_up: bool = False
    stacked_experts: Literal["", "columns", "column-halves", "rows", "halves", "bare-halves"] = ""
    split_linear: Literal["", "z", "all"] = ""
    linear_of_ggml: bool = False
    split_conv: bool = False
    rope_pairs: bool = False
    index_pairs: bool = False
    correction_in_row: bool = False
    norm_offset: float = 0.0
    times: Mapping[str, tuple[str, bool]] = field(default_factory=lambda: MappingProxyType({}))

    def in_layer(self, layer: int, module: str, tensor: str) -> str:
        """The full name of a tensor of a module of a layer."""
        return self.layer.format(layer) + self._called(module) + ("." + tensor if tensor else "")

    def in_transformers(self, tensor: str) -> str:
        """What transformers calls the parameter that a tensor is."""
        for stored, module in self.modules_of_transformers.items():
            tensor = tensor.replace(f".{stored}.", f".{module}.")
        return tensor

    def _called(self, module: str) -> str:
        """The family's name of a module: the longest beginning that has another name decides."""
        rest, _, leaf = module.rpartition(".")
        if leaf in self.leaves:
            module = f"{rest}.{self.leaves[leaf]}"
        for begin in sorted(self.modules, key=len, reverse=True):
            if f"{module}.".startswith(f"{begin}."):
                return self.modules[begin] + module[len(begin) :]
        return module


@dataclass(frozen=True)
class Family:
    """models: what it is known by. fields: what of a spec is not `common_fields`, from
    transformers' config object.

    converted: the config of the checkpoint that a model becomes, and what its tensors are called;
    None: its own config, and `names`. modules: the same of transformers' modules, where its loader
    renames tensors; None: they are called as these.
    """

    models: str
    fields: Callable[[Any], Fields]
    names: TensorNames = TensorNames()  # frozen
    converted: Callable[[Config, Has], tuple[dict[str, Any], TensorNames]] | None = None
    modules: TensorNames | None = None


def layers_with(has: Has, tensor: str) -> Iterator[str]:
    """Prefixes of layers that have a tensor of this name."""
    for i in range(_FIRST):
        if has(f"model.layers.{i}.{tensor}"):
            yield f"model.layers.{i}."


def full_config(config: Mapping[str, Any]) -> Any:
    """Return transformers' config object, which adds to the dicts it is given.

    Raises UnsupportedModelError for values that it refuses.
    """
    import_configurations()
    from transformers import AutoConfig, PreTrainedConfig

    check_counts(config)
    keys = {k: deepcopy(v) for k, v in config.items() if k != "quantization_config"}
    what = f"config.json of model_type {shown(config['model_type'])}"
    with raised_as(
        UnsupportedModelError, f"{what} is not one that transformers accepts", "correct it"
    ):
        keys = PreTrainedConfig._decode_special_floats(keys)  # infinity is not JSON
        return AutoConfig.for_model(**keys)


def class_of(model_type: str) -> str | None:
    """transformers' class of a causal language model; None: this version of it has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) or _UNLISTED.get(model_type)


def common_fields(config: Any) -> Fields:
    """The fields of a spec as most families call them."""
    layers, heads = config.num_hidden_layers, for_all(config, "num_attention_heads", None)
    head_dim = head_dim_of(config)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if config.model_type in _OPTIONAL_ROPE and rope.get("rope_theta") is None:
        rope = {}
    by_type = rope.keys() <= _KINDS  # of layers, or there is none
    if not by_type and rope.keys() & _KINDS:
        raise unsupported(
            "rope_parameters", sorted(rope), "one object for each of full_attention and "
            "sliding_attention"
        )  # fmt: skip
    return {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(config, "intermediate_size", 0),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": for_all(config, "num_key_value_heads", heads),
        "head_dim": head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "norm_eps": getattr(config, "rms_norm_eps", 0.0),
        "activation": activation(getattr(config, "hidden_act", "silu")),
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "rope": None if by_type else rope_of(config, rope, head_dim),
        "rope_layers": (bool(rope),) * layers,
        "sliding_window": (None,) * layers,
    }


def head_dim_of(config: Any) -> int:
    """Channels of a head, where a config does not say so those of the hidden states' share."""
    own = for_all(config, "head_dim", None)
    return int(own or config.hidden_size // for_all(config, "num_attention_heads", None))


def for_all(config: Any, key: str, default: Any) -> Any:
    """What a config says of all layers, where it has other values for some, too."""
    return vars(config)[key] if key in vars(config) else getattr(config, key, default)


def rope_of(config: Any, parameters: Mapping[str, Any], head_dim: int) -> RopeSpec:
    """The RoPE of transformers' `rope_parameters`. Raises UnsupportedModelError."""
    rope: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in parameters.items()
        if value is not None
    }
    kind = rope.pop("rope_type", None)
    if kind is None:
        raise unsupported("rope_parameters", sorted(parameters), "one rope_type for all layers")
    original = getattr(config, "original_max_position_embeddings", None)
    if kind == "longrope" and original is not None:
        rope.setdefault("original_max_position_embeddings", original)
    theta, part = rope.pop("rope_theta", None), rope.get("partial_rotary_factor", 1.0)
    for key, value in (("rope_theta", theta), ("partial_rotary_factor", part)):
        if not is_number(value) or not value > 0:
            raise unsupported(f"rope_parameters.{key}", value, "a number above 0")
    rope.pop("type", None)
    dim = head_dim if kind == "proportional" else int(head_dim * part)
    return RopeSpec(str(kind), float(theta), dim, tuple(sorted(rope.items())))


def whole_heads(rope: RopeSpec, head_dim: int) -> RopeSpec:
    """The same. Raises UnsupportedModelError where it rotates a part of a head."""
    if rope.dim != head_dim:  # transformers takes no notice of the factor in these families
        raise unsupported("rope_parameters.partial_rotary_factor", rope.dim / head_dim, "1")
    return rope


def query_scale(config: Any) -> tuple[Fields, dict[str, Any]]:
    """How queries are scaled by position, and the `rope_parameters` without what says so."""
    rope = dict(config.rope_parameters)
    beta = rope.pop("llama_4_scaling_beta", None)
    if beta is None:
        return {}, rope
    every = rope.get("original_max_position_embeddings")
    if not is_number(beta) or not beta >= 0:
        raise unsupported("rope_parameters.llama_4_scaling_beta", beta, "null, or 0 and more")
    if type(every) is not int or every < 1:
        raise unsupported(
            "rope_parameters.original_max_position_embeddings", every, "a whole number above 0"
        )
    return {"query_scale": QueryScale(float(beta), every)}, rope


def mixture(config: Any, layers: Iterable[bool] | None = None, **more: Any) -> ExpertsSpec:
    """Experts by the names that most configs have, and more. layers: that have them; None: all."""

    def read(*names: str) -> Any:
        return next((getattr(config, name) for name in names if hasattr(config, name)), None)

    every = (True,) * config.num_hidden_layers
    usual = {
        "count": read("num_experts", "num_local_experts", "n_routed_experts"),
        "top_k": config.num_experts_per_tok,
        "intermediate_size": read("moe_intermediate_size", "intermediate_size"),
        "activation": activation(getattr(config, "hidden_act", "silu")),
    }
    return ExpertsSpec(layers=every if layers is None else tuple(layers), **{**usual, **more})


def activation(name: str) -> str:
    """transformers' name of an activation as a spec has it."""
    return _ACTIVATIONS.get(name, name)


def biases(attention: bool, mlp: bool = False) -> Fields:
    """Which matrices have biases: all of attention, all of the MLP."""
    return {"qkv_bias": attention, "o_bias": attention, "mlp_bias": mlp}


def positive(config: Any, key: str) -> float:
    """A number of a config that is divided by. Raises UnsupportedModelError."""
    value = getattr(config, key)
    if not is_number(value) or not value > 0:
        raise unsupported(key, value, "a number above 0")
    return float(value)


def windows(config: Any) -> tuple[int | None, ...]:
    """The sliding window, or the chunk, of each layer, from its `layer_types`."""
    used = getattr(config, "use_sliding_window", True)
    kinds: dict[str, int | None] = {
        "full_attention": None,
        "sliding_attention": getattr(config, "sliding_window", None) if used else None,
    }
    if hasattr(config, "attention_chunk_size"):
        kinds["chunked_attention"] = config.attention_chunk_size
    for kind in config.layer_types:
        if kind not in kinds:
            raise unsupported("layer_types", kind, ", ".join(kinds))
    return tuple(kinds[kind] for kind in config.layer_types)


def one_window(config: Any) -> tuple[int | None, ...]:
    """The same sliding window for all layers."""
    return (config.sliding_window,) * config.num_hidden_layers

"""Reading the spec of the Llama family from `config.json`: one function of a few lines per family.

transformers' own config classes fill in defaults and bring the keys of old files (`rope_theta`,
`rope_scaling`, `max_window_layers`) into their present form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import Any

from qoff.errors import UnsupportedModelError

from .spec import RopeSpec, unsupported

Fields = dict[str, Any]  # fields of DecoderSpec by name


def llama(config: Any) -> Fields:
    """Llama 1 to 3, and the many models that share its class."""
    return {
        "qkv_bias": config.attention_bias,
        "o_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }


def mistral(config: Any) -> Fields:
    """Llama without biases; one sliding window for all layers."""
    return {"sliding_window": (config.sliding_window,) * config.num_hidden_layers}


def qwen2(config: Any) -> Fields:
    """Biases on queries, keys and values only; sliding windows layer by layer."""
    return {"qkv_bias": True, "sliding_window": _windows(config)}


def qwen3(config: Any) -> Fields:
    """Norms on query and key heads; sliding windows layer by layer."""
    return {
        "qkv_bias": config.attention_bias,
        "o_bias": config.attention_bias,
        "qk_norm": True,
        "sliding_window": _windows(config),
    }


def smollm3(config: Any) -> Fields:
    """Llama with some layers that do not rotate."""
    rope_layers = tuple(bool(x) for x in config.no_rope_layers)
    return {
        **llama(config),
        "rope_layers": rope_layers[: config.num_hidden_layers],
        "sliding_window": _windows(config),
    }


FAMILIES: Mapping[str, Callable[[Any], Fields]] = MappingProxyType(
    {"llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3, "smollm3": smollm3}
)


def read_spec(config: Mapping[str, Any]) -> Fields:
    """Return the fields of the DecoderSpec of a `config.json`.

    Raises UnsupportedModelError for a `model_type` not in FAMILIES, and for values that
    transformers' config class refuses.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise unsupported("model_type", model_type, ", ".join(FAMILIES))
    full = _with_defaults(config)
    head_dim = getattr(full, "head_dim", None) or full.hidden_size // full.num_attention_heads
    rope = dict(full.rope_parameters)
    if "rope_type" not in rope:
        raise unsupported("rope_parameters", sorted(rope), "one rope_type for all layers")
    return {
        "model_type": model_type,
        "vocab_size": full.vocab_size,
        "hidden_size": full.hidden_size,
        "intermediate_size": full.intermediate_size,
        "num_layers": full.num_hidden_layers,
        "num_heads": full.num_attention_heads,
        "num_kv_heads": full.num_key_value_heads,
        "head_dim": head_dim,
        "max_position_embeddings": full.max_position_embeddings,
        "norm_eps": full.rms_norm_eps,
        "activation": full.hidden_act,
        "tie_word_embeddings": full.tie_word_embeddings,
        "rope": RopeSpec(
            kind=rope.pop("rope_type"),
            theta=float(rope.pop("rope_theta")),
            scaling=tuple(sorted((k, v) for k, v in rope.items() if k != "type")),
        ),
        "rope_layers": (True,) * full.num_hidden_layers,
        "sliding_window": (None,) * full.num_hidden_layers,
        **family(full),
    }


def _with_defaults(config: Mapping[str, Any]) -> Any:
    """Return transformers' config object, which adds to the dicts it is given."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    keys = {k: deepcopy(v) for k, v in config.items() if k != "quantization_config"}
    if not keys.get("num_attention_heads", 1):  # transformers divides by it before checking it
        raise unsupported("num_attention_heads", 0, "a whole number above 0")
    try:
        return AutoConfig.for_model(**keys)
    except (StrictDataclassError, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModelError(
            f"config.json of model_type {config['model_type']!r} is not one that transformers "
            f"accepts: {reason}; correct it"
        ) from error


def _windows(config: Any) -> tuple[int | None, ...]:
    kinds: Mapping[str, int | None] = {
        "full_attention": None,
        "sliding_attention": config.sliding_window if config.use_sliding_window else None,
    }
    for kind in config.layer_types:
        if kind not in kinds:
            raise unsupported("layer_types", kind, ", ".join(kinds))
    return tuple(kinds[kind] for kind in config.layer_types)

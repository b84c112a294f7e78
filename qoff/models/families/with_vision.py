"""Models that see become their language models: images are not read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from qoff.models.spec_parts import unsupported

from . import experts, gemma, linear, llama
from .family import Config, Family, Has, TensorNames, class_of, full_config

_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def _text_alone(
    config: Config, has: Has, of: Mapping[str, Family], kinds: Mapping[str, str]
) -> tuple[dict[str, Any], TensorNames]:
    """The language model, as transformers 4 or 5 calls its tensors.

    of: families that it may be of. kinds: what it becomes, by the `model_type` of its part of the
    config, the default first.
    """
    if not isinstance(text := config.get("text_config"), dict):
        raise unsupported("text_config", text, "an object")
    kind = text.get("model_type", next(iter(kinds)))
    if kind not in kinds:
        raise unsupported("text_config.model_type", kind, ", ".join(kinds))
    becomes = kinds[kind]
    names = of[becomes].names
    old = has("language_model.model.embed_tokens.weight")
    begin = "language_model.model." if old else "model.language_model."
    head = "language_model.lm_head.weight" if old else "lm_head.weight"
    if has(f"{begin}embed_tokens.weight"):
        default = not has(head)
    else:  # no tensor is known
        default = full_config({"model_type": becomes}).tie_word_embeddings
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", default))
    found = {
        **text,
        "model_type": becomes,
        "architectures": [class_of(becomes)],
        "tie_word_embeddings": tied,
    }
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := found.get(key), dict):
            found[key] = _of_text(rope)
    for key in _TOKENS:
        if config.get(key) is not None:
            found.setdefault(key, config[key])
    table, context, norm = (begin + name.removeprefix("model.") for name in names.per_layer)
    first, last = (begin + name.removeprefix("model.") for name in names.streams)
    names = replace(
        names,
        layer=f"{begin}layers.{{}}.",
        embedding=f"{begin}embed_tokens.weight",
        per_layer=(table, context, norm),
        streams=(first, last),
        norm=f"{begin}norm",
        head=head,
    )
    return found, names


def _of_text(rope: dict[str, Any]) -> dict[str, Any]:
    """RoPE whose positions have three dimensions, where all three are those of the text."""
    dimensions = ("mrope_section", "mrope_interleaved")
    found = {key: value for key, value in rope.items() if key not in dimensions}
    for key in ("rope_type", "type"):
        if found.get(key) == "mrope":
            found[key] = "default"
    return found


def _family(models: str, of: Mapping[str, Family], kinds: Mapping[str, str]) -> Family:
    """kinds: by `model_type` what each becomes."""
    first = of[next(iter(kinds.values()))]
    alone = partial(_text_alone, of=of, kinds=kinds)
    return Family(f"{models}, without images", first.fields, first.names, alone)


SOURCES: Mapping[str, Family] = {
    "gemma3": _family("Gemma 3 4B to 27B", gemma.FAMILIES, {"gemma3_text": "gemma3_text"}),
    "gemma3n": _family("Gemma 3n", gemma.FAMILIES, {"gemma3n_text": "gemma3n_text"}),
    "gemma4": _family("Gemma 4", gemma.FAMILIES, {"gemma4_text": "gemma4_text"}),
    "llama4": _family("Llama 4", experts.FAMILIES, {"llama4_text": "llama4_text"}),
    "mistral3": _family(
        "Mistral Small 3.1 and 3.2, Ministral 3",
        llama.FAMILIES,
        {"mistral": "mistral", "ministral3": "ministral3"},
    ),
    "qwen3_5": _family("Qwen 3.5, dense", linear.FAMILIES, {"qwen3_5_text": "qwen3_5_text"}),
    "qwen3_5_moe": _family(
        "Qwen 3.5 35B-A3B and larger", linear.FAMILIES, {"qwen3_5_moe_text": "qwen3_5_moe_text"}
    ),
    "qwen3_vl": _family("Qwen 3 VL", llama.FAMILIES, {"qwen3_vl_text": "qwen3"}),
}

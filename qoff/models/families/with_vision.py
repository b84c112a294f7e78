"""Models that see become their language models: images are not read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from qoff.dynamo import import_configurations
from qoff.models.spec_parts import unsupported
from qoff.quant import CONFIG_KEYS

from .family import Config, Family, Has, TensorNames, class_of, full_config, head_dim_of
from .known import FAMILIES

_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
_ROPE = ("rope_parameters", "rope_scaling")
_NAMES = (  # how names of tensors begin, and the head
    ("model.language_model.", "lm_head.weight"),  # in transformers 5
    ("language_model.model.", "language_model.lm_head.weight"),  # in transformers 4
    ("model.text_model.", "lm_head.weight"),  # in Idefics 3
    ("model.", "lm_head.weight"),  # in Qwen 2 VL
)


@dataclass(frozen=True)
class _Seeing:
    """A model that sees.

    kinds: what its language model becomes, by `model_type`, the default first.
    part: the field of the config that describes the language model; flat: where there is none, the
    others do. stacked: `TensorNames.stacked_experts`, where it is not that of what it becomes.
    fields: of the config of what it becomes, which its own does not have.
    """

    kinds: Mapping[str, str]
    part: str = "text_config"
    flat: bool = False
    stacked: Literal["", "column-halves"] = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    def text(self, config: Config, has: Has) -> tuple[dict[str, Any], TensorNames]:
        """The config of the language model alone, and what its tensors are called."""
        whole = config.get(self.part)
        if self.flat and self.part not in config:
            whole = {k: v for k, v in config.items() if k not in ("model_type", "vision_config")}
        if not isinstance(whole, dict):
            raise unsupported(self.part, whole, "an object")
        kind = whole.get("model_type", next(iter(self.kinds)))
        if kind not in self.kinds:
            raise unsupported(f"{self.part}.model_type", kind, ", ".join(self.kinds))
        becomes = self.kinds[kind]
        text = whole if kind == becomes else _as(becomes, kind, whole)
        begin, head = next((x for x in _NAMES if has(f"{x[0]}embed_tokens.weight")), _NAMES[0])
        if has(f"{begin}embed_tokens.weight"):
            default = not has(head)
        else:  # no tensor is known
            default = full_config({"model_type": becomes}).tie_word_embeddings
        tied = config.get("tie_word_embeddings", whole.get("tie_word_embeddings", default))
        found = {
            **{key: value for key, value in text.items() if key not in CONFIG_KEYS},
            **self.fields,
            "model_type": becomes,
            "architectures": [class_of(becomes)],
            "tie_word_embeddings": tied,
        }
        for key in _ROPE:
            if isinstance(rope := found.get(key), dict):
                found[key] = _of_text(rope)
        for key in _TOKENS:
            if config.get(key) is not None:
                found.setdefault(key, config[key])
        return found, _inside(FAMILIES[becomes].names, begin, head, self.stacked)


def _as(becomes: str, kind: str, text: Config) -> Config:
    """A config of transformers' class for text that is seen beside, for that of text alone.

    The classes have other defaults. Names that transformers does not know have none.
    """
    import_configurations()
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        return text
    known = full_config({"model_type": becomes}).to_dict()
    stated = full_config({**text, "model_type": kind})
    found = {key: value for key, value in stated.to_dict().items() if key in known}
    found["head_dim"] = head_dim_of(stated)
    if isinstance(rope := found.get(_ROPE[0]), dict):  # which has what the others say
        if "rope_type" in rope:  # one for all layers
            found[_ROPE[0]] = {"partial_rotary_factor": 1.0, **rope}
        text = {k: v for k, v in text.items() if k not in (_ROPE[1], "rope_theta")}
    return {**text, **found}


def _inside(
    names: TensorNames, begin: str, head: str, stacked: Literal["", "column-halves"]
) -> TensorNames:
    """Names of tensors of a language model within another."""
    table, context, norm = (begin + name.removeprefix("model.") for name in names.per_layer)
    first, last = (begin + name.removeprefix("model.") for name in names.streams)
    return replace(
        names,
        layer=f"{begin}layers.{{}}.",
        embedding=f"{begin}embed_tokens.weight",
        per_layer=(table, context, norm),
        streams=(first, last),
        norm=begin + names.norm.removeprefix("model."),
        head=head,
        stacked_experts=stacked or names.stacked_experts,
    )


def _of_text(rope: dict[str, Any]) -> dict[str, Any]:
    """RoPE whose positions have three dimensions, where all three are those of the text."""
    dimensions = ("mrope_section", "mrope_interleaved")
    found = {key: value for key, value in rope.items() if key not in dimensions}
    for key in ("rope_type", "type"):
        if found.get(key) == "mrope":
            found[key] = "default"
    return found


def _family(models: str, kinds: Mapping[str, str], **more: Any) -> Family:
    """kinds, more: of `_Seeing`."""
    first = FAMILIES[next(iter(kinds.values()))]
    seeing = _Seeing(kinds, **more)
    return Family(f"{models}, without images", first.fields, first.names, seeing.text)


def _same(*kinds: str) -> dict[str, str]:
    return {kind: kind for kind in kinds}


SOURCES: Mapping[str, Family] = {
    "gemma3": _family("Gemma 3 4B to 27B", _same("gemma3_text")),
    "gemma3n": _family("Gemma 3n", _same("gemma3n_text")),
    "gemma4": _family("Gemma 4", _same("gemma4_text")),
    "gemma4_unified": _family(
        "Gemma 4 12B",
        {"gemma4_unified_text": "gemma4_text"},
        fields={"hidden_size_per_layer_input": 0, "enable_moe_block": False},
    ),
    "llama4": _family("Llama 4", _same("llama4_text")),
    "mistral3": _family(
        "Mistral Small 3.1, 3.2 and 4, Ministral 3", _same("mistral", "ministral3", "mistral4")
    ),
    "kimi_k25": _family("Kimi K2.5", {"deepseek_v3": "deepseek_v3", "kimi_k2": "deepseek_v3"}),
    **{
        kind: _family(models, {f"{kind}_text": "qwen2"}, flat=True)
        for kind, models in (("qwen2_vl", "Qwen 2 VL"), ("qwen2_5_vl", "Qwen 2.5 VL"))
    },
    "qwen3_5": _family("Qwen 3.5, dense", _same("qwen3_5_text")),
    "qwen3_5_moe": _family("Qwen 3.5 35B-A3B and larger", _same("qwen3_5_moe_text")),
    "qwen3_vl": _family("Qwen 3 VL", {"qwen3_vl_text": "qwen3"}),
    "qwen3_vl_moe": _family(
        "Qwen 3 VL 30B-A3B, 235B-A22B",
        {"qwen3_vl_moe_text": "qwen3_moe"},
        stacked="column-halves",
        fields={"norm_topk_prob": True},
    ),
    "glm4v": _family("GLM 4.1V 9B", {"glm4v_text": "glm4"}, flat=True),
    "glm46v": _family("GLM 4.6V Flash", {"glm4v_text": "glm4"}),
    "glm4v_moe": _family("GLM 4.5V and 4.6V", {"glm4v_moe_text": "glm4_moe"}),
    "exaone4_5": _family("EXAONE 4.5", {"exaone4": "exaone4", "exaone4_5_text": "exaone4"}),
    "internvl": _family("InternVL 3 and 3.5", _same("qwen2", "qwen3", "qwen3_moe", "gpt_oss")),
    "internvl_chat": _family(
        "InternVL 3 and 3.5 as first published",
        _same("qwen2", "qwen3", "qwen3_moe", "gpt_oss"),
        part="llm_config",
    ),
    "lfm2_vl": _family("LFM2-VL", _same("lfm2", "lfm2_moe")),
    "step3p7": _family("Step 3.7 Flash", _same("step3p5")),
    "llava": _family("LLaVA 1.5, Pixtral", _same("llama", "mistral", "qwen2")),
    "llava_next": _family("LLaVA 1.6", _same("llama", "mistral", "qwen2")),
    "idefics3": _family("Idefics 3", _same("llama")),
    "smolvlm": _family("SmolVLM", _same("llama")),
}

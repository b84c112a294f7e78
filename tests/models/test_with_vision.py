"""Models that see become their language models when they are converted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qoff.checkpoint import Checkpoint
from qoff.models.convert.convert import convert
from qoff.models.families import SOURCES, converted
from qoff.models.families.family import class_of, full_config
from qoff.models.spec import DecoderSpec
from tests.converted_models import EIGHT, NEARLY, expected, logits, random_weights
from tests.tiny_families import FAMILIES, TINY
from tests.tiny_models import save_model, save_tokenizer
from tests.tolerances import relative_rms

_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_CLIP = {**_VISION, "model_type": "clip_vision_model"}
_PIXTRAL = {**_VISION, "head_dim": 16, "model_type": "pixtral"}
_QWEN = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
}
_QWEN3_VL = {**_QWEN, "deepstack_visual_indexes": [0]}
_TEXT = {**TINY, "num_key_value_heads": 2, "head_dim": 32}
_NARROW = {**TINY, "num_key_value_heads": 2}  # as many channels in all heads as in hidden states
_ALL_EXPERTS = {  # are chosen, whatever rounding does to scores
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
}


def _sections(sizes: list[int], **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sizes, **more}
    return {"rope_parameters": rope}


_GLM = _sections([2, 1, 1], partial_rotary_factor=0.5)
# By name, what is seen with, what is read with, and what that becomes.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "gemma3": (
        _VISION,
        {k: v for k, v in {**TINY, **FAMILIES["gemma3"]}.items() if k != "model_type"},
        "gemma3_text",
    ),
    "gemma4": (
        {**_VISION, "num_key_value_heads": 2, "head_dim": 16},
        {**TINY, **FAMILIES["gemma4-small"]},
        "gemma4_text",
    ),
    "gemma4_unified": (
        {"model_type": "gemma4_unified_vision"},
        {
            k: v
            for k, v in {**TINY, **FAMILIES["gemma4"], "model_type": "gemma4_unified_text"}.items()
            if k != "hidden_size_per_layer_input"
        },
        "gemma4_text",
    ),
    "mistral3": (_PIXTRAL, {**_TEXT, "model_type": "mistral", "sliding_window": None}, "mistral"),
    "mistral3-ministral3": (_PIXTRAL, {**_TEXT, **FAMILIES["ministral3"]}, "ministral3"),
    "mistral3-mistral4": (
        _PIXTRAL,
        {**TINY, **FAMILIES["mistral4"], "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},
        "mistral4",
    ),
    "llama4": (
        {
            **_VISION,
            **dict.fromkeys(("vision_output_dim", "projector_input_dim"), 32),
            "projector_output_dim": 32,
        },
        {**TINY, **FAMILIES["llama4"]},
        "llama4_text",
    ),
    "kimi_k25": (
        {k: v for k, v in _VISION.items() if k not in ("image_size", "patch_size")},
        {
            **TINY,
            **FAMILIES["deepseek-v3"],
            "model_type": "kimi_k2",
            **dict.fromkeys(("n_group", "topk_group"), 1),
            "num_experts_per_tok": 8,
        },
        "deepseek_v3",
    ),
    "qwen2_vl": (
        {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
        {**_NARROW, **_sections([3, 3, 2])},
        "qwen2",
    ),
    "qwen2_5_vl": (_QWEN, {**_NARROW, **_sections([3, 3, 2])}, "qwen2"),
    "qwen3_5": (_QWEN, {**TINY, **FAMILIES["qwen3.5"]}, "qwen3_5_text"),
    "qwen3_5_moe": (
        _QWEN,
        {
            **TINY,
            **FAMILIES["qwen3.5-moe"],
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts_per_tok": 8,
        },
        "qwen3_5_moe_text",
    ),
    "qwen3_vl": (_QWEN3_VL, {**_TEXT, **_sections([6, 5, 5], mrope_interleaved=True)}, "qwen3"),
    "qwen3_vl_moe": (
        _QWEN3_VL,
        {
            **_TEXT,
            **_ALL_EXPERTS,
            "num_experts": 4,
            **_sections([6, 5, 5], mrope_interleaved=True),
        },
        "qwen3_moe",
    ),
    "glm4v": (_QWEN, {**_NARROW, **_GLM}, "glm4"),
    "glm46v": (
        {**_QWEN, "model_type": "glm4v_vision"},
        {**_NARROW, **_GLM, "model_type": "glm4v_text"},
        "glm4",
    ),
    "glm4v_moe": (
        _QWEN,
        {**_NARROW, **_ALL_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, **_GLM},
        "glm4_moe",
    ),
    "exaone4_5": (_QWEN, {**TINY, **FAMILIES["exaone4"]}, "exaone4"),
    "internvl": (
        {**_VISION, "image_size": [28, 28], "patch_size": [14, 14]},
        {**_NARROW, "model_type": "qwen2"},
        "qwen2",
    ),
    "lfm2_vl": (
        {**_VISION, "model_type": "siglip2_vision_model"},
        {**TINY, **FAMILIES["lfm2"]},
        "lfm2",
    ),
    "step3p7": (
        {**_VISION, "mlp_ratio": 1.0},
        {**TINY, **FAMILIES["step-3.5"], "num_experts_per_tok": 8},
        "step3p5",
    ),
    "llava": (_CLIP, {**TINY, **FAMILIES["llama3-rope"]}, "llama"),
    "llava_next": (_CLIP, {**TINY, **FAMILIES["mistral-window"]}, "mistral"),
    "idefics3": (_VISION, {**TINY, "model_type": "llama"}, "llama"),
    "smolvlm": (_VISION, {**TINY, "model_type": "llama"}, "llama"),
}
_TIED = ("gemma3", "gemma4", "gemma4_unified", "qwen2_vl")


def _save(path: Path, name: str) -> Any:
    """Save a random model as transformers does, and return it."""
    vision, text, _ = MODELS[name]
    kind = name.split("-")[0]
    if kind not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not know it")
    config = AutoConfig.for_model(
        kind, text_config=dict(text), vision_config=vision, tie_word_embeddings=name in _TIED
    )
    model = AutoModelForImageTextToText.from_config(config)
    random_weights(model)
    model.save_pretrained(path)
    if name == "kimi_k25":  # transformers 5.24 calls all layers blocks, which only the eyes have
        _rename(path, {"language_model.model.blocks.": "language_model.model.layers."})
    return model


def _rename(path: Path, begins: dict[str, str]) -> None:
    """Rename tensors of a saved model, by how their names begin."""

    def renamed(name: str) -> str:
        begin = next((x for x in begins if name.startswith(x)), "")
        return begins.get(begin, "") + name.removeprefix(begin)

    file = path / "model.safetensors"
    tensors = {renamed(name): x for name, x in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_sees_becomes_its_language_model(tmp_path: Path, name: str) -> None:
    model = _save(tmp_path / "model", name)
    convert(tmp_path / "model", tmp_path / "out", quant=EIGHT)
    tokens = torch.randint(3, 128, (19,))
    # Llama 4 that sees cannot read text alone in transformers 5.24.
    wanted = expected(model.language_model if name == "llama4" else model, tokens)
    assert relative_rms(logits(tmp_path / "out", tokens), wanted) < NEARLY
    assert Checkpoint.open(tmp_path / "out").config["model_type"] == MODELS[name][2]


@pytest.mark.parametrize("name", ["gemma3", "llama4", "qwen3_vl", "llava"])
def test_names_of_the_other_version_are_the_same(tmp_path: Path, name: str) -> None:
    """Of transformers 4 and 5: where in a model the language model is."""
    _save(tmp_path / "model", name)
    tokens, found = torch.randint(3, 128, (19,)), []
    stored = load_file(tmp_path / "model" / "model.safetensors")
    old = {"language_model.model.": "model.language_model.", "language_model.lm_head": "lm_head"}
    new = {"model.language_model.": "language_model.model.", "lm_head": "language_model.lm_head"}
    others = old if any(x.startswith("language_model.model.") for x in stored) else new
    for out in ("out", "renamed"):
        found.append(logits(convert(tmp_path / "model", tmp_path / out, quant=EIGHT), tokens))
        _rename(tmp_path / "model", others)
    assert torch.equal(*found)


def test_experts_are_transposed_or_not(tmp_path: Path) -> None:
    """Qwen 3 VL is published in one way, and saved by transformers 5 in the other."""
    _save(tmp_path / "model", "qwen3_vl_moe")
    tokens, found = torch.randint(3, 128, (19,)), []
    file = tmp_path / "model" / "model.safetensors"
    for out in ("saved", "published"):
        found.append(logits(convert(tmp_path / "model", tmp_path / out, quant=EIGHT), tokens))
        turned = {
            k: x.mT.contiguous() if ".experts." in k else x for k, x in load_file(file).items()
        }
        save_file(turned, file, {"format": "pt"})
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl", "kimi_k25"])
def test_a_config_as_it_was_published_is_the_same(tmp_path: Path, name: str) -> None:
    """Qwen 2 VL's has no part for text; InternVL's calls it, and itself, otherwise.

    Kimi K2.5's text is of a kind that transformers does not know.
    """
    _save(tmp_path / "model", name)
    tokens = torch.randint(3, 128, (19,))
    wanted = logits(convert(tmp_path / "model", tmp_path / "out", quant=EIGHT), tokens)
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    text = config.pop("text_config")
    if name == "internvl":
        config |= {"model_type": "internvl_chat", "llm_config": text}
    elif name == "kimi_k25":
        config |= {"text_config": text | {"model_type": "kimi_k2"}}
    else:
        config = {**text, **config}
        rope = config.pop("rope_parameters")
        config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope | {"type": "mrope"}}
        del rope["rope_type"]
    file.write_text(json.dumps(config))
    assert torch.equal(
        logits(convert(tmp_path / "model", tmp_path / "b", quant=EIGHT), tokens), wanted
    )


def test_gemma_3n_becomes_its_language_model(tmp_path: Path) -> None:
    """transformers needs timm for the whole."""
    whole, tokens = tmp_path / "whole", torch.randint(3, 128, (19,))
    save_model(whole, "gemma3n")
    wanted = logits(convert(whole, tmp_path / "text", quant=EIGHT), tokens)
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({"model_type": "gemma3n", "text_config": config}))
    tensors = load_file(whole / "model.safetensors")
    inside = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    inside["model.vision_tower.conv.weight"] = torch.zeros(3, 3)
    save_file(inside, whole / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(convert(whole, tmp_path / "out", quant=EIGHT), tokens), wanted)
    assert Checkpoint.open(tmp_path / "out").config["model_type"] == "gemma3n_text"


def test_the_chat_template_of_its_processor_comes_along(tmp_path: Path) -> None:
    """transformers 4 wrote it into a file of its own, and the tokenizer may have none."""
    source = tmp_path / "model"
    save_model(source)
    save_tokenizer(source)
    (source / "chat_template.jinja").unlink()
    template = (
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}!{% endfor %}"
    )
    (source / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    out = convert(source, tmp_path / "out", quant=EIGHT)
    assert AutoTokenizer.from_pretrained(out).chat_template == template
    file = source / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "own"}))
    out = convert(source, tmp_path / "own", quant=EIGHT)
    assert AutoTokenizer.from_pretrained(out).chat_template == "own"


@pytest.mark.parametrize("name", [k for k in SOURCES if k in MODELS or k == "internvl_chat"])
def test_fields_that_a_class_of_text_lacks_have_no_defaults_of_another(name: str) -> None:
    """What only the class of what it becomes has is given, or changes nothing."""
    seeing = getattr(SOURCES[name].converted, "__self__", None)
    assert seeing is not None
    harmless = {"bos_token_id", "eos_token_id", "tie_word_embeddings", "num_nextn_predict_layers"}
    harmless |= {"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"}
    harmless |= {"num_experts", "top_k_experts", "moe_intermediate_size"}  # without experts
    harmless |= {"vocab_size_per_layer_input"}  # without such embeddings
    harmless |= {"attention_bias", "use_qk_norm"}  # GLM's defaults are what all of these have
    for kind, becomes in seeing.kinds.items():
        if kind != becomes and kind in CONFIG_MAPPING:
            known, said = (full_config({"model_type": x}).to_dict() for x in (becomes, kind))
            assert known.keys() - said.keys() <= harmless | {"head_dim"} | seeing.fields.keys()


def _spec(name: str, **text: Any) -> DecoderSpec:
    config = {"model_type": name, "text_config": {"model_type": f"{name}_text", **text}}
    return DecoderSpec.from_config(converted(config, lambda name: False)[0])


def test_defaults_are_those_of_the_text() -> None:
    """Shares of experts, and how much of a head rotates."""
    experts = _spec("qwen3_vl_moe", num_experts_per_tok=2).experts
    assert experts is not None
    assert experts.normalized
    for part, dim in ((None, 128), (0.5, 64)):
        rope = _spec("glm4v", **({} if part is None else {"partial_rotary_factor": part})).rope
        assert rope is not None
        assert rope.dim == dim


def test_how_weights_were_quantized_is_no_part_of_the_text() -> None:
    config = {"model_type": "llava", "text_config": {"model_type": "llama"}}
    for key in ("quantization_config", "compression_config"):
        config["text_config"] |= {key: {}}  # type: ignore[operator]
    found, _ = converted(config, lambda name: False)
    assert not {"quantization_config", "compression_config"} & found.keys()


def test_transformers_does_not_say_which_class_mistral_4_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "mistral4", raising=False)
    assert class_of("mistral4") == "Mistral4ForCausalLM"

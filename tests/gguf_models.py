"""Models of transformers as GGUF files, as llama.cpp's converter writes them.

Names come from the map that it uses, which is in the package `gguf`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH as ARCH
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests import gguf_linear, gguf_mamba

Array = NDArray[Any]
ARCHITECTURES = {  # by model_type
    **dict.fromkeys(("llama", "mistral", "mixtral"), ARCH.LLAMA),
    "exaone": ARCH.EXAONE,
    "internlm2": ARCH.INTERNLM2,
    "pangu_embedded": ARCH.PANGU_EMBED,
    "minicpm": ARCH.MINICPM,
    "ministral3": ARCH.MISTRAL3,
    "smollm3": ARCH.SMOLLM3,
    "qwen2": ARCH.QWEN2,
    "qwen3": ARCH.QWEN3,
    "phi3": ARCH.PHI3,
    "granite": ARCH.GRANITE,
    **dict.fromkeys(("olmo2", "olmo3"), ARCH.OLMO2),
    "cohere": ARCH.COMMAND_R,
    "glm": ARCH.CHATGLM,
    "glm4": ARCH.GLM4,
    "gemma": ARCH.GEMMA,
    "gemma2": ARCH.GEMMA2,
    "gemma3_text": ARCH.GEMMA3,
    "gemma3n_text": ARCH.GEMMA3N,
    "gemma4_text": ARCH.GEMMA4,
    "gpt_neox": ARCH.GPTNEOX,
    "cohere2": ARCH.COHERE2,
    "exaone4": ARCH.EXAONE4,
    "seed_oss": ARCH.SEED_OSS,
    "arcee": ARCH.ARCEE,
    "apertus": ARCH.APERTUS,
    "ernie4_5": ARCH.ERNIE4_5,
    "jais2": ARCH.JAIS2,
    "starcoder2": ARCH.STARCODER2,
    "qwen2_moe": ARCH.QWEN2MOE,
    "qwen3_moe": ARCH.QWEN3MOE,
    "gpt_oss": ARCH.GPT_OSS,
    "llama4_text": ARCH.LLAMA4,
    "qwen3_next": ARCH.QWEN3NEXT,
    "qwen3_5_text": ARCH.QWEN35,
    "qwen3_5_moe_text": ARCH.QWEN35MOE,
    "kimi_linear": ARCH.KIMI_LINEAR,
    "granitemoehybrid": ARCH.GRANITE_HYBRID,
    "falcon_h1": ARCH.FALCON_H1,
    "nemotron_h": ARCH.NEMOTRON_H,
    "lfm2": ARCH.LFM2,
    "lfm2_moe": ARCH.LFM2MOE,
    "phimoe": ARCH.PHIMOE,
    "olmoe": ARCH.OLMOE,
    **dict.fromkeys(("granitemoe", "granitemoeshared"), ARCH.GRANITE_MOE),
    "afmoe": ARCH.AFMOE,
    "step3p5": ARCH.STEP35,
    "mimo_v2_flash": ARCH.MIMO2,
    "mistral4": ARCH.MISTRAL4,
    "nemotron": ARCH.NEMOTRON,
    "glm4_moe": ARCH.GLM4_MOE,
    "dots1": ARCH.DOTS1,
    "exaone_moe": ARCH.EXAONE_MOE,
    "minimax_m2": ARCH.MINIMAXM2,
    "ernie4_5_moe": ARCH.ERNIE4_5_MOE,
    "hunyuan_v1_dense": ARCH.HUNYUAN_DENSE,
    "hunyuan_v1_moe": ARCH.HUNYUAN_MOE,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "youtu"), ARCH.DEEPSEEK2),
    "glm_moe_dsa": ARCH.GLM_DSA,
    "deepseek_v32": ARCH.GLM_DSA,  # whose names of tensors it has
}
_KDA = re.compile(r"_conv1d|\.A_log|\.dt_bias|\.0\.block_sparse_moe\.")  # and its only MLP
_NAMES = {"deepseek_v32": "deepseek32"}  # which the package does not know yet
_SUFFIXES = (".weight", ".bias")
_PERMUTED = (
    "llama",
    "mistral",
    "mixtral",
    "ministral3",
    "smollm3",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "granitemoehybrid",
)
_PERMUTED += ("arcee", "internlm2", "minicpm")
_LESS_ONE = ("gemma", "gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_LESS_ONE += ("step3p5",)
_SIGMOID = ("glm4_moe", "dots1", "exaone_moe", "minimax_m2", "deepseek_v3", "afmoe")
_SIGMOID += ("deepseek_v32", "glm_moe_dsa", "lfm2_moe", "mimo_v2_flash")
_NUMBERS = {  # keys of GGUF by keys of a config
    "max_position_embeddings": "context_length",
    "model_max_length": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "norm_eps": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    "moe_topk": "expert_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "route_scale": "expert_weights_scale",
    "moe_router_scaling_factor": "expert_weights_scale",
    "share_expert_dim": "expert_shared_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "num_dense_layers": "leading_dense_block_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "num_experts_per_tok": "expert_used_count",
    "num_experts_per_token": "expert_used_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "q_lora_rank": "attention.q_lora_rank",
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
    "kv_lora_rank": "attention.kv_lora_rank",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "use_parallel_residual": "use_parallel_residual",
}
_ROPE = {
    "factor": "scaling.factor",
    "original_max_position_embeddings": "scaling.original_context_length",
    "beta_fast": "scaling.yarn_beta_fast",
    "beta_slow": "scaling.yarn_beta_slow",
}
TOKENIZER: dict[str, Any] = {"model": "gpt2", "pre": "gpt-2", "merges": ["a b"]}


@dataclass
class GGUFModel:
    """What a GGUF file has. kinds: the type of tensors by a part of their names, else F32."""

    architecture: str
    metadata: dict[str, Any]  # after the architecture's name, but for those of xIELU
    tensors: dict[str, Array]
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=lambda: dict(TOKENIZER))

    @classmethod
    def of(cls, directory: Path, model_type: str | None = None) -> GGUFModel:
        """That of a model of transformers that was saved in float32.

        model_type: that of the model as which llama.cpp's converter writes it, if not its own.
        """
        config = json.loads((directory / "config.json").read_text())
        config["model_type"] = model_type or config["model_type"]
        config.setdefault("num_hidden_layers", len(config.get("layers_block_type", ())))
        kind = ARCHITECTURES[config["model_type"]]
        if kind == ARCH.NEMOTRON_H and "moe" in config["layers_block_type"]:
            kind = ARCH.NEMOTRON_H_MOE
        name = _NAMES.get(config["model_type"], gguf.MODEL_ARCH_NAMES[kind])
        metadata = _metadata(config)
        if ahead := config.get("num_nextn_predict_layers") or 0:
            metadata["block_count"] += ahead
            metadata["nextn_predict_layers"] = ahead
        found = cls(name, metadata, {})
        names, plain = (  # layers without experts have Llama's names
            gguf.get_tensor_name_map(x, metadata["block_count"]) for x in (kind, ARCH.LLAMA)
        )
        tensors = load_file(directory / "model.safetensors")
        if config["model_type"] == "apertus":
            metadata |= _xielu(config, tensors)
        for name, values in _renamed(config, tensors):
            mapped = names.get_name(name, _SUFFIXES) or plain.get_name(name, _SUFFIXES)
            mapped = name if name.startswith("blk.") else mapped
            assert mapped is not None, name
            found.tensors[mapped] = values
        found.tensors |= _rope_tensors(config)
        return found

    def kind(self, name: str) -> Kind:
        """The type that a tensor is written in."""
        found = [kind for part, kind in self.kinds.items() if part in name]
        return found[0] if found and self.tensors[name].ndim > 1 else Kind.F32

    def rounded(self) -> GGUFModel:
        """The same with the values that the file's types hold, in float32."""
        tensors = {
            name: gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
            for name, values in self.tensors.items()
            for kind in [self.kind(name)]
        }
        return GGUFModel(self.architecture, self.metadata, tensors)

    def write(self, path: Path, per_file: int = 0) -> Path:
        """Write the file; per_file: the most tensors in one of its parts, 0 for one file."""
        writer = GGUFWriter(path, self.architecture, split_max_tensors=per_file)
        for key, value in self.metadata.items():
            whole = key.startswith("xielu.")
            _add(writer, key if whole else f"{self.architecture}.{key}", value)
        self._write_tokenizer(writer)
        for name, values in self.tensors.items():
            kind = self.kind(name)
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _write_tokenizer(self, writer: GGUFWriter) -> None:
        size = len(self.tensors["token_embd.weight"])
        tokens = [*(f"<{i}>" for i in range(size - 3)), "a", "b", "ab"]
        writer.add_tokenizer_model(self.tokenizer["model"])
        writer.add_tokenizer_pre(self.tokenizer["pre"])
        writer.add_token_list(tokens)
        writer.add_token_types([3] * 3 + [1] * (size - 3))
        writer.add_token_merges(self.tokenizer["merges"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(0)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    methods: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    methods[type(value)](key, value)


def _metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: config[name] for name, key in _NUMBERS.items() if config.get(name) is not None}
    head_dim = config.get("head_dim")
    size = head_dim or config["hidden_size"] // config["num_attention_heads"]
    if head_dim is not None:
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    model_type = config["model_type"]
    rope = config.get("rope_parameters") or {}
    if "sliding_attention" in rope:
        found["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    if rope:
        found["rope.freq_base"] = float(rope["rope_theta"])
        found["rope.dimension_count"] = int(rope.get("partial_rotary_factor", 1.0) * size)
    if model_type == "phimoe":
        found["rope.scaling.attn_factor"] = rope["short_mscale"]
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope.get("rope_type") in ("linear", "yarn"):
        found["rope.scaling.type"] = rope["rope_type"]
    if rope.get("rope_type") != "llama3":
        found |= {f"rope.{key}": rope[name] for name, key in _ROPE.items() if rope.get(name)}
    if model_type in ("gemma3_text", "gemma3n_text", "gemma4_text", "olmo3", "exaone_moe", "afmoe"):
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        found["attention.sliding_window_pattern"] = slides
    if model_type == "gemma3n_text":
        found |= _gemma3n(config)
    if model_type == "gemma4_text":
        found |= _gemma4(config, slides)
    if model_type == "step3p5":
        found |= _step(config)
        del found["rope.dimension_count"]
    if model_type == "mimo_v2_flash":
        found |= _mimo(config)
    if model_type in ("gpt_oss", "minimax_m2", "llama4_text", "hunyuan_v1_moe"):
        found["expert_feed_forward_length"] = config["intermediate_size"]
    if model_type == "llama4_text":
        found["feed_forward_length"] = config["intermediate_size_mlp"]
    if model_type == "ministral3":
        found["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
    if model_type in ("ministral3", "mistral4"):
        found["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if model_type == "qwen3_5_moe_text":  # whose layers all have experts
        del found["feed_forward_length"]
    if {"mamba_d_state", "ssm_state_size"} & config.keys():
        if "moe" not in config.get("layers_block_type", ["moe"]):  # whose keys a config has, too
            found = {key: x for key, x in found.items() if not key.startswith("expert_")}
        found |= gguf_mamba.metadata(config)
    if model_type == "falcon_h1":
        del found["embedding_scale"]  # which its matrices have
    if "conv_L_cache" in config:
        found |= _short_conv(config)
    if "indexer_types" in config:
        found["attention.indexer.types"] = [kind == "full" for kind in config["indexer_types"]]
    if model_type == "kimi_linear":
        found |= _latent(config, rope) | gguf_linear.kda_metadata(config)
    elif "linear_num_value_heads" in config:
        found |= gguf_linear.metadata(config)
    if "kv_lora_rank" in config and model_type != "kimi_linear":
        found |= _latent(config, rope)
    if model_type in _SIGMOID:
        found["expert_gating_func"] = 2
        found |= {"expert_weights_norm": config["norm_topk_prob"]} if "n_group" in config else {}
    if model_type in ("afmoe", "mistral4"):
        found["expert_weights_norm"] = True
    return found


def _short_conv(config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers that convolve have no KV heads; a dense model has the width that its MLPs have."""
    heads = config["num_key_value_heads"]
    found: dict[str, Any] = {
        "attention.head_count_kv": [heads * (kind != "conv") for kind in config["layer_types"]],
        "attention.layer_norm_rms_epsilon": config["norm_eps"],
        "shortconv.l_cache": config["conv_L_cache"],
    }
    if config.get("block_auto_adjust_ff_dim"):
        unit = config["block_multiple_of"]
        inner = int(config["block_ffn_dim_multiplier"] * int(2 * config["intermediate_size"] / 3))
        found["feed_forward_length"] = unit * ((inner + unit - 1) // unit)
    return found


def _gemma3n(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sparse gates by where they are cut off, in standard deviations; others by -inf."""
    shares = torch.tensor(config["activation_sparsity_pattern"])
    return {
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "altup.active_idx": config["altup_active_idx"],
        "altup.num_inputs": config["altup_num_inputs"],
        "activation_sparsity_scale": torch.distributions.Normal(0, 1).icdf(shares).tolist(),
    }


def _step(config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers with a window have other heads; half of each head turns in the others."""
    heads = {"full_attention": config["num_attention_heads"]}
    heads["sliding_attention"] = config["num_sliding_attention_heads"]
    kinds, limits = config["layer_types"], ("swiglu_limits", "swiglu_limits_shared")
    each = [[float(limit or 0) for limit in config[key]] for key in limits]
    return {
        "attention.head_count": [heads[kind] for kind in kinds],
        "attention.head_count_kv": [config["num_key_value_heads"]] * len(kinds),
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
        "swiglu_clamp_exp": each[0],
        "swiglu_clamp_shexp": each[1],
        "expert_weights_norm": True,
    }


def _mimo(config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers with a window have twice the KV heads; the token itself does not count."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    kv_heads = config["num_key_value_heads"]
    return {
        "attention.value_length": config["v_head_dim"],
        "attention.value_scale": config["attention_value_scale"],
        "attention.head_count_kv": [kv_heads * (1 + x) for x in slides],
        "attention.sliding_window": config["sliding_window"] - 1,
        "attention.sliding_window_pattern": [int(x) for x in slides],
    }


def _gemma4(config: Mapping[str, Any], slides: list[bool]) -> dict[str, Any]:
    """Lengths of heads without a window are the plain ones."""
    full = config["per_layer_config"][str(slides.index(False))]
    heads = config["num_key_value_heads"], full.get("num_key_value_heads")
    shared = config["num_kv_shared_layers"]
    found: dict[str, Any] = {
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
    }
    if config["use_double_wide_mlp"]:
        inner, own = config["intermediate_size"], len(slides) - shared
        found["feed_forward_length"] = [inner] * own + [2 * inner] * shared
    for key in ("attention.key_length", "attention.value_length"):
        found |= {key: full["head_dim"], f"{key}_swa": config["head_dim"]}
    found["rope.dimension_count"] = full["head_dim"]
    found["rope.dimension_count_swa"] = config["head_dim"]
    if heads[1] is not None:
        found["attention.head_count_kv"] = [heads[0] if x else heads[1] for x in slides]
    if config["enable_moe_block"]:
        found["expert_used_count"] = config["top_k_experts"]
    return found


def _latent(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Latent attention has one KV head of keys that are cached."""
    plain, turning = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    found = {
        "attention.head_count_kv": 1,
        "attention.key_length": config["kv_lora_rank"] + turning,
        "attention.value_length": config["kv_lora_rank"],
        "attention.key_length_mla": plain + turning,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": turning,
    }
    if rope.get("mscale_all_dim"):
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return found


def _xielu(config: Mapping[str, Any], tensors: Mapping[str, Array]) -> dict[str, Any]:
    """Of each layer what its activation has learned, before the softplus."""
    layers = range(config["num_hidden_layers"])
    return {
        f"xielu.{x}": [tensors[f"model.layers.{i}.mlp.act_fn.{x}"].item() for i in layers]
        for x in ("alpha_p", "alpha_n", "beta", "eps")
    }


def _renamed(
    config: Mapping[str, Any], tensors: Mapping[str, Array]
) -> Iterator[tuple[str, Array]]:
    """Tensors as llama.cpp's converter changes them, under names that are in its map."""
    model_type, stacks = config["model_type"], dict[str, dict[int, Array]]()
    for name, values in tensors.items():
        if ".act_fn." in name:  # metadata
            continue
        if model_type == "falcon_h1":
            values = gguf_mamba.multiplied(config, name, values)
        one = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if one is not None:
            stacks.setdefault(f"{one[1]}.{one[3]}.weight", {})[int(one[2])] = values
        elif name.endswith("e_score_correction_bias"):
            yield name.replace("_bias", ".bias"), values.flatten()
        elif "block_sparse_moe.input_linear" in name:
            stem = name.replace("block_sparse_moe.input_linear", "mlp.experts.{}_proj")
            for which, part in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                yield stem.format(which), part
        elif model_type == "kimi_linear" and _KDA.search(name):
            yield from gguf_linear.kda_renamed(name, values)
        elif name.endswith(("layer_scalar", "correct_output_scale")):
            yield f"{name}.weight", values
        elif (x := re.fullmatch(r"(model\.altup_\w+)\.(\d+)\.weight", name)) is not None:
            stacks.setdefault(f"{x[1]}.weight", {})[int(x[2])] = values
        elif name.endswith(("router.scale", "router.per_expert_scale")):  # not in its map
            layer = name.split(".")[2]
            of = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
            yield f"blk.{layer}.{of}.scale", values
        elif model_type == "nemotron" and name.endswith("norm.weight"):
            yield name, values + 1
        elif name.endswith(".conv.conv.weight"):
            yield name, values.squeeze(1)
        elif name.endswith((".expert_bias", ".router_bias")):
            yield f"{name}.bias", values
        elif "shared_mlp.input_linear" in name:
            stem = "mlp.shared_expert" if config["num_local_experts"] else "mlp"
            for which, part in zip(("gate", "up"), np.split(values, 2), strict=True):
                yield name.replace("shared_mlp.input_linear", f"{stem}.{which}_proj"), part
        elif "shared_mlp.output_linear" in name:
            stem = "mlp.shared_expert" if config["num_local_experts"] else "mlp"
            yield name.replace("shared_mlp.output_linear", f"{stem}.down_proj"), values
        elif model_type in ("gemma4_text", "mistral4") and ".experts." in name:
            yield f"{name}.weight", values
        elif ".mlp.experts." in name:
            yield from _gpt_oss_experts(name, values)
        elif name.endswith("experts.gate_up_proj"):
            for which, part in zip(("gate", "up"), np.split(values, 2, axis=2), strict=True):
                yield name.replace("gate_up", which) + ".weight", part.swapaxes(1, 2)
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", values.swapaxes(1, 2)
        elif name.endswith("kv_b_proj.weight"):
            heads = values.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
            keys, others = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
            yield name.replace("kv_b", "k_b"), np.ascontiguousarray(keys.swapaxes(1, 2))
            yield name.replace("kv_b", "v_b"), np.ascontiguousarray(others)
        elif name.endswith((".sinks", ".attention_sink_bias")):
            yield f"{name}.weight", values
        elif "query_key_value" in name:
            heads = values.reshape(config["num_attention_heads"], 3, -1, *values.shape[1:])
            yield name, heads.swapaxes(0, 1).reshape(values.shape)
        elif ".mamba." in name or ".mixer." in name:
            yield from gguf_mamba.renamed(config, name, values)
        elif ".linear_attn." in name:
            yield from gguf_linear.renamed(config, name, values)
        elif model_type in _LESS_ONE and name.endswith("norm.weight"):
            yield name, values + 1
        elif model_type in _PERMUTED and (x := re.search(r"\.([qk])_proj\.", name)):
            heads = config["num_attention_heads" if x[1] == "q" else "num_key_value_heads"]
            yield name, permuted(values, heads)
        elif "shared_expert_gate" in name:
            yield name, values.squeeze()
        else:
            yield name, values
    for name, experts in stacks.items():
        name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
        name = name.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
        whole = "feed_forward" in name or name.startswith("model.")
        full = name if whole else f"model.{name}"
        yield full, np.stack([experts[e] for e in range(len(experts))])


def permuted(values: Array, heads: int) -> Array:
    """The row order that llama.cpp's converter gives Llama's queries and keys."""
    pairs = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _gpt_oss_experts(name: str, values: Array) -> Iterator[tuple[str, Array]]:
    """[experts, columns, rows], rows of gate and up in turn, and biases [experts, rows]."""
    stem, bias = name.removesuffix("_bias"), name.endswith("_bias")
    suffix = "bias" if bias else "weight"
    values = values if bias else values.swapaxes(1, 2)
    if stem.endswith("gate_up_proj"):
        for which, x in enumerate(("gate_proj", "up_proj")):
            yield f"{stem.replace('gate_up_proj', x)}.{suffix}", values[:, which::2]
    else:
        yield f"{stem}.{suffix}", values


def _rope_tensors(config: Mapping[str, Any]) -> dict[str, Array]:
    """Divisors of frequencies: of Phi-3, and those of Llama 3.1 as its formula gives them."""
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope and rope["full_attention"]["rope_type"] == "proportional":
        full = next(x["head_dim"] for x in config["per_layer_config"].values())
        turned = int(full * rope["full_attention"]["partial_rotary_factor"]) // 2
        factors = [1.0] * turned + [1e30] * (full // 2 - turned)
        return {"rope_freqs.weight": np.array(factors, np.float32)}
    size = dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if config["model_type"] == "step3p5":
        rope = rope["full_attention"]
        dim = int(size * rope["partial_rotary_factor"])
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{x}.weight": np.array(rope[f"{x}_factor"], np.float32)
            for x in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, 1, 2 / dim))
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    # Llama 4's factors are the same: there is a step.
    smooth = np.clip((original / wavelengths - low) / max(high - low, 1e-9), 0, 1)
    divisors = 1 / ((1 - smooth) / rope["factor"] + smooth)
    whole = np.ones(size // 2, np.float32)
    whole[: len(divisors)] = divisors
    return {"rope_freqs.weight": whole}

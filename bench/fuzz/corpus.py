"""The intact files that inputs are made from: a tiny llama in several forms, and GGUF files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from . import gguf_files
from .gguf_files import VOCAB

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "torch_dtype": "float32",
}
_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: tuple[dict[str, Any], ...] = (  # beside Llama
    {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    {"model_type": "qwen3_moe", **_MOE, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    {"model_type": "gemma3_text", "sliding_window": 8, "query_pre_attn_scalar": 32},
    {"model_type": "gemma3", "text_config": {**CONFIG, "query_pre_attn_scalar": 32}},
    {"model_type": "gpt_neox", "rotary_pct": 0.25, "use_parallel_residual": True},
    {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 32, "activation_function": "relu"},
    {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "gpt_oss", "num_local_experts": 4, "rope_parameters": _ROPE},
    {"model_type": "granite", "logits_scaling": 2.0, "embedding_multiplier": 12.0},
    {"model_type": "smollm3", "no_rope_layers": [1, 0]},
    {"model_type": "phi3", "partial_rotary_factor": 0.5, "rope_parameters": _ROPE},
)
QUANTIZATIONS: tuple[dict[str, Any], ...] = (
    {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32, "zero_point": True},
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    {"quant_method": "mxfp4"},
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
            }
        },
    },
)
GENERATION: dict[str, Any] = {
    "bos_token_id": 257,
    "eos_token_id": [258, 259],
    "pad_token_id": 0,
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 50,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "max_new_tokens": 20,
    "transformers_version": "5.0.0",
}
TEMPLATE = (
    "{% for m in messages %}{{ bos_token }}{{ m['role'] }}: {{ m['content'] | trim }}{% endfor %}"
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write(folder: Path) -> None:
    """Write `source`, `sharded`, `checkpoint` and GGUF files into a folder, in a child.

    What a conversion starts, threads above all, stays out of this process, which forks.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _write(folder)
            status = 0
        finally:
            os._exit(status)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("the intact files could not be written")


def _write(folder: Path) -> None:
    from safetensors.torch import save_file

    from qoff.models.convert.convert import convert
    from qoff.quant import QuantConfig

    torch.manual_seed(0)
    tensors = _tensors()
    source, sharded = folder / "source", folder / "sharded"
    for place in (source, sharded):
        place.mkdir()
        (place / "config.json").write_text(json.dumps(CONFIG))
        (place / "generation_config.json").write_text(json.dumps(GENERATION))
    _save_tokenizer(source)
    save_file(tensors, source / "model.safetensors")
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i}.safetensors"
        save_file({name: tensors[name] for name in part}, sharded / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    convert(source, folder / "checkpoint", quant=QuantConfig(solver="rtn", group_size=32))
    for architecture in gguf_files.METADATA:
        gguf_files.save(folder / f"{architecture}.gguf", architecture)


def _tensors() -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, 64),
        "model.norm.weight": (64,),
    }
    for layer in range(2):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (64,),
                "post_attention_layernorm": (64,),
                "self_attn.q_proj": (128, 64),
                "self_attn.k_proj": (64, 64),
                "self_attn.v_proj": (64, 64),
                "self_attn.o_proj": (64, 128),
                "mlp.gate_proj": (96, 64),
                "mlp.up_proj": (96, 64),
                "mlp.down_proj": (64, 96),
            }.items()
        }
    return {name: torch.randn(shape) / 8 for name, shape in shapes.items()}


def _letters() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return list(bytes_to_unicode().values())


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate([*_letters(), "th", "<s>", "</s>", "the"])}
    backend = Tokenizer(models.BPE(vocab, [("t", "h"), ("th", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)

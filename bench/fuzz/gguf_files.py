"""The intact GGUF files that inputs are made from, of one layer each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

VOCAB = 260
_NUMBERS: dict[str, Any] = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}
_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
METADATA: dict[str, dict[str, Any]] = {  # by architecture, beside `_NUMBERS`
    "llama": {},
    "gemma3": {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True]},
    "phi3": {"rope.dimension_count": 16, "rope.scaling.original_context_length": 64},
    "granite": {"logit_scale": 2.0, "embedding_scale": 12.0, "attention.scale": 0.1},
    "qwen3moe": {**_EXPERTS, "expert_weights_norm": True},
    "gpt-oss": {**_EXPERTS, **_YARN, "attention.sliding_window": 8},
}
_ATTENTION = {"attn_q": (128, 64), "attn_k": (64, 64), "attn_v": (64, 64), "attn_output": (64, 128)}
_MLP = {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
_STACKS = {
    "ffn_gate_inp": (4, 64),
    "ffn_gate_exps": (4, 32, 64),
    "ffn_up_exps": (4, 32, 64),
    "ffn_down_exps": (4, 64, 32),
}


def save(path: Path, architecture: str) -> None:
    """Write a model of an architecture of `METADATA`, its experts in MXFP4."""
    from gguf import GGMLQuantizationType as Kind
    from gguf import GGUFWriter
    from gguf.quants import quantize

    writer = GGUFWriter(path, architecture)
    for key, value in {**_NUMBERS, **METADATA[architecture]}.items():
        methods: dict[type, Callable[..., None]] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        methods[type(value)](f"{architecture}.{key}", value)
    _write_tokenizer(writer)
    random = np.random.default_rng(0)
    for name, shape in _shapes(architecture).items():
        values = random.standard_normal(shape, np.float32) * 0.1 + (len(shape) == 1)
        kind = Kind.F32
        if len(shape) > 1:
            types = {"token_embd": Kind.Q8_0, "ffn_up.": Kind.Q4_0, "_exps.": Kind.MXFP4}
            kind = next((t for part, t in types.items() if part in f"{name}."), kind)
            kind = Kind.F32 if name.endswith(".bias") else kind
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes(architecture: str) -> dict[str, tuple[int, ...]]:
    layer: dict[str, tuple[int, ...]] = {"attn_norm.weight": (64,), "ffn_norm.weight": (64,)}
    experts = "expert_count" in METADATA[architecture]
    matrices = {**_ATTENTION, **(_STACKS if experts else _MLP)}
    if architecture == "phi3":
        for name in ("attn_q", "attn_k", "attn_v", "ffn_gate"):
            del matrices[name]
        matrices |= {"attn_qkv": (256, 64), "ffn_up": (192, 64)}
    layer |= {f"{name}.weight": shape for name, shape in matrices.items()}
    if architecture in ("gemma3", "qwen3moe"):
        layer |= {"attn_q_norm.weight": (32,), "attn_k_norm.weight": (32,)}
    if architecture == "gemma3":
        layer |= {"post_attention_norm.weight": (64,), "post_ffw_norm.weight": (64,)}
    if architecture == "gpt-oss":
        del layer["ffn_norm.weight"]
        layer |= {"post_attention_norm.weight": (64,), "attn_sinks.weight": (4,)}
        layer |= {f"{name}.bias": shape[:-1] for name, shape in matrices.items()}
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, 64),
        "output_norm.weight": (64,),
        **{f"blk.0.{name}": shape for name, shape in layer.items()},
    }
    if architecture == "phi3":
        found |= {"rope_factors_long.weight": (8,), "rope_factors_short.weight": (8,)}
    return found


def _write_tokenizer(writer: Any) -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*bytes_to_unicode().values(), "<s>", "</s>", "<pad>", "th"])
    writer.add_token_types([1] * 256 + [3] * 3 + [1])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)

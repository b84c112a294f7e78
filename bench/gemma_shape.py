"""Gemma 3 270M's shape with random weights: a config for qoff, a GGUF file for llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

CONFIG: dict[str, Any] = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(18)],
    "tie_word_embeddings": True,
}
QUICK = CONFIG | {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "layer_types": ["sliding_attention", "full_attention"],
}


def write_gguf(path: Path, config: Mapping[str, Any] = CONFIG) -> None:
    """Write random weights in float16, with no tokenizer; needs the package gguf."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "gemma3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    generator = np.random.default_rng(0)
    for name, shape in _shapes(config):
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
        else:
            drawn = generator.standard_normal(shape, dtype=np.float32) / shape[1] ** 0.5
            writer.add_tensor(name, drawn.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a GGUF file's tensors."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_q": (q, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, q),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
        "attn_q_norm": (dim,),
        "attn_k_norm": (dim,),
        **dict.fromkeys(
            ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"), (hidden,)
        ),
    }
    yield "token_embd.weight", (config["vocab_size"], hidden)
    yield "output_norm.weight", (hidden,)
    for i in range(config["num_hidden_layers"]):
        for name, shape in layer.items():
            yield f"blk.{i}.{name}.weight", shape

"""A random model in a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.gguf_models import ARCHITECTURES, permuted
from tests.quant.packed_matrices import gguf_blocks

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 32, 2
CONFIG: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 1e5},
    "llama-biased": {"attention_bias": True, "mlp_bias": True},
    "llama-tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "smollm3": {},
    "llama-wide": {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64},  # for K types
}


class Model:
    """A random model of a family, its GGUF file, and what its matrices are worth there."""

    def __init__(self, family: str, kinds: Mapping[str, Kind] | None = None) -> None:
        self.arch = family.partition("-")[0]
        self.kinds = kinds or {}
        self._names = gguf.get_tensor_name_map(ARCHITECTURES[self.arch], LAYERS)
        config = {"model_type": self.arch, **CONFIG, **FAMILIES[family]}
        self.config = AutoConfig.for_model(**config)
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(self.config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.1)
        self.tensors = {n: p.detach() for n, p in model.named_parameters()}
        self.metadata: dict[str, Any] = {
            "context_length": 512,
            "embedding_length": self.config.hidden_size,
            "feed_forward_length": self.config.intermediate_size,
            "block_count": LAYERS,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.key_length": self.config.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": float(self.config.rope_parameters["rope_theta"]),
        }
        self.extra: dict[str, np.ndarray] = {}
        self.tokenizer: dict[str, Any] = {"model": "gpt2", "pre": "smollm"}

    def kind(self, name: str) -> Kind:
        if self.tensors[name].ndim == 1:
            return Kind.F32
        for part, kind in self.kinds.items():
            if part in name:
                return kind
        return Kind.Q8_0 if "embed_tokens" in name or "lm_head" in name else Kind.Q4_1

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.arch)
        for key, value in self.metadata.items():
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            (writer.add_string if isinstance(value, str) else add)(f"{self.arch}.{key}", value)
        self._write_tokenizer(writer)
        for name in self.tensors:
            raw = self.raw(name)
            if self.arch in ("llama", "smollm3") and ".q_proj." in name:
                raw = permuted(raw, HEADS)
            if self.arch in ("llama", "smollm3") and ".k_proj." in name:
                raw = permuted(raw, KV_HEADS)
            called = self._names.get_name(name, (".weight", ".bias"))
            writer.add_tensor(called, raw, raw_dtype=self.kind(name))
        for name, values in self.extra.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def value(self, name: str) -> Tensor:
        """The tensor as the file has it, in the row order of Hugging Face."""
        values = gguf.quants.dequantize(self.raw(name), self.kind(name))
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def raw(self, name: str) -> np.ndarray:
        """The rows of a tensor as stored; random ones for types that only llama.cpp makes."""
        kind, tensor = self.kind(name), self.tensors[name]
        if kind.name.endswith("_K"):
            rows, columns = tensor.shape
            return gguf_blocks(kind.name, rows, columns // 256, seed=len(name))
        return gguf.quants.quantize(tensor.numpy(), kind)

    def _write_tokenizer(self, writer: gguf.GGUFWriter) -> None:
        tokens = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz0123456789"]
        tokens += [f"<{i}>" for i in range(CONFIG["vocab_size"] - len(tokens) - 1)] + ["ab"]
        for place, text in self.tokenizer.get("texts", {}).items():
            tokens[place] = text
        writer.add_tokenizer_model(self.tokenizer["model"])
        writer.add_tokenizer_pre(self.tokenizer["pre"])
        writer.add_token_list(tokens)
        writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(0)
        writer.add_chat_template("{{ messages[0]['content'] }}")

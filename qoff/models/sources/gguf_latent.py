"""Latent attention in GGUF: deepseek2, of DeepSeek V2 and V3, GLM 4.7 Flash, ...; with an index.

Since April 2025 a head's matrices of keys and values are tensors of their own, `attn_k_b` [heads,
latent, nope_dim], transposed, and `attn_v_b` [heads, value_dim, latent]; before, and here, they are
the rows of one. What YaRN's `mscale` is does not stand in a file; it is `mscale_all_dim`, as
llama.cpp takes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from qoff.errors import FormatError
from qoff.quant import GGUFFile, QTensor

from .gguf_experts import SIGMOID, SOFTMAX, deepseek, groups
from .gguf_fields import Config, common, rms, scaled_queries
from .gguf_metadata import Metadata

_KEYS, _VALUES, _BOTH = ".attn_k_b.weight", ".attn_v_b.weight", ".attn_kv_b.weight"
MODULES = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
}
INDEX_MODULES = {
    **MODULES,
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "self_attn.indexer.k_norm": "indexer.k_norm",
}
_GLM_52_TOKENS = 1 << 20  # of context: from there on files without types are of GLM 5.2


def is_v3(metadata: Metadata) -> bool:
    """Whether experts are chosen by sigmoids, as DeepSeek V3 does."""
    return bool(metadata.get("expert_gating_func", 0) == SIGMOID[-1])


def _latent(metadata: Metadata, config: Config) -> Config:
    """Sizes, and the RoPE."""
    sizes = latent_sizes(metadata)
    metadata.only("attention.head_count_kv", 1, config["num_attention_heads"])
    rope = dict(config["rope_parameters"])
    multiplier = metadata.get("rope.scaling.yarn_log_multiplier", 0.0)
    if rope["rope_type"] == "yarn" and multiplier:
        rope["mscale"] = rope["mscale_all_dim"] = round(10 * multiplier, 6)
    heads = config["num_attention_heads"]
    return {"num_key_value_heads": heads, **sizes, "rope_parameters": rope}


def latent_sizes(metadata: Metadata) -> Config:
    """Old files have the lengths of a head's keys and values where new ones have those cached."""
    key = metadata.get("attention.key_length_mla", metadata.get("attention.key_length"))
    value = metadata.get("attention.value_length_mla", metadata.get("attention.value_length"))
    rope_dim = metadata.need("rope.dimension_count")
    if key is None or value is None or rope_dim >= key:
        raise FormatError(
            f"{metadata.path}: keys of {key} channels, {rope_dim} of them with RoPE, and values of "
            f"{value}; it is damaged, get it again"
        )
    return {
        "q_lora_rank": metadata.get("attention.q_lora_rank"),
        "kv_lora_rank": metadata.need("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key - rope_dim,
        "v_head_dim": value,
    }


def base(metadata: Metadata) -> Config:
    """What is common to all, where heads are not of one size."""
    found = common(metadata, head_dim=metadata.need("rope.dimension_count"))
    del found["head_dim"]
    return found


def deepseek_v2(metadata: Metadata, config: Config) -> Config:
    metadata.only("expert_weights_norm", False)
    found = groups(metadata)
    return {
        **deepseek(metadata, SOFTMAX),
        **_latent(metadata, config),
        **found,
        "topk_method": "greedy" if found["n_group"] == 1 else "group_limited_greedy",
        "norm_topk_prob": False,
        "attention_bias": False,
    }


def deepseek_v3(metadata: Metadata, config: Config) -> Config:
    return {
        **deepseek(metadata),
        **_latent(metadata, config),
        **groups(metadata),
        "attention_bias": False,
    }


def deepseek_v32(metadata: Metadata, config: Config) -> Config:
    return {
        **deepseek_v3(metadata, config),
        "index_n_heads": metadata.need("attention.indexer.head_count"),
        "index_head_dim": metadata.need("attention.indexer.key_length"),
        "index_topk": metadata.need("attention.indexer.top_k"),
    }


def glm_dsa(metadata: Metadata, config: Config) -> Config:
    """Some layers attend to what an earlier one chose, since GLM 5.2: the last three of four."""
    every = 1 if config["max_position_embeddings"] < _GLM_52_TOKENS else 4
    full = [i < 2 or (i - 2) % every == 0 for i in range(metadata.layers)]
    stated = metadata.get("attention.indexer.types")
    if stated is not None:
        full = [bool(kind) for kind in stated.tolist()[: metadata.layers]]
    return {
        **deepseek_v32(metadata, config),
        "indexer_types": ["full" if one else "shared" for one in full],
    }


def mistral4(metadata: Metadata, config: Config) -> Config:
    """Queries are scaled by position where a file says so, as in llama.cpp."""
    found = _latent(metadata, config)
    return {
        **deepseek(metadata, SOFTMAX),
        **found,
        **groups(metadata),
        "attention_bias": False,
        "rope_parameters": found["rope_parameters"]
        | scaled_queries(metadata, config["max_position_embeddings"]),
    }


def youtu(metadata: Metadata, config: Config) -> Config:
    """A model without experts."""
    return {**rms(metadata), **_latent(metadata, config), "attention_bias": False}


class Joined:
    """Tensors of keys and of values as one. Raises FormatError for two that do not fit."""

    def __init__(self, file: GGUFFile, keys: str) -> None:
        self._file, self._keys = file, keys
        self._values = keys.removesuffix(_KEYS) + _VALUES
        shapes = [file.shape(name) for name in (self._keys, self._values)]
        (heads, latent, plain), (others, values, columns) = (
            shape if len(shape) == 3 else (0, 0, 0) for shape in shapes
        )
        if not heads or (heads, latent) != (others, columns):
            raise FormatError(
                f"{file.path}: tensors {self._keys} {list(shapes[0])} and {self._values} "
                f"{list(shapes[1])}; expected [heads, latent, keys] and [heads, values, latent]"
            )
        self.shape = (heads * (plain + values), latent)
        self.kinds = {file.tensor_type(name) for name in (self._keys, self._values)}
        self._heads = heads

    def chunks(self) -> Iterator[Tensor]:
        """The rows of one head after the other, float32."""
        for head in range(self._heads):
            keys, values = (self._item(name, head) for name in (self._keys, self._values))
            yield torch.cat((keys.T, values)).contiguous()

    def _item(self, name: str, head: int) -> Tensor:
        found: Any = self._file.item(name, head)
        return found.dequantize() if isinstance(found, QTensor) else found.float()


def joined(file: GGUFFile, names: Iterable[str]) -> dict[str, Joined]:
    """Those of a file whose keys and values are apart, by what they are called together."""
    there = set(names)
    return {
        name.removesuffix(_KEYS) + _BOTH: Joined(file, name)
        for name in names
        if name.endswith(_KEYS) and name.removesuffix(_KEYS) + _VALUES in there
    }


def is_part(name: str) -> bool:
    """Whether a tensor is a part of one that `joined` makes."""
    return name.endswith((_KEYS, _VALUES))

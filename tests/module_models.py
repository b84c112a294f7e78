"""Tiny random models that run through transformers' modules, and transformers' logits for them.

All but Gemma 3n and Falcon H1 are of architectures without a spec. Earlier versions had none for
these either: their checkpoints from then go on to run through modules, where no other layers
attend to packed keys and values of earlier ones, or have both attention and states.
"""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
)

from qoff.checkpoint import Checkpoint, TensorEntry, WeightFile, read_weight
from qoff.kernels.layout.qtensor import QTensor
from qoff.memory.plan import EMBEDDING, LM_HEAD, PER_LAYER
from qoff.models.convert.convert import convert
from qoff.models.modules import configs
from qoff.models.modules.structure import Structure, UnitWeight, cache_argument, matrices_of
from qoff.models.modules.text_part import keep_text, sees
from tests.tiny_families import BOS, EOS, LLAMA3_ROPE, PAD, TINY, VOCAB
from tests.tiny_models import QUANT, save_tokenizer

HYBRID_JAMBA: dict[str, Any] = {
    "model_type": "jamba",
    "num_experts": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "mamba_d_state": 8,
    "mamba_dt_rank": 32,
}
WITHOUT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODULES: dict[str, dict[str, Any]] = {
    "stablelm": {"model_type": "stablelm", "num_key_value_heads": 2},
    "bloom": {"model_type": "bloom", "n_layer": 3, "n_head": 4, "tie_word_embeddings": True},
    "minicpm3": {
        "model_type": "minicpm3",
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "jamba": HYBRID_JAMBA,
    "falcon": {"model_type": "falcon", "multi_query": True, "parallel_attn": True, "alibi": False},
    "gpt2": {
        "model_type": "gpt2",
        "n_layer": 3,
        "n_head": 4,
        "n_embd": 64,
        "n_inner": 80,
        **WITHOUT_DROPOUT,
    },
    "vaultgemma": {
        "model_type": "vaultgemma",
        "head_dim": 16,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": 5.0,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "falcon_h1": {
        "model_type": "falcon_h1",
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "head_dim": 16,
    },
    "gemma3n": {
        "model_type": "gemma3n_text",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "head_dim": 16,
        "sliding_window": 6,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 128,
        "num_kv_shared_layers": 2,
        "laurel_rank": 32,
        "altup_num_inputs": 2,
        "tie_word_embeddings": True,
    },
    "mamba2": {
        "model_type": "mamba2",
        "num_heads": 4,
        "head_dim": 32,
        "n_groups": 1,
        "state_size": 8,
        "chunk_size": 8,
    },
}


HEADS_OF_64: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# With heads whose KV cache can be packed.
PACKABLE: dict[str, dict[str, Any]] = {
    "stablelm-head64": {"model_type": "stablelm", **HEADS_OF_64},
    "gpt2-head64": {"model_type": "gpt2", **HEADS_OF_64, "n_inner": 80},
    "vaultgemma-head64": {**MODULES["vaultgemma"], **HEADS_OF_64, "sliding_window": 90},
    "jamba-head64": {**HYBRID_JAMBA, **HEADS_OF_64},
    "gemma3n-head64": {**MODULES["gemma3n"], **HEADS_OF_64, "sliding_window": 90},
}

ARIA: dict[str, Any] = {  # experts whose matrices are transposed
    "model_type": "aria_text",
    "moe_num_experts": 4,
    "moe_topk": 2,
    "moe_num_shared_experts": 1,
    "intermediate_size": 64,
}

NEWEST: dict[str, dict[str, Any]] = {  # by their `model_type`, of transformers 5.24
    "lara_mini": {  # linear attention, windows with RoPE and layers without, experts
        "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 6,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "tie_word_embeddings": True,
    },
    "apertus1p5_text": {"num_key_value_heads": 2, "rope_parameters": LLAMA3_ROPE},
    "inkling2_loop_text": {  # whose second layer is computed twice
        "head_dim": 16,
        "swa_head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "num_key_value_heads": 2,
        "sliding_window_size": 6,
        "unpadded_vocab_size": VOCAB,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "loop_num_passes": 2,
        "loop_gate_rank": 8,
    },
}
_INDEXED: dict[str, Any] = {  # latent attention with an index of keys
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "index_topk": 8,
    "index_head_dim": 32,
    "index_n_heads": 2,
}
# By their `model_type`: only their own modules know what their caches hold.
OWN_CACHES: dict[str, dict[str, Any]] = {
    "deepseek_v4": {  # blocks of tokens that are summed up, windows, hyper-connections
        "moe_intermediate_size": 32,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "partial_rotary_factor": 0.5,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 4,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
        "layer_types": [
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "compressed_sparse_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    },
    "minimax_m3_vl_text": {  # an index of blocks of keys
        "intermediate_size": 32,
        "dense_intermediate_size": 64,
        "shared_intermediate_size": 32,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rotary_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_block_size": 8,
        "index_topk_blocks": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "axk2": {**_INDEXED, "gated_norm_rank": 8},
    "qwen4_exp_text": {  # DeltaNet, an index of keys, hyper-connections
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "hc_count": 2,
        "hc_lowrank": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    },
}
_SEES: dict[str, Any] = {  # with as little as there can be
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "head_dim": 16,
}
# By their `model_type`: text that a model that sees continues, and what it sees with.
SEEING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "minimax_m3_vl": (OWN_CACHES["minimax_m3_vl_text"], _SEES),
    "glm5_next": (
        {
            **_INDEXED,
            "qk_rope_head_dim": 0,
            "qk_head_dim": 16,
            "index_kpool": 4,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "hc_mult": 2,
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        },
        {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2,
         "projection_intermediate_size": 32, "out_hidden_size": 64},
    ),
    "mistral_large4": ({k: v for k, v in _INDEXED.items() if k != "q_lora_rank"}, _SEES),
    "hy_v4_vl": (
        {**_INDEXED, "hc_mult": 2, "rope_parameters":
         {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
        {**_SEES, "num_key_value_heads": 2, "out_hidden_size": 64},
    ),
    "inkling2": (
        {k: v for k, v in NEWEST["inkling2_loop_text"].items() if not k.startswith("loop_")},
        {**_SEES, "projection_hidden_dim": 32, "text_hidden_size": 64, "posemb_grid_size": 2},
    ),
    "cohere2_vision": ({"num_key_value_heads": 2, "sliding_window": 6}, _SEES),
}  # fmt: skip

REMOTE = """
from transformers import StableLmConfig, StableLmForCausalLM

class HalConfig(StableLmConfig):
    model_type = "hal9000"

class HalForCausalLM(StableLmForCausalLM):
    config_class = HalConfig
"""


def save_module_model(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> None:
    """Save a random model of an architecture without a spec.

    Skips the test where the installed transformers does not know it yet.
    """
    torch.manual_seed(len(name))
    named = {**NEWEST, **OWN_CACHES}
    by_type = {kind: {"model_type": kind, **config} for kind, config in named.items()}
    by_type |= {kind: text for kind, (text, _) in SEEING.items()}
    own = {**MODULES, **PACKABLE, **by_type, "aria": ARIA}[name]
    kind = own.get("model_type", name)
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not know {kind}")
    sizes = {**TINY, "num_hidden_layers": 3, **own}
    if name in SEEING:
        sizes = {"model_type": name, "text_config": sizes, "vision_config": SEEING[name][1]}
    config = AutoConfig.for_model(**sizes)
    model = _auto(config).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    model.generation_config = GenerationConfig(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
    model.to(dtype).save_pretrained(folder)
    save_tokenizer(folder)


def _auto(config: Any) -> Any:
    """transformers' class for a model, of text alone if there is one."""
    return AutoModelForImageTextToText if sees(config.model_type) else AutoModelForCausalLM


def changed(path: Path, **values: Any) -> Path:
    """A source's config.json with other values, in place."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **values}))
    return path


def save_model_with_code(folder: Path) -> Path:
    """Save a StableLM that calls itself by another name, with its own classes in hal.py."""
    save_module_model(folder, "stablelm")
    (folder / "hal.py").write_text(REMOTE)
    names = {"AutoConfig": "hal.HalConfig", "AutoModelForCausalLM": "hal.HalForCausalLM"}
    return changed(folder, model_type="hal9000", auto_map=names)


def module_source(base: Path, name: str) -> Path:
    """The saved model, under `base`; made once."""
    path = base / "module-models" / name
    if not path.exists():
        save_module_model(path, name)
    return path


def module_checkpoint(base: Path, name: str, packing: str = "rows16") -> Path:
    """The checkpoint of `module_source`, under `base`; made once."""
    path = base / "module-checkpoints" / f"{name}-{packing}"
    if not path.exists():
        with patch.object(configs, "FAMILIES", {}):  # whatever has a spec by now
            convert(module_source(base, name), path, quant=QUANT, for_cpu=packing == "rows16")
    return path


def module_reference(base: Path, name: str) -> Any:
    """transformers' model, in float32, with the dequantized weights of the checkpoint."""
    return dequantized(module_source(base, name), module_checkpoint(base, name))


def dequantized(source: Path, path: Path) -> Any:
    """transformers' model of a source, in float32, with the dequantized weights of a checkpoint."""
    checkpoint = Checkpoint.open(path)
    kind = _auto(AutoConfig.from_pretrained(source))
    model = kind.from_pretrained(source, dtype=torch.float32).eval()
    keep_text(model) if kind is AutoModelForImageTextToText else None
    structure = Structure.of(model)
    with torch.no_grad():
        for i, file in enumerate(checkpoint.layers):
            for place in structure.layer(i):
                _put(file, place, structure)
        for place in (*structure.tables, *structure.outer()):
            _put(checkpoint.outer, place, structure)
    return model


def _put(file: WeightFile, place: UnitWeight, structure: Structure) -> None:
    weight = getattr(place.module, place.attribute)
    name = structure.stored_as(place)
    if isinstance(file.weights.get(name), TensorEntry) or name in (EMBEDDING, LM_HEAD, PER_LAYER):
        weight.copy_(dense(file, name))
        return
    for matrix in matrices_of(place):
        value = dense(file, matrix.name)
        part = weight if matrix.expert is None else weight[matrix.expert]
        part.copy_(value.T if matrix.transposed else value)


def dense(file: WeightFile, name: str) -> Tensor:
    """A weight of a checkpoint as floats."""
    value = read_weight(file, file.weights[name])
    return value.dequantize() if isinstance(value, QTensor) else value


def padded(tokens: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Ids and mask of a batch padded on the left."""
    width = max(len(t) for t in tokens)
    ids, mask = torch.zeros(2, len(tokens), width, dtype=torch.int64)
    for row, t in enumerate(tokens):
        ids[row, width - len(t) :] = t
        mask[row, width - len(t) :] = 1
    return ids, mask


@torch.no_grad()
def expected_logits(model: Any, prompts: list[Tensor], decoded: Tensor) -> list[Tensor]:
    """transformers' logits of the real tokens of a prefill, and of every decode step."""
    known = signature(model.forward).parameters
    cache = str(cache_argument(model))
    ids, mask = padded(prompts)
    past, found = None, []
    for step, new in enumerate((ids, *decoded.T[:, :, None])):
        if step:
            mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=torch.int64)], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
        options = {"position_ids": positions} if "position_ids" in known else {}
        out = model(new, attention_mask=mask, use_cache=True, **{cache: past}, **options)
        past = getattr(out, cache)
        found.append(out.logits[:, 0] if step else out.logits[mask.bool()])
    return found

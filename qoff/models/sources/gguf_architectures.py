"""What becomes of each architecture of GGUF: a `config.json`, and the names of its tensors.

Facts are from llama.cpp: `conversion/*.py` (what is written), `gguf-py/gguf/tensor_mapping.py` and
`src/models/*.cpp` (what is read, and defaults of keys that old files do not have). What the keys do
not say has the value of transformers' config class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from qoff.models.families.family import TensorNames, class_of

from . import gguf_dense as dense
from . import gguf_experts as experts
from . import gguf_gemma as gemma
from . import gguf_kimi as kimi
from . import gguf_latent as latent
from . import gguf_linear as linear
from . import gguf_mamba as mamba
from . import gguf_mimo as mimo
from . import gguf_short_conv as short_conv
from . import gguf_step as step
from . import gguf_xielu as xielu
from .gguf_fields import Config, common, stacked
from .gguf_metadata import EMBEDDING, HEAD, Metadata

_MODULES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn": "attn_sinks",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.post_norm": "post_attention_norm",
    "mlp.post_norm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    "mlp.router.correction": "exp_probs_b.bias",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.experts": "experts",  # one by one
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`.

    fields: of its config, what is not common. rope_pairs: neighbouring rows of queries and keys
    turn together (llama.cpp permutes those of Llama when it converts). partial: a part of each head
    may turn. fused_gate_up: `ffn_up` has the rows of the gate, too. index_pairs, split_gates,
    linear (that of most layers), split_conv: as `TensorNames` has them. modules: its own names of
    modules. norm: the last one. base: what is in place of the fields that all have alike.
    tensors: what the metadata has of weights, by the names that tensors would have.
    """

    model_type: str
    fields: Callable[[Metadata, Config], Config]
    rope_pairs: bool = False
    index_pairs: bool = False
    partial: bool = False
    fused_gate_up: bool = False
    split_gates: bool = False
    modules: Mapping[str, str] | None = None
    linear: Literal["", "z", "all"] = ""
    split_conv: bool = False
    norm: str = "output_norm"
    base: Callable[[Metadata], Config] | None = None
    tensors: Callable[[Metadata], Mapping[str, Tensor]] | None = None

    def config(self, metadata: Metadata) -> Config:
        """The `config.json`. Raises FormatError or UnsupportedModelError."""
        config = {
            **(common(metadata, self.partial) if self.base is None else self.base(metadata)),
            "model_type": self.model_type,
            "architectures": [class_of(self.model_type)],
        }
        return {**config, **self.fields(metadata, config)}

    def names(self, metadata: Metadata) -> TensorNames:
        """What the tensors of a file are called. They are fused or not as its first layer's are."""
        fused = "blk.0.attn_qkv.weight"
        return TensorNames(
            layer="blk.{}.",
            modules={**_MODULES, **(self.modules or {})},
            embedding=EMBEDDING,
            norm=self.norm,
            head=HEAD,
            per_layer=gemma.PER_LAYER,
            streams=gemma.STREAMS,
            fused_qkv="rows" if metadata.has(fused) and not self.linear else "",
            split_gates=self.split_gates,
            fused_gate_up=self.fused_gate_up,
            stacked_experts=stacked(metadata),
            split_linear=self.linear,
            linear_of_ggml=True,
            split_conv=self.split_conv,
            rope_pairs=self.rope_pairs,
            index_pairs=self.index_pairs,
        )


def find(metadata: Metadata) -> Architecture:
    """That of a file whose `general.architecture` is one of `ARCHITECTURES`."""
    if metadata.architecture == "llama" and metadata.get("expert_count", 0):
        return _MIXTRAL
    if metadata.architecture == "deepseek2" and metadata.get("attention.temperature_scale", 0.0):
        return ARCHITECTURES["mistral4"]  # Mistral Large 3
    if metadata.architecture == "deepseek2" and latent.is_v3(metadata):
        return _DEEPSEEK_V3
    if metadata.architecture == "deepseek2" and not metadata.get("expert_count", 0):
        return _YOUTU
    if metadata.architecture == "granitemoe" and metadata.get(_SHARED, 0):
        return _GRANITE_SHARED
    if metadata.architecture == "olmo2" and metadata.get("attention.sliding_window", 0):
        return _OLMO3
    return ARCHITECTURES[metadata.architecture]


_ONE_NORM = {"post_attention_layernorm": "attn_norm"}  # before attention and MLP side by side
_NORM_BEHIND_ATTENTION = {"post_attention_layernorm": "post_attention_norm"}
_MIXTRAL = Architecture("mixtral", experts.mixtral, rope_pairs=True)
_DEEPSEEK_V2 = Architecture(
    "deepseek_v2", latent.deepseek_v2, rope_pairs=True, modules=latent.MODULES, base=latent.base
)
_DEEPSEEK_V3 = replace(_DEEPSEEK_V2, model_type="deepseek_v3", fields=latent.deepseek_v3)
_YOUTU = replace(_DEEPSEEK_V3, model_type="youtu", fields=latent.youtu)
_INDEXED = replace(
    _DEEPSEEK_V3,
    model_type="deepseek_v32",
    fields=latent.deepseek_v32,
    modules=latent.INDEX_MODULES,
)
_SHARED = "expert_shared_feed_forward_length"
_GRANITE_SHARED = Architecture("granitemoeshared", experts.granite_moe_shared, rope_pairs=True)
_OLMO3 = Architecture("olmo3", dense.olmo3)
_LFM2 = Architecture(
    "lfm2",
    short_conv.lfm2,
    modules={"short_conv": "shortconv"},
    norm="token_embd_norm",
    base=short_conv.base,
)
_NEMOTRON_H = Architecture(
    "nemotron_h", mamba.nemotron, modules=mamba.NEMOTRON_MODULES, base=mamba.nemotron_base
)
ARCHITECTURES: Mapping[str, Architecture] = {
    "deepseek2": _DEEPSEEK_V2,
    "deepseek32": _INDEXED,
    "glm-dsa": replace(_INDEXED, model_type="glm_moe_dsa", fields=latent.glm_dsa, index_pairs=True),
    "mistral4": replace(_DEEPSEEK_V2, model_type="mistral4", fields=latent.mistral4),
    "llama": Architecture("llama", dense.llama, rope_pairs=True),
    "exaone": Architecture("llama", dense.llama),
    "internlm2": Architecture("llama", dense.llama, rope_pairs=True),
    "pangu-embedded": Architecture("llama", dense.llama),
    "mistral3": Architecture("ministral3", dense.mistral3, rope_pairs=True),
    "qwen": Architecture("qwen2", dense.qwen1),
    "qwen2": Architecture("qwen2", dense.qwen),
    "qwen2vl": Architecture("qwen2", dense.qwen),
    "qwen3": Architecture("qwen3", dense.qwen),
    "qwen3vl": Architecture("qwen3", dense.qwen),  # pictures are in other files
    "smollm3": Architecture("smollm3", dense.llama, rope_pairs=True),
    "phi3": Architecture("phi3", dense.phi3, partial=True, fused_gate_up=True),
    "granite": Architecture("granite", dense.granite, rope_pairs=True),
    "minicpm": Architecture("granite", dense.minicpm, rope_pairs=True),
    "olmo2": Architecture("olmo2", dense.qwen),
    "exaone4": Architecture("exaone4", dense.exaone4),
    "arcee": Architecture("arcee", dense.llama, rope_pairs=True),
    "apertus": Architecture("apertus", xielu.apertus, modules=xielu.MODULES, tensors=xielu.numbers),
    "seed_oss": Architecture("seed_oss", dense.seed_oss, modules=_NORM_BEHIND_ATTENTION),
    "ernie4_5": Architecture("ernie4_5", dense.ernie4_5, rope_pairs=True),
    "chatglm": Architecture("glm", dense.glm, rope_pairs=True, partial=True, fused_gate_up=True),
    "glm4": Architecture("glm4", dense.glm, rope_pairs=True, partial=True, fused_gate_up=True),
    "gemma": Architecture("gemma", dense.gemma),
    "gemma2": Architecture("gemma2", dense.gemma2),
    "gemma3": Architecture("gemma3_text", dense.gemma3),
    "gemma3n": Architecture("gemma3n_text", gemma.gemma3n, modules=gemma.GEMMA3N_MODULES),
    "gemma4": Architecture("gemma4_text", gemma.gemma4, modules=gemma.MODULES, base=gemma.base),
    "gptneox": Architecture("gpt_neox", dense.gpt_neox, partial=True),
    "command-r": Architecture("cohere", dense.cohere, rope_pairs=True, modules=_ONE_NORM),
    "cohere2": Architecture("cohere2", dense.cohere2, rope_pairs=True, modules=_ONE_NORM),
    "jais2": Architecture("jais2", dense.jais2),
    "nemotron": Architecture("nemotron", dense.nemotron, partial=True),
    "starcoder2": Architecture("starcoder2", dense.starcoder2),
    "qwen2moe": Architecture("qwen2_moe", experts.qwen2_moe),
    "qwen3moe": Architecture("qwen3_moe", experts.qwen3_moe),
    "qwen3vlmoe": Architecture("qwen3_moe", experts.qwen3_moe),
    "qwen3next": Architecture(
        "qwen3_next", linear.qwen3_next, partial=True, modules=linear.MODULES, linear="z"
    ),
    "qwen35": Architecture(
        "qwen3_5_text", linear.qwen3_5, partial=True, modules=linear.MODULES, linear="all"
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        linear.qwen3_5_moe,
        modules=linear.MODULES,
        linear="all",
        base=linear.qwen3_5_moe_base,
    ),
    "kimi-linear": Architecture(
        "kimi_linear",
        kimi.kimi_linear,
        modules=kimi.MODULES,
        split_conv=True,
        base=kimi.base,
    ),
    "lfm2": _LFM2,
    "lfm2moe": replace(_LFM2, model_type="lfm2_moe", fields=short_conv.lfm2_moe),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        mamba.granite,
        rope_pairs=True,
        modules=mamba.MODULES,
        base=mamba.granite_base,
    ),
    "falcon-h1": Architecture("falcon_h1", mamba.falcon_h1, modules=mamba.MODULES),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": replace(_NEMOTRON_H, fields=mamba.nemotron_moe),
    "phimoe": Architecture("phimoe", experts.phimoe),
    "olmoe": Architecture("olmoe", experts.olmoe),
    "granitemoe": Architecture("granitemoe", experts.granite_moe, rope_pairs=True),
    "afmoe": Architecture(
        "afmoe", experts.afmoe, split_gates=True, modules={"self_attn.gate_proj": "attn_gate"}
    ),
    "mimo2": Architecture("mimo_v2_flash", mimo.mimo, base=mimo.base),
    "step35": Architecture(
        "step3p5", step.step, split_gates=True, modules=step.MODULES, base=step.base
    ),
    "glm4moe": Architecture(
        "glm4_moe", experts.glm4_moe, partial=True, modules=_NORM_BEHIND_ATTENTION
    ),
    "dots1": Architecture("dots1", experts.dots1),
    "exaone-moe": Architecture("exaone_moe", experts.exaone_moe),
    "minimax-m2": Architecture("minimax_m2", experts.minimax_m2, partial=True),
    "ernie4_5-moe": Architecture("ernie4_5_moe", experts.ernie4_5_moe, rope_pairs=True),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", dense.qwen),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", experts.hunyuan_moe),
    "llama4": Architecture("llama4_text", experts.llama4, rope_pairs=True),
    "gpt-oss": Architecture("gpt_oss", experts.gpt_oss, modules=_NORM_BEHIND_ATTENTION),
}

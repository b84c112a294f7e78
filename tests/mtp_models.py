"""Tiny random models with a layer for multi-token prediction, and transformers' of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from qoff.checkpoint import Checkpoint
from qoff.models.convert.convert import convert
from qoff.models.families import tensor_names
from qoff.models.families.mtp import mtp_names
from qoff.models.mtp import mtp_checkpoint
from tests.tiny_families import FAMILIES, VOCAB
from tests.tiny_models import QUANT, reference_model, save_model, save_tokenizer, stored_tensors

_APART = {
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "post_norm": "mtp.norm",
}


def save_with_mtp(directory: Path, family: str, sure: bool = False, **changes: Any) -> None:
    """`save_model` with a layer for multi-token prediction, named as it is published.

    sure: what follows a token depends on that token alone, and the layer knows it.
    """
    if not family.startswith("deepseek"):
        changes["head_dim"] = 64  # so that K and V can be packed
    if family == "qwen3.5-moe":  # transformers takes the norms of the last layer
        changes["layer_types"] = ["linear_attention", "linear_attention", "full_attention"]
    save_model(directory, family, num_nextn_predict_layers=1, **changes)
    save_tokenizer(directory, FAMILIES[family].get("vocab_size", VOCAB))
    config = AutoConfig.from_pretrained(directory)
    mtp = _mtp_model(AutoModelForCausalLM.from_config(config))
    weights = load_file(directory / "model.safetensors")
    torch.manual_seed(1)
    for name, value in mtp.layers[0].state_dict().items():
        random = torch.randn_like(value) * 0.1 + float("norm" in name)
        weights |= _apart_experts(_published(name, config), random)
    if sure:
        _be_sure(weights, config)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def _apart_experts(name: str, value: Tensor) -> dict[str, Tensor]:
    """A tensor by its name, or of all experts those of each, as they are published."""
    stem, found, matrix = name.partition(".experts.")
    if not found:
        return {name: value}
    parts = value.chunk(2, 1) if matrix == "gate_up_proj" else [value]
    called = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,)
    return {
        f"{stem}.experts.{e}.{own}.weight": part[e].contiguous()
        for own, part in zip(called, parts, strict=True)
        for e in range(len(value))
    }


def _be_sure(weights: dict[str, Tensor], config: Any) -> None:
    """Have layers change nothing, and the layer behind them see the newest token alone."""
    for name, value in weights.items():
        if name.removesuffix(".weight").endswith(("o_proj", "out_proj", "down_proj")):
            value.zero_()
    width = config.hidden_size
    own = {name: weights[_published(f"{name}.weight", config)] for name in _APART}
    own["enorm"].fill_(float(not config.model_type.startswith("qwen3")))  # which adds 1
    own["post_norm"].copy_(weights["model.norm.weight"])
    own["eh_proj"].zero_()[:, :width].copy_(torch.eye(width))


def tiny_with_mtp(base: Path, family: str, packing: str = "rows16", sure: bool = False) -> Path:
    """The checkpoint of `save_with_mtp`, under `base`; made once."""
    called = f"{family}-sure" if sure else family
    path = base / "mtp-checkpoints" / f"{called}-{packing}"
    if not path.exists():
        model = base / "mtp-models" / called
        if not model.exists():
            save_with_mtp(model, family, sure)
        convert(model, path, quant=QUANT, for_cpu=packing == "rows16")
    return path


def reference_with_mtp(path: Path) -> tuple[Any, MtpModel]:
    """transformers' model, and that of its layer, with the dequantized weights of a checkpoint."""
    model, checkpoint = reference_model(path), Checkpoint.open(path)
    mtp, layer = _mtp_model(model), mtp_checkpoint(checkpoint)
    assert layer is not None
    family, count = checkpoint.config["model_type"], len(checkpoint.layers)
    has_mtp = "mtp." if _apart(family) else f"model.layers.{count}."
    names = mtp_names(tensor_names(family), count, lambda name: name.startswith(has_mtp))
    assert names is not None
    found = dict(stored_tensors(layer, replace(names, stacked_experts="bare-halves")))
    config = model.config
    own = {name: found[_published(name, config)] for name in mtp.layers[0].state_dict()}
    mtp.layers[0].load_state_dict(own)
    return model, mtp.float().eval()


def _mtp_model(model: Any) -> MtpModel:
    """transformers' model of the layer; it does not say that Qwen3-Next has one, which attends."""
    config = model.config
    if config.model_type.startswith("qwen3"):
        config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    return MtpModel(model, 1)


def _apart(family: str) -> bool:
    """Whether the layer's tensors are called "mtp"."""
    return family == "mellum" or family.startswith("qwen3")


def _published(name: str, config: Any) -> str:
    """What a checkpoint calls a tensor of transformers' `MtpLayer`."""
    apart, behind = _apart(config.model_type), f"model.layers.{config.num_hidden_layers}."
    module, _, leaf = name.rpartition(".")
    if module in _APART:
        own = "shared_head.norm" if module == "post_norm" else module
        return f"{_APART[module] if apart else behind + own}.{leaf}"
    return ("mtp.layers.0." if apart else behind) + name.removeprefix("mtp_block.")

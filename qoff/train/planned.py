"""A training of a model that is not there: its sizes, of `config.json` alone.

The model is built of tensors without memory, by transformers and PEFT as `offload` is given it, and
a pass goes through its layers, so that units, placement and what a layer saves for its backward are
counted by the code that a training counts with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError, UnsupportedModelError, raised_as
from qoff.hf.plugin.streaming import Frozen, frozen_of
from qoff.models.families.family import full_config
from qoff.models.modules.configs import layer_configs

from .activations import Cost
from .batches import Limits
from .costs import costs_of
from .finetune import Lora, adapted
from .mixtures import dequantize_routers, packed_experts
from .needs import needs_of
from .optimizers import Optimizer
from .sizes import Sizes


@dataclass(frozen=True)
class Work:
    """Multiplications of a token with the matrices of a layer, or of the head.

    learned, frozen: matrices that learn, and others. bits: of an element of each.
    """

    learned: float
    frozen: float
    bits: tuple[int, int]


@dataclass(frozen=True)
class Planned:
    """What a training is made of.

    costs: of each layer and a micro-batch, without seconds; empty where values decide what a layer
    computes. work: of each layer, then of the head. heads: channels of all query heads, the mean of
    layers. hidden: bytes of the hidden states of a micro-batch. loaded: bytes of the model that are
    in memory when `offload` is given it, not mapped.
    frozen: packed weights beside adapters. cut: gives the sizes with linear layers of more bytes
    cut into tiles of so many.
    """

    sizes: Sizes
    costs: Sequence[Cost]
    work: Sequence[Work]
    heads: int
    tokens: int
    hidden: int
    loaded: int
    parameters: int
    frozen: Frozen | None
    cut: Callable[[int, str], Sizes]

    @property
    def layers(self) -> int:
        return len(self.work) - 1

    @property
    def learned(self) -> int:
        """Elements that learn."""
        return sum(p.numel() for unit in self.sizes.stepped for p in unit.parameters.values())


def planned(
    config: Mapping[str, Any],
    optimizer: Optimizer,
    *,
    lora: Lora | None = None,
    packed: Checkpoint | None = None,
    dtype: str = "auto",
    tokens: int,
    micro_batches: int,
    clips: bool = False,
    device: str = "cpu",
    delayed: bool = False,
    gradients: str = "auto",
) -> Planned:
    """The training of the model of a `config.json`; the arguments are those of `offload`.

    lora, packed: adapters beside a qoff checkpoint, which streams; its files need not be there.
    dtype: of weights where all learn, and what a GPU computes in beside packed ones. Raises
    UnsupportedModelError, ArgumentError, also for more tokens than learned positions.
    """
    # Tensors beside parameters are real: masks depend on their values.
    with FakeTensorMode(allow_non_fake_inputs=True):
        if lora is None:
            model = measured = _model(config, dtype)
        else:
            with torch.device("meta"):  # PEFT moves what it makes
                model, measured = (_adapted(config, lora, packed is not None) for _ in range(2))
            if packed is not None:
                dequantize_routers(measured)
            _to_cpu(measured)
    Limits.of(model, tokens).check_length(tokens)
    costs = costs_of(measured, tokens)
    # Beside packed weights, a GPU computes in this dtype, and a CPU in float32.
    half = packed is not None and device != "cpu" and _named(config, dtype) == "float16"
    needs = partial(
        needs_of, model, optimizer, tokens, micro_batches, clips or half, lora is not None, delayed,
        gradients=gradients,
    )  # fmt: skip
    layers, _, sizes = needs()
    work = [_work(layer, model.config, packed) for layer in layers]
    work.append(_head(model, packed))
    hidden = sizes.hidden // 4 * model.dtype.itemsize
    loaded = _converted(model, config, dtype)
    parameters = sum(p.numel() for p in model.parameters())
    text = model.config.get_text_config(decoder=True)
    heads = [one.num_attention_heads * _head_dim(one) for one in layer_configs(text)]
    frozen = None
    if packed is not None:
        frozen = frozen_of(packed, torch.device(device))
        loaded = 0
    return Planned(
        sizes,
        costs,
        work,
        int(fmean(heads)),
        tokens,
        hidden,
        loaded,
        parameters,
        frozen,
        cache(lambda most, part: needs(most, part)[2]),
    )


def _model(config: Mapping[str, Any], dtype: str) -> Any:
    """The model without memory, as `from_pretrained` would have it."""
    from transformers import AutoModelForCausalLM

    if "model_type" not in config:
        raise ArgumentError("config.json has no model_type; only models of transformers train")
    with raised_as(UnsupportedModelError, "config.json: transformers makes no model of it"):
        made = full_config(config)
        chosen = getattr(made, "dtype", None) or torch.float32 if dtype == "auto" else dtype
        model: Any = AutoModelForCausalLM.from_config(
            made, dtype=getattr(torch, chosen) if isinstance(chosen, str) else chosen
        )
    return model.train()


def _adapted(config: Mapping[str, Any], lora: Lora, packed: bool) -> Any:
    """The model with adapters, which are beside packed weights or others."""
    model = _model(config, "float32")
    with packed_experts(model) if packed else nullcontext():
        return adapted(model, lora)


def _to_cpu(model: nn.Module) -> None:
    """Replace the tensors of a model on meta by fake ones, which say that they are a CPU's."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                made = torch.empty_like(p, device="cpu")
                module._parameters[name] = nn.Parameter(made, p.requires_grad)
        others: tuple[dict[str, Any], ...] = (module._buffers, module.__dict__)
        for own in others:
            for name, x in own.items():
                if isinstance(x, Tensor):
                    own[name] = torch.empty_like(x, device="cpu")


def _converted(model: Any, config: Mapping[str, Any], dtype: str) -> int:
    """Bytes of weights that transformers converts while it loads them.

    Others are mapped: those of another dtype than the files', which `config` has, are not, nor are
    experts, which it puts into one tensor.
    """
    kept = dtype == "auto" or dtype == _named(config, "auto")
    return sum(p.nbytes for p in model.parameters() if not kept or p.dim() == 3)


def _named(config: Mapping[str, Any], dtype: str) -> str:
    """A dtype by name; "auto": that of the config."""
    return dtype if dtype != "auto" else str(config.get("dtype") or config.get("torch_dtype"))


def _head_dim(text: Any) -> float:
    """Channels of a query head of a layer in attention: the mean of its two products."""
    parts = [getattr(text, name, 0) or 0 for name in _LATENT]
    if all(parts):  # as in DeepSeek V3, whose `head_dim` is that of the rotary part
        return sum(parts) / 2
    own = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return (own + (parts[-1] or own)) / 2  # as in MiMo V2, whose values have fewer channels


_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _work(layer: nn.Module, config: Any, packed: Checkpoint | None) -> Work:
    """Of a layer; of experts, which are three-dimensional, those that a token is given to."""
    top = getattr(config.get_text_config(decoder=True), "num_experts_per_tok", None)
    sums, bits = [0.0, 0.0], 32
    for p in layer.parameters():
        if p.dim() < 2:
            continue
        share = min(1.0, top / p.shape[0]) if top and p.dim() == 3 else 1.0
        sums[not p.requires_grad] += p.numel() * share
        if p.requires_grad:
            bits = 8 * p.itemsize
    return Work(sums[0], sums[1], (bits, bits if packed is None else 4))


def _head(model: Any, packed: Checkpoint | None) -> Work:
    weight = model.get_output_embeddings().weight
    count, bits = float(weight.numel()), 8 * weight.itemsize
    if packed is None:
        return Work(count, 0.0, (bits, bits))
    return Work(0.0, count, (32, 8))

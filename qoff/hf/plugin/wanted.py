"""Which parameters of a transformers model are quantized while it is loaded."""

from __future__ import annotations

import json
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.quantizers_utils import should_convert_module

from qoff.errors import QuantizationError, UnsupportedModelError
from qoff.hf.packed.derived import is_router
from qoff.hf.packed.experts import DOWN, GATE_UP, form_of
from qoff.models.spec import DecoderSpec
from qoff.quant.matrix import ROUTER_BITS

from .config import QoffConfig

# How much the output of a shared expert counts, and what linear attention forgets by.
_EXACT = (".shared_expert_gate", ".in_proj_ba", ".in_proj_a", ".in_proj_b")
_IN_ROUTERS = (".gate.wg", ".router.proj")  # linears, of Hunyuan and Gemma 4


def quantizable(model: PreTrainedModel, config: QoffConfig) -> dict[str, int]:
    """Which parameters of a model are quantized as they arrive, with how many bits.

    Raises QuantizationError where the group does not divide the columns, UnsupportedModelError for
    experts of a family that qoff has no decoder for.
    """
    head = model.get_output_embeddings()
    found: dict[str, int] = {}
    experts, routers = experts_of(model), []
    for name, module in model.named_modules():
        if not should_convert_module(name, config.modules_to_not_convert):
            experts.pop(name, None)
            continue
        plain = type(module) is nn.Linear
        if isinstance(module, nn.Embedding) or (module is head and plain):
            found[f"{name}.weight"] = config.head_bits
        elif plain and name.endswith(_EXACT):
            found[f"{name}.weight"] = ROUTER_BITS
        elif is_router(module) or (plain and name.endswith(_IN_ROUTERS)):
            routers.append(f"{name}.weight")
        elif plain:
            found[f"{name}.weight"] = config.bits
        elif name in experts:
            found.update({f"{name}.{matrices}": config.bits for matrices in (GATE_UP, DOWN)})
    if experts:
        activation_of(model)
        found.update(dict.fromkeys(routers, ROUTER_BITS))
    for target, source in model.all_tied_weights_keys.items():
        if (target in found) != (source in found):  # one of two that share a weight stays as it is
            found.pop(target, None)
            found.pop(source, None)
    for name in found:
        own = experts.get(name.rpartition(".")[0])
        form = None if own is None else form_of(own)
        turned = form is not None and form.transposed
        columns = model.get_parameter(name).shape[-2 if turned else -1]
        if columns % config.group_size:
            raise QuantizationError(
                f"{name}: group_size {config.group_size} does not divide its {columns} columns; "
                "choose another, or name it in modules_to_not_convert"
            )
    return found


def experts_of(model: PreTrainedModel) -> dict[str, Any]:
    """The modules with experts by their names: those with matrices in three dimensions."""
    return {
        name: module
        for name, module in model.named_modules()
        if "expert" in name and any(p.dim() > 2 for p in module.parameters(recurse=False))
    }


def activation_of(model: PreTrainedModel) -> str:
    """That of a model's experts. Raises UnsupportedModelError for a family without a decoder."""
    config = json.loads(model.config.to_json_string())
    try:
        experts = DecoderSpec.from_config(config).experts
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"experts of {type(model).__name__} cannot be quantized while loading ({error}); use "
            "qoff convert and qoff.load, or name them in modules_to_not_convert"
        ) from error
    assert experts is not None
    return experts.activation

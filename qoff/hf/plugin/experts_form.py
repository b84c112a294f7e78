"""How the experts of a transformers model can be packed."""

from __future__ import annotations

import json
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from qoff.errors import UnsupportedModelError
from qoff.hf.packed.experts import ExpertsForm, form_of
from qoff.hf.packed.own_experts import own_form
from qoff.models.spec import DecoderSpec


def experts_of(model: PreTrainedModel) -> dict[str, Any]:
    """The modules with experts by their names: those with matrices in three dimensions."""
    return {
        name: module
        for name, module in model.named_modules()
        if "expert" in name and any(p.dim() > 2 for p in module.parameters(recurse=False))
    }


def activation_of(model: PreTrainedModel) -> str | None:
    """That of a model's experts; None for a family that qoff has no decoder for."""
    try:
        experts = DecoderSpec.from_config(json.loads(model.config.to_json_string())).experts
    except UnsupportedModelError:
        return None
    return None if experts is None else experts.activation


def experts_form(module: nn.Module, activation: str | None) -> ExpertsForm | None:
    """The form of a module with experts: for qoff's kernels where these know the family.

    activation: `activation_of` its model. None: they cannot be packed.
    """
    return form_of(module, activation) or own_form(module)

"""Putting packed modules into a transformers model in place of its own, and taking them out."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from qoff.errors import UnsupportedModelError
from qoff.hf.packed.derived import (
    QoffEmbedding,
    QoffRouter,
    dense_like,
    is_router,
    packed_like,
)
from qoff.hf.packed.experts import QoffExperts
from qoff.hf.packed.linear import QoffConv1D, QoffGroups, QoffLinear
from qoff.hf.packed.module import PackedModule
from qoff.kernels.layout.qexperts import QExperts
from qoff.kernels.layout.qtensor import QTensor
from qoff.models.modules.structure import groups_of, is_conv1d

from .experts_form import activation_of, experts_form

Packed: TypeAlias = QTensor | QExperts


def install(model: PreTrainedModel, name: str, packed: QTensor) -> set[str]:
    """Give the linear, embedding or router `name` packed weights; return what parameters they are.

    What is tied to it shares them. Where another matrix of its own was loaded for that, the two
    differ, and are tied no longer, as transformers does. Raises UnsupportedModelError for a module
    of another kind.
    """
    parameter = f"{name}.weight"
    module = model.get_submodule(name)
    if isinstance(module, PackedModule) and module.owner is not module:  # its owner came first
        if _same(module.qtensor, packed):
            return {parameter}
        model.config.tie_word_embeddings = False
    made = _packed(module, packed, name)
    model.set_submodule(name, made)
    tied = {t for t, source in model.all_tied_weights_keys.items() if source == parameter}
    for target in tied:
        _tie(model, target.removesuffix(".weight"), made)
        _forget_tie(model, target)
    return {parameter, *tied}


def experts_module(model: PreTrainedModel, path: str) -> QoffExperts:
    """The experts module at `path`; one for packed matrices takes the place of transformers' own.

    Raises UnsupportedModelError for a module that is no experts module, or of another form.
    """
    module = model.get_submodule(path)
    if isinstance(module, QoffExperts):
        return module
    form = experts_form(module, activation_of(model))
    if form is None:
        raise UnsupportedModelError(
            f"{path}: is a {type(module).__name__}; only experts of transformers' own interface "
            "can be packed; name them in modules_to_not_convert"
        )
    made = form.kind(module, form).train(module.training)
    model.set_submodule(path, made)
    return made


def packed_modules(model: nn.Module) -> dict[str, PackedModule]:
    """The packed modules of a model by their names, tied ones, too."""
    return {name: m for name, m in model.named_modules() if isinstance(m, PackedModule)}


def parameters_of(model: nn.Module) -> dict[str, Packed | Tensor]:
    """Parameters and buffers of a model, those that are packed by transformers' names, too."""
    found: dict[str, Packed | Tensor] = dict(model.named_buffers())
    found |= dict(model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        if isinstance(module, PackedModule):
            found[f"{name}.weight"] = module.qtensor
        elif isinstance(module, QoffExperts):
            found |= {f"{name}.{key}": part.qexperts for key, part in module.matrices.items()}
    return found


def restore(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Put modules of torch with dequantized weights in place of the packed ones."""
    weights: dict[PackedModule, nn.Parameter] = {}
    for name, module in packed_modules(model).items():
        owner = module.owner
        if owner not in weights:
            weights[owner] = nn.Parameter(owner.qtensor.dequantize(dtype), requires_grad=False)
        model.set_submodule(name, _dense(module, weights[owner]))
    for name, experts in list(model.named_modules()):
        if isinstance(experts, QoffExperts):
            model.set_submodule(name, experts.dense(dtype))
    for submodel in model.modules():
        submodel.__dict__.pop("_tied_weights_keys", None)
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def _packed(module: nn.Module, packed: QTensor, name: str) -> PackedModule:
    made: PackedModule
    if isinstance(module, nn.Embedding) or is_router(module):  # which may be a kind of linear
        made = packed_like(module, packed, cast(nn.Parameter, module.weight).dtype)
    elif isinstance(module, nn.Linear) or is_conv1d(module):
        kind = QoffConv1D if is_conv1d(module) else QoffLinear
        weight, bias = (module._parameters[key] for key in ("weight", "bias"))
        dtype = cast(nn.Parameter, weight).dtype
        if isinstance(module, nn.Linear) and (groups := groups_of(module)):
            made = QoffGroups(packed, module, groups, dtype)
        else:
            made = kind(packed, bias, dtype)
    else:
        raise UnsupportedModelError(
            f"{name}: is a {type(module).__name__}; only linears, embeddings and routers can be "
            "packed"
        )
    made.train(module.training)
    return made


def _dense(module: PackedModule, weight: nn.Parameter) -> nn.Module:
    if isinstance(module, QoffEmbedding | QoffRouter):
        return dense_like(module, weight).train(module.training)
    made: nn.Module
    with torch.device("meta"):
        if isinstance(module, QoffGroups):
            made = module.replaced
        elif isinstance(module, QoffConv1D):
            made = Conv1D(*weight.shape)
            weight = nn.Parameter(weight.T.contiguous(), requires_grad=False)
        else:
            made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.register_parameter("weight", weight)
    made.register_parameter("bias", cast("nn.Parameter | None", module.bias))
    return made.train(module.training)


def _tie(model: PreTrainedModel, name: str, owner: PackedModule) -> None:
    module = model.get_submodule(name)
    if isinstance(module, PackedModule) and not _same(module.qtensor, owner.qtensor):
        model.config.tie_word_embeddings = False
        return
    if not isinstance(module, nn.Linear):
        raise UnsupportedModelError(f"{name}: a tied {type(module).__name__} cannot be packed")
    model.set_submodule(name, QoffLinear(owner, module.bias).train(module.training))


def _forget_tie(model: PreTrainedModel, target: str) -> None:
    """transformers shall not tie what shares packed weights already."""
    model.all_tied_weights_keys.pop(target, None)
    for prefix, submodel in model.named_modules():
        ties = getattr(submodel, "_tied_weights_keys", None)
        if isinstance(submodel, PreTrainedModel) and isinstance(ties, dict):
            local = target.removeprefix(f"{prefix}." if prefix else "")
            if local in ties:
                submodel._tied_weights_keys = {k: v for k, v in ties.items() if k != local}


def _same(a: QTensor, b: QTensor) -> bool:
    alike = (a.shape, a.bits, a.group_size, a.packing) == (b.shape, b.bits, b.group_size, b.packing)
    return alike and torch.equal(a.codes, b.codes) and torch.equal(a.scale_min, b.scale_min)


def table_of(module: nn.Module, own: str) -> dict[str, Any]:
    """Where a module has a tensor of its own: a router's correction is a buffer."""
    return module._buffers if own in module._buffers else module._parameters


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that a module itself has."""
    found = {**module._parameters, **module._buffers}
    return {own: x for own, x in found.items() if x is not None}

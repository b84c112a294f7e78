"""Mixtures of experts in a training that is planned: as they compute, and as packed ones do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from qoff.hf.packed.derived import is_router
from qoff.hf.packed.experts import QoffExperts
from qoff.hf.plugin.experts_form import activation_of, experts_form, experts_of


class GroupedProducts(TorchDispatchMode):
    """Has products of experts' matrices, which torch counts in bfloat16 alone, in any dtype.

    For tensors without memory.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            x, matrices = args[:2]
            return x.new_empty(x.shape[0], matrices.shape[-1])
        return func(*args, **(kwargs or {}))


@contextmanager
def packed_experts(model: PreTrainedModel) -> Iterator[None]:
    """Have experts save for their backward what packed ones do, and PEFT find no matrix of them.

    It adapts experts and routers by the names of their parameters, and packed ones have none. They
    are back at the end, frozen.
    """
    experts, activation = experts_of(model), activation_of(model)
    for module in experts.values():
        form = experts_form(module, activation)
        if form is not None and form.kind is QoffExperts:
            module.forward = _packed
    modules = [*experts.values(), *filter(is_router, model.modules())]
    matrices = [
        (module._parameters, name, p)
        for module in modules
        for name, p in module._parameters.items()
        if p is not None and (p.dim() > 2 or name == "weight")
    ]
    for own, name, _ in matrices:
        del own[name]
    try:
        yield
    finally:
        for own, name, p in matrices:
            own[name] = p.requires_grad_(False)


def dequantize_routers(model: nn.Module) -> None:
    """Have routers compute with tensors that are no parameters, as packed ones dequantize theirs.

    So layers save them for their backward.
    """
    for router in filter(is_router, model.modules()):
        weight = router._parameters.pop("weight")
        assert weight is not None
        router.weight = weight.detach()


def _packed(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    found: Tensor = _Packed.apply(x.reshape(-1, x.shape[-1]), topk_ids, topk_weights)
    return found.view(x.shape)


class _Packed(torch.autograd.Function):
    """Saves what packed experts do (`qoff.hf.packed.experts`), and computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, topk_ids, topk_weights)
        return torch.empty_like(x)

"""Which weights of a layer are quantized, and as which matrices they are stored."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from .structure import UnitWeight

_LINEAR = ("Linear", "FalconLinear")  # classes that compute x @ W.T + bias
_ROUTERS = ("gate", "router", "shared_expert_gate")  # modules that choose experts: as the head
_MATRICES = ("gate_up_proj", "up_proj", "down_proj")  # of transformers' experts modules


@dataclass(frozen=True)
class Matrix:
    """A matrix [N, K] of a weight: all of it, or that of one expert.

    expert: its number in a weight [experts, ...]. transposed: the weight has it as [K, N].
    """

    name: str  # in the checkpoint
    shape: tuple[int, int]
    expert: int | None = None
    transposed: bool = False
    sensitive: bool = False  # as many bits as embedding and head

    def of(self, weight: Tensor) -> Tensor:
        """The matrix, contiguous [N, K], in a weight."""
        part = weight if self.expert is None else weight[self.expert]
        return (part.T if self.transposed else part).contiguous()


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer and nothing more; a router may look like one."""
    return isinstance(module, nn.Linear) and type(module).__name__ in _LINEAR


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is the transposed linear layer of GPT-2 and its kin."""
    from transformers.pytorch_utils import Conv1D

    return type(module) is Conv1D


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds experts as transformers' interface for their forward pass has them."""
    known = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_apply_gate")
    return all(hasattr(module, name) for name in known)


def matrices_of(place: UnitWeight, group: int) -> list[Matrix]:
    """The matrices that a weight of a layer is stored as; none: it stays a float tensor.

    group: of the quantization, which must divide the columns of all of them.
    """
    module, weight = place.module, getattr(place.module, place.attribute)
    if place.attribute == "weight" and (is_linear(module) or is_conv1d(module)):
        turned = is_conv1d(module)
        rows, columns = weight.shape[::-1] if turned else weight.shape
        leaf = place.name.split(".")[-2]
        whole = Matrix(place.name, (rows, columns), None, turned, leaf in _ROUTERS)
        return [whole] if columns % group == 0 else []
    if place.attribute not in _MATRICES or weight.dim() != 3 or not is_experts(module):
        return []
    turned = bool(module.is_transposed)
    count, rows, columns = weight.shape
    if turned:
        rows, columns = columns, rows
    if columns % group:
        return []
    return [
        Matrix(f"{place.name}.{e}", (rows, columns), e, turned, sensitive=False)
        for e in range(count)
    ]

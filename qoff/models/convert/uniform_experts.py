"""Experts in one form: those of a layer are computed together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from qoff.memory.plan import is_expert
from qoff.quant import QTensor, widened

Weights = Mapping[str, QTensor | Tensor]


def with_uniform_experts(weights: Weights) -> dict[str, QTensor | Tensor]:
    """The weights of a layer, its experts' matrices of a kind in one form that holds all of them.

    The widest codes, the smallest groups, and float32 scales where any has them: no value changes.
    """
    alike: dict[str, list[str]] = defaultdict(list)
    for name, weight in weights.items():
        if is_expert(name) and isinstance(weight, QTensor):
            alike[name.rpartition(".")[2]].append(name)
    found = dict(weights)
    for names in alike.values():
        matrices = [weight for name in names if isinstance(weight := weights[name], QTensor)]
        bits, group = max(m.bits for m in matrices), min(m.group_size for m in matrices)
        wide = any(m.scale_min.dtype == torch.float32 for m in matrices)
        dtype = torch.float32 if wide else matrices[0].scale_min.dtype
        for name, matrix in zip(names, matrices, strict=True):
            same = widened(matrix, bits, group)
            found[name] = replace(same, scale_min=same.scale_min.to(dtype))
    return found

"""The experts of a layer on a GPU: checks and cases of `bench.gpu`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.gpu.case import BOUNDS, Check, PreparedCase, TimedCase, dtypes, relative_rms, short
from bench.gpu.model_shapes import ModelShape
from bench.gpu.operands import random_weight, together
from qoff.kernels.layout.qexperts import ExpertsMlp, QExperts
from qoff.kernels.reference import experts as reference
from qoff.kernels.triton.moe.experts import experts

OP = "experts"
GROUP = 64
_TOKENS = (1, 16, 64, 512, 2048)
_GATED, _UNGATED = ("silu", True), ("relu2", False)  # activations


@dataclass(frozen=True)
class RoutedLayer:
    """x [M, H], who computes it and how much that counts [M, T], and the experts' matrices."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    mlp: ExpertsMlp

    def run(self) -> Tensor:
        return experts(self.x, self.topk_ids, self.topk_weights, self.mlp)

    def truth(self) -> Tensor:
        """In float64."""
        weights = self.topk_weights.double()
        return reference.experts(self.x.double(), self.topk_ids, weights, self.mlp)


def checks(device: torch.device, tiny: bool) -> Iterator[Check]:
    sizes = ((4, 2, 64, 64),) if tiny else ((8, 2, 512, 256), (5, 3, 2048, 768))
    forms = ((4, 64),) if tiny else ((4, 32), (4, 64), (4, 128), (8, 64))
    for m in (1, 5) if tiny else (1, 7, 64, 300):
        for dtype in dtypes(device)[:1] if tiny else dtypes(device):
            for size in sizes:
                for kind, bits, group in (*((_GATED, *form) for form in forms), (_UNGATED, 4, 64)):
                    name = f"{short(dtype)} M={m} {size} {bits} bit group {group} {kind[0]}"
                    error = partial(_error, size, m, dtype, bits, group, kind, device)
                    # Activations are rounded once more than in the reference.
                    yield Check(OP, name, error, 2 * BOUNDS[dtype])


def _error(
    size: tuple[int, int, int, int],
    m: int,
    dtype: torch.dtype,
    bits: int,
    group: int,
    kind: tuple[str, bool],
    device: torch.device,
) -> float:
    layer = _layer(size, m, dtype, device, bits, group, kind)
    return relative_rms(layer.run(), layer.truth())


def cases(quick: bool, models: Sequence[ModelShape]) -> Iterator[TimedCase]:
    """Bytes and operations count the experts that are expected to be chosen, once each."""
    for m in (1, 64) if quick else _TOKENS:
        for model in (model for model in models if model.experts):
            values = 3 * model.hidden * model.intermediate
            packed = values // 2 + values // GROUP * 4
            chosen = model.experts * (1 - (1 - model.per_token / model.experts) ** m)
            size = (model.experts, model.per_token, model.hidden, model.intermediate)
            yield TimedCase(
                OP,
                model.name,
                f"{model.per_token} of {model.experts} experts, M={m}",
                round(chosen * packed) + 6 * m * model.hidden,
                partial(_build, size, m),
                flops=2.0 * m * model.per_token * values,
                m=m,
                footprint=2 * model.experts * packed + 16 * m * model.per_token * model.hidden,
            )


def _build(size: tuple[int, int, int, int], m: int, device: torch.device) -> PreparedCase:
    return PreparedCase(_layer(size, m, torch.float16, device).run)


def _layer(
    size: tuple[int, int, int, int],
    m: int,
    dtype: torch.dtype,
    device: torch.device,
    bits: int = 4,
    group: int = GROUP,
    kind: tuple[str, bool] = _GATED,
) -> RoutedLayer:
    """size: experts, of a token, H, I. Every token has random experts, none twice."""
    count, per_token, hidden, inner = size
    activation, gated = kind
    chosen = torch.rand(m, count, device=device).topk(per_token)
    return RoutedLayer(
        torch.randn(m, hidden, device=device).to(dtype),
        chosen.indices,
        chosen.values.softmax(1),
        ExpertsMlp(
            _matrices(count, (1 + gated) * inner, hidden, device, bits, group),
            _matrices(count, hidden, inner, device, bits, group),
            activation,
            gated=gated,
        ),
    )


def _matrices(count: int, n: int, k: int, device: torch.device, bits: int, group: int) -> QExperts:
    return together([random_weight(n, k, device, bits, group) for _ in range(count)])

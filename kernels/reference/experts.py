"""The MLP of a mixture of experts in plain torch: what `experts` of `ops.Ops` means."""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.kernels.layout.qexperts import ExpertsMlp
from qoff.kernels.layout.routing import NEVER_ZERO, Routing

from .linear import activated, gate_and_up, times


def activate(z: Tensor, activation: str, gated: bool = True, limit: float = 0.0) -> Tensor:
    """Return the gated activation of z [M, 2I], whose columns alternate 16 of gate, 16 of up.

    activation: one of `ending.ACTIVATIONS`, of the gate times up; "clamped_swiglu" is that of
    gpt-oss, (up + 1) * gate * sigmoid(1.702 gate), gate at most 7 and up within -7..7. gated: or
    else z is [M, I], and the activation is of each number. limit: see `ending.Ending`.
    """
    if not gated:
        return activated(activation, z)
    gate, up = gate_and_up(z)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return ((up + 1) * gate * torch.sigmoid(1.702 * gate)).flatten(1)
    return times(activated(activation, gate), up, limit)


def route(
    scores: Tensor,
    routing: Routing,
    correction: Tensor | None = None,
    gains: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Experts of each token, int64 [M, top_k], best first, and their weights, float32 [M, top_k].

    scores: [M, E], of a router. correction, gains: [E]. `Routing` says what becomes of them.
    """
    shares = scores.float()
    if routing.shares == "all":
        shares = shares.softmax(-1)
    elif routing.shares == "sigmoid":
        shares = shares.sigmoid()
    merits = shares if correction is None else shares + correction.float()
    if routing.groups > 1:
        grouped = merits.unflatten(1, (routing.groups, -1))
        judged = grouped.topk(routing.group_best, dim=-1).values.sum(-1)
        best = judged.topk(routing.top_groups, dim=-1).indices
        others = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
        merits = grouped.masked_fill(others[..., None], -torch.inf).flatten(1)
    ids = merits.topk(routing.top_k, dim=-1).indices
    weights = shares.gather(1, ids)
    if routing.shares == "topk":
        weights = weights.softmax(-1)
    elif routing.shares == "mixer":
        weights = _mixed(shares, ids, routing.jitter)
    if routing.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + NEVER_ZERO)
    if gains is not None:
        weights = weights * gains.float()[ids]
    return ids, weights * routing.scale if routing.scale != 1 else weights


def _mixed(scores: Tensor, ids: Tensor, jitter: float) -> Tensor:
    """The weights of experts of each token [M, top_k], best first, by SparseMixer."""
    left, weights = scores, []
    for chosen in ids.split(1, dim=1):
        best = scores.gather(1, chosen)
        far = best - scores > 2 * jitter * torch.maximum(scores.abs(), best)
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(1, chosen))
        left = left.scatter(1, chosen, -torch.inf)
    return torch.cat(weights, dim=1)


def experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    mlp: ExpertsMlp,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    of: tuple[int, int] | None = None,
) -> Tensor:
    """Return residual + sum over t of topk_weights * (down @ f(gate_up @ x + bias) + bias), [M, H].

    Where `mlp.weighs_input`, topk_weights multiply x in place of the outputs. x, residual: [M, H],
    any float dtype, in which all is computed. topk_ids: int64 [M, T], the experts of each token;
    topk_weights: [M, T], how much each counts. Nothing is rounded. of: where these are a part of a
    choice, its number of pairs of a token and an expert, and of experts; such a part is of pairs,
    each as a token with one expert, whose `out` is float32: with `add_experts` the results are
    those of the whole.
    """
    y = torch.zeros_like(x)
    for e in topk_ids.unique().tolist():
        token, place = (topk_ids == e).nonzero(as_tuple=True)
        share = topk_weights[token, place, None].to(x.dtype)
        if mlp.weighs_input:
            y.index_add_(0, token, expert(share * x[token], mlp, e))
        else:
            y.index_add_(0, token, share * expert(x[token], mlp, e))
    y = y if residual is None else y + residual
    return y if out is None else out.copy_(y)


def add_experts(
    weighted: Tensor, *, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return residual + the sum of each token's weighted outputs in their order, [M, H].

    weighted: float32 [M, T, H].
    """
    total = weighted[:, 0]
    for t in range(1, weighted.shape[1]):
        total = total + weighted[:, t]
    total = total if residual is None else total + residual
    return total if out is None else out.copy_(total)


def expert(x: Tensor, mlp: ExpertsMlp, e: int) -> Tensor:
    """The MLP of expert e on rows x [m, H]."""
    z = x @ mlp.gate_up.expert(e).dequantize(x.dtype).T
    if mlp.gate_up_bias is not None:
        z = z + mlp.gate_up_bias[e].to(x.dtype)
    z = activate(z, mlp.activation, mlp.gated, mlp.limit)
    z = z @ mlp.down.expert(e).dequantize(x.dtype).T
    return z if mlp.down_bias is None else z + mlp.down_bias[e].to(x.dtype)

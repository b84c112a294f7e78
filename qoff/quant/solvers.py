"""Choosing the scale and the minimum of each group of weights, without data.

A solver takes groups float32 [N, G, g] and returns scale and minimum [N, G] as they will be stored,
or, in float32, what compact ones are made of (`solved`); codes follow from those by rounding to the
nearest. Errors are those of the values that the stored scale and minimum give, so that no solver is
worse than `rtn` in the norm it minimizes. All raise QuantizationError as `minmax_scale` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from qoff.errors import QuantizationError
from qoff.kernels.layout.hqq import NORM as HQQ_NORM
from qoff.kernels.layout.hqq import SPANS, TINY, ZEROS
from qoff.kernels.layout.scales import COMPACT, SPAN_MAX, expanded, span_below, zero_for
from qoff.kernels.reference import hqq as reference
from qoff.kernels.reference.hqq import line
from qoff.kernels.reference.quantization import minmax_scale, nearest_levels

Range = tuple[Tensor, Tensor]  # scale and minimum
Solver = Callable[[Tensor, int, torch.dtype], Range]


class SpanError(QuantizationError):
    """A group spans more than compact scales can hold."""


_MSE_SHRINKS = tuple(1 - 0.03 * i for i in range(1, 14))  # fractions of the full range, to 0.61
_MSE_REFITS = 4


def mse(
    groups: Tensor,
    bits: int,
    scale_dtype: torch.dtype,
    importance: Tensor | None = None,
    shrinks: Sequence[float] = _MSE_SHRINKS,
    refits: int = _MSE_REFITS,
) -> Range:
    """Minimize the squared error of each group, weighted by the importance of columns [G, g].

    Tries ranges shrunk around their middle, then refits scale and minimum to the codes by least
    squares, some times.
    """
    loss = partial(_error, groups, bits, 2, importance)
    best = minmax_scale(groups, bits, scale_dtype)
    scale, minimum = (x.float() for x in best)
    half_span, error = scale * ((2**bits - 1) / 2), loss(best)
    for shrink in shrinks:
        tried = scale * shrink, minimum + half_span * (1 - shrink)
        best, error = _better(loss, best, error, tried)
    for _ in range(refits):
        tried = line(nearest_levels(groups, *best, bits), groups, importance)
        best, error = _better(loss, best, error, tried)
    return best


def hqq(groups: Tensor, bits: int, scale_dtype: torch.dtype) -> Range:
    """Minimize sum |error|**0.7 of each group by half-quadratic splitting (`kernels.reference`)."""
    start = minmax_scale(groups, bits, scale_dtype)
    if groups.device.type == "cpu":
        from qoff.kernels.cpu.solvers.hqq import hqq as compiled  # numba, not always needed

        return compiled(groups, *start, bits)
    return by_torch(groups, start, bits)


def by_torch(groups: Tensor, start: Range, bits: int) -> Range:
    """What `hqq` finds from the whole range on, by operations of torch."""
    loss = partial(_error, groups, bits, HQQ_NORM, None)
    return _better(loss, start, loss(start), reference.hqq(groups, *start, bits))[0]


# rtn, round to nearest, spans each group from its minimum to its maximum.
SOLVERS: Mapping[str, Solver] = {"hqq": hqq, "mse": mse, "rtn": minmax_scale}


def solved(name: str, groups: Tensor, bits: int, scale_dtype: torch.dtype) -> Range:
    """What a solver of SOLVERS finds, as it is stored in `scale_dtype`, compact ones too."""
    solver = SOLVERS[name]
    if scale_dtype != COMPACT:
        return solver(groups, bits, scale_dtype)
    norm = HQQ_NORM if name == "hqq" else 2
    return compact(groups, bits, solver(groups, bits, torch.float32), norm)


def floats_of(found: Range, bits: int) -> Range:
    """Scale and minimum, as they are stored, in float32."""
    if found[0].dtype == COMPACT:
        return expanded(*found, bits)
    return found[0].float(), found[1].float()


def compact(
    groups: Tensor, bits: int, found: Range, norm: float = 2, importance: Tensor | None = None
) -> Range:
    """Compact scales of groups [N, G, g], those near a range in float32 that lose least.

    The loss is that of `mse`, or with another norm that of `hqq`. Returns spans and zero points,
    uint8 [N, G]; raises SpanError for spans that there are none of.
    """
    (scale, minimum), top, steps = found, 2**bits - 1, 2.0**bits
    middle, highest = minimum + top / 2 * scale, minimum + top * scale
    # Where 0 is not between the ends of a range, a span reaches to it.
    span = torch.maximum(scale * steps, torch.maximum(highest * (steps / top), -minimum))
    if not bool((span <= SPAN_MAX).all()):
        raise SpanError(f"weights up to {float(groups.abs().max()):.4g} overflow compact scales")
    if groups.device.type == "cpu" and norm == HQQ_NORM and importance is None:
        from qoff.kernels.cpu.solvers.hqq import compact as compiled  # numba, not always needed

        return compiled(groups, scale, minimum, bits)
    below = span_below(span)
    best = torch.zeros_like(below, dtype=torch.uint8), torch.zeros_like(below, dtype=torch.uint8)
    error = torch.full_like(scale, torch.inf)
    for above in range(SPANS):
        chosen = (below + above).clamp_(max=255).to(torch.uint8)
        wide, _ = expanded(chosen, best[1], bits)
        least = middle - top / 2 * wide
        for _ in range(ZEROS):
            tried = chosen, zero_for(least, wide * steps)
            floats = expanded(*tried, bits)
            missing = groups - nearest_levels(groups, *floats, bits).mul_(wide[..., None])
            least = _mean(missing, importance)
            lost = missing.sub_(floats[1][..., None]).abs_().pow_(norm)
            lost = (lost if importance is None else lost.mul_(importance)).sum(2)
            wins = lost < error
            best = torch.where(wins, tried[0], best[0]), torch.where(wins, tried[1], best[1])
            error = torch.where(wins, lost, error)
    return best


def _mean(values: Tensor, importance: Tensor | None) -> Tensor:
    """Means of groups [N, G, g], weighted by the importance of columns [G, g]: [N, G]."""
    if importance is None:
        return values.mean(2)
    return (values * importance).sum(2) / importance.sum(1).clamp_min(TINY)


def _error(
    groups: Tensor, bits: int, norm: float, importance: Tensor | None, found: Range
) -> Tensor:
    """Sum of importance * |w - dequantized|**norm of each group, float32 [N, G]."""
    levels = nearest_levels(groups, *found, bits)
    scale, minimum = (x.float()[..., None] for x in found)
    error = levels.mul_(scale).add_(minimum).sub_(groups).abs_().pow_(norm)
    return (error if importance is None else error.mul_(importance)).sum(2)


def _better(
    loss: Callable[[Range], Tensor], best: Range, error: Tensor, tried: Range
) -> tuple[Range, Tensor]:
    """Group by group whichever of `best`, whose loss is `error`, and `tried` loses less."""
    tried = tried[0].to(best[0].dtype), tried[1].to(best[1].dtype)
    tried_error = loss(tried)
    wins = tried_error < error  # false for NaN: an overflow of the stored dtype never wins
    chosen = torch.where(wins, tried[0], best[0]), torch.where(wins, tried[1], best[1])
    return chosen, torch.where(wins, tried_error, error)

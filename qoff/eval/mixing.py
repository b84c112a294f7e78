"""Formats for the matrices of a model: the least loss for a size, or the least size for a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qoff.errors import ArgumentError
from qoff.quant import Format

from .knapsack import Option, least_cost, least_size
from .sensitivity import Sensitivities, Sensitivity

_TRIES = 4
_CLOSE = 0.9  # a loss of this part of what is allowed will do


@dataclass(frozen=True)
class Mix:
    """Formats by the full names of the matrices in a model's layers, and what they cost.

    loss: measured, not estimated, in nats a token on the texts of the sensitivities.
    """

    formats: Mapping[str, Format]
    bits_per_weight: float  # of these matrices, scales and minima included
    loss: float


def mixed_for_bits(model: Sensitivities, found: Sequence[Sensitivity], bits: float) -> Mix:
    """Return the formats of least loss with at most so many bits a weight.

    Where one format for all matrices fits as well and is measured to lose less, that one. found: of
    `model`. Raises ArgumentError for fewer bits than the smallest formats take.
    """
    weights = sum(one.weights for one in found)
    chosen = least_cost(_options(found), int(bits * weights / 8))
    if chosen is None:
        least = sum(min(one.nbytes.values()) for one in found) * 8 / weights
        raise ArgumentError(
            f"{bits:g} bits a weight are too few; the smallest formats take {least:.3f}, scales "
            "and minima included"
        )
    mix = _mix(model, found, chosen)
    same = _one_format(found, int(bits * weights / 8))
    if same is None or dict(mix.formats) == dict.fromkeys(mix.formats, same):
        return mix
    alike = _mix(model, found, [list(one.nbytes).index(same) for one in found])
    return min(mix, alike, key=lambda x: x.loss)


def mixed_for_loss(model: Sensitivities, found: Sequence[Sensitivity], most: float) -> Mix:
    """Return the smallest formats found whose measured loss is at most `most` nats a token.

    Estimates rank matrices; how large their sum is in truth, a measurement of the choice tells, by
    which the next one is made: four at the most. found: of `model`. Raises ArgumentError where
    the largest formats lose more.
    """
    options, factor = _options(found), 1.0
    best: Mix | None = None
    for _ in range(_TRIES):
        chosen = least_size(options, most / factor)
        if chosen is None:
            chosen = [_largest(item) for item in options]
        mix = _mix(model, found, chosen)
        if mix.loss <= most and (best is None or mix.bits_per_weight < best.bits_per_weight):
            best = mix
        if _CLOSE * most <= mix.loss <= most:
            break
        estimate = sum(item[i].cost for item, i in zip(options, chosen, strict=True))
        factor = mix.loss / max(estimate, 1e-30) / (0.5 + 0.5 * _CLOSE)
    if best is None:
        best = _mix(model, found, [_largest(item) for item in options])
    if best.loss > most:
        raise ArgumentError(
            f"a loss of {most:g} nats a token cannot be had: the largest formats lose "
            f"{best.loss:.3g}; allow more"
        )
    return best


def _one_format(found: Sequence[Sensitivity], nbytes: int) -> Format | None:
    """The largest format that all matrices can have within so many bytes."""
    shared = set.intersection(*(set(one.nbytes) for one in found))
    sizes = {form: sum(one.nbytes[form] for one in found) for form in shared}
    fitting = [form for form, size in sizes.items() if size <= nbytes]
    return max(fitting, key=sizes.__getitem__, default=None)


def _options(found: Sequence[Sensitivity]) -> list[list[Option]]:
    return [[Option(one.nbytes[form], one.loss[form]) for form in one.nbytes] for one in found]


def _largest(item: Sequence[Option]) -> int:
    return min(range(len(item)), key=lambda i: item[i].cost)


def _mix(model: Sensitivities, found: Sequence[Sensitivity], chosen: Sequence[int]) -> Mix:
    formats = {one.name: list(one.nbytes)[i] for one, i in zip(found, chosen, strict=True)}
    nbytes = sum(one.nbytes[formats[one.name]] for one in found)
    bits = 8 * nbytes / sum(one.weights for one in found)
    return Mix(formats, bits, model.measured(formats))

"""Formats for the matrices of a model: the least loss for a size, or the least size for a loss."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from qoff.errors import ArgumentError
from qoff.quant import Format

from .sensitivity import Sensitivities, Sensitivity

_TRIES = 4
_CLOSE = 0.9  # a loss of this part of what is allowed will do
_SOLVER = {"mip_rel_gap": 1e-5, "time_limit": 60.0}


@dataclass(frozen=True)
class Mix:
    """Formats by the full names of the matrices in a model's layers, and what they cost.

    loss: measured, not estimated, in nats a token on the texts of the sensitivities.
    """

    formats: Mapping[str, Format]
    bits_per_weight: float  # of these matrices, scales and minima included
    loss: float


def mixed_for_bits(model: Sensitivities[Any], found: Sequence[Sensitivity], bits: float) -> Mix:
    """Return the formats of least loss with at most so many bits a weight.

    If one format for all matrices also fits and measures better, that one is returned. found: of
    `model`. Raises ArgumentError for fewer bits than the smallest formats take.
    """
    sizes, weights = _values(found, "nbytes"), sum(one.weights for one in found)
    limit = int(bits * weights / 8)
    chosen = choose(_values(found, "loss"), sizes, limit)
    if chosen is None:
        least = sum(map(min, sizes)) * 8 / weights
        raise ArgumentError(
            f"{bits:g} bits a weight are too few; the smallest formats take {least:.3f}, scales "
            "and minima included"
        )
    mix = _mix(model, found, chosen)
    same = _one_format(found, limit)
    if same is None or set(mix.formats.values()) == {same}:
        return mix
    alike = _mix(model, found, [list(one.nbytes).index(same) for one in found])
    return min(mix, alike, key=lambda x: x.loss)


def mixed_for_loss(model: Sensitivities[Any], found: Sequence[Sensitivity], most: float) -> Mix:
    """Return the smallest formats found whose measured loss is at most `most` nats a token.

    Estimates rank matrices; how far their sum is off, a measurement of the choice tells, by which
    the next choice is made: four at most. found: of `model`. Raises ArgumentError if the largest
    formats lose more.
    """
    sizes, losses, factor = _values(found, "nbytes"), _values(found, "loss"), 1.0
    largest = [min(range(len(item)), key=item.__getitem__) for item in losses]
    best: Mix | None = None
    for _ in range(_TRIES):
        chosen = choose(sizes, losses, most / factor) or largest
        mix = _mix(model, found, chosen)
        if mix.loss <= most and (best is None or mix.bits_per_weight < best.bits_per_weight):
            best = mix
        if _CLOSE * most <= mix.loss <= most:
            break
        estimate = sum(item[i] for item, i in zip(losses, chosen, strict=True))
        factor = mix.loss / max(estimate, 1e-30) / (0.5 + 0.5 * _CLOSE)
    best = best or _mix(model, found, largest)
    if best.loss > most:
        raise ArgumentError(
            f"a loss of {most:g} nats a token cannot be reached: the largest formats lose "
            f"{best.loss:.3g}; allow more"
        )
    return best


def choose(
    costs: Sequence[Sequence[float]], bounded: Sequence[Sequence[float]], limit: float
) -> list[int] | None:
    """One option for each item, by its number: least sum of `costs`, sum of `bounded` <= limit.

    Both have a number for each option of each item. None where nothing keeps within the limit.
    """
    if limit < 0:
        return None
    count = [len(item) for item in costs]
    unit = limit / 1e6 or 1.0  # so that the solver's absolute tolerances are small
    bound = np.concatenate(bounded) / unit
    one_each = np.repeat(np.eye(len(count)), count, axis=1)  # [items, options of all]
    with _without_lines(b"Highs"):
        found = milp(
            np.concatenate(costs) / (max(map(max, costs)) or 1.0),
            integrality=1,
            bounds=Bounds(0, 1),
            constraints=[
                LinearConstraint(one_each, 1, 1),
                LinearConstraint(bound, ub=limit / unit),
            ],
            options=_SOLVER,
        )
    if found.x is None:
        return None
    return [int(item.argmax()) for item in np.split(found.x, np.cumsum(count)[:-1])]


@contextmanager
def _without_lines(start: bytes) -> Iterator[None]:
    """Leave out lines of the process's standard output that begin so; others come afterwards.

    HiGHS writes some there whatever it is told, in the middle of what a command prints as JSON.
    """
    try:
        own = os.dup(1)
    except OSError:  # there is none
        yield
        return
    sys.stdout.flush()
    with TemporaryFile() as kept:
        os.dup2(kept.fileno(), 1)
        try:
            yield
        finally:
            ctypes.CDLL(None).fflush(None)  # what C has not written yet
            os.dup2(own, 1)
            os.close(own)
            kept.seek(0)
            for line in kept:
                if not line.startswith(start):
                    os.write(1, line)


def _one_format(found: Sequence[Sensitivity], nbytes: int) -> Format | None:
    """The largest format that all matrices can have within so many bytes."""
    shared = set.intersection(*(set(one.nbytes) for one in found))
    sizes = {form: sum(one.nbytes[form] for one in found) for form in shared}
    fitting = [form for form, size in sizes.items() if size <= nbytes]
    return max(fitting, key=sizes.__getitem__, default=None)


def _values(found: Sequence[Sensitivity], name: str) -> list[list[float]]:
    """A number for each format of each matrix, in the same order for both names."""
    return [list(getattr(one, name).values()) for one in found]


def _mix(model: Sensitivities[Any], found: Sequence[Sensitivity], chosen: Sequence[int]) -> Mix:
    formats = {one.name: list(one.nbytes)[i] for one, i in zip(found, chosen, strict=True)}
    nbytes = sum(one.nbytes[formats[one.name]] for one in found)
    bits = 8 * nbytes / sum(one.weights for one in found)
    return Mix(formats, bits, model.solved(formats))

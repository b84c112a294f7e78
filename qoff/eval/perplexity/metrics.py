"""Perplexity, and how far a model's predictions are from those of a reference.

The definitions, and those of standard errors, are those of llama.cpp's `llama-perplexity
--kl-divergence`: perplexity is exp of the mean negative log-likelihood; a ratio of two perplexities
is exp of the mean difference, token by token, whose error is therefore small; the divergence is
KL(reference || model) in nats; agreement is how often both have the same likeliest token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """What the model made of each scored token.

    Where the reference is a stored part of its predictions, kl is an estimate: kl_error is its
    standard error, and the divergence lies between kl_low and kl_high for certain. None: it is
    exact.
    """

    nll: Floats  # -log of its probability
    reference_nll: Floats | None = None
    kl: Floats | None = None
    same_top: NDArray[np.bool_] | None = None
    kl_error: Floats | None = None
    kl_low: Floats | None = None
    kl_high: Floats | None = None


@dataclass(frozen=True)
class Estimate:
    """A number and its standard error; NaN: it is not known."""

    value: float
    error: float

    def __str__(self) -> str:
        digits = 1 - math.floor(math.log10(self.error)) if self.error > 0 else 4
        digits = min(max(digits, 2), 6)
        error = "-" if math.isnan(self.error) else f"{self.error:.{digits}f}"
        return f"{self.value:z.{digits}f} ± {error}"

    @property
    def percent(self) -> str:
        """The same, of a fraction."""
        error = "-" if math.isnan(self.error) else f"{self.error:.2%}"
        return f"{self.value:.2%} ± {error}"


def significant(value: float) -> str:
    """A number with three significant digits, six decimals at most."""
    magnitude = math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0
    return f"{value:z.{min(max(2 - magnitude, 0), 6)}f}"


@dataclass(frozen=True)
class Divergence:
    """How far a model is from a reference, over the same tokens."""

    perplexity_ratio: Estimate
    mean_kl: Estimate
    median_kl: float
    kl_99: float  # 99 % of tokens are below
    max_kl: float
    same_top: Estimate
    reference_perplexity: Estimate
    kl_draws_error: float = 0.0  # of mean_kl, from what a stored reference has not; part of its own
    kl_at_least: float = 0.0  # for certain
    kl_at_most: float = 0.0


@dataclass(frozen=True)
class Summary:
    """Means over all tokens that were scored; the divergence from a reference, if there is one."""

    tokens: int
    perplexity: Estimate
    divergence: Divergence | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: numbers, with errors beside them."""
        out: dict[str, Any] = {"tokens": self.tokens}
        far = {} if self.divergence is None else vars(self.divergence)
        for name, value in {"perplexity": self.perplexity, **far}.items():
            estimated = isinstance(value, Estimate)
            out |= {name: value.value, f"{name}_error": value.error} if estimated else {name: value}
        return out


def summarize(scores: Scores) -> Summary:
    """Means over all scored tokens. Raises ValueError without any."""
    if not len(scores.nll):
        raise ValueError("no tokens were scored")
    divergence = None
    if scores.kl is not None and scores.reference_nll is not None and scores.same_top is not None:
        kl = scores.kl
        error, low, high = (
            x if found is None else found
            for x, found in zip(
                (np.zeros_like(kl), kl, kl),
                (scores.kl_error, scores.kl_low, scores.kl_high),
                strict=True,
            )
        )
        divergence = Divergence(
            _exp_mean(scores.nll - scores.reference_nll),
            _mean(kl),
            float(np.median(kl)),
            float(np.quantile(kl, 0.99)),
            float(kl.max()),
            _mean(scores.same_top.astype(np.float64)),
            _exp_mean(scores.reference_nll),
            float(np.linalg.norm(error)) / len(kl),
            float(low.mean()),
            float(high.mean()),
        )
    return Summary(len(scores.nll), _exp_mean(scores.nll), divergence)


def _mean(values: Floats) -> Estimate:
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Estimate(float(values.mean()), error)


def _exp_mean(values: Floats) -> Estimate:
    mean = _mean(values)
    return Estimate(math.exp(mean.value), math.exp(mean.value) * mean.error)

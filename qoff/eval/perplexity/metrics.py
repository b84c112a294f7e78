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
    """What the model made of each scored token."""

    nll: Floats  # -log of its probability
    reference_nll: Floats | None = None
    kl: Floats | None = None
    same_top: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.nll)


@dataclass(frozen=True)
class Estimate:
    """A number and its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        digits = 1 - math.floor(math.log10(self.error)) if self.error > 0 else 4
        digits = min(max(digits, 2), 6)
        return f"{self.value:.{digits}f} ± {self.error:.{digits}f}"


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


@dataclass(frozen=True)
class Summary:
    """Means over all tokens that were scored."""

    tokens: int
    perplexity: Estimate
    divergence: Divergence | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: numbers, with errors beside them."""
        out: dict[str, Any] = {"tokens": self.tokens, **_pair("perplexity", self.perplexity)}
        if self.divergence is not None:
            for name, value in vars(self.divergence).items():
                out |= _pair(name, value) if isinstance(value, Estimate) else {name: value}
        return out


def summarize(scores: Scores) -> Summary:
    """Means over all scored tokens. Raises ValueError without any."""
    if not len(scores):
        raise ValueError("no tokens were scored")
    perplexity = _exp_mean(scores.nll)
    if scores.kl is None or scores.reference_nll is None or scores.same_top is None:
        return Summary(len(scores), perplexity)
    return Summary(
        len(scores),
        perplexity,
        Divergence(
            _exp_mean(scores.nll - scores.reference_nll),
            _mean(scores.kl),
            float(np.median(scores.kl)),
            float(np.quantile(scores.kl, 0.99)),
            float(scores.kl.max()),
            _mean(scores.same_top.astype(np.float64)),
            _exp_mean(scores.reference_nll),
        ),
    )


def _mean(values: Floats) -> Estimate:
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Estimate(float(values.mean()), error)


def _exp_mean(values: Floats) -> Estimate:
    mean = _mean(values)
    return Estimate(math.exp(mean.value), math.exp(mean.value) * mean.error)


def _pair(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.value, f"{name}_error": estimate.error}

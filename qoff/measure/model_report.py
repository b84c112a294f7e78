"""What `qoff bench` says of a model: a row for each case in each setup, and a result to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qoff.units import format_size

from .machine import machine
from .model_rates import ModelRate
from .results import Result
from .samples import QUIET
from .tables import comma_separated, markdown

NAME = "model_rates"
_HEADER = ("model", "size", "backend", "plan", "test", "t/s")
_COLUMNS = (
    "model",
    "size_bytes",
    "backend",
    "plan",
    "test",
    "batch_size",
    "depth",
    "tokens",
    "repetitions",
    "tokens_per_s",
    "tokens_per_s_sd",
    "tokens_per_s_median",
    "disk_bytes_per_token",
    "kv_bytes",
)


@dataclass(frozen=True)
class ModelReport:
    """The rates of one model.

    nbytes: of its files. settings: what was asked for. others: cores that other processes took,
    on average.
    """

    model: str
    nbytes: int
    backend: str
    settings: Mapping[str, Any]
    rates: Sequence[ModelRate]
    others: float = 0.0

    @property
    def notes(self) -> list[str]:
        """What a reader of the figures has to know."""
        if self.others < QUIET:
            return []
        return [
            f"other processes took {self.others:.1f} cores meanwhile: these figures are too low; "
            "measure again on a quiet machine"
        ]

    def markdown(self) -> str:
        """A table with mean and standard deviation of tokens per second."""
        return markdown(
            _HEADER,
            [
                (
                    self.model,
                    format_size(self.nbytes),
                    self.backend,
                    str(rate.setup),
                    str(rate.case),
                    f"{rate.tokens_per_s.mean:.2f} ± {rate.tokens_per_s.sd:.2f}",
                )
                for rate in self.rates
            ],
        )

    def csv(self) -> str:
        """A line for each row, with bytes and numbers apart."""
        return comma_separated(
            _COLUMNS,
            [
                (
                    self.model,
                    self.nbytes,
                    self.backend,
                    rate.setup,
                    rate.case,
                    rate.case.batch,
                    rate.case.depth,
                    rate.case.tokens,
                    len(rate.tokens_per_s.values),
                    rate.tokens_per_s.mean,
                    rate.tokens_per_s.sd,
                    rate.tokens_per_s.median,
                    rate.disk_bytes_per_token,
                    rate.kv_bytes,
                )
                for rate in self.rates
            ],
        )

    def result(self) -> Result:
        """The same as a result, which can be kept and compared with others.

        The names of its figures do not hold the model's, so that two models can be compared.
        """
        measured = {
            f"{rate.setup}: {rate.case}": {
                "tokens_per_s": {
                    **rate.tokens_per_s.summary(),
                    "mean": rate.tokens_per_s.mean,
                    "sd": rate.tokens_per_s.sd,
                },
                "disk_bytes_per_token": rate.disk_bytes_per_token,
                "kv_bytes": rate.kv_bytes,
            }
            for rate in self.rates
        }
        settings = {
            "model": self.model,
            "model_bytes": self.nbytes,
            "backend": self.backend,
            **self.settings,
        }
        gpu = "" if self.backend == "cpu" else self.backend
        return Result(NAME, settings, measured, notes=self.notes, machine=machine(gpu))

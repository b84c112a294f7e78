"""What `qoff bench` says of a model: a row for each case in each setup, and a result to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qoff.units import format_size

from .machine import machine
from .model_rates import ModelRate
from .results import BenchResult
from .samples import QUIET
from .tables import comma_separated, markdown

NAME = "model_rates"
_HEADER = ("model", "size", "backend", "plan", "test", "t/s")


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
        what = self.model, format_size(self.nbytes), self.backend
        rows = []
        for rate in self.rates:
            speed = f"{rate.tokens_per_s.mean:.2f} ± {rate.tokens_per_s.sd:.2f}"
            rows.append((*what, str(rate.setup), str(rate.case), speed))
        return markdown(_HEADER, rows)

    def csv(self) -> str:
        """A line for each row, with bytes and numbers apart."""
        rows: list[dict[str, object]] = [
            {
                "model": self.model,
                "size_bytes": self.nbytes,
                "backend": self.backend,
                "plan": rate.setup,
                "test": rate.case,
                "batch_size": rate.case.batch,
                "depth": rate.case.depth,
                "tokens": rate.case.tokens,
                "repetitions": len(rate.tokens_per_s.values),
                "tokens_per_s": rate.tokens_per_s.mean,
                "tokens_per_s_sd": rate.tokens_per_s.sd,
                "tokens_per_s_median": rate.tokens_per_s.median,
                "disk_bytes_per_token": rate.disk_bytes_per_token,
                "kv_bytes": rate.kv_bytes,
            }
            for rate in self.rates
        ]
        return comma_separated(list(rows[0]), [list(row.values()) for row in rows])

    def result(self) -> BenchResult:
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
        settings = {"model": self.model, "model_bytes": self.nbytes, "backend": self.backend}
        gpu = "" if self.backend == "cpu" else self.backend
        return BenchResult(
            NAME, {**settings, **self.settings}, measured, notes=self.notes, machine=machine(gpu)
        )

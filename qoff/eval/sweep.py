"""Evaluating all cells of a grid, each once: an interrupted sweep goes on where it was."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.hf.load import is_checkpoint, source_stamps
from qoff.kvcache import KVQuant
from qoff.models.convert.convert import convert
from qoff.quant import QuantConfig
from qoff.quant.matrix import CALIBRATED

from .cells import CellResult, CellStore
from .grid import Cell
from .metrics import Scores, by_place, summarize
from .models import bits_per_weight, open_runtime, subject_of
from .reference import Reference
from .scoring import Sample, evaluate
from .subjects import layer_errors
from .texts import digest

PLACES = 32  # bins of the place in the window
Rate = Callable[[Path, KVQuant | None], float]  # tokens per second of a checkpoint
# cells done, cells in all, the cell, "kept", "damaged" or "computed"
Watch = Callable[[int, int, Cell, str], None]


class Sweep:
    """The cells of one model over one text, against one reference.

    source: a qoff checkpoint, whose weights are taken as they are, or a model to quantize. folder:
    results of cells, in `cells`. rate: how fast a checkpoint decodes; None: not measured.
    calibration: token ids, int64 [texts, tokens], for solvers that want them.
    """

    def __init__(
        self,
        source: Path,
        sample: Sample,
        folder: Path,
        *,
        reference: Reference | None = None,
        rate: Rate | None = None,
        calibration: Tensor | None = None,
    ) -> None:
        self._source, self._sample, self._folder = source, sample, folder
        self._reference, self._rate = reference, rate
        self._calibration = calibration
        self._store = CellStore(folder / "cells")

    def run(self, cells: Sequence[Cell], watch: Watch | None = None) -> list[CellResult]:
        """Results of all cells, in their order; those that are there already are not computed.

        A damaged file of a cell is computed anew. Raises what conversion and evaluation raise.
        """
        results, done = [], 0
        for weights, group in groupby(cells, key=lambda cell: cell.weights):
            for cell, result, state in self._group(weights, list(group)):
                results.append(result)
                done += 1
                if watch is not None:
                    watch(done, len(cells), cell, state)
        return results

    def _group(
        self, weights: QuantConfig | None, cells: Iterable[Cell]
    ) -> Iterator[tuple[Cell, CellResult, str]]:
        """The cells of one way to quantize the weights."""
        calibrated = weights is not None and weights.solver in CALIBRATED
        ids = self._calibration if calibrated else None
        with _Converted(self._source, weights, self._folder, ids) as converted:
            for cell in cells:
                key = self._key(cell)
                known = self._store.read(key)
                state = "kept" if known else "damaged" if self._store.exists(key) else "computed"
                if known is None:
                    known = self._compute(cell, converted.checkpoint())
                    self._store.write(key, known)
                yield cell, known, state

    def _key(self, cell: Cell) -> str:
        reference = None if self._reference is None else self._reference.meta
        calibrated = cell.weights is not None and cell.weights.solver in CALIBRATED
        ids = self._calibration if calibrated else None
        rated = self._rate is not None
        stamps = source_stamps(self._source)
        return digest(stamps, self._sample.digest, reference, rated, repr(cell), ids)

    def _compute(self, cell: Cell, checkpoint: Path) -> CellResult:
        kv, reference, sample = cell.kv, self._reference, self._sample
        with open_runtime(checkpoint, kv) as runtime:
            subject = subject_of(runtime, cell.name, kv)
            scores = evaluate(subject, sample, reference)
            errors = []
            if reference is not None and len(reference.hidden):
                errors = layer_errors(reference.hidden, subject, sample.first)
            size = kv.bytes_per_token(runtime.spec)
        rate = None
        if self._rate is not None and not (kv.before_rope or kv.ggml):
            rate = self._rate(checkpoint, kv.quant)  # with a real cache
        return _result(cell, scores, bits_per_weight(checkpoint), size, errors, rate)


class _Converted:
    """A checkpoint of the weights of some cells, made when the first asks for it, then removed."""

    def __init__(
        self, source: Path, weights: QuantConfig | None, folder: Path, ids: Tensor | None
    ) -> None:
        if (weights is None) != is_checkpoint(source):
            raise ArgumentError(
                f"{source}: a qoff checkpoint is evaluated as it is, and anything else quantized"
            )
        self._source, self._weights, self._folder, self._ids = source, weights, folder, ids
        self._made: Path | None = None

    def checkpoint(self) -> Path:
        if self._weights is None:
            return self._source
        if self._made is None:
            self._made = Path(tempfile.mkdtemp(prefix=".weights-", dir=self._folder))
            target = self._made / "checkpoint"
            convert(self._source, target, quant=self._weights, for_cpu=True, calibration=self._ids)
        return self._made / "checkpoint"

    def __enter__(self) -> _Converted:
        return self

    def __exit__(self, *_: object) -> None:
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)


def _result(
    cell: Cell,
    scores: Scores,
    bits: float,
    kv_bytes: float,
    errors: list[float],
    rate: float | None,
) -> CellResult:
    summary = summarize(scores)
    more: dict[str, Any] = {}
    if summary.divergence is not None and scores.kl is not None:
        far = summary.divergence
        more = {
            "perplexity_ratio": far.perplexity_ratio.value,
            "perplexity_ratio_error": far.perplexity_ratio.error,
            "mean_kl": far.mean_kl.value,
            "mean_kl_error": far.mean_kl.error,
            "median_kl": far.median_kl,
            "kl_99": far.kl_99,
            "same_top": far.same_top.value,
            "kl_by_place": by_place(scores.kl, np.asarray(scores.place), PLACES),
        }
    return CellResult(
        weights=cell.weights_name,
        kv=cell.kv.name,
        bits_per_weight=bits,
        kv_bytes_per_token=kv_bytes,
        tokens=summary.tokens,
        perplexity=summary.perplexity.value,
        perplexity_error=summary.perplexity.error,
        tokens_per_s=rate,
        layer_errors=errors,
        **more,
    )

"""Evaluating all cells of a grid, each once: an interrupted sweep continues where it was."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.eval.perplexity.metrics import summarize
from qoff.eval.perplexity.models import bits_per_weight, open_runtime, subject_of
from qoff.eval.perplexity.reference import Reference
from qoff.eval.perplexity.scoring import Progress, Sample, evaluate
from qoff.eval.texts import digest
from qoff.hf.load import is_checkpoint, source_stamps
from qoff.hf.torch_threads import one_torch_thread
from qoff.kvcache import KVQuant
from qoff.measure.model_rates import Sequences
from qoff.models.convert.convert import convert
from qoff.models.runtime import Runtime
from qoff.quant import QuantConfig
from qoff.quant.matrix import CALIBRATED

from .cells import VERSION, CellResult, CellStore
from .grid import Cell

Rate = Callable[[Path, KVQuant | None, Tensor], float]
_PROMPT, _NEW, _ROUNDS = 256, 32, 3  # of the rate: tokens before, tokens of a round, rounds


class Sweep:
    """The cells of one model over one text, against one reference.

    source: a qoff checkpoint, whose weights are taken as they are, or a model to quantize. folder:
    results of cells, in `cells`. rate: as `decode_rate`; None: not measured. calibration: token
    ids, int64 [texts, tokens], for solvers that want them.
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

    def run(self, cells: Sequence[Cell], progress: Progress | None = None) -> list[CellResult]:
        """Results of all cells, in their order; those that are there already are not computed.

        A damaged file of a cell is computed again. Raises what conversion and evaluation raise.
        """
        results: list[CellResult] = []
        for weights, group in groupby(cells, key=lambda cell: cell.weights):
            with self._converted(weights) as checkpoint:
                for cell in group:
                    key = self._key(cell)
                    known = self._store.read(key)
                    if known is None:
                        known = self._compute(cell, checkpoint())
                        self._store.write(key, known)
                    results.append(known)
                    if progress is not None:
                        progress(len(results), len(cells))
        return results

    @contextmanager
    def _converted(self, weights: QuantConfig | None) -> Iterator[Callable[[], Path]]:
        """A function that gives the checkpoint of some weights, made when it is first called."""
        if (weights is None) != is_checkpoint(self._source):
            raise ArgumentError(
                f"{self._source}: a qoff checkpoint is evaluated as it is, and anything else "
                "quantized"
            )
        with tempfile.TemporaryDirectory(prefix=".weights-", dir=self._folder) as folder:
            target = Path(folder) / "checkpoint"

            def checkpoint() -> Path:
                if weights is None:
                    return self._source
                if not target.exists():
                    ids = self._ids(weights)
                    convert(self._source, target, quant=weights, for_cpu=True, calibration=ids)
                return target

            yield checkpoint

    def _ids(self, weights: QuantConfig | None) -> Tensor | None:
        """What a solver is calibrated on, if it is."""
        return self._calibration if weights is not None and weights.solver in CALIBRATED else None

    def _key(self, cell: Cell) -> str:
        reference = None if self._reference is None else self._reference.meta
        made_of = source_stamps(self._source), self._sample.digest, reference
        rated = self._rate is not None
        return digest(VERSION, *made_of, rated, repr(cell), self._ids(cell.weights))

    def _compute(self, cell: Cell, checkpoint: Path) -> CellResult:
        kv = cell.kv
        with open_runtime(checkpoint, kv) as runtime:
            subject = subject_of(runtime, cell.name, kv)
            found = summarize(evaluate(subject, self._sample, self._reference)).as_dict()
            kv_bytes = kv.bytes_per_token(runtime.spec)
        rate = None
        if self._rate is not None and not kv.ggml:
            prompt = self._sample.tokens(self._sample.windows[0])[:_PROMPT]
            rate = self._rate(checkpoint, kv.quant, prompt)  # with a real cache
        bits = bits_per_weight(checkpoint)
        return CellResult(cell.weights_name, kv.name, bits, kv_bytes, rate, found)


@torch.inference_mode()
def decode_rate(checkpoint: Path, kv: KVQuant | None, prompt: Tensor) -> float:
    """Tokens per second after a prompt, int64 [T]: the median of three rounds after a warm-up.

    A rough figure, of one sequence; `qoff bench` measures with care. Errors are those of `Runtime`.
    """
    with Runtime(checkpoint, kv=kv) as runtime, one_torch_thread():
        sequence = Sequences(runtime, 1, len(prompt) + _NEW * (1 + _ROUNDS))
        token, seconds = sequence.read(prompt[None]), []
        for _ in range(1 + _ROUNDS):
            start = perf_counter()
            for _ in range(_NEW):
                token = sequence.read(token[:, None])
            seconds.append(perf_counter() - start)
    return _NEW / median(seconds[1:])

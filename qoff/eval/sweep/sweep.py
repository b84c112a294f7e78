"""Evaluating all cells of a grid, each once: an interrupted sweep continues where it was."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.eval.kv import kv_bytes_per_token, kv_name
from qoff.eval.perplexity.metrics import summarize
from qoff.eval.perplexity.models import PIECE_TOKENS, bits_per_weight, open_runtime
from qoff.eval.perplexity.reference import Reference
from qoff.eval.perplexity.scoring import Sample, evaluate
from qoff.eval.perplexity.subjects import QoffSubject
from qoff.eval.texts import digest
from qoff.hf.checkpoints import is_checkpoint
from qoff.hf.stamps import source_stamps
from qoff.kernels.torch_threads import one_torch_thread
from qoff.kvcache import KVQuant
from qoff.measure.model_rates import Sequences
from qoff.models.convert.convert import convert
from qoff.models.runtime import Runtime
from qoff.quant import QuantConfig
from qoff.quant.matrix import CALIBRATED
from qoff.schema import json_text, replace_text

from .cells import CellResult
from .grid import Cell

Progress = Callable[[int, int], None]  # cells done, cells in all
Rate = Callable[[Path, KVQuant | None, Tensor], float]
_PROMPT, _NEW, _ROUNDS = 256, 32, 3  # of the rate: tokens before, tokens of a round, rounds
_VERSION = 4  # of the files of cells


class Sweep:
    """The cells of one model over one text, against one reference.

    source: a qoff checkpoint, whose weights are taken as they are, or a model to quantize. folder:
    `cells` in it has a file for each cell that is done. rate: as `decode_rate`; None: not measured.
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

    def run(self, cells: Sequence[Cell], progress: Progress | None = None) -> list[CellResult]:
        """Results of all cells, in their order; those that are there already are not computed.

        A damaged file of a cell is computed again. Raises what conversion and evaluation raise.
        """
        stored = is_checkpoint(self._source)
        if any((cell.weights is None) != stored for cell in cells):
            raise ArgumentError(
                f"{self._source}: a qoff checkpoint is evaluated as it is, and anything else "
                "quantized"
            )
        (self._folder / "cells").mkdir(parents=True, exist_ok=True)
        results: list[CellResult] = []
        for weights, group in groupby(cells, key=lambda cell: cell.weights):
            with tempfile.TemporaryDirectory(prefix=".weights-", dir=self._folder) as folder:
                converted = Path(folder) / "checkpoint"
                for cell in group:
                    results.append(self._result(cell, weights, converted))
                    if progress is not None:
                        progress(len(results), len(cells))
        return results

    def _result(self, cell: Cell, weights: QuantConfig | None, converted: Path) -> CellResult:
        """Of one cell, whose weights are, or will be, at `converted` if they are quantized."""
        ids = self._calibration if weights is not None and weights.solver in CALIBRATED else None
        reference = None if self._reference is None else self._reference.says
        made_of = source_stamps(self._source), self._sample.digest, reference
        key = digest(_VERSION, *made_of, self._rate is not None, repr(cell), ids)
        file = self._folder / "cells" / f"{key}.json"
        try:
            return CellResult.read(file.read_text())
        except (OSError, ValueError, TypeError):  # there is none yet, or it is damaged
            pass
        if weights is not None and not converted.exists():
            convert(self._source, converted, quant=weights, for_cpu=True, calibration=ids)
        result = self._compute(cell, self._source if weights is None else converted)
        replace_text(file, json_text(asdict(result)))
        return result

    def _compute(self, cell: Cell, checkpoint: Path) -> CellResult:
        kv, rate = cell.kv, None
        with open_runtime(checkpoint, kv, self._sample.longest) as runtime:
            subject = QoffSubject(runtime, cell.name, PIECE_TOKENS)
            found = summarize(evaluate(subject, self._sample, self._reference)).as_dict()
            kv_bytes = kv_bytes_per_token(kv, runtime.spec)
        if self._rate is not None:
            prompt = self._sample.tokens(self._sample.windows[0])[:_PROMPT]
            rate = self._rate(checkpoint, kv, prompt)
        bits = bits_per_weight(checkpoint)
        return CellResult(cell.weights_name, kv_name(kv), bits, kv_bytes, rate, found)


def decode_rate(checkpoint: Path, kv: KVQuant | None, prompt: Tensor) -> float:
    """Tokens per second after a prompt, int64 [T]: the median of three rounds after a warm-up.

    A rough figure, of one sequence; `qoff bench` measures with care. Errors are those of `Runtime`.
    """
    with Runtime(checkpoint, kv=kv) as runtime, one_torch_thread(), torch.inference_mode():
        sequence = Sequences(runtime, 1, len(prompt) + _NEW * (1 + _ROUNDS))
        token, seconds = sequence.read(prompt[None]), []
        for _ in range(1 + _ROUNDS):
            start = perf_counter()
            for _ in range(_NEW):
                token = sequence.read(token[:, None])
            seconds.append(perf_counter() - start)
    return _NEW / median(seconds[1:])

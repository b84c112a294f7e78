"""One run: model after model against the clock, each row in a process of its own."""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.gpu import stages
from bench.gpu.child import Emit, Ended, Event, Job, run
from bench.gpu_models import ours, peers
from bench.gpu_models.ours import Place
from bench.gpu_models.report import Measured, ModelReport
from bench.gpu_models.rows import Row
from qoff.schema import replace_text

JSON, TEXT, LOG = "gpu_models.json", "gpu_models.txt", "log.txt"
_LEAST_S = 10.0  # a row is not begun with less time left
_WRITE_LIMIT_S = 180.0
SYSTEMS: Mapping[str, Callable[[Place, Row], dict[str, Any]]] = {
    "qoff": ours.measure,
    "transformers": peers.transformers,
    "accelerate": peers.accelerate,
    "flexgen": peers.flexgen,
    "hang": peers.hang,
}


class ModelCampaign:
    """Measures rows, and keeps `report` on disk in `folder`. The models are written to `place`."""

    def __init__(self, report: ModelReport, folder: Path, place: Place, seconds: float) -> None:
        self.report, self.folder, self.place = report, folder, place
        self._start, self._before = time.monotonic(), report.seconds
        self._end = self._start + seconds

    def run(self, rows: Sequence[Row]) -> None:
        """All rows that are not done, in their order; models are written and removed on the way.

        Raises ArgumentError without a GPU, or with another one than the report's.
        """
        gc.freeze()  # the children do not look through what all have
        try:
            self._describe()
            wanted = [row for row in rows if row.key not in self.report.done]
            for model, group in groupby(wanted, key=lambda row: row.model):
                self._measure_model(model, list(group))
        finally:
            gc.unfreeze()
        self.write()

    def _measure_model(self, model: str, rows: Sequence[Row]) -> None:
        if any(row.system == "qoff" for row in rows):
            self._job(f"write {model}", partial(_write, self.place, model), _WRITE_LIMIT_S)
        for row in rows:
            self._job(row.key, partial(_measure, self.place, row), row.limit_s)
        shutil.rmtree(self.place.folder / model, ignore_errors=True)

    def _describe(self) -> None:
        before, self.report.gpu = self.report.gpu, {}
        rehearse = not self.place.on_gpu
        run([stages.device(stages.Settings(rehearse=rehearse))], 1, self._on_event, self._on_end)
        found, why = self.report.gpu, self.report.failed.pop("device", "")
        if not found:
            self.report.gpu = before
        stages.check_gpu(before, found, [why])

    def _job(self, name: str, do: Callable[[Emit], None], limit_s: float) -> None:
        left = self._end - time.monotonic()
        if left < min(_LEAST_S, limit_s):
            self.report.late.append(name)
            return
        self.report.failed.pop(name, None)
        limit_s = min(limit_s, left)
        run([Job(name, do, limit_s, limit_s)], 1, self._on_event, self._on_end)

    def _on_event(self, job: Job, event: Event) -> None:
        if "gpu" in event:
            self.report.gpu = event["gpu"]
        if "written" in event:
            self.report.written[event["model"]] = event["written"]
        if "result" in event:
            self.report.results.append(Measured(**event["result"]))

    def _on_end(self, ended: Ended) -> list[Job]:
        name = ended.job.name
        self.report.took[name] = round(ended.seconds, 1)
        if ended.lost and name not in self.report.done:
            lines = [line for line in ended.tail.splitlines() if line.strip()]
            last = lines[-1] if lines and not ended.killed else ""
            self.report.failed[name] = f"{ended.lost}: {last}".rstrip(": ")
            with (self.folder / LOG).open("a") as log:
                log.write(f"== {name}: {ended.lost}\n{ended.tail}\n")
        self.write()
        return []

    def write(self) -> None:
        """Everything found so far: JSON and text."""
        self.report.seconds = round(self._before + time.monotonic() - self._start, 1)
        content = json.dumps(self.report.content(), indent=1)
        replace_text(self.folder / JSON, content + "\n")
        replace_text(self.folder / TEXT, self.report.text() + "\n")


def _write(place: Place, model: str, emit: Emit) -> None:
    emit({"model": model, "written": ours.write(place, model)})


def _measure(place: Place, row: Row, emit: Emit) -> None:
    emit({"result": asdict(Measured.of(row, SYSTEMS[row.system](place, row)))})

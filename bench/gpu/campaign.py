"""One run on a GPU: stage after stage against the clock, everything written as it comes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.gpu import stages
from bench.gpu.child import Ended, Event, Job, run
from bench.gpu.ops import SHARES
from bench.gpu.report import GpuReport
from bench.gpu.stages import STAGES, Settings
from qoff.kernels.triton.launch import tuned
from qoff.schema import replace_text

JSON, TEXT, LOG = "gpu.json", "gpu.txt", "log.txt"
_WRITE_S = 2.0  # between two versions of the files, while a child runs
_LOSSES = 2  # of a child of an op in a stage; then the rest of the op is left out
# What part of the time that is left a stage may take, at most.
_PARTS = {
    "compile": 0.35,
    "checks": 0.4,
    "tests": 0.35,
    "training": 0.3,
    "ceilings": 0.2,
    "timings": 0.75,
}

MakeJob = Callable[[str], Job]


class Campaign:
    """Runs the stages, and keeps `report` on disk in `folder`."""

    def __init__(self, settings: Settings, report: GpuReport, folder: Path, seconds: float) -> None:
        self.settings, self.report, self.folder = settings, report, folder
        self._end = time.monotonic() + seconds
        self._written = 0.0
        self._stage = ""
        self._at: dict[str, str] = {}  # job -> the item that it is at
        self._losses: dict[str, int] = {}

    def run(self) -> None:
        """All stages, the most valuable first; what there is no time for is in the report.

        Raises ArgumentError without a GPU, or with another one than the report's.
        """
        for stage in (stage for stage in STAGES if stage in self.settings.stages):
            self._stage, self._at, self._losses = stage, {}, {}
            start = time.monotonic()
            if self._left() > 0:
                getattr(self, f"_{stage}")()
            else:
                self._late("stages", stage)
            before = self.report.seconds.get(stage, 0.0)
            self.report.seconds[stage] = round(before + time.monotonic() - start, 1)
            self.write()

    def _left(self) -> float:
        return self._end - time.monotonic()

    def _part(self) -> float:
        return self._left() * _PARTS[self._stage]

    def _late(self, what: str, name: str) -> None:
        self.report.late.setdefault(what, []).append(name)

    def _device(self) -> None:
        before, self.report.gpu = self.report.gpu, {}
        self._run([stages.device(self.settings)])
        found = self.report.gpu
        if not found:
            self.report.gpu = before
        stages.check_gpu(before, found, self.report.failed)

    def _compile(self) -> None:
        self.report.compiled.clear()
        self._compile_kernels(["checks", "cases"], self._part())

    def _compile_kernels(self, what: Sequence[str], limit_s: float) -> None:
        self._run([stages.compiling(self.settings, self.report.gpu, what, limit_s)])

    def _checks(self) -> None:
        """Of several ops at once, as none is timed."""
        end = time.monotonic() + self._part()

        def job(op: str) -> Job:
            done = {name for checked, name, *_ in self.report.checks if checked == op}
            return stages.checks(self.settings, op, done, max(0.0, end - time.monotonic()))

        self._run_ops(self.settings.ops, job, self.settings.checks_at_once)

    def _tests(self) -> None:
        if not self.report.tests:
            self._run([stages.pytest(self.settings, self.folder, self._part())])

    def _training(self) -> None:
        if not self.report.training:
            self._run([stages.trainings(self.settings, self._part())])

    def _ceilings(self) -> None:
        if self.report.ceilings is None:
            self._run([stages.ceilings(self.settings, self._part())])

    def _timings(self) -> None:
        end = time.monotonic() + self._part()
        wrong = self._wrong()
        for op in wrong:
            self._late("ops that are wrong, not timed", op)
        self._share([op for op in self.settings.ops if op not in wrong], end, stages.timings)

    def _tuning(self) -> None:
        right = [op for op in stages.tuned_ops(self.settings) if op not in self._wrong()]
        if right and not self.settings.rehearse:
            self._compile_kernels(["searches"], self._left() / 2)
        self._share(right, self._end, stages.tuning)

    def _wrong(self) -> list[str]:
        checks = self.report.checks
        wrong = {op for op, *_, error, bound, raised in checks if raised or not error <= bound}
        return [op for op in self.settings.ops if op in wrong]

    def _share(
        self, ops: Sequence[str], end: float, make: Callable[[Settings, str, set[str], float], Job]
    ) -> None:
        """One op after the other, each with its share of the time until `end`."""
        for i, op in enumerate(ops):
            rest = sum(SHARES[name] for name in ops[i:])
            until = time.monotonic() + max(0.0, end - time.monotonic()) * SHARES[op] / rest

            def job(op: str, until: float = until) -> Job:
                seconds = max(0.0, until - time.monotonic())
                settings = replace(self.settings, with_peers=op not in self._losses)
                return make(settings, op, set(self.report.done), seconds)

            self._run_ops([op], job, 1)

    def _run_ops(self, ops: Iterable[str], make: MakeJob, at_once: int) -> None:
        run(map(make, ops), at_once, self._on_event, partial(self._on_end, make=make))

    def _run(self, jobs: Sequence[Job]) -> None:
        run(jobs, 1, self._on_event, self._on_end)

    def _on_event(self, job: Job, event: Event) -> None:
        if "begin" in event:
            self._at[job.name] = event["begin"]
            return
        self._at.pop(job.name, None)
        if "late" in event:
            self._late(f"{self._stage} of {job.name}", event["late"])
        else:
            self.report.add(event)
        if time.monotonic() - self._written > _WRITE_S:
            self.write()

    def _on_end(self, ended: Ended, make: MakeJob | None = None) -> list[Job]:
        """Note what a lost child was at; a new one goes on with the rest.

        Not after a hang, as the next check would most likely hang, too. A case that was timed is
        tried again without its peers, which may have been the reason.
        """
        name, again = ended.job.name, list[Job]()
        if ended.lost:
            losses = self._losses[name] = self._losses.get(name, 0) + 1
            without_peers = self._stage == "timings" and losses == 1
            self._note_loss(name, self._at.pop(name, ""), ended, without_peers)
            hopeless = losses > _LOSSES or (ended.killed and not without_peers)
            if make and not hopeless and self._left() > 0:
                again.append(make(name))
            elif make:
                self._late(f"{self._stage} after a loss, the rest of", name)
        self.write()
        return again

    def _note_loss(self, name: str, item: str, ended: Ended, again: bool) -> None:
        why = f"the process was lost: {ended.lost}"
        if item and self._stage == "checks":
            self.report.checks.append((name, item, float("inf"), 0.0, why))
        else:
            last = " ".join(ended.tail.split())[-200:]
            self.report.failed.append(f"{self._stage} {item or name}: {why}: {last}")
            self.report.done += [item] * (item != "" and not again)
        with (self.folder / LOG).open("a") as log:
            log.write(f"== {self._stage} {name} {item}: {ended.lost}\n{ended.tail}\n")

    def write(self) -> None:
        """Everything found so far: JSON, text and tuned configurations."""
        self._written = time.monotonic()
        content = json.dumps(self.report.content(), indent=1)
        replace_text(self.folder / JSON, content + "\n")
        replace_text(self.folder / TEXT, self.report.text() + "\n")
        if self.report.tuned:
            path = self.folder / "tuned" / tuned.file_name(self.report.gpu["name"])
            path.parent.mkdir(exist_ok=True)
            text = json.dumps(self.report.tuned, indent=1, sort_keys=True)
            replace_text(path, text + "\n")

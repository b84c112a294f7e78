"""The stages of a run on a GPU, each a list of jobs, in order of worth."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu import ops, predict, rehearsal, training, tune, work
from bench.gpu.case import Check, TimedCase
from bench.gpu.child import Emit, Job
from bench.gpu.model_shapes import shapes
from bench.gpu.timer import CudaTimer, Timer
from qoff.errors import ArgumentError
from qoff.kernels.triton.launch.gpu import Gpu

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("device", "compile", "checks", "tests", "training", "ceilings", "timings", "tuning")
_GPU_TESTS = re.compile(r"mark\.gpu\b|^from tests\.memory\.kinds import", re.MULTILINE)
_TEST_S = 60  # of one GPU test
_INTERRUPT_S = 10.0  # for pytest to write its reports in
TUNED = (
    "w4_linear",
    "decode_attention",
    "prefill_attention",
    "latent_attention",
    "merge",
    "dequantize",
)


@dataclass(frozen=True)
class Settings:
    """What was asked for. rehearse: no GPU, tiny shapes, three ops with faults."""

    ops: tuple[str, ...] = ops.OPS
    stages: tuple[str, ...] = STAGES
    quick: bool = False
    rehearse: bool = False
    jobs: int = os.cpu_count() or 1
    checks_at_once: int = 4
    with_peers: bool = True

    def silence_s(self, op: str) -> float:
        """Without an event for as long, a child hangs: more than a kernel's compiling takes."""
        hangs = self.rehearse and rehearsal.FAULTS.get(op) == "hang"
        return rehearsal.SILENCE_S if hangs else 60.0

    def device(self) -> torch.device:
        """In a child only: a process that has used the GPU cannot be forked."""
        return torch.device("cpu" if self.rehearse else "cuda")

    def timer(self) -> Timer:
        return rehearsal.HostTimer() if self.rehearse else CudaTimer(self.device())

    def checks(self, op: str) -> Iterator[Check]:
        if self.rehearse and op in rehearsal.FAULTS:
            rehearsal.break_op(op, rehearsal.FAULTS[op])
        checks: Iterator[Check] = ops.module(op).checks(self.device(), self.rehearse)
        return checks

    def cases(self, op: str) -> Iterator[TimedCase]:
        if self.rehearse:
            return rehearsal.cases(op)
        cases: Iterator[TimedCase] = ops.module(op).cases(self.quick, shapes(self.quick))
        return cases

    def searches(self, op: str) -> Iterable[tune.Search]:
        if self.rehearse:
            return ()
        return tune.searches(op, shapes(self.quick), Gpu.of(self.device()).capability)


def device(settings: Settings) -> Job:
    """What GPU this is."""

    def do(emit: Emit) -> None:
        if not settings.rehearse and not torch.cuda.is_available():
            print("there is no CUDA device that torch can use")
            sys.exit(2)
        work.describe(emit, settings.device())

    return Job("device", do, 120.0, 120.0)


def check_gpu(before: Mapping[str, Any], found: Mapping[str, Any], failures: Sequence[str]) -> None:
    """Raise ArgumentError without a GPU, or with another one than that of the run to go on with."""
    if not found:
        raise ArgumentError(f"no GPU to use: {failures[-1]}")
    if before and before["name"] != found["name"]:
        raise ArgumentError(
            f"the run to go on with was on {before['name']}, this is {found['name']}: "
            "start a new one"
        )


def compiling(settings: Settings, gpu: dict[str, Any], what: Sequence[str], limit_s: float) -> Job:
    """`bench.gpu.compiling` of the ops, in a process where Triton compiles."""
    wanted = rehearsal.COMPILED if settings.rehearse else settings.ops
    command = [sys.executable, "-m", "bench.gpu.compiling", "--jobs", str(settings.jobs)]
    for name in ("exact", "capability", "processors"):
        command += [f"--{name}", str(gpu[name])]
    command += [word for op in wanted for word in ("--op", op)]
    command += [word for one in what for word in ("--work", one)]
    command += ["--quick"] * settings.quick + ["--tiny"] * settings.rehearse
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

    def do(emit: Emit) -> None:
        with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for line in process.stdout:
                emit(json.loads(line))
        sys.exit(process.returncode)

    return Job("compile", do, limit_s, limit_s)


def checks(settings: Settings, op: str, done: Collection[str], seconds: float) -> Job:
    """The checks of an op, as many as `seconds` hold."""

    def do(emit: Emit) -> None:
        work.check(emit, settings.checks(op), done, time.monotonic() + seconds)

    silence_s = settings.silence_s(op)
    return Job(op, do, seconds + silence_s, silence_s)


def trainings(settings: Settings, limit_s: float) -> Job:
    """Steps of training, beside the CPU's."""

    def do(emit: Emit) -> None:
        as_gpu = rehearsal.as_on_a_gpu if settings.rehearse else nullcontext
        training.measure(emit, settings.device(), settings.rehearse, as_gpu)

    return Job("training", do, limit_s, limit_s)


def ceilings(settings: Settings, limit_s: float) -> Job:
    """The GPU's limits."""

    def do(emit: Emit) -> None:
        sizes = {"nbytes": 1 << 16, "size": 16, "hops": 4} if settings.rehearse else {}
        work.measure_ceilings(emit, settings.device(), settings.timer(), **sizes)

    return Job("ceilings", do, limit_s, limit_s)


def timings(settings: Settings, op: str, done: Collection[str], seconds: float) -> Job:
    """The cases of an op, as many as `seconds` hold."""

    def do(emit: Emit) -> None:
        end = time.monotonic() + seconds
        device, timer = settings.device(), settings.timer()
        cases = settings.cases(op)
        work.time_cases(emit, cases, done, device, timer, end, settings.with_peers)

    silence_s = settings.silence_s(op)
    return Job(op, do, seconds + silence_s, silence_s)


def tuning(settings: Settings, op: str, done: Collection[str], seconds: float) -> Job:
    """The searches of an op, as many as `seconds` hold."""

    def do(emit: Emit) -> None:
        end = time.monotonic() + seconds
        searches, where = settings.searches(op), settings.device()
        promising = partial(predict.promising, device=where, end=end)
        tune.tune(emit, searches, done, where, settings.timer(), end, promising)

    silence_s = settings.silence_s(op)
    return Job(op, do, seconds + 2 * silence_s, seconds + silence_s)


def tuned_ops(settings: Settings) -> list[str]:
    return [op for op in settings.ops if op in TUNED]


def gpu_tests() -> list[str]:
    """The files that have tests for a GPU; to import all others would take half a minute."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(p.relative_to(ROOT)) for p in files if _GPU_TESTS.search(p.read_text())]


def pytest(settings: Settings, folder: Path, limit_s: float) -> Job:
    """`pytest -m gpu`, whose output goes to pytest.txt and pytest.xml as it comes."""
    files = rehearsal.TESTS if settings.rehearse else gpu_tests()
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-ra", "--tb=short"]
    command += ["--import-mode=importlib", "-o", "addopts=", f"--junitxml={folder / 'pytest.xml'}"]
    if importlib.util.find_spec("pytest_timeout"):
        command += [f"--timeout={_TEST_S}"]
    if importlib.util.find_spec("xdist") and not settings.rehearse:
        command += ["-n", str(min(8, max(1, settings.jobs // 2)))]

    def do(emit: Emit) -> None:
        path = folder / "pytest.txt"
        with path.open("w") as out:
            process = subprocess.Popen([*command, *files], cwd=ROOT, stdout=out, stderr=out)
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                _interrupt(process)
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        summary = lines[-1].strip("= ") if lines else "no output"
        emit({"tests": {"status": process.returncode, "summary": summary}})

    return Job("pytest", do, limit_s + 2 * _INTERRUPT_S, limit_s + 2 * _INTERRUPT_S)


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """As by the keyboard: pytest then says what it has seen. Then the hard way."""
    process.send_signal(2)
    try:
        process.wait(_INTERRUPT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

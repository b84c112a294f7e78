"""A run of the GPU bench: a hang, an abort or a wrong result costs one op, the rest comes home."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import child, rehearsal, stages, training, work
from bench.gpu.campaign import Campaign
from bench.gpu.child import Emit, Ended, Event, Job
from bench.gpu.ops import OPS
from bench.gpu.report import GpuReport
from bench.gpu.stages import STAGES, Settings
from qoff.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="a rehearsal is for where there is no GPU"
    ),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork"),
]


def hang(emit: Emit) -> None:
    emit({"begin": "a"})
    time.sleep(100)


def abort(emit: Emit) -> None:
    emit({"begin": "a"})
    os.abort()


def finish(emit: Emit) -> None:
    emit({"begin": "a"})
    emit({"item": "a", "text": "x" * 200_000})  # more than a pipe holds


def leave(emit: Emit) -> None:
    sys.exit(3)


def run_jobs(jobs: list[Job], at_once: int = 2) -> tuple[list[Event], dict[str, Ended]]:
    events: list[Event] = []
    ended: dict[str, Ended] = {}

    def on_end(how: Ended) -> list[Job]:
        ended[how.job.name] = how
        return []

    child.run(jobs, at_once, lambda job, event: events.append(event), on_end)
    return events, ended


def test_children_end_in_every_way() -> None:
    jobs = [Job(do.__name__, do, 60.0, 60.0) for do in (abort, finish, leave)]
    events, ended = run_jobs([*jobs, Job("hang", hang, 60.0, 0.5), Job("long", hang, 0.5, 60.0)])
    assert {name: how.lost for name, how in ended.items()} == {
        "abort": "died of SIGABRT",
        "finish": "",
        "leave": "exit status 3",
        "hang": "no sign of life for 0 s",
        "long": "took longer than 0 s",
    }
    assert {name for name, how in ended.items() if how.killed} == {"hang", "long"}
    assert "in abort" in ended["abort"].tail
    assert [event for event in events if "text" in event] == [{"item": "a", "text": "x" * 200_000}]


def test_what_a_child_started_ends_with_it() -> None:
    """A process of its group, and a child of its own in another group."""

    def start(emit: Emit) -> None:
        with subprocess.Popen(["sleep", "100"]) as process:
            emit({"pid": process.pid})

            def on_event(job: Job, event: Event) -> None:
                emit(event)

            child.run([Job("inner", tell, 60.0, 60.0)], 1, on_event, lambda ended: [])

    def tell(emit: Emit) -> None:
        emit({"pid": os.getpid()})
        time.sleep(100)

    events, _ = run_jobs([Job("start", start, 60.0, 1.5)])
    pids = [event["pid"] for event in events]
    assert len(pids) == 2
    end = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


GPU = {"name": "Test", "exact": 90, "capability": 90, "processors": 4}


@pytest.fixture
def stubs(
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Callable[[str, Collection[str], Emit], None]]:
    """What the jobs of checks and timings do, by stage; all others do nothing."""
    found: dict[str, Callable[[str, Collection[str], Emit], None]] = {}

    def job(stage: str) -> Callable[..., Job]:
        def make(settings: Settings, op: str, done: Collection[str], limit: float) -> Job:
            return Job(op, lambda emit: found[stage](op, done, emit), limit, 1.0)

        return make

    def nothing(*args: Any) -> Job:
        return Job("nothing", lambda emit: None, 9.0, 9.0)

    monkeypatch.setattr(stages, "device", lambda s: Job("gpu", lambda e: e({"gpu": GPU}), 9, 9))
    for name in ("compiling", "trainings", "ceilings", "pytest"):
        monkeypatch.setattr(stages, name, nothing)
    for name in ("checks", "timings", "tuning"):
        monkeypatch.setattr(stages, name, job(name))
        found[name] = lambda op, done, emit: None
    return found


def run_campaign(folder: Path, report: GpuReport, seconds: float = 60.0, **settings: Any) -> None:
    Campaign(Settings(ops=("rope", "merge"), **settings), report, folder, seconds).run()


def test_an_op_goes_on_after_an_abort(tmp_path: Path, stubs: dict[str, Any]) -> None:
    def checks(op: str, done: Collection[str], emit: Emit) -> None:
        for name in (n for n in "abc" if n not in done):
            emit({"begin": name})
            if (op, name) == ("merge", "b"):
                os.abort()
            emit({"check": [op, name, 0.0, 1.0, ""]})

    stubs["checks"] = checks
    stubs["timings"] = lambda op, done, emit: emit({"late": op})
    report = GpuReport({})
    run_campaign(tmp_path, report)
    assert report.wrong == ["merge: b: the process was lost: died of SIGABRT"]
    assert {(op, name) for op, name, *_ in report.checks} == {
        (op, name) for op in ("rope", "merge") for name in "abc"
    }
    assert report.late["timings of rope"] == ["rope"]
    assert report.late["ops that are wrong, not timed"] == ["merge"]
    again = GpuReport.read((tmp_path / "gpu.json").read_text())
    assert again.checks == report.checks
    assert "1 failed" in (tmp_path / "gpu.txt").read_text()
    assert "died of SIGABRT" in (tmp_path / "log.txt").read_text()


def test_an_op_that_hangs_or_keeps_aborting_is_left(tmp_path: Path, stubs: dict[str, Any]) -> None:
    def checks(op: str, done: Collection[str], emit: Emit) -> None:
        for name in (n for n in "abcdef" if n not in done):
            emit({"begin": name})
            time.sleep(100) if op == "rope" else os.abort()

    stubs["checks"] = checks
    report = GpuReport({})
    run_campaign(tmp_path, report)
    assert [op for op, *_ in report.checks].count("merge") == 3
    assert [op for op, *_ in report.checks].count("rope") == 1
    assert sorted(report.late["checks after a loss, the rest of"]) == ["merge", "rope"]


def test_a_case_that_is_lost_is_timed_without_its_peers(
    tmp_path: Path, stubs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def timings(settings: Settings, op: str, done: Collection[str], seconds: float) -> Job:
        def do(emit: Emit) -> None:
            emit({"begin": f"{op} case"})
            if settings.with_peers:
                time.sleep(100)
            emit({"skipped": "by then there were no peers", "item": f"{op} case"})

        return Job(op, do, 60.0, 0.5)

    monkeypatch.setattr(stages, "timings", timings)
    report = GpuReport({})
    run_campaign(tmp_path, report, stages=("device", "timings"))
    assert report.done == ["rope case", "merge case"]
    assert len(report.skipped) == len(report.failed) == 2


def test_a_gpu_that_is_lost_is_no_end_of_the_op(tmp_path: Path, stubs: dict[str, Any]) -> None:
    """The check that raised is reported before the process ends."""

    def checks(op: str, done: Collection[str], emit: Emit) -> None:
        for name in (n for n in "ab" if n not in done):
            emit({"begin": name})
            emit({"check": [op, name, 1.0, 0.0, "an illegal address"]})
            sys.exit(work.GPU_LOST)

    stubs["checks"] = checks
    report = GpuReport({})
    run_campaign(tmp_path, report)
    assert sorted((op, name) for op, name, *_ in report.checks) == [
        (op, name) for op in ("merge", "rope") for name in "ab"
    ]
    assert all("exit status 3" in line for line in report.failed)


def test_a_second_run_goes_on_where_the_first_ended(tmp_path: Path, stubs: dict[str, Any]) -> None:
    def timings(op: str, done: Collection[str], emit: Emit) -> None:
        emit({"failed": f"{op} did {sorted(done)}", "item": f"{op} {len(done)}"})

    stubs["timings"] = timings
    first = GpuReport({})
    run_campaign(tmp_path, first, stages=("device", "timings"))
    again = GpuReport.read((tmp_path / "gpu.json").read_text())
    run_campaign(tmp_path, again, stages=("device", "timings"))
    assert again.failed[2:] == [
        "rope did ['merge 1', 'rope 0']",
        "merge did ['merge 1', 'rope 0', 'rope 2']",
    ]
    again.gpu = {**GPU, "name": "another"}
    with pytest.raises(ArgumentError, match="was on another, this is Test"):
        run_campaign(tmp_path, again)


def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    report = GpuReport({})
    run_campaign(tmp_path, report, seconds=0)
    assert report.late["stages"] == list(STAGES)
    assert "left out: stages: device to tuning, 8 in all" in (tmp_path / "gpu.txt").read_text()


# Triton compiles here, as it is imported where nothing says that it interprets. The bench itself,
# told to run, ends with its message.
COMPILING = """
import json, sys, warnings
warnings.simplefilter('ignore')
from bench.gpu import compiling, ops
from bench.gpu.__main__ import main
from qoff.kernels.triton.launch.gpu import Gpu
found = compiling.collect(ops.OPS, ['checks'], Gpu(90, 132), 90, True, True)
print(json.dumps([[r.op, r.kernel] for r in found]))
one = [r for r in found if r.op == 'gated_silu'][:1]
compiling.compile_all(one, 90, 1, lambda e: print(json.dumps(e)))
compiling.compile_all(one, 90, 1, lambda e: print(json.dumps(e)), 0.01)
print(main(['--out', sys.argv[1]]))
"""


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """What a process without an interpreter or a GPU says, of `COMPILING`."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILING, str(tmp_path_factory.mktemp("compiling"))]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env={**env, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run


def test_without_a_gpu_there_is_one_message(compiling: subprocess.CompletedProcess[str]) -> None:
    assert compiling.stdout.splitlines()[-1] == "2"
    assert "there is no CUDA device that torch can use" in compiling.stderr


def test_what_the_ops_launch_is_compiled(compiling: subprocess.CompletedProcess[str]) -> None:
    """On meta tensors every op launches what it does on a GPU, and these kernels compile."""
    found, done, late = map(json.loads, compiling.stdout.splitlines()[:3])
    assert {op for op, _ in found} == set(OPS)
    kernels = {kernel for _, kernel in found}
    assert {"gemv_kernel", "gemm_kernel", "merge_kernel", "pack_kernel"} <= kernels
    assert done["compiled"]["error"] == ""
    assert done["compiled"]["registers"] > 0
    assert done["compiled"]["spilled"] == 0
    assert late["compiled"]["error"].startswith("no sign of life for 0 s")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rehearsal_brings_home_all_but_what_is_broken(tmp_path: Path) -> None:
    """Three ops fail: one hangs, one aborts, one computes something else."""
    command = [sys.executable, "-m", "bench.gpu", "--rehearse", "--minutes", "4"]
    right = {"rms_norm"}
    command += [word for op in (*rehearsal.FAULTS, *right) for word in ("--op", op)]
    run = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 1, run.stderr
    report = GpuReport.read((tmp_path / "gpu.json").read_text())
    lines = {op: [line for line in report.wrong if line.startswith(op)] for op in rehearsal.FAULTS}
    assert all(lines.values()), (report.wrong, run.stdout[-4000:])
    assert "no sign of life" in lines["rope"][0]
    assert "died of SIGABRT" in lines["merge"][0]
    assert "error 0.5, at most" in lines["gated_silu"][0]
    assert len(report.wrong) == sum(map(len, lines.values()))
    assert {op for op, *_, raised in report.checks if not raised} == right | {"gated_silu"}
    assert {r.op for r in report.results} == right
    assert report.failed == []
    assert report.ceilings is not None
    assert [row["name"] for row in report.training] == [kind.name for kind in training.KINDS]
    assert all(row["difference"] <= row["bound"] for row in report.training)
    assert report.compiled
    assert not any(row["error"] for row in report.compiled)
    assert "skipped" in report.tests["summary"]
    assert set(report.seconds) == set(STAGES)
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"gpu.json", "gpu.txt", "log.txt", "pytest.txt", "pytest.xml"}
    assert (tmp_path / "gpu.txt").read_text().strip() in run.stdout
    assert all(how in (tmp_path / "log.txt").read_text() for how in (signal.SIGABRT.name, "life"))

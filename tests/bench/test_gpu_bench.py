"""The GPU bench without a GPU: checks on tiny shapes, times by a fake clock, reports and pictures.

Launchers run in Triton's interpreter; no time is asserted.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu, gpu_ceilings, plot, tune
from bench.cuda_timer import Timing
from bench.gpu_case import Call, Case, Check, Work, relative_rms
from bench.gpu_ceilings import Ceilings
from bench.gpu_operands import random_cache, random_weight
from bench.gpu_peers import BACKENDS, sdpa
from bench.gpu_report import CaseResult, GpuReport
from bench.gpu_targets import CUBLAS, TARGETS
from bench.model_shapes import LLAMA_8B, MODELS, TOKENS
from qoff.errors import OpError
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.triton.attention import decode
from qoff.kernels.triton.launch import tuned
from qoff.kernels.triton.linear import gemv, skinny

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
# The launchers of the same tests on a GPU are what `python -m bench.gpu` runs there.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets nothing here")


class FakeTimer:
    """Runs every call once; the first takes a millisecond, each peer a millisecond more."""

    def measure(self, calls: Mapping[str, Call], budget_s: float) -> dict[str, Timing]:
        del budget_s
        for call in calls.values():
            call()
        return {
            name: Timing((2e-3 * (i + 1),) * 3, (1e-3 * (i + 1),) * 3)
            for i, name in enumerate(calls)
        }


def module(op: str) -> Any:
    return importlib.import_module(f"bench.{op}")


@pytest.mark.parametrize("op", gpu.OPS)
def test_tiny_checks_pass(op: str) -> None:
    report = GpuReport({}, 90, "test")
    gpu.check_all(report, module(op).checks(CPU, True))
    assert report.checks
    assert all(name == op for name, *_ in report.checks)
    assert report.wrong == []


@pytest.mark.parametrize("op", gpu.OPS)
@pytest.mark.parametrize("quick", [False, True])
def test_cases_are_described(op: str, quick: bool) -> None:
    cases = list(module(op).cases(quick))
    assert cases
    assert len({(case.model, case.name) for case in cases}) == len(cases)
    for case in cases:
        assert case.op == op
        assert case.nbytes > 0
        assert case.nbytes <= case.footprint or op == "merge"


def test_a_case_of_each_matmul_is_listed() -> None:
    cases = list(module("w4_linear").cases(False))
    assert len(cases) == len(MODELS) * len(TOKENS) * 5
    assert cases[0].flops == 2 * 4096 * 6144
    assert cases[0].stored == 4096 * 6144 // 2


@pytest.mark.parametrize("m", [1, 17])
def test_a_matmul_is_built_and_timed_beside_its_peers(m: int) -> None:
    case = module("w4_linear").case("tiny", "o", m, 32, 256)
    result = gpu.time_case(case, CPU, FakeTimer())
    assert result.seconds == 1e-3
    assert result.launched_seconds == 2e-3
    assert result.peers[CUBLAS] == 2e-3
    assert set(result.missing) <= {"gemlite", "torch int4"}
    work = case.build(CPU)
    ours, cublas = work.call(), work.peers[CUBLAS]()()
    assert isinstance(ours, torch.Tensor)
    assert ours.shape == cublas.shape  # type: ignore[attr-defined]


def test_a_peer_that_computes_something_else_is_not_timed() -> None:
    peers = {name: lambda f=f: lambda: torch.ones(3) * f for name, f in (("a", 1.01), ("b", 2.0))}
    case = Case("w4_linear", "", "", 1, lambda d: Work(lambda: torch.ones(3), peers, True))
    result = gpu.time_case(case, CPU, FakeTimer())
    assert list(result.peers) == ["a"]
    assert result.missing["b"].startswith("ValueError: its result is 1 off ours")


@pytest.mark.parametrize(
    ("op", "build"),
    [
        ("decode_attention", lambda m, shape: m.case(shape, 130, 2)),
        ("kv_append", lambda m, shape: Case("", "", "", 1, lambda d: m._build(shape, 1, 2, d))),
        ("kv_append", lambda m, shape: Case("", "", "", 1, lambda d: m._build(shape, 70, 1, d))),
    ],
)
def test_tiny_problems_are_timed_beside_their_peers(op: str, build: Any) -> None:
    shape = replace(LLAMA_8B, heads=4, kv_heads=2, head_dim=64)
    result = gpu.time_case(build(module(op), shape), CPU, FakeTimer())
    assert result.seconds == 1e-3
    assert result.peers, result.missing


@pytest.mark.parametrize("context", [0, 130])
def test_prefill_is_timed_beside_attention_of_as_many_keys(
    monkeypatch: pytest.MonkeyPatch, context: int
) -> None:
    prefill = module("prefill_attention")
    monkeypatch.setattr(prefill, "_ROWS", 3)
    shape = replace(LLAMA_8B, heads=4, kv_heads=2, head_dim=64)
    work = prefill._build(shape, context, CPU)
    out, _ = work.call()
    assert work.peers["sdpa math"]()().shape == (1, 4, 3, 64)
    assert out.shape == (3, 4, 64)


@pytest.mark.parametrize("causal", [False, True])
def test_a_causal_peer_ends_at_the_last_key(causal: bool) -> None:
    q, k, v = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 7, 16), torch.randn(1, 2, 7, 16)
    out = sdpa("math", q, k, v, causal)()
    scores = q @ k.repeat_interleave(2, 1).mT / 4
    if causal:
        scores += torch.full((3, 7), -torch.inf).triu(5)
    expected = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected)
    assert len(BACKENDS) == 4


def broken_check(kind: str) -> Check:
    def error() -> float:
        if kind == "raises":
            raise OpError("not this one")
        return {"wrong": 0.5, "nan": float("nan")}[kind]

    return Check("w4_linear", kind, error, 1e-3)


@pytest.mark.parametrize("kind", ["wrong", "nan", "raises"])
def test_all_checks_run_after_a_wrong_one(kind: str) -> None:
    report = GpuReport({}, 90, "test")
    good = Check("rope", "fine", lambda: 0.0, 1e-3)
    gpu.check_all(report, [broken_check(kind), good])
    assert len(report.checks) == 2
    (line,) = report.wrong
    assert line.startswith(f"w4_linear: {kind}: ")


def test_checks_of_all_ops_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    for op, count in (("rope", 3), ("merge", 1)):
        found = [Check(op, str(i), lambda: 0.0, 1.0) for i in range(count)]
        monkeypatch.setattr(module(op), "checks", lambda d, t, found=found: iter(found))
    turns = [f"{c.op} {c.name}" for c in gpu.in_turn(["rope", "merge"], CPU)]
    assert turns == ["rope 0", "merge 0", "rope 1", "rope 2"]


def test_a_check_sees_what_nobody_wrote() -> None:
    def error() -> float:
        return relative_rms(torch.empty(64, dtype=torch.float16), torch.zeros(64))

    report = GpuReport({}, 90, "test")
    gpu.check_all(report, [Check("rope", "unwritten", error, 1e9)])
    assert len(report.wrong) == 1


@pytest.fixture
def small_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tiny case for each op, no GPU asked for."""

    def cases(op: str) -> Iterator[Case]:
        peers: dict[str, Any] = {
            CUBLAS: lambda: list,
            "absent": lambda: importlib.import_module("no"),
        }
        yield Case(op, "tiny", f"{op} case", 1000, lambda d: Work(list, peers), 1e6, m=1)

    ceilings = Ceilings(2e6, 1e6, 1e12, 1e12)
    monkeypatch.setattr(gpu_ceilings, "measure", lambda timer, device: ceilings)
    monkeypatch.setattr(gpu, "CudaTimer", lambda device: FakeTimer())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA Test 1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 40, 1 << 40))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    for op in gpu.OPS:
        monkeypatch.setattr(module(op), "cases", lambda quick, op=op: cases(op))
        monkeypatch.setattr(module(op), "checks", lambda d, t, op=op: [Check(op, "", lambda: 0, 1)])


@pytest.mark.usefixtures("small_bench")
def test_a_run_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "out.json"
    assert gpu.main(["--quick", "--out", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "NVIDIA Test 1, compute capability 9.0" in printed
    assert "not measured: w4_linear: absent: ModuleNotFoundError" in printed
    written = json.loads(path.read_text())
    assert [r["op"] for r in written["results"]] == list(gpu.OPS)
    assert len(written["targets"]) == len(TARGETS)
    assert written["versions"].keys() == {"python", "torch", "triton", "gemlite"}
    assert written["machine"]["gpu"] == "NVIDIA Test 1"
    quantize = next(t for t in written["targets"] if t["op"] == "quantize")
    assert (quantize["worst"], quantize["met"]) == (1.0, True)  # 1000 bytes in 1 ms of 1 MB/s
    assert plot.main([str(path)]) == 0
    assert {p.name for p in path.parent.iterdir()} == {
        "out.json",
        "out-roofline.svg",
        "out-ratio.svg",
    }


@pytest.mark.usefixtures("small_bench")
def test_a_wrong_op_ends_in_failure_and_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module("w4_linear"), "checks", lambda d, t: [broken_check("wrong")])
    assert gpu.main(["--out", str(tmp_path / "out.json")]) == 1
    printed = capsys.readouterr().out
    assert "w4_linear: wrong: error 0.5, at most 0.001" in printed
    assert "skipped: w4_linear is wrong and was not timed" in printed
    written = json.loads((tmp_path / "out.json").read_text())
    assert [r["op"] for r in written["results"]] == [op for op in gpu.OPS if op != "w4_linear"]


def test_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    report = GpuReport({}, 90, "test")
    cases = [Case("rope", "m", str(i), 1, lambda d: Work(list)) for i in range(4)]
    gpu.time_all(report, cases, CPU, FakeTimer(), clock=lambda: next(now), end=1)
    assert [r.name for r in report.results] == ["0", "1"]
    assert report.skipped == ["2 cases of rope for lack of time, from m 2 to m 3"]
    monkeypatch.setattr(gpu, "_free_memory", lambda device: 10)
    gpu.time_all(report, [replace(cases[0], footprint=11)], CPU, FakeTimer())
    assert report.skipped[-1] == "rope m 0 for lack of memory"


def test_a_case_that_raises_does_not_end_the_run() -> None:
    def fail(device: torch.device) -> Work:
        raise RuntimeError("out of memory")

    report = GpuReport({}, 90, "test")
    cases = [Case("rope", "m", "a", 1, fail), Case("rope", "m", "b", 1, lambda d: Work(list))]
    gpu.time_all(report, cases, CPU, FakeTimer())
    assert [r.name for r in report.results] == ["b"]
    assert report.failed == ["rope m a: RuntimeError: out of memory"]
    assert "FAILED: rope m a: RuntimeError: out of memory" in report.text()


@pytest.mark.usefixtures("small_bench")
def test_what_was_found_before_an_error_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cases(quick: bool) -> Iterator[Case]:
        raise OpError("no cases")

    monkeypatch.setattr(module("rope"), "cases", cases)
    path = tmp_path / "out.json"
    assert gpu.main(["--out", str(path)]) == 1
    written = json.loads(path.read_text())
    assert written["failed"] == ["OpError: no cases"]
    assert [r["op"] for r in written["results"]] == list(gpu.OPS[:-1])


@pytest.mark.usefixtures("small_bench")
@pytest.mark.parametrize("seconds", ["100", "20"])
def test_the_other_ops_go_on_in_a_new_process_when_the_gpu_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: str
) -> None:
    def synchronize(device: Any = None) -> None:
        raise RuntimeError("an illegal memory access")

    started: list[str] = []
    monkeypatch.setattr(module("merge"), "checks", lambda d, t: [broken_check("raises")])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(os, "chdir", lambda path: None)
    monkeypatch.setattr(os, "execvp", lambda file, words: started.append(words[-1]))
    path = tmp_path / "out.json"
    ops = ["--op", "w4_linear", "--op", "merge"]
    assert gpu.main(["--out", str(path), "--seconds", seconds, *ops]) == 1
    why = "the GPU was lost to w4_linear: RuntimeError: an illegal memory access"
    assert json.loads(path.read_text())["failed"] == [why]
    assert len(started) == (seconds == "100")
    for command in started:
        assert command.endswith(" --op merge; exit 1")
        assert str(tmp_path / "out-anew.json") in command


@pytest.mark.parametrize(
    ("m", "stored", "ours", "cublas", "what", "met"),
    [
        (1, 64 << 20, 1.0, 3.0, "M=1, 64 MiB and more", True),
        (1, 64 << 20, 1.0, 2.9, "M=1, 64 MiB and more", False),
        (1, 63 << 20, 1.0, 2.9, "M=1, 64 MiB and more", None),
        (64, 0, 1.0, 2.1, "M=64", True),
        (4096, 0, 1.0, 0.89, "M=256 and more", False),
    ],
)
def test_targets(
    m: int, stored: int, ours: float, cublas: float, what: str, met: bool | None
) -> None:
    case = Case("w4_linear", "", "", 1, lambda d: Work(list), m=m, stored=stored)
    timing = Timing((ours,) * 3, (ours,) * 3)
    peers = {CUBLAS: Timing((cublas,) * 3, (cublas,) * 3)}
    report = GpuReport({}, 90, "test", ceilings=Ceilings(1, 1, 1, 1))
    report.results = [CaseResult.of(case, timing, peers, {})]
    rows = {row["what"]: row for row in report.target_rows() if row["op"] == "w4_linear"}
    assert rows[what]["met"] is met


def test_a_target_depends_on_the_gpu() -> None:
    eta = next(t for t in TARGETS if t.op == "w4_linear" and t.figure == "eta")
    assert (eta.bound(80), eta.bound(89), eta.bound(90)) == (0.92, 0.92, 0.85)


def test_ceilings_count_bytes_and_operations() -> None:
    found = gpu_ceilings.measure(FakeTimer(), CPU, nbytes=1 << 12, size=16)
    assert found == Ceilings(4096 / 1e-3, 2 * 4096 / 3e-3, 2 * 16**3 / 1e-3, 2 * 16**3 / 1e-3)


def test_random_operands_have_the_shapes_asked_for() -> None:
    q = random_weight(8, 128, CPU, bits=8, group=32)
    assert 0.5 < q.dequantize().std() * 128**0.5 * 3 < 4
    cache = random_cache(KVFormat(64), 2, [0, 64, 65, 200], torch.float16, CPU)
    assert cache.step.packed.tolist() == [0, 0, 64, 192]
    used = [int(p) for s, n in enumerate([0, 0, 1, 3]) for p in cache.step.table[s, :n]]
    assert sorted(used) == list(range(4))


@pytest.mark.parametrize("op", ["w4_linear", "decode_attention"])
def test_tuning_asks_for_the_keys_that_launchers_look_up(
    monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    asked: list[tuple[str, str]] = []

    def lookup(op: str, device: torch.device, key: str) -> None:
        asked.append((op, key))

    monkeypatch.setattr(tuned, "lookup", lookup)
    for launcher in (gemv, skinny, decode):
        launcher._configured.cache_clear()
    shape = replace(LLAMA_8B, heads=4, kv_heads=2, head_dim=64)
    monkeypatch.setattr(tune, "MODELS", (shape,))
    monkeypatch.setattr(tune, "_CONTEXT", 70)
    monkeypatch.setattr(tune, "_BATCH", 1)
    if op == "w4_linear":
        found = [tune._linear(m, 32, 128) for m in (1, 64)]
    else:
        found = list(tune.searches([op]))
    for search in found:
        search.build(CPU)(None)()
    assert {(s.op, s.key) for s in found} <= set(asked)


def test_tuning_writes_what_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Timer(FakeTimer):
        def measure(self, calls: Mapping[str, Call], budget_s: float) -> dict[str, Timing]:
            order = list(calls)
            return {n: Timing((1.0,), (1.0 / (1 + order.index(n)),)) for n in calls}

    def launch(config: Any) -> Call:
        def call() -> None:
            if config is not None and config.programs == 99:
                raise RuntimeError("does not fit")

        return call

    configs = tuple(tune.DecodeConfig(1, programs=p) for p in (4, 8, 99))
    search = tune.Search("decode_attention", "key", configs, lambda device: launch)
    monkeypatch.setattr(tune, "searches", lambda ops: [search])
    path = tune.tune(CPU, Timer(), ["decode_attention"], 9.0, tmp_path, gpu="NVIDIA Test 1")
    assert path.name == "nvidia-test-1.json"
    assert tuned._read(path)["decode_attention"]["key"]["programs"] == 8
    assert tune.best(replace(search, candidates=()), CPU, FakeTimer()) is None


def test_without_cuda_there_is_one_message() -> None:
    """In a process where only torch, triton and the standard library can be imported."""
    blocked = ("numba", "rich", "psutil", "transformers", "gguf", "matplotlib", "safetensors")
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from bench import gpu\n"
        "for op in gpu.OPS:\n"
        "    gpu._module(op)\n"
        "import bench.tune\n"
        "sys.exit(gpu.main(['--quick']))\n"
    )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.returncode == 2, run.stderr
    assert run.stderr == "bench.gpu needs a CUDA device that torch can use; there is none\n"
    assert run.stdout == ""


@pytest.mark.parametrize("content", ["not json", '{"bench": "cpu"}', '{"bench": "gpu"}'])
def test_a_file_without_times_is_refused(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    assert plot.main([str(path)]) == 2
    assert str(path) in capsys.readouterr().err

"""The GPU bench without a GPU: checks on tiny shapes, times by a fake clock, reports and pictures.

Launchers run in Triton's interpreter; no time is asserted.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import plot
from bench.gpu import ceilings, ops, work
from bench.gpu.case import Call, Check, PreparedCase, SerialChain, TimedCase, relative_rms
from bench.gpu.ceilings import Ceilings
from bench.gpu.model_shapes import LLAMA_8B, MODELS, TOKENS, shapes
from bench.gpu.operands import random_cache, random_weight
from bench.gpu.peers import BACKENDS, in_two_parts, sdpa
from bench.gpu.report import CaseResult, GpuReport
from bench.gpu.targets import CUBLAS, TARGETS
from bench.gpu.timer import CALLS, CallTimes
from qoff.errors import OpError
from qoff.kernels.layout.kv_format import KVFormat

CPU = torch.device("cpu")
# The launchers of the same tests on a GPU are what `python -m bench.gpu` runs there.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets nothing here")


class FakeTimer:
    """Runs every call once; the first takes a millisecond, each peer a millisecond more."""

    def measure(self, calls: Mapping[str, Sequence[Call]], budget_s: float) -> dict[str, CallTimes]:
        del budget_s
        for several in calls.values():
            for call in several:
                call()
        return {
            name: CallTimes((2e-3 * (i + 1),) * 3, (1e-3 * (i + 1),) * 3, True, len(several))
            for i, (name, several) in enumerate(calls.items())
        }


@pytest.mark.parametrize("op", ops.OPS)
def test_tiny_checks_pass(op: str) -> None:
    report = GpuReport({})
    work.check(report.add, ops.module(op).checks(CPU, True), ())
    assert report.checks
    assert all(checked == op for checked, *_ in report.checks)
    assert report.wrong == []


@pytest.mark.parametrize("op", ops.OPS)
def test_checks_have_names_of_their_own(op: str) -> None:
    names = [check.name for check in ops.module(op).checks(CPU, False)]
    assert len({*names}) == len(names)


@pytest.mark.parametrize("op", ops.OPS)
@pytest.mark.parametrize("quick", [False, True])
def test_cases_are_described(op: str, quick: bool) -> None:
    cases = list(ops.module(op).cases(quick, shapes(quick)))
    assert cases
    assert len({case.key for case in cases}) == len(cases)
    for case in cases:
        assert case.op == op
        assert case.nbytes > 0
        assert case.nbytes <= case.footprint or op == "merge"


def test_a_case_of_each_matmul_is_listed() -> None:
    cases = list(ops.module("w4_linear").cases(False, MODELS))
    assert len(cases) == len(MODELS) * len(TOKENS) * 5
    assert cases[0].flops == 2 * 4096 * 6144
    assert cases[0].stored == 4096 * 6144 // 2


@pytest.mark.parametrize("m", [1, 17])
def test_a_matmul_is_built_and_timed_beside_its_peers(m: int) -> None:
    case = ops.module("w4_linear").case("tiny", "o", m, 32, 256)
    result = work.time_case(case, CPU, FakeTimer())
    assert result.seconds == 1e-3
    assert result.launched_seconds == 2e-3
    assert 1 <= result.calls <= CALLS
    assert result.peers[CUBLAS] == 2e-3
    assert set(result.missing) <= {"gemlite", "torch int4"}
    prepared = case.build(CPU)
    ours, cublas = prepared.call(), prepared.peers[CUBLAS]()()
    assert isinstance(ours, torch.Tensor)
    assert ours.shape == cublas.shape  # type: ignore[attr-defined]


def test_a_peer_that_computes_something_else_is_not_timed() -> None:
    peers = {name: lambda f=f: lambda: torch.ones(3) * f for name, f in (("a", 1.01), ("b", 2.0))}
    case = TimedCase(
        "w4_linear", "", "", 1, lambda d: PreparedCase(lambda: torch.ones(3), peers, True)
    )
    result = work.time_case(case, CPU, FakeTimer())
    assert list(result.peers) == ["a"]
    assert result.missing["b"].startswith("ValueError: its result is 1 off ours")


@pytest.mark.parametrize(
    ("op", "build"),
    [
        ("decode_attention", lambda m, shape: m.case(shape, 130, 2)),
        (
            "kv_append",
            lambda m, shape: TimedCase("", "", "", 1, lambda d: m._build(shape, 1, 2, d)),
        ),
        (
            "kv_append",
            lambda m, shape: TimedCase("", "", "", 1, lambda d: m._build(shape, 70, 1, d)),
        ),
    ],
)
def test_tiny_problems_are_timed_beside_their_peers(op: str, build: Any) -> None:
    shape = replace(LLAMA_8B, heads=4, kv_heads=2, head_dim=64)
    result = work.time_case(build(ops.module(op), shape), CPU, FakeTimer())
    assert result.seconds == 1e-3
    assert result.peers, result.missing


@pytest.mark.parametrize("context", [0, 130])
def test_prefill_is_timed_beside_attention_of_as_many_keys(
    monkeypatch: pytest.MonkeyPatch, context: int
) -> None:
    prefill = ops.module("prefill_attention")
    monkeypatch.setattr(prefill, "_ROWS", 3)
    shape = replace(LLAMA_8B, heads=4, kv_heads=2, head_dim=64)
    prepared = prefill._build(shape, context, CPU)
    out, _ = prepared.call()
    assert prepared.peers["sdpa math"]()().shape == (1, 4, 3, 64)
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


@pytest.mark.parametrize("heads", [1, 4])
def test_attention_in_two_parts_is_causal_attention(heads: int) -> None:
    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = q @ k.mT / 4
        if causal:
            scores += torch.full((3, 3), -torch.inf).triu(1)
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    q, k, v = (torch.randn(2, heads, n, 16) for n in (3, 7, 7))
    expected = sdpa("math", q, k, v, True)()
    torch.testing.assert_close(in_two_parts(attend, q, k, v), expected)


def test_the_calls_of_a_graph_have_operands_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []

    def build(device: torch.device) -> PreparedCase:
        built.append(device)
        return PreparedCase(list, {"peer": lambda: list})

    case = TimedCase("rope", "", "", 1, build, footprint=100)
    assert work.time_case(case, CPU, FakeTimer()).calls == len(built) == CALLS
    monkeypatch.setattr(work, "_free_memory", lambda device: 350)
    assert work.time_case(case, CPU, FakeTimer()).calls == 3
    monkeypatch.setattr(work, "_LONG_S", -1)
    assert work.time_case(case, CPU, FakeTimer()).calls == 1


def broken_check(kind: str) -> Check:
    def error() -> float:
        if kind == "raises":
            raise OpError("not this one")
        return {"wrong": 0.5, "nan": float("nan")}[kind]

    return Check("w4_linear", kind, error, 1e-3)


@pytest.mark.parametrize("kind", ["wrong", "nan", "raises"])
def test_all_checks_run_after_a_wrong_one(kind: str) -> None:
    report = GpuReport({})
    good = Check("rope", "fine", lambda: 0.0, 1e-3)
    work.check(report.add, [broken_check(kind), good], ())
    assert len(report.checks) == 2
    (line,) = report.wrong
    assert line.startswith(f"w4_linear: {kind}: ")


def test_checks_that_are_done_are_not_done_again() -> None:
    report = GpuReport({})
    checks = [Check("rope", name, lambda: 0.0, 1e-3) for name in "abc"]
    work.check(report.add, checks, {"a", "c"})
    assert [name for _, name, *_ in report.checks] == ["b"]
    late: list[dict[str, Any]] = []
    work.check(late.append, checks, {"a", "c"}, end=0.0)
    assert late == [{"late": "b"}]


def test_a_check_sees_what_nobody_wrote() -> None:
    def error() -> float:
        return relative_rms(torch.empty(64, dtype=torch.float16), torch.zeros(64))

    report = GpuReport({})
    work.check(report.add, [Check("rope", "unwritten", error, 1e9)], ())
    assert len(report.wrong) == 1


def test_an_error_that_the_gpu_keeps_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(device: Any = None) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    report = GpuReport({})
    with pytest.raises(SystemExit) as left:
        work.check(report.add, [broken_check("raises")], ())
    assert left.value.code == work.GPU_LOST
    assert "not this one" in report.wrong[0]


def timed(cases: Iterable[TimedCase], seconds: float = 1e6) -> tuple[GpuReport, list[str]]:
    """What timing the cases reports, and which there was no time for."""
    report, late = GpuReport({}), list[str]()

    def emit(event: dict[str, Any]) -> None:
        report.add(event)
        late.extend([event["late"]] if "late" in event else [])

    end = time.monotonic() + seconds
    work.time_cases(emit, cases, ["rope m done"], CPU, FakeTimer(), end)
    return report, late


def test_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [TimedCase("rope", "m", name, 1, lambda d: PreparedCase(list)) for name in ("a", "b")]
    done = TimedCase("rope", "m", "done", 1, lambda d: PreparedCase(list))
    report, late = timed([*cases, done])
    assert [r.name for r in report.results] == ["a", "b"]
    assert report.done == ["rope m a", "rope m b"]
    assert not late
    assert timed([*cases, done], -1)[1] == ["rope m a", "rope m b"]
    monkeypatch.setattr(work, "_free_memory", lambda device: 10)
    report, _ = timed([replace(cases[0], footprint=11)])
    assert report.skipped == ["rope m a for lack of memory"]
    assert report.done == ["rope m a"]


def test_a_case_that_raises_does_not_end_the_run() -> None:
    def fail(device: torch.device) -> PreparedCase:
        raise RuntimeError("out of memory")

    good = TimedCase("rope", "m", "b", 1, lambda d: PreparedCase(list))
    report, _ = timed([TimedCase("rope", "m", "a", 1, fail), good])
    assert [r.name for r in report.results] == ["b"]
    assert report.failed == ["rope m a: RuntimeError: out of memory"]
    assert report.done == ["rope m a", "rope m b"]
    assert "FAILED: rope m a: RuntimeError: out of memory" in report.text()


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    peers: dict[str, Any] = {CUBLAS: lambda: list, "absent": lambda: importlib.import_module("no")}
    chain = SerialChain(2, 10)
    cases = [
        TimedCase(
            op, "m", "c", 1000, lambda d: PreparedCase(list, peers, chain=chain), flops=1e6, m=1
        )
        for op in ("w4_linear", "quantize")
    ]
    report, _ = timed(cases)
    report.gpu = {"name": "NVIDIA Test 1", "exact": 86, "capability": 89, "processors": 3}
    report.ceilings = Ceilings(2e6, 1e6, 1e12, 1e12, launch=1e-6, latency=1e-7)
    report.add({"check": ["rope", "x", float("inf"), 1.0, "lost"]})
    report.add({"tuned": ["w4_gemv", "key", {"block_n": 32}], "item": "w4_gemv key"})
    report.add({"compiled": {"op": "rope", "kernel": "k", "error": "no", "seconds": 1.0}})
    report.late = {"checks of rope": ["a", "b"], "timings of rope": [*"abcd"]}
    text = report.text()
    for line in (
        "NVIDIA Test 1, compute capability 8.6",
        "1 kernels compiled in 1 s of CPU time, 1 failed, 0 spill registers",
        "not measured: w4_linear: absent: ModuleNotFoundError",
        "left out: checks of rope: a, b\n",
        "left out: timings of rope: a to d, 4 in all",
        "limit of latencies 503.0 us",  # two launches, ten loads, a thousand bytes
        "tuned: w4_gemv key: {'block_n': 32}",
    ):
        assert line in text
    content = json.dumps(report.content())
    again = GpuReport.read(content)
    assert again.late == {}
    again.late = report.late
    assert json.dumps(again.content()) == content
    (quantize,) = [t for t in report.target_rows() if t["op"] == "quantize"]
    assert (quantize["worst"], quantize["met"]) == (1.0, True)  # 1000 bytes in 1 ms of 1 MB/s
    path = tmp_path / "gpu.json"
    path.write_text(content)
    assert plot.main([str(path)]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"gpu.json", "gpu-roofline.svg", "gpu-ratio.svg"}


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
    case = TimedCase("w4_linear", "", "", 1, lambda d: PreparedCase(list), m=m, stored=stored)
    timing = CallTimes((ours,) * 3, (ours,) * 3)
    peers = {CUBLAS: CallTimes((cublas,) * 3, (cublas,) * 3)}
    report = GpuReport({}, {"capability": 90}, ceilings=Ceilings(1, 1, 1, 1))
    report.results = [CaseResult.of(case, timing, peers, {})]
    rows = {row["what"]: row for row in report.target_rows() if row["op"] == "w4_linear"}
    assert rows[what]["met"] is met


def test_a_target_depends_on_the_gpu() -> None:
    eta = next(t for t in TARGETS if t.op == "w4_linear" and t.figure == "eta")
    assert (eta.bound(80), eta.bound(89), eta.bound(90)) == (0.92, 0.92, 0.85)


def test_nothing_is_asked_of_products_without_tensor_cores() -> None:
    asked = [GpuReport({}, {"capability": c}).target_rows() for c in (75, 80)]
    names = [{f"{row['op']}: {row['what']}" for row in rows} for rows in asked]
    assert names[1] - names[0] == {
        "w4_linear: M=16",
        "w4_linear: M=64",
        "w4_linear: M=256 and more",
        "prefill_attention: all, the best backend, cuDNN too",
    }


def test_a_short_attention_is_held_against_its_latencies() -> None:
    """Two launches of 2 us, ten loads of 0.5 us and 3 MB at 3 TB/s are 10 us."""
    ceilings = Ceilings(3e12, 1, 1, 1, launch=2e-6, latency=5e-7)
    long = TimedCase("decode_attention", "", "", 3_000_000, lambda d: PreparedCase(list))
    time_of = CallTimes((1, 1, 1), (16e-6,) * 3)
    for stored, figure in ((1 << 20, "chain"), (1 << 28, "eta")):
        case = replace(long, tokens=8192, stored=stored)
        report = GpuReport({}, {"capability": 90}, ceilings=ceilings)
        report.results = [CaseResult.of(case, time_of, {}, {}, SerialChain(2, 10))]
        met = {row["figure"]: row["worst"] for row in report.target_rows() if row["cases"]}
        expected = 10 / 16 if figure == "chain" else 1 / 16
        assert met == {figure: pytest.approx(expected)}


def test_ceilings_count_bytes_and_operations() -> None:
    found = ceilings.measure(FakeTimer(), CPU, nbytes=1 << 12, size=16, hops=4)
    assert (found.read, found.copy) == (4096 / 1e-3, 2 * 4096 / 3e-3)
    assert found.fp16 == found.bf16 == 2 * 16**3 / 1e-3
    assert found.link == 4096 / 4 / 4e-3
    assert found.latency == 2e-3 / 4


def test_a_chain_of_loads_follows_the_table() -> None:
    following = torch.tensor([3, 0, 1, 2], dtype=torch.int32)
    out = torch.zeros(1, dtype=torch.int32)
    ceilings.chase_kernel[(1,)](following, out, 2)
    assert out.item() == 2


def test_random_operands_have_the_shapes_asked_for() -> None:
    q = random_weight(8, 128, CPU, bits=8, group=32)
    assert 0.5 < q.dequantize().std() * 128**0.5 * 3 < 4
    cache = random_cache(KVFormat(64), 2, [0, 64, 65, 200], torch.float16, CPU)
    assert cache.step.packed.tolist() == [0, 0, 64, 192]
    used = [int(p) for s, n in enumerate([0, 0, 1, 3]) for p in cache.step.table[s, :n]]
    assert sorted(used) == list(range(4))


@pytest.mark.parametrize("content", ["not json", '{"bench": "cpu"}', '{"bench": "gpu"}'])
def test_a_file_without_times_is_refused(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    assert plot.main([str(path)]) == 2
    assert str(path) in capsys.readouterr().err

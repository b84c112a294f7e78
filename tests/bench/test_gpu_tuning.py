"""Tuning without a GPU: keys, the model of a launch, and what is reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import ops, pieces, predict, stages, tune
from bench.gpu.case import Call
from bench.gpu.model_shapes import LLAMA_8B
from bench.gpu.report import GpuReport
from bench.gpu.timer import CallTimes
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.triton.launch import tuned
from qoff.kernels.triton.launch.gpu import Gpu
from tests.bench.test_gpu_bench import CPU, FakeTimer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets nothing here")


@pytest.mark.parametrize("op", ["w4_linear", *stages.TUNED[1:]])
def test_tuning_asks_for_the_keys_that_launchers_look_up(
    monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    asked: list[tuple[str, str]] = []

    def lookup(op: str, device: torch.device, key: str) -> None:
        asked.append((op, key))

    monkeypatch.setattr(tuned, "lookup", lookup)
    for forget in tune.CHOOSERS:
        forget.cache_clear()
    shape = replace(LLAMA_8B, hidden=64, heads=1, kv_heads=1, head_dim=64, intermediate=64)
    shape = replace(shape, vocabulary=32)
    for name, small in (("_CONTEXT", 70), ("_BATCH", 1), ("_ROWS", 4)):
        monkeypatch.setattr(tune, name, small)
    latent = ops.module("latent_attention")
    monkeypatch.setattr(latent, "_FORM", KVFormat(96, latent=64))
    monkeypatch.setattr(latent, "_MODELS", {"a small one": 3})
    monkeypatch.setattr(latent, "_TUNED", (70,))
    half = torch.float16
    if op == "w4_linear":
        monkeypatch.setattr(pieces, "TOKENS", 2)
        found = [tune._linear(m, 32, 128, half) for m in (1, 64)] + [tune._pieces(32, 128, half)]
    else:
        found = list(tune.searches(op, (shape,), 75))  # there in float16 alone
    for search in found:
        search.build(CPU)(None)()
    names = {(name, s.key) for s in found for name in s.names.values() or (s.op,)}
    assert names <= set(asked)


def test_tuning_covers_both_types_and_every_bucket() -> None:
    found = [s for op in stages.TUNED for s in tune.searches(op, (LLAMA_8B,))]
    keys = {(s.op, s.key.removesuffix("-4096x4096")) for s in found}
    for dtype in ("float16", "bfloat16"):
        for m in tune._BUCKETS:
            assert ("w4_linear", f"{dtype}-4-64-{m}") in keys
        assert ("scratch", dtype) in keys
        for op in ("dequantize", "merge", "prefill_attention", "latent_attention"):
            assert any(name == op and key.startswith(dtype) for name, key in keys)
        assert ("decode_attention", f"{dtype}-128-k4-v4-8") in keys
    assert len({s.name for s in found}) == len(found)


GOOD = predict.Figures(4, 64, 0, 8 << 10, 8 << 10, 0.5)


@pytest.mark.parametrize(
    ("worse", "programs"),
    [
        (replace(GOOD, spilled=32), 264),
        (replace(GOOD, in_flight=256), 264),
        (replace(GOOD, bytes_per_instruction=0.01), 264),
        (GOOD, 140),  # leaves most processors idle in its last round
        (GOOD, 10),
    ],
)
def test_the_model_of_a_launch(worse: predict.Figures, programs: int) -> None:
    gpu = Gpu(90, 132)
    assert predict.cost(worse, programs, gpu) > 1.2 * predict.cost(GOOD, 264, gpu)
    assert predict.cost(replace(GOOD, shared=1 << 20), 264, gpu) == float("inf")


def test_only_the_most_promising_candidates_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    @contextmanager
    def recording(gpu: Gpu, exact: int, keep: Any) -> Iterator[None]:
        assert (gpu, exact) == (Gpu.of(CPU), 89)
        kept.append(keep)
        yield

    def build(device: torch.device) -> Any:
        assert device.type == "meta"

        def call(programs: int) -> None:
            if programs == 8:
                raise RuntimeError("does not compile")
            for name in ("add_splits_kernel", "main"):
                kept[-1](SimpleNamespace(kernel=SimpleNamespace(__name__=name), programs=programs))

        return lambda programs: partial(call, programs)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(predict, "recording", recording)
    monkeypatch.setattr(predict, "figures_of", lambda launch, exact: GOOD)
    search = tune.Search("op", "key", tuple(range(1, 41)), build)
    found = predict.promising(search, device=CPU, end=float("inf"))
    assert len(found) == tune.TIMED
    assert found[0] == 16  # none of 4 processors idle, and enough bytes on their way
    assert 8 not in found
    assert all(programs % 4 == 0 or programs > 20 for programs in found)
    assert predict.promising(search, device=CPU, end=0.0) == []
    few = replace(search, candidates=(8, 3))
    assert predict.promising(few, device=CPU, end=0.0) == [8, 3]


def test_sizes_of_pieces_are_ranked_by_what_they_leave_idle() -> None:
    n, k = 57344, 8192
    sizes = list(pieces.sizes(n, k))
    assert sizes[0].nbytes == 16 << 20
    rows = [pieces.rows_of_piece(n, k, size.nbytes) for size in sizes]
    assert len(set(rows)) == len(rows) > tune.TIMED
    assert rows[-1] == n

    def expected(mib: int, processors: int, l2: int) -> float:
        return pieces.expected_on(pieces.ScratchConfig(mib << 20), n, k, processors, l2)

    assert expected(16, 132, 0) > 1.1 * expected(512, 132, 0)  # 64 tiles for 132 processors
    assert expected(16, 64, 50 << 20) < expected(512, 64, 50 << 20)  # read from the L2
    search = tune._pieces(n, k, torch.float16)
    found = predict.promising(search, device=CPU, end=float("inf"))
    assert len(found) == tune.TIMED
    assert set(found) < set(search.candidates)


def test_tuning_reports_what_is_faster() -> None:
    class Timer(FakeTimer):
        def measure(
            self, calls: Mapping[str, Sequence[Call]], budget_s: float
        ) -> dict[str, CallTimes]:
            order = list(calls)
            return {n: CallTimes((1.0,), (1.0 / (1 + order.index(n)),)) for n in calls}

    def launch(config: Any) -> Call:
        def call() -> None:
            if config is not None and config.resident == 99:
                raise RuntimeError("does not fit")

        return call

    configs = tuple(tune.DecodeConfig(1, resident=p) for p in (4, 8, 99))
    names: dict[type, str] = {tune.DecodeConfig: "a way"}
    search = tune.Search("decode_attention", "key", configs, lambda device: launch, names)
    same = replace(search, key="same", candidates=())
    report = GpuReport({})
    tune.tune(report.add, [search, same], (), CPU, Timer(), float("inf"))
    assert report.tuned["a way"].keys() == {"key"}
    assert report.tuned["a way"]["key"]["resident"] == 8
    assert report.done == ["decode_attention key", "decode_attention same"]
    late: list[dict[str, Any]] = []
    tune.tune(late.append, [search, same], report.done[:1], CPU, Timer(), 0.0)
    assert late == [{"late": "decode_attention same"}]

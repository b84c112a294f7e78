"""What is said of rates: a note where the machine was not quiet, a result to compare."""

from __future__ import annotations

from qoff.measure.cases import Case, Setup
from qoff.measure.compare import samples_of
from qoff.measure.model_rates import ModelRate
from qoff.measure.model_report import ModelReport
from qoff.measure.samples import Samples

RATES = [
    ModelRate(Setup(kv_bits=kv), Case(kind, 8, depth), Samples((1.0, 2.0, 4.5)), 3.0, 100)
    for kv in ("none", "4")
    for kind in ("pp", "tg")
    for depth in (0, 64)
]


def report(others: float = 0.0, backend: str = "cpu") -> ModelReport:
    return ModelReport("a|model", 3 << 20, backend, {"repetitions": 3}, RATES, others)


def test_work_of_others_is_noted() -> None:
    assert report(0.05).notes == report(0.05).result().notes == []
    (note,) = report(1.5).result().notes
    assert "1.5 cores" in note


def test_every_rate_is_a_figure_of_the_result() -> None:
    found = report().result()
    assert dict(samples_of(found)) == {
        (f"{rate.setup}: {rate.case}", "tokens_per_s"): rate.tokens_per_s for rate in RATES
    }
    assert found.settings["model_bytes"] == 3 << 20
    first = found.measured["resident, KV f32: pp8"]
    assert first["tokens_per_s"]["mean"] == 2.5
    assert first["disk_bytes_per_token"] == 3.0


def test_the_gpu_is_named_where_it_was_one() -> None:
    assert "gpu" not in report().result().machine
    found = report(backend="Some GPU").result()
    assert found.machine["gpu"] == "Some GPU"
    assert found.stem().startswith("model_rates-some-gpu-")


def test_a_row_shows_mean_and_deviation() -> None:
    lines = report().markdown().splitlines()
    assert len(lines) == 2 + len(RATES)
    assert "| a\\|model |" in lines[2]
    assert "3.0 MiB" in lines[2]
    assert lines[2].endswith("| 2.50 ± 1.80 |")

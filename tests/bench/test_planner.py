"""bench.planner's measures, small. No time is asserted."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from math import log

import pytest

from bench.planner import flexgen, regret, rounds
from bench.planner.__main__ import MEASURES
from bench.planner.candidates import Candidates
from qoff.kernels.processor import pool_threads
from qoff.plan import Plan
from qoff.plan.workload import Lengths, Workload
from tests.plan.machines import MIB, machine, sizes
from tests.tiny_models import tiny_checkpoint


def test_every_plan_is_measured_and_predicted(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64-deep")
    there = replace(machine(), cores=pool_threads())  # whose arenas the plans are opened with
    monkeypatch.setattr(rounds, "measured_profile", lambda *_: there)
    work = rounds.works_of(True, 1)["135M"]
    runs = rounds.measured({"tiny": (path, work)}, 1)["tiny"]
    assert len(runs.found) + len(runs.refused) == 10
    busy = {label: one.decode.busy for label, one in runs.found.items()}
    half = busy["50% of the weights"]["disk read"]
    assert busy["all resident"]["disk read"] == 0 < half
    assert busy["50%, sequential"]["disk read"] == pytest.approx(2 * half)
    plain = rounds.Factors()
    for one in runs.found.values():
        assert plain.seconds(one) == pytest.approx(one.decode.seconds)
    fitted = rounds.Factors.fitted(runs)
    least, before = (
        sum(abs(log(f.seconds(one) / runs.median(x))) for x, one in runs.found.items())
        for f in (fitted, plain)
    )
    assert least < before


def test_flexgens_figures_follow_from_its_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flexgen, "_ours", lambda *_: None)
    report = flexgen.measure(quick=True)
    assert len(report.bars) == 2
    assert all(bar.met for bar in report.bars)
    shipped = report.measured["OPT-30B, prompt 512"]
    assert shipped["predicted"] == pytest.approx(7.136, abs=1e-3)
    kinds = {x: one["kind"] for x, one in report.measured.items()}
    assert kinds["OPT-175B, prompt 512"] == "disk fitted to this row"
    assert all("fit" in kind for x, kind in kinds.items() if "compressed" in x)


def test_candidates_fit_and_are_different() -> None:
    work = Workload(Lengths.of(256), Lengths.of(64), 6)
    there = machine(device=8 * MIB)
    drawn = Candidates(sizes(), there, work, Plan(context=work.context)).drawn(5, seed=0)
    assert len({repr(one.plan) for one in drawn}) == 5
    assert all(sum(one.bytes_by_tier()["device"].values()) <= 8 * MIB for one in drawn)


def test_plans_that_the_turns_do_not_tell_apart_have_no_order() -> None:
    seconds = {"a": [1.0, 1.1, 1.0], "b": [1.1, 1.0, 1.1], "c": [3.0, 2.0, 3.0], "d": [4.0] * 3}
    assert rounds.order(seconds, {"a": 2.0, "b": 1.0, "c": 3.0, "d": 4.0}) == (1.0, 1, 6)
    found = rounds.order(seconds, {"a": 1.0, "b": 2.0, "c": 3.0, "d": 3.0})  # c and d alike
    assert found.tau == pytest.approx(4 / 5)
    assert rounds.order(seconds, {"a": 4.0, "b": 4.0, "c": 2.0, "d": 1.0}).tau == -1.0


def test_slow_plans_go_no_further_and_the_first_always_does() -> None:
    took = [9.0, 5.0, 1.0, 1.05, 1.06, 1.07, 1.08, 2.0, 3.0, 4.0]
    found = regret.race([lambda s=s: s for s in took], 3, 2)  # type: ignore[misc]
    assert [len(seconds) for seconds in found] == [5, 1, 5, 5, 5, 5, 5, 1, 1, 1]
    assert all(set(seconds) == {s} for seconds, s in zip(found, took, strict=True))


def test_regret_is_of_the_first_plan() -> None:
    assert regret.ratio([[2.0, 1.0], [4.0, 2.0], [3.0, 9.0]]) == pytest.approx(1.5)
    low, high = regret.interval([[2.0, 1.0], [2.0, 1.0]])
    assert low == high == 2.0


@pytest.mark.parametrize("name", MEASURES)
def test_every_measure_is_there(name: str) -> None:
    assert callable(import_module(f"bench.planner.{name}").measure)

"""Without a plan and budgets: as before where the model fits, the planner's choice where not."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

import qoff
from qoff.checkpoint import Checkpoint
from qoff.plan import Plan, default
from qoff.plan.explain import explain
from qoff.plan.workload import Lengths, Workload
from tests.tiny_models import tiny_checkpoint

from .machines import GIB, MIB, machine, sizes

CPU = torch.device("cpu")
WORK = Workload(Lengths.of(256), Lengths.of(64), 24)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    found = {"device": GIB, "host": 0, "disk": GIB}
    monkeypatch.setattr(default, "usable_memory", lambda *_: found)
    monkeypatch.setattr(default, "kept_profile", lambda *_: replace(machine(), usable=found))
    return found


def test_what_fits_is_as_before(
    free: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")
    checkpoint = Checkpoint.open(path)
    assert default.default_plan(checkpoint, CPU, torch.float32) == Plan()
    assert default.default_bounds(checkpoint, CPU) == (None, None)


def test_what_does_not_fit_is_planned_and_runs(
    free: dict[str, int],
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")
    free["device"] = 5 * MIB
    with caplog.at_level(logging.WARNING), qoff.LLM(path) as llm:
        assert llm.plan.device_memory is not None
        assert llm.plan.device_memory <= 5 * MIB
        params = qoff.SamplingParams(max_tokens=2, ignore_eos=True)
        (answer,) = llm.generate({"prompt_token_ids": [5, 6]}, params)
    assert len(answer.token_ids) == 2
    (line,) = [r.getMessage() for r in caplog.records if r.name == default.__name__]
    assert "5.0 MiB free" in line
    assert "limit: " in line


def test_bounds_of_a_model_that_does_not_fit(
    free: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")
    free["device"] = 100 << 10
    assert default.default_bounds(Checkpoint.open(path), CPU) == (100 << 10, None)


def test_an_explanation_names_tiers_limit_and_what_would_be_faster() -> None:
    found = explain(sizes(), machine(device=6 * MIB), WORK)
    assert found.found.decode.limit in found.line()
    tiers = {row[0] for row in found.tiers()}
    assert tiers == {"device", "disk"}
    changes = {row[0]: row[1:] for row in found.changes()}
    assert float(changes["32.0 GiB more of device memory"][1].removesuffix("x")) >= 1
    assert not [w for w in found.warnings() if "everything fits" in w]


def test_a_model_that_fits_is_said_to_need_no_offloading() -> None:
    found = explain(sizes(), machine(device=GIB), WORK)
    assert any("no offloading" in warning for warning in found.warnings())

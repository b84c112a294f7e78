"""Without a plan and budgets: as before where the model fits, the planner's choice where not."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import qoff
from qoff.checkpoint import Checkpoint
from qoff.memory.plan import plan_residency
from qoff.models.convert.convert import convert
from qoff.plan import Plan, default
from qoff.plan import explain as explaining
from qoff.plan.explain import explain
from qoff.plan.machine import beside_plan
from qoff.plan.manual import Memory
from qoff.plan.native_sizes import NativeSizes
from qoff.plan.workload import Lengths, Workload
from qoff.quant import QuantConfig
from tests.module_models import module_checkpoint
from tests.tiny_models import tiny_checkpoint, tiny_model

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
    plain = Plan(prefill_tokens=256)
    assert default.default_plan(checkpoint, CPU, torch.float32, plain=plain) == plain
    assert default.default_bounds(checkpoint, CPU) == (None, None)


@pytest.mark.parametrize("modules", [None, "bloom"])
def test_what_does_not_fit_is_planned_and_runs(
    free: dict[str, int],
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
    modules: str | None,
) -> None:
    base = tmp_path_factory.getbasetemp()
    path = module_checkpoint(base, modules) if modules else tiny_checkpoint(base, "llama-head64")
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


def test_prompts_that_are_read_whole_have_no_more_tokens_than_a_pass(
    free: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever the context leaves for them."""
    checkpoint = Checkpoint.open(module_checkpoint(tmp_path_factory.getbasetemp(), "jamba"))
    free["device"] = 4 * MIB
    found = default.default_plan(checkpoint, CPU, torch.float32, plain=Plan(prefill_tokens=96))
    assert (found.prefill_tokens, found.context) == (96, 256)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_plan_is_chosen_again_while_a_limit_leaves_less(
    free: dict[str, int],
    tier: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")
    less = {"device": 5 * MIB, "host": 5 * MIB, "disk": GIB}
    left = iter([less, *[{**less, tier: 4 * MIB}] * 2])
    searched = list[int]()

    def search(sizes: NativeSizes, on: Any, *others: Any) -> Any:
        searched.append(on.usable[tier])
        return explain(sizes, on, *others)

    monkeypatch.setattr(default, "usable_memory", lambda *_: next(left))
    monkeypatch.setattr(default, "left_by_limits", lambda: 104 * MIB)
    monkeypatch.setattr(explaining, "explain", search)
    default.default_plan(Checkpoint.open(path), CPU, torch.float32)
    assert searched == [5 * MIB, 4 * MIB]


def test_no_bound_is_above_what_a_limit_leaves(
    free: dict[str, int],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64"))
    gpu = torch.device("cuda")
    monkeypatch.setattr(
        default, "left_by_limits", lambda: 104 * MIB
    )  # 24, and an eighth where it is free
    with caplog.at_level(logging.WARNING):
        assert default.within_limit(CPU, 70 * MIB, 5 * MIB) == (70 * MIB, 5 * MIB)
        assert default.within_limit(CPU, None, 5 * MIB) == (65 * MIB, 5 * MIB)
        assert default.within_limit(gpu, GIB, None) == (GIB, None)
        assert default.within_limit(CPU, None, None, share=0.5)[0] == 28 * MIB * 7 // 8
        assert default.within_limit(CPU, 70 * MIB, None, share=0.5) == (70 * MIB, None)
        assert default.default_bounds(checkpoint, CPU) == (70 * MIB, None)
        most = 80 * MIB - beside_plan(80 * MIB)
        assert default.within_limit(CPU, most, None) == (most, None)
        assert not caplog.records
        assert default.within_limit(CPU, GIB, GIB) == (most, 0)
        assert default.within_limit(gpu, GIB, GIB) == (GIB, most)
    assert "device_memory is 1.0 GiB, but the limit" in caplog.records[0].getMessage()
    assert "75.8 MiB" in caplog.records[0].getMessage()
    assert len(caplog.records) == 3
    kv_on_host = Plan(device_memory="1GiB", kv_placement=qoff.KVPlacement(0, 1))
    found = default.plan_within_limit(kv_on_host, checkpoint, CPU)
    sizes = NativeSizes.of_checkpoint(checkpoint)
    on_host = Memory.of(kv_on_host, sizes.spec, sizes.shapes).total("host")
    assert on_host > 0
    assert found == replace(kv_on_host, device_memory=most - on_host)
    monkeypatch.setattr(default, "left_by_limits", lambda: None)
    assert default.plan_within_limit(kv_on_host, checkpoint, CPU) == kv_on_host


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


def test_a_better_machine_is_never_said_to_be_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan there is the present one, where the search finds nothing as fast."""
    found = explain(sizes(True), machine(True, device=140 * MIB, host=GIB), WORK)
    slow = replace(found.found, decode=replace(found.found.decode, seconds=1e6))
    monkeypatch.setattr("qoff.plan.explain.find_plan", lambda *args, **options: slow)
    changes = {row[0]: float(row[2].removesuffix("x")) for row in found.changes()}
    assert changes.pop("8-bit KV cache") < 1
    assert changes.keys() == {"32.0 GiB more of host memory", "a link twice as fast"}
    assert min(changes.values()) >= 1


def test_what_passes_through_host_memory_is_on_the_device_of_a_cpu() -> None:
    """KV blocks on their way to disk, which no tier of its own has room for."""
    on = machine(device=6 * MIB)
    plain = explain(sizes(), on, WORK)
    memory = plain.found.memory
    host = dict.fromkeys(memory.purposes["host"], 0) | {"KV blocks": MIB}
    staged = replace(memory, purposes={**memory.purposes, "host": host})
    found = replace(plain, found=replace(plain.found, memory=staged))
    assert {row[0] for row in found.tiers()} == {"device", "disk"}
    before, after = plain.bytes_by_tier()["device"], found.bytes_by_tier()["device"]
    moved = memory.purposes["host"].get("KV blocks", 0)
    assert after == before | {"KV blocks": before["KV blocks"] - moved + MIB}
    assert found.values()["bytes"] == found.bytes_by_tier()
    both = (machine(True, host=GIB), sizes(True))
    beside = replace(found, machine=both[0], sizes=both[1])
    assert beside.bytes_by_tier()["host"]["KV blocks"] == MIB


def test_a_model_that_fits_is_said_to_need_no_offloading() -> None:
    found = explain(sizes(), machine(device=GIB), WORK)
    assert any("no offloading" in warning for warning in found.warnings())
    assert [row[0] for row in found.changes()] == ["8-bit KV cache"]


def test_a_change_of_the_bits_of_a_cache_changes_nothing_else() -> None:
    kv = qoff.KVQuant(window=32, sinks=16, attention_top=0.5)
    found = explain(sizes(), machine(device=GIB), WORK, Plan(kv=kv))
    ((_, _, other),) = found._others()
    assert other.kv == replace(kv, k_bits=8, v_bits=8)


def test_the_disk_has_to_have_room_for_the_checkpoint_and_the_plan() -> None:
    found = explain(sizes(), machine(device=6 * MIB), WORK)
    memory = found.found.memory
    spilled = replace(memory, purposes={**memory.purposes, "disk": {"KV cache": MIB}})
    there = {**found.machine.usable, "disk": found.sizes.nbytes + MIB}
    for more, said in ((0, False), (-1, True)):
        on = replace(found.machine, usable={**there, "disk": there["disk"] + more})
        one = replace(found, machine=on, found=replace(found.found, memory=spilled))
        noted = [x for x in one.warnings() if "the plan 1.0 MiB more" in x]
        assert bool(noted) == said


def test_a_bound_of_a_gpu_alone_leaves_host_memory_to_what_is_free(
    free: dict[str, int], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")
    gpu, free["host"] = torch.device("cuda"), 6 * MIB
    assert default.host_bound(gpu, 5 * MIB, None) == 6 * MIB
    assert default.host_bound(gpu, 5 * MIB, None, share=0.5) == 3 * MIB
    assert default.host_bound(gpu, 5 * MIB, 0) == 0
    assert default.host_bound(gpu, None, None) is default.host_bound(CPU, 5 * MIB, None) is None
    plan, checkpoint = Plan(device_memory=5 * MIB), Checkpoint.open(path)
    assert default.plan_within_limit(plan, checkpoint, gpu).host_memory == 6 * MIB
    none = replace(plan, host_memory=0)
    assert default.plan_within_limit(none, checkpoint, gpu) == none
    assert default.plan_within_limit(plan, checkpoint, CPU) == plan


def test_on_a_gpu_codes_of_six_bits_are_counted_as_bytes(
    free: dict[str, int], tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    source = tiny_model(tmp_path_factory.getbasetemp(), "llama")
    quant = QuantConfig(bits=6, head_bits=6, group_size=32, solver="rtn")
    checkpoint = Checkpoint.open(convert(source, tmp_path / "six", quant=quant))
    stored = sum(file.nbytes for file in checkpoint.files)
    placed = plan_residency(checkpoint, None, packing="split32").resident_bytes
    assert placed > stored
    for tight, roomy, device in ((stored, placed, "cuda"), (stored - 4096, stored, "cpu")):
        where = torch.device(device)
        free["device"] = tight + 256 * MIB
        assert default.default_bounds(checkpoint, where)[0] == free["device"]
        free["device"] = roomy + 257 * MIB
        assert default.default_bounds(checkpoint, where) == (None, None)

"""Experts of the CPU that pass through the device for passes of many tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from qoff.checkpoint import Checkpoint
from qoff.engine import LLM, gpu_executor
from qoff.errors import DiskReadError
from qoff.memory import plan_residency
from qoff.memory.experts import ExpertWave
from qoff.memory.io.cuda_transfers import CudaTransfers
from qoff.memory.io.transfers import UnitRead
from qoff.memory.plan import placement
from qoff.models.convert.convert import convert
from qoff.models.native.choices import Choice, Pairs
from qoff.models.native.experts import Experts
from qoff.models.runtime import Runtime
from qoff.plan import Plan
from qoff.plan.processor import Processor
from qoff.plan.profile import Link
from tests.engine.test_llm_device import ON_GPU
from tests.instruments import threads_beside
from tests.memory.kinds import SimulatedStream
from tests.models.cpu_experts import (
    FAMILIES,
    HOOKS,
    PARAMS,
    PLAIN_KV,
    PROMPTS,
    SMALL,
    TOKENS,
    Model,
    logits_of,
    opened,
    slots_of,
)
from tests.models.test_triton_decoder import KV8
from tests.plan.machines import machine
from tests.tiny_models import QUANT, save_model
from tests.tolerances import FLOAT16_LOGITS, assert_close

pytestmark = pytest.mark.usefixtures("few_programs")


@pytest.mark.parametrize("family", FAMILIES)
def test_passes_of_many_tokens_bring_them_to_the_device(
    models: Callable[[str], Model], family: str
) -> None:
    """A prompt does, and its experts are those of the device; the next token leaves them."""
    model = models(family)
    with opened(model, min(slots_of(model, True)), passing_from=4) as runtime:
        plan, arena, experts = runtime.residency, runtime.store.arena, runtime.spec.experts
        assert experts is not None
        assert_close(logits_of(runtime), model.logits, tolerance=FLOAT16_LOGITS[0])
        done = runtime.store.stats.experts
    layers = sum(experts.layers)
    assert plan.passing
    assert arena.used == plan.device_bytes - plan.workspace
    assert done.on_cpu <= experts.top_k * layers
    assert done.on_cpu or family == "llama4"
    assert done.passed >= experts.top_k


def test_experts_that_pass_are_computed_as_any_on_the_device(
    models: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, however many come together, on their way past a copy stream, too."""
    model = models("qwen3-moe")
    with opened(model, 2, cpu_experts=False) as runtime:
        expected = logits_of(runtime)
    for together in (1, 3, 32):
        monkeypatch.setattr(placement, "passing_together", lambda _, count=together: count)
        more = {} if ON_GPU else {"transfers": CudaTransfers("cpu", stream=SimulatedStream)}
        for how in ({}, more):
            with opened(model, max(slots_of(model, True)), passing_from=0, **how) as runtime:
                plan, cache = runtime.residency, runtime.store.experts
                assert cache is not None
                assert torch.equal(logits_of(runtime), expected)
                done, raw = cache.stats, plan.cpu_expert_bytes // len(plan.cpu_experts)
                assert done.on_cpu == 0 < done.passed
                fetched = (done.misses + done.guessed) * plan.expert_bytes
                assert done.bytes == fetched + done.passed * raw


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
def test_codes_that_the_device_widens_pass_as_they_stream(
    tmp_path: Path, device: str, bits: int
) -> None:
    """Of experts that do not lie alike in the pages of their file; as where all of them stay."""
    save_model(tmp_path / "model", "gpt-oss", **SMALL, **FAMILIES["gpt-oss"])
    quant = replace(QUANT, bits=bits)
    path = convert(tmp_path / "model", tmp_path / "checkpoint", quant=quant)
    everything = plan_residency(Checkpoint.open(path), None, packing="split32").device_bytes
    model, found = Model(path, device, torch.empty(0), everything), list[Tensor]()
    for how in ({"cpu_experts": False}, {"passing_from": 0}):
        with opened(model, max(slots_of(model, True)), **how) as runtime:
            found.append(logits_of(runtime))
            assert (runtime.store.stats.experts.passed > 0) == ("passing_from" in how)
    assert torch.equal(*found)
    how = {"kv": KV8, "device": device, "dtype": torch.float16}
    with Runtime(path, instrumentation=HOOKS, **how) as runtime:
        assert not runtime.residency.slots
        assert_close(logits_of(runtime), found[0], tolerance=FLOAT16_LOGITS[0])


def test_passes_of_few_tokens_leave_experts_where_they_are(
    models: Callable[[str], Model],
) -> None:
    model = models("gpt-oss")
    least = min(slots_of(model, True))
    with opened(model, least, passing_from=TOKENS) as runtime:
        found, done = logits_of(runtime), runtime.store.stats.experts
        experts = runtime.residency.cpu_experts
    with opened(model, least) as runtime:
        assert runtime.residency.cpu_experts == experts
        assert torch.equal(found, logits_of(runtime))
        assert done.on_cpu == runtime.store.stats.experts.on_cpu > 0 == done.passed


@pytest.mark.parametrize("error", [DiskReadError, KeyboardInterrupt])
def test_a_way_that_was_broken_off_is_gone_again(
    models: Callable[[str], Model], error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, before = models("gpt-oss"), set(threading.enumerate())
    with opened(model, min(slots_of(model, True)), passing_from=0) as runtime:
        expected, cache = logits_of(runtime), runtime.store.experts
        assert cache is not None
        passing = cache.passing
        assert passing is not None
        steps = (passing._transfers, "copy_unit"), (UnitRead, "wait"), (passing, "_repack")
        for at, step in steps:
            with monkeypatch.context() as patch:
                patch.setattr(at, step, Mock(side_effect=error("broken")))
                with pytest.raises(error, match="broken"):
                    logits_of(runtime)
            assert torch.equal(logits_of(runtime), expected)
            assert len(passing._free) + len(passing._coming) == 2
    assert not threads_beside(before)


def bounded(model: Model, plan: Plan) -> Plan:
    """The plan with memory for a few experts on the device."""
    with LLM(model.path, plan, device=model.device, _instrumentation=HOOKS) as llm:
        beside = llm._rounds.current.opened.executor.memory_of(llm.plan, tiled=True).total("device")
    return replace(plan, device_memory=beside + slots_of(model, True)[3], host_memory=1 << 26)


def test_rounds_in_which_some_passes_bring_experts_and_some_leave_them(
    models: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass goes by its own tokens, so nothing depends on what it shares a round with."""
    model, mixed = models("qwen3-moe"), list[bool]()
    compute, compute_wave = Experts._compute_pairs, Experts._compute_wave

    def computed(self: Experts, some: list[Pairs], *how: Any) -> None:
        for choice, places, _ in some:
            ids = choice.ids.flatten()[places]
            assert choice.on_cpu is None or not choice.on_cpu[ids].any()
        compute(self, some, *how)

    def wave_computed(self: Experts, choices: list[Choice], wave: ExpertWave, *how: Any) -> None:
        mixed.append(wave.passing and any(choice.on_cpu is not None for choice in choices))
        compute_wave(self, choices, wave, *how)

    monkeypatch.setattr(Experts, "_compute_pairs", computed)
    monkeypatch.setattr(Experts, "_compute_wave", wave_computed)
    plan = Plan(batch_size=1, batches=2, context=64, prefill_tokens=3, kv=PLAIN_KV)
    plan = replace(bounded(model, plan), cpu_experts=True, cpu_expert_tokens=1)
    found, done = [], []
    for schedule in ("block", "sequential"):
        where: dict[str, Any] = {"device": model.device, "_instrumentation": HOOKS}
        some = replace(plan, schedule=schedule)
        with LLM(model.path, some, **where) as llm:
            found.append([one.token_ids for one in llm.generate(PROMPTS, PARAMS)])
            done.append(llm.runtime.store.stats.experts)
            assert llm.residency.passing_from == 2
            used = llm.residency.device_bytes + llm.memory.total("device")
            assert used <= (plan.device_memory or 0)
        if schedule == "block":
            assert any(mixed)
            mixed.clear()
    assert found[0] == found[1]
    assert done[0].on_cpu == done[1].on_cpu > 0 < done[0].passed <= done[1].passed
    assert not any(mixed)


@pytest.mark.parametrize("link", [1e6, 1e15])
def test_who_computes_is_decided_by_the_rates_of_the_machine(
    models: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch, link: float
) -> None:
    model = models("qwen3-moe")
    on = replace(machine(True), to_device=Link(link), from_device=Link(1e15))
    on = replace(on, host=Processor.of(1e10, 1e10), device=Processor.of(1e12, 1e12))
    monkeypatch.setattr(gpu_executor, "known_profile", lambda *_: on)
    plan = Plan(batch_size=1, context=64, prefill_tokens=8, kv=PLAIN_KV)
    plan = replace(bounded(model, plan), cpu_experts=True)
    with LLM(model.path, plan, device=model.device, _instrumentation=HOOKS) as llm:
        assert llm.plan.cpu_expert_tokens is not None
        assert (llm.plan.cpu_expert_tokens < 8) == (link > 1e10)
        assert (llm.residency.passing > 0) == (link > 1e10)

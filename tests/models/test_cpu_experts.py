"""Experts that the CPU computes beside a GPU; without one Triton interprets its ops on the CPU."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from qoff.engine import LLM
from qoff.errors import ArgumentError, DiskReadError, OpError
from qoff.kvcache import KVQuant
from qoff.memory.experts.on_cpu import CpuExperts
from qoff.memory.instrumentation import PLAIN
from qoff.memory.io.cuda_transfers import CudaTransfers
from qoff.memory.plan import Expert
from qoff.models.native import cpu_pairs
from qoff.models.native.choices import Choice
from qoff.models.native.cpu_pairs import CpuPairs
from qoff.plan import Plan
from tests.engine.test_llm_device import ON_GPU
from tests.instruments import threads_beside
from tests.memory.kinds import SimulatedStream
from tests.models.cpu_experts import (
    FAMILIES,
    HOOKS,
    PARAMS,
    PROMPTS,
    TOKENS,
    Model,
    logits_of,
    opened,
    slots_of,
)
from tests.models.test_triton_decoder import checkpoint as dense_checkpoint
from tests.models.test_triton_decoder import interpreted
from tests.tolerances import FLOAT16_LOGITS, assert_close

pytestmark = pytest.mark.usefixtures("few_programs")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_are_those_of_the_device(models: Callable[[str], Model], family: str) -> None:
    model = models(family)
    before = set(threading.enumerate())
    with opened(model, 2) as runtime:
        cache, plan, experts = runtime.store.experts, runtime.residency, runtime.spec.experts
        assert cache is not None
        assert experts is not None
        cache.record = []
        assert_close(logits_of(runtime), model.logits, tolerance=FLOAT16_LOGITS[0])
        done = cache.stats
        chosen = {Expert(layer, n) for layer, numbers in cache.record for n in numbers}
        there = np.flatnonzero(cache.now.slots >= 0)
        everyone = [Expert(i, n) for i, count in enumerate(cache.counts) for n in range(count)]
        pairs = TOKENS * experts.top_k * sum(count > 0 for count in cache.counts)
    assert len(plan.cpu_experts) == len(everyone) - 2
    assert not plan.cpu_experts.intersection(chosen)
    assert not plan.cpu_experts.intersection(everyone[key] for key in there)
    assert pairs / 2 < done.on_cpu <= pairs
    assert done.bytes == (done.misses + done.guessed) * plan.expert_bytes
    assert not threads_beside(before)


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_no_bit_depends_on_the_cache_of_the_device(
    models: Callable[[str], Model], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models(family)
    most = max(slots_of(model))
    with opened(model, 2) as runtime:
        plan = runtime.residency
    count = len(plan.cpu_experts)
    host = plan.host_bytes - (count - 3) * plan.cpu_expert_bytes // count
    found: list[Tensor] = []
    on_cpu, event = set[frozenset[Expert]](), Mock()
    if not ON_GPU:
        monkeypatch.setattr(cpu_pairs, "_marked", lambda _: event)  # as on a GPU
    for slots, together in ((2, 4096), (most, 4096), (2, 5)):
        monkeypatch.setattr(cpu_pairs, "WAVE_PAIRS", together)
        with opened(model, slots, host_memory=host) as runtime:
            assert runtime.residency.host_bytes <= host
            on_cpu.add(runtime.residency.cpu_experts)
            found.append(logits_of(runtime))
            done = runtime.store.stats.experts
            assert done.misses > 0 < done.on_cpu
        assert ON_GPU or event.synchronize.call_count
    assert len(on_cpu) == 1
    assert {one.layer for one in on_cpu.pop()} == {0, 1}
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("error", [OpError, KeyboardInterrupt])
def test_what_goes_wrong_in_the_thread_reaches_the_caller(
    models: Callable[[str], Model], error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, before = models("qwen3-moe"), set(threading.enumerate())
    with opened(model, 2) as runtime:
        expected = logits_of(runtime)
        with monkeypatch.context() as patch:
            patch.setattr(cpu_pairs, "_compute", Mock(side_effect=error("broken")))
            # A thread that died of what is no `Exception` computes no more.
            raised = DiskReadError if error is KeyboardInterrupt else error
            with pytest.raises(raised, match="broken"):
                logits_of(runtime)
        if raised is error:
            assert torch.equal(logits_of(runtime), expected)
    assert not threads_beside(before)


def test_an_interrupt_leaves_nothing_running(
    models: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, compute = models("qwen3-moe"), cpu_pairs._compute
    begun, ended = Mock(), Mock()

    def slow(*arguments: Any) -> Tensor:
        begun()
        time.sleep(0.05)
        found = compute(*arguments)
        ended()
        return found

    with opened(model, 2) as runtime:
        expected = logits_of(runtime)
        with monkeypatch.context() as patch:
            patch.setattr(cpu_pairs, "_compute", slow)
            patch.setattr(CpuExperts, "join", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                logits_of(runtime)
        assert begun.call_count == ended.call_count > 0
        assert torch.equal(logits_of(runtime), expected)


@interpreted
def test_on_their_way_past_a_copy_stream(models: Callable[[str], Model]) -> None:
    model = models("gpt-oss")
    with opened(model, 2) as runtime:
        expected = logits_of(runtime)
    transfers = CudaTransfers("cpu", stream=SimulatedStream)
    with opened(model, 2, transfers=transfers) as runtime:
        plan = runtime.residency
        assert plan.host_staging == 2
        assert runtime.store.host_arena.used <= plan.host_bytes
        assert torch.equal(logits_of(runtime), expected)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes that `cpu_pairs` has allocated: those that are there, and the most at a time."""
    empty, count = torch.empty, {"now": 0, "most": 0}

    def given_back(nbytes: int) -> None:
        count["now"] -= nbytes

    def counted(*shape: Any, **options: Any) -> Tensor:
        found = empty(*shape, **options)
        if sys._getframe(1).f_globals["__name__"] == cpu_pairs.__name__:
            count["now"] += found.nbytes
            count["most"] = max(count.values())
            weakref.finalize(found, given_back, found.nbytes)
        return found

    monkeypatch.setattr(torch, "empty", counted)
    return count


def test_batches_of_an_llm(
    models: Callable[[str], Model], taken: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, compute = models("qwen3-moe"), cpu_pairs._compute
    plan = Plan(batch_size=1, batches=5, context=64, prefill_tokens=8, kv=KVQuant(8, 8, window=16))
    together, asked, finish = list[int](), threading.Event(), CpuPairs.finish

    def computed(*arguments: Any) -> Tensor:
        together.append(len(arguments[3]))
        assert asked.wait(20)
        return compute(*arguments)

    def finished(pairs: CpuPairs, choices: list[Choice]) -> None:
        asked.set()
        finish(pairs, choices)

    where: dict[str, Any] = {"device": model.device, "_instrumentation": HOOKS}
    with LLM(model.path, plan, **where) as llm:
        assert llm.memory.total("host") == 0
        memory = llm._rounds.current.opened.executor.memory_of(llm.plan, tiled=True)
        expected = [one.token_ids for one in llm.generate(PROMPTS, PARAMS)]
    plan = replace(plan, cpu_experts=True, host_memory=1 << 26)
    found, most = [], []
    monkeypatch.setattr(cpu_pairs, "_compute", computed)
    monkeypatch.setattr(CpuPairs, "finish", finished)
    for schedule in ("block", "sequential"):
        together.clear()
        asked.clear()
        budget = memory.total("device") + slots_of(model)[3]
        some = replace(plan, schedule=schedule, device_memory=budget)
        with LLM(model.path, some, **where) as llm:
            found.append([one.token_ids for one in llm.generate(PROMPTS, PARAMS)])
            done, residency = llm.runtime.store.stats.experts, llm.runtime.residency
            counted = llm.memory.total("host")
            assert counted >= taken["most"] > 0 < done.on_cpu
            assert counted + residency.host_bytes <= 1 << 26
        most.append(max(together))
    assert found[0] == found[1]
    assert most[0] > most[1] == 1  # passes of a round are computed together
    assert [one[0] for one in found[0]] == [one[0] for one in expected]


def test_what_has_no_experts_for_the_cpu_is_refused(
    models: Callable[[str], Model], tmp_path: Path
) -> None:
    model, plan = models("qwen3-moe"), Plan(context=64, cpu_experts=True)
    for path, device, hooks, message in (
        (model.path, "cpu", PLAIN, "a CPU computes all experts"),
        (model.path, model.device, HOOKS, "no expert stays in host memory"),
        (dense_checkpoint(tmp_path), model.device, HOOKS, "needs a mixture"),
    ):
        with pytest.raises(ArgumentError, match=message) as refused:
            LLM(path, plan, device=device, _instrumentation=hooks)
        assert "\n" not in str(refused.value)
    with pytest.raises(ArgumentError, match="cpu_experts is 1"):
        Plan(cpu_experts=1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="cpu_expert_tokens is -1; use None or a whole number"):
        Plan(cpu_experts=True, cpu_expert_tokens=-1)
    with pytest.raises(ArgumentError, match="cpu_expert_tokens needs cpu_experts"):
        Plan(cpu_expert_tokens=8)

"""Experts that the CPU computes beside a GPU; without one Triton interprets its ops on the CPU."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from qoff.checkpoint import Checkpoint
from qoff.engine import LLM, SamplingParams, gpu_executor
from qoff.errors import ArgumentError, BudgetError, DiskReadError, OpError
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.reference.experts import activate
from qoff.kvcache import KVQuant
from qoff.memory import plan_residency
from qoff.memory.experts import ExpertWave
from qoff.memory.experts.on_cpu import CpuExperts
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.memory.io.cuda_transfers import CudaTransfers
from qoff.memory.io.transfers import UnitRead
from qoff.memory.plan import Expert, Layouts, placement
from qoff.models.convert.convert import convert
from qoff.models.forward_pass import ForwardPass
from qoff.models.native import cpu_pairs
from qoff.models.native.choices import Choice, Pairs
from qoff.models.native.cpu_pairs import CpuPairs
from qoff.models.native.experts import Experts
from qoff.models.runtime import Runtime
from qoff.plan import Plan
from qoff.plan.processor import Processor
from qoff.plan.profile import Link
from tests.engine.test_llm_device import ON_GPU
from tests.instruments import POISON, threads_beside
from tests.memory.kinds import SimulatedStream
from tests.models.test_triton_decoder import KV8, interpreted, triton_ops
from tests.models.test_triton_decoder import checkpoint as dense_checkpoint
from tests.plan.machines import machine
from tests.tiny_models import QUANT, save_model
from tests.tolerances import FLOAT16_LOGITS, assert_close
from tests.triton_module import interpret_few

HOOKS = POISON if ON_GPU else Instrumentation(poison=True, ops=triton_ops)
SMALL: dict[str, Any] = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL |= {"num_hidden_layers": 2, "vocab_size": 32, "intermediate_size": 32}
READ = [5, 9, 11, 3, 30, 17, 8], [12]
TOKENS = sum(map(len, READ))
PROMPTS = [[5, 9, 11, 3], [30, 17], [8, 12, 4, 21, 6], [7, 7], [19, 25, 10]]
PLAIN_KV = KVQuant(8, 8, window=16)
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
# Without biases, with them, beside a shared expert or an MLP, and with weights of inputs.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"decoder_sparse_step": 1, "num_experts": 32},
    "gpt-oss": {},
    "qwen2-moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "gemma4-moe": {
        "num_global_key_value_heads": 1,
        "global_head_dim": 512,
        "sliding_window": 40,
        "moe_intermediate_size": 32,
    },
    "llama4": {"no_rope_layer_interval": 2, "attention_chunk_size": 40},
}


@pytest.fixture(
    scope="module",
    params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)],
    autouse=True,
)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "interpreter" and ON_GPU:
        pytest.skip("Triton interprets kernels only where there is no GPU")
    return "cuda" if request.param == "cuda" else "cpu"


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only attention, cache and experts are Triton's; the decoder's tests run it on all kernels."""
    if not ON_GPU:
        interpret_few(monkeypatch, w4_linear)


def w4_linear(x: Tensor, weight: QTensor, bias: Tensor | None, end: Any, scratch: Any) -> Tensor:
    """`kernels.triton.linear.linear.w4_linear` in torch."""
    y = x.float() @ weight.dequantize().T
    y = (y if bias is None else y + bias).to(x.dtype)
    y = activate(y, "silu") if end.silu_mul else y
    y = y if end.residual is None else y + end.residual
    return y if end.out is None else end.out.copy_(y)


@dataclass(frozen=True, eq=False)
class Model:
    """A mixture, its logits where all of it is on the device, and the bytes that this takes."""

    path: Path
    device: str
    logits: Tensor
    nbytes: int


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, device: str) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def model(family: str) -> Model:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            save_model(folder / "model", family, **SMALL, **FAMILIES[family])
            path = convert(folder / "model", folder / "checkpoint", quant=QUANT)
            with Runtime(path, kv=KV8, device=device, instrumentation=HOOKS) as runtime:
                logits, plan = logits_of(runtime), runtime.residency
            made[family] = Model(path, device, logits, plan.device_bytes)
        return made[family]

    return model


def logits_of(runtime: Runtime) -> Tensor:
    """Those of a prompt and of a token after it."""
    cache, found = runtime.new_cache(1), list[Tensor]()
    for tokens in READ:
        ragged = Ragged.of([len(tokens)], cache.lengths)
        run = ForwardPass(torch.tensor(tokens), ragged, cache, None)
        found.append(runtime.forward(run).cpu().clone())
    return torch.cat(found)


@cache
def slots_of(model: Model, passing: bool = False) -> dict[int, int]:
    """A budget for each number of slots that the device may have for experts.

    passing: with room for one that passes through it.
    """
    checkpoint, found = Checkpoint.open(model.path), dict[int, int]()
    how: dict[str, Any] = {"packing": "split32", "layouts": Layouts(checkpoint, "split32")}
    how |= {"cpu_experts": True, "passing_from": 0} if passing else {}
    with contextlib.suppress(BudgetError):
        for budget in range(model.nbytes, 0, -1024):
            slots = plan_residency(checkpoint, budget, **how).expert_slots
            found[slots] = budget
    return {slots: found[slots] for slots in sorted(found) if slots}


def opened(model: Model, slots: int, **options: Any) -> Runtime:
    """With so many slots for experts on the device."""
    given: dict[str, Any] = {"host_memory": 1 << 30, "cpu_experts": True, **options}
    budget = slots_of(model, "passing_from" in options)[slots]
    given = {"device": model.device, "device_memory": budget, **given}
    return Runtime(model.path, kv=KV8, instrumentation=HOOKS, **given)


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
    with Runtime(path, kv=KV8, device=device, instrumentation=HOOKS) as runtime:
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

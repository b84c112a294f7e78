"""Rounds that are off what is expected: what changes then, and that no token does."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from collections.abc import Sequence as Sequence_
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, product
from pathlib import Path

import pytest
import torch

from qoff.engine import LLM, SamplingParams
from qoff.engine.adapting import Adapter, adapter_of
from qoff.engine.answers import completion
from qoff.engine.executor import Executor
from qoff.engine.request import Sequence
from qoff.engine.rounds import Rounds
from qoff.engine.schedule import Schedule
from qoff.engine.simulated.executor import open_simulated
from qoff.engine.simulated.machine import VirtualMachine
from qoff.errors import BudgetError
from qoff.kvcache import KVQuant
from qoff.kvcache.store.placement import KVPlacement
from qoff.memory.io.virtual import VirtualClock
from qoff.models.forward_pass import ForwardPass
from qoff.plan import Plan
from qoff.plan.adapt import Knobs, Load
from qoff.plan.profile import Link, MachineProfile
from qoff.plan.sizes import ModelSizes
from qoff.quant import QuantConfig
from tests.plan.machines import MIB, SMALL, machine
from tests.tiny_models import tiny_checkpoint

FAST = 5e9
PLAN = Plan(
    batch_size=2,
    batches=3,
    context=512,
    prefill_tokens=128,
    kv=KVQuant(window=16),
    device_memory=29 * MIB // 4,
    schedule="sequential",
)


@dataclass
class Virtual:
    """Rounds in virtual time."""

    machine: VirtualMachine
    rounds: Rounds
    adapter: Adapter | None

    def answer(self, tokens: int, count: int = 6, prompt: int = 100) -> list[float]:
        """Seconds of the rounds of some sequences."""
        first = len(self.rounds.history)
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        ask = tuple(range(prompt))
        groups = [[Sequence(i, 0, None, ask, params, tokens, frozenset())] for i in range(count)]
        list(self.rounds.answers(groups))
        return [one.seconds for one in self.rounds.history[first:]]


@contextmanager
def virtual(plan: Plan) -> Iterator[Virtual]:
    profile = replace(machine(), disk_read=Link(FAST, 1e-5, 0.0))
    model = ModelSizes.of(SMALL | {"num_hidden_layers": 4}, QuantConfig(packing="rows16"))
    with ExitStack() as own:
        there = VirtualMachine(profile, VirtualClock())
        executor: Executor = open_simulated(model.checkpoint, plan, there, own)
        there.loading = False
        hooks = executor.instrumentation
        store = executor.runtime.store
        schedule = _Zeros(executor.runtime.decoder, store, plan.schedule, hooks)
        adapter = adapter_of(executor, schedule, profile)
        rounds = Rounds(plan, executor, schedule, partial(completion, tokenizer=None), adapter)
        yield Virtual(there, rounds, adapter)


class _Zeros(Schedule):
    """Logits that are there."""

    def round(self, passes: Sequence_[ForwardPass]) -> list[torch.Tensor]:
        return [torch.zeros_like(logits) for logits in super().round(passes)]


def _mean(seconds: list[float]) -> float:
    return sum(seconds) / len(seconds)


def test_a_throttled_disk_changes_the_schedule(caplog: pytest.LogCaptureFixture) -> None:
    with virtual(PLAN) as run:
        assert run.adapter is not None
        run.answer(30)
        assert run.adapter.knobs.schedule == "sequential"
        assert not caplog.messages
        run.machine.read.rate = FAST / 50
        throttled = run.answer(60)
    assert run.adapter.knobs.schedule == "block"
    assert len(caplog.messages) == 1
    said = caplog.messages[0]
    assert re.search(r"disk read 5 to 0\.0\d+ GB/s", said)
    assert "schedule block, not sequential" in said
    assert "opened anew with" in said  # batches are what memory is taken for
    with virtual(replace(PLAN, adapt=False)) as other:
        assert other.adapter is None
        other.machine.read.rate = FAST / 50
        fixed = other.answer(60)
    assert _mean(throttled[:10]) == pytest.approx(_mean(fixed[:10]), rel=0.05)
    assert _mean(throttled[-20:]) < 0.5 * _mean(fixed[-20:])  # of which 4.5 ms is Python's


def test_a_disk_that_recovers_is_used_again() -> None:
    with virtual(replace(PLAN, schedule="block")) as run:
        run.machine.read.rate = FAST / 50
        run.answer(40)
        assert run.adapter is not None
        slow = run.adapter._running.machine.disk_read.bytes_per_s
        run.machine.read.rate = FAST
        run.answer(40)
        fast = run.adapter._running.machine.disk_read.bytes_per_s
    assert slow == pytest.approx(FAST / 50, rel=0.1)
    assert fast > 20 * slow


def test_what_goes_wrong_in_it_costs_no_answer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Adapter, "observe", lambda *_: 1 // 0)
    with virtual(PLAN) as run:
        assert len(run.answer(5)) > 5
    (said,) = caplog.records
    assert said.exc_info is not None


def test_a_plan_opened_anew_leaves_room_for_adapters_and_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = list[int]()

    def find(_: ModelSizes, machine: MachineProfile, *__: object) -> None:
        given.append(sum(machine.usable.values()))
        raise BudgetError("enough")

    monkeypatch.setattr("qoff.plan.adapt.find_plan", find)
    with virtual(PLAN) as run:
        assert run.adapter is not None
        running = run.adapter._running
        running.reopened(run.adapter.knobs, Load(2, 1, 100), 2)
        running._memory = running._memory.beside({"adapters": 1000, "draft model": 2000})
        running.reopened(run.adapter.knobs, Load(2, 1, 100), 2)
    assert given[0] - given[1] == 3000


def test_rounds_as_expected_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with virtual(PLAN) as run:
        run.answer(60)
        assert run.adapter is not None
        assert run.adapter.knobs == Knobs("sequential", 3, 3)
    assert not caplog.messages


def test_a_bound_on_latency_admits_fewer() -> None:
    """KV cache on disk, of all sequences, is what a slow disk brings in each round."""
    on_disk = KVPlacement(0, 0)
    bound = 0.012
    plan = replace(PLAN, schedule="block", kv_placement=on_disk, token_s=bound, device_memory=None)
    with virtual(plan) as run:
        run.machine.read.rate = FAST / 100
        found = run.answer(25, count=12, prompt=250)
        assert run.adapter is not None
        assert run.adapter.knobs.batches < 3
    assert found[6] > bound
    assert _mean(found[-20:]) < bound


def test_no_token_depends_on_what_changes(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All knobs in turn, a round each: tokens and log-probabilities are those without."""
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64-deep")
    numbers = torch.Generator().manual_seed(0)
    prompts = [torch.randint(100, (n,), generator=numbers).tolist() for n in (90, 250, 40, 200, 77)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    plan = replace(
        PLAN,
        kv_placement=KVPlacement(0.3, 0.3),
        activations="host",
        spill_folder=tmp_path,
        device_memory=None,
        adapt=False,
    )
    with LLM(path, plan, device="cpu") as llm:
        wanted = [(one.token_ids, one.logprobs) for one in llm.generate(prompts, params)]
    knobs = cycle(Knobs(*one) for one in product(("block", "sequential"), (1, 3), (1, 2, 3)))

    def restless(self: Adapter, *_: object) -> None:
        self.knobs = next(knobs)
        self._schedule.kind = self.knobs.schedule

    monkeypatch.setattr(Adapter, "observe", restless)
    with LLM(path, replace(plan, adapt=True), device="cpu") as llm:
        found = [(one.token_ids, one.logprobs) for one in llm.generate(prompts, params)]
        assert len(llm.rounds) > 9
    assert found == wanted

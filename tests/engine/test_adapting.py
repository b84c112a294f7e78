"""Rounds that are off what is expected: what changes then, and that no token does."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.planner.virtual_rounds import SimulatedRounds
from qoff.engine import LLM, SamplingParams
from qoff.engine.adapting import Adapter, _load
from qoff.engine.calls import Call
from qoff.engine.request import Sequence
from qoff.kernels.layout.ragged import Ragged
from qoff.kvcache import KVQuant
from qoff.kvcache.store.placement import KVPlacement
from qoff.plan import Plan
from qoff.plan.adapt import Knobs, Load, RunningPlan
from qoff.plan.native_sizes import NativeSizes
from qoff.plan.profile import Link
from qoff.plan.reopen import Better
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
    device_memory=7 * MIB,
    schedule="sequential",
)


@pytest.fixture(autouse=True)
def seconds_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of this model take seconds, however slow the disk is."""
    monkeypatch.setattr("qoff.engine.adapting._LEAST_S", 0.0)


class Virtual(SimulatedRounds):
    """Rounds in virtual time."""

    def seconds(self, tokens: int, count: int = 6, prompt: int = 100) -> list[float]:
        """Of the rounds of some sequences."""
        return [one.seconds for one in self.answer(count, prompt, tokens)]


def virtual(plan: Plan) -> Virtual:
    profile = replace(machine(), disk_read=Link(FAST, 1e-5, 0.0))
    model = NativeSizes.of(SMALL | {"num_hidden_layers": 4}, QuantConfig(packing="rows16"))
    return Virtual(model, plan, profile)


def _mean(seconds: list[float]) -> float:
    return sum(seconds) / len(seconds)


def test_a_throttled_disk_changes_the_schedule(caplog: pytest.LogCaptureFixture) -> None:
    with virtual(PLAN) as run:
        assert run.adapter is not None
        run.seconds(30)
        assert run.adapter.knobs.schedule == "sequential"
        assert not caplog.messages
        run.machine.read.rate = FAST / 50
        throttled = run.seconds(60)
    assert run.adapter.knobs.schedule == "block"
    assert len(caplog.messages) == 1
    said = caplog.messages[0]
    assert re.search(r"disk read 5 to 0\.0\d+ GB/s", said)
    assert "schedule block, not sequential" in said
    assert "opened anew with" in said  # batches are what memory is taken for
    with virtual(replace(PLAN, adapt=False)) as other:
        assert other.adapter is None
        other.machine.read.rate = FAST / 50
        fixed = other.seconds(60)
    assert _mean(throttled[:10]) == pytest.approx(_mean(fixed[:10]), rel=0.05)
    assert _mean(throttled[-20:]) < 0.5 * _mean(fixed[-20:])  # of which 4.5 ms is Python's


def test_a_disk_that_recovers_is_used_again() -> None:
    with virtual(replace(PLAN, schedule="block")) as run:
        run.machine.read.rate = FAST / 50
        run.seconds(40)
        assert run.adapter is not None
        slow = run.adapter._running.machine.disk_read.bytes_per_s
        run.machine.read.rate = FAST
        run.seconds(40)
        fast = run.adapter._running.machine.disk_read.bytes_per_s
    assert slow == pytest.approx(FAST / 50, rel=0.1)
    assert fast > 20 * slow


def test_what_goes_wrong_in_it_costs_no_answer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Adapter, "observe", lambda *_: 1 // 0)
    with virtual(PLAN) as run:
        assert len(run.seconds(5)) > 5
    (said,) = caplog.records
    assert said.exc_info is not None


def test_rounds_as_expected_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with virtual(PLAN) as run:
        run.seconds(60)
        assert run.adapter is not None
        assert run.adapter.knobs == Knobs("sequential", 3, 3)
    assert not caplog.messages


def test_drafted_tokens_are_part_of_what_rounds_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: Any = [SimpleNamespace(ragged=Ragged.of([4, 4, 1], [10, 20, 30]), cache=None)]
    load = _load(passes)
    assert load == Load(3, 1, 20, drafted=2)
    asked = list[int]()
    seconds = RunningPlan.seconds

    def noted(self: RunningPlan, load: Load, schedule: str) -> float:
        asked.append(load.drafted)
        return seconds(self, load, schedule)

    with virtual(replace(PLAN, token_s=1.0)) as run:
        assert run.adapter is not None
        running = run.adapter._running
        monkeypatch.setattr(RunningPlan, "seconds", noted)
        running.best(run.adapter.knobs, load, 6)
    assert set(asked) == {2}


def test_a_bound_on_latency_admits_fewer() -> None:
    """KV cache on disk, of all sequences, is what a slow disk brings in each round."""
    on_disk = KVPlacement(0, 0)
    bound = 0.012
    plan = replace(PLAN, schedule="block", kv_placement=on_disk, token_s=bound, device_memory=None)
    with virtual(plan) as run:
        run.machine.read.rate = FAST / 100
        found = run.seconds(25, count=12, prompt=250)
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
        assert self._opened is not None
        self._opened.schedule.kind = self.knobs.schedule

    monkeypatch.setattr(Adapter, "observe", restless)
    with LLM(path, replace(plan, adapt=True), device="cpu") as llm:
        found = [(one.token_ids, one.logprobs) for one in llm.generate(prompts, params)]
        assert len(llm.rounds) > 9
    assert found == wanted


def test_another_plan_is_opened_where_that_pays(caplog: pytest.LogCaptureFixture) -> None:
    """A disk that slows down while many requests wait: the change costs less than it saves."""
    with virtual(PLAN) as run:
        run.answer(6, 100, 15)
        run.machine.read.rate = FAST / 50
        bytes_before = run.rounds.current.opened.executor.memory.total("device")
        done = run.answer(30, 100, 20)
        ended = [one.ended for one in done]
        took = ended[-1] - ended[0]
        plan = run.rounds.current.plan
        limit = run.rounds.current
        used = limit.memory.total("device") + limit.residency.device_bytes
    assert plan.batches * plan.batch_size < 6
    assert used <= (PLAN.device_memory or 0)
    assert bytes_before > limit.memory.total("device")
    assert sum(one.generated for one in done) == 30 * 20
    said, opened = caplog.messages
    assert re.search(r"saves .* s of what is left and takes .*: as soon as the running", said)
    assert opened.startswith("opened anew in")
    caplog.clear()
    with virtual(replace(PLAN, adapt="rounds")) as run:
        run.answer(6, 100, 15)
        run.machine.read.rate = FAST / 50
        ended = [one.ended for one in run.answer(30, 100, 20)]
        assert run.rounds.current.plan.batches == 3
    assert took < 0.5 * (ended[-1] - ended[0])
    assert len(caplog.messages) == 1


def test_too_little_work_is_not_worth_a_change(caplog: pytest.LogCaptureFixture) -> None:
    with virtual(PLAN) as run:
        run.machine.read.rate = FAST / 50
        run.answer(6, 100, 60)  # all of them run
        assert run.rounds.current.plan == PLAN
        run.answer(6, 100, 3)
        assert run.rounds.current.plan == PLAN
    assert "saves 0 s" in caplog.text


def test_a_plan_is_kept_for_some_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever seems to be better meanwhile; what still does when the time has come is opened."""
    other = replace(PLAN, batch_size=3, batches=2)

    def better(running: RunningPlan, *_: object) -> Better:
        return Better(PLAN if running.plan == other else other, 3.0, 100.0, 0.0, 0)

    monkeypatch.setattr("qoff.engine.adapting.better_plan", better)
    with virtual(PLAN) as run:

        def answered(rate: float, after: float) -> Plan:
            run.machine.clock.sleep_until(run.machine.clock.now() + after)
            run.machine.read.rate = rate
            run.answer(24, 100, 12)
            return run.rounds.current.plan

        assert answered(FAST / 50, 0) == other
        assert answered(FAST, 100) == other
        assert answered(FAST, 700) == PLAN


def test_a_link_that_recovers_meanwhile_changes_what_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The running sequences end slowly; before they have, the reason for that plan is gone."""
    wanted = list[Plan]()
    observe = Adapter.observe
    with virtual(PLAN) as run:

        def noted(self: Adapter, *arguments: Any) -> None:
            observe(self, *arguments)
            wanted.extend([] if self.wanted is None else [self.wanted])
            if len(wanted) == 3:
                run.machine.read.rate = FAST

        monkeypatch.setattr(Adapter, "observe", noted)
        run.machine.read.rate = FAST / 50
        run.answer(18, 100, 60)
        assert wanted
        assert run.rounds.current.plan != wanted[0]


def test_few_requests_to_a_server_leave_places_for_more() -> None:
    """A client alone would be answered sooner with one place, and others would wait for it."""

    class Client(Call):
        follows = math.inf

    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for call, least in ((Call(), 1), (Client(), 6)):
        with virtual(PLAN) as run:
            run.machine.read.rate = FAST / 50
            places = list[int]()
            one = Sequence(0, 0, None, tuple(range(100)), params, 60, frozenset())

            def noted(*given: Any, places: list[int] = places) -> None:
                places.append(given[-1])

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("qoff.engine.adapting.better_plan", noted)
                list(run.rounds.answers([[one]], call))
            assert set(places) == {least}


def test_what_stays_open_ended_counts_for_some_minutes() -> None:
    """A server does not know what comes: a change pays as if the load went on."""

    class Client(Call):
        follows = math.inf

    with virtual(PLAN) as run:
        run.machine.read.rate = FAST / 50
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        call = Client()
        ask = tuple(range(100))
        groups = [[Sequence(i, 0, None, ask, params, 60, frozenset())] for i in range(6)]
        assert len(list(run.rounds.answers(groups, call))) == 6
        assert run.rounds.current.plan != PLAN  # while nobody waited
        assert not run.rounds._places.calls

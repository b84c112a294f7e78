"""Mixtures in virtual time: the bytes of the engine for the same routes, and as many hits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qoff.checkpoint import Checkpoint
from qoff.engine.simulated import Driver, Simulation, simulated
from qoff.engine.simulated.experts import Router
from qoff.kernels.processor import usable_threads
from qoff.memory.experts import ExpertCache
from qoff.memory.experts.policy import Lru, NextUse
from qoff.memory.experts.routes import MadeUpRoutes, RecordedRoutes
from qoff.memory.experts.simulator import simulate
from qoff.models.convert.convert import convert
from qoff.models.forward_pass import ForwardPass
from qoff.plan import Memory
from qoff.plan.mixture import slots_of_some
from qoff.plan.native_sizes import NativeSizes
from qoff.plan.search import find_plan
from qoff.plan.workload import Lengths, Workload
from qoff.quant import QuantConfig
from tests.plan import machines
from tests.plan.machines import GIB, MIB, MIXTURE, machine
from tests.tiny_models import QUANT, budgets, save_model

from .test_simulated import KIB, PLAIN_PLAN, moved, real


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    more = {"num_experts": 32, "moe_intermediate_size": 256, "decoder_sparse_step": 1}
    save_model(folder / "model", "qwen3-moe", head_dim=64, **more)
    convert(folder / "model", folder / "checkpoint", quant=QUANT, for_cpu=True)
    return folder / "checkpoint"


class Replayed(Router):
    """What a run asked for, each time by so many passes together."""

    def __init__(self, record: Sequence[tuple[int, tuple[int, ...]]], passes: int) -> None:
        self._record, self._passes, self._asked = record, passes, Counter[int]()

    def choose(self, layer: int, run: ForwardPass) -> NDArray[np.int64]:
        at = self._asked[layer] // self._passes
        self._asked[layer] += 1
        return np.array([numbers for where, numbers in self._record if where == layer][at])


@pytest.mark.parametrize(
    "options",
    [{}, {"schedule": "sequential"}, {"host_memory": 512 * KIB}],
    ids=["block", "sequential", "host"],
)
def test_bytes_are_those_of_the_engine(
    mixture: Path, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExpertCache, "_guesses", lambda cache, _: cache.now.guesses[:0])
    sizes = NativeSizes.of_checkpoint(Checkpoint.open(mixture))
    plan = replace(PLAIN_PLAN, spill_folder=tmp_path, **options)
    beside = Memory.of(plan, sizes.spec, sizes.shapes, tiled=True).total("device")
    least, _ = budgets(mixture)  # with one slot for an expert
    # What a layer wants has room: else what leaves depends on what has come, and so on threads.
    plan = replace(plan, device_memory=beside + least + 12 * sizes.expert_bytes)
    with real(mixture, plan) as executor:
        experts = executor.runtime.store.experts
        assert experts is not None
        experts.record = record = []
        wanted = moved(Driver(executor))
        stats = experts.stats
    assert stats.hits > 0
    assert stats.misses > 0
    assert (stats.saved > 0) == ("host_memory" in options)
    router = Replayed(record, 2 if plan.schedule == "block" else 1)
    here = replace(machine(), cores=usable_threads())  # what ops share depends on these
    with Simulation(sizes, plan, here, router) as run:
        found = moved(run.driver)
        again = run.executor.runtime.store.experts
        assert again is not None
        assert replace(again.stats, bytes=0) == replace(stats, bytes=0)
    assert found == wanted
    assert wanted[0] > 0


@pytest.mark.parametrize(("on_gpu", "requests"), [(False, 1), (False, 16), (True, 1)])
def test_virtual_time_hits_as_often_as_the_model_says(on_gpu: bool, requests: int) -> None:
    sizes = machines.mixture(on_gpu)
    part, beside = sizes.nbytes // 3, (132 if on_gpu else 3) * MIB
    on = machine(on_gpu, device=part + beside, host=part * on_gpu, disk=GIB)
    work = Workload(Lengths.of(64), Lengths.of(16), requests)
    best = find_plan(sizes, on, work)
    assert best.hits is not None
    # The bound's LPs know the convex curve below what caches miss, which is none at one token.
    assert best.bound <= best.seconds <= 1.5 * best.bound
    found = simulated(best, sizes, on, work)
    for said, done in ((best.decode, found.decode), (best.prefill, found.prefill)):
        assert done.rounds * done.seconds >= 0.85 * said.rounds * max(said.busy.values())
        assert done.rounds * done.seconds <= 1.5 * said.rounds * said.seconds


def test_plans_of_many_experts_are_compared_in_virtual_time() -> None:
    config = {**MIXTURE, "num_experts": 256, "num_experts_per_tok": 8}
    sizes = NativeSizes.of(config, QuantConfig(packing="split32"))
    on = machine(True, device=sizes.nbytes // 3 + 132 * MIB, host=sizes.nbytes // 3)
    work = Workload(Lengths.of(64), Lengths.of(16), 16)
    best = find_plan(sizes, on, work, simulate=lambda one: simulated(one, sizes, on, work))
    assert best.simulated is not None
    assert best.hits is not None


@pytest.mark.parametrize("asked", [8, 64])
@pytest.mark.parametrize("part", [0.25, 0.5])
def test_caches_of_some_layers_hit_as_often_as_that_of_all(asked: int, part: float) -> None:
    """Also where a layer asks for all its experts, in turn, and hits only what was left of it."""

    def hits(layers: int, slots: int) -> float:
        random = np.random.default_rng(0)
        routes = [
            (i, random.permutation(64)[:asked].tolist()) for _ in range(40) for i in range(layers)
        ]
        return simulate(NextUse([64] * layers), routes, slots, len(routes) // 2)

    slots = int(part * 64 * 24)
    some = round(float(slots_of_some(np.array(slots), asked, 6, 24)))
    assert hits(6, some) == pytest.approx(hits(24, slots), abs=0.03)


def test_recorded_routes_decide() -> None:
    """A text that always takes the same experts needs no other ones; one that goes round does."""
    sizes = machines.mixture()
    experts = sizes.spec.experts
    assert experts is not None
    layers, top_k, count = sum(experts.layers), experts.top_k, experts.count
    same = np.broadcast_to(np.arange(top_k), (64, layers, top_k))
    rounds = (np.arange(64)[:, None, None] * top_k + same) % count
    on = machine(device=sizes.nbytes // 3 + 3 * MIB)
    seconds = []
    for numbers in (same, np.sort(rounds)):
        work = Workload(Lengths.of(64), Lengths.of(64), 1, routes=RecordedRoutes(numbers))
        best = find_plan(sizes, on, work)
        assert best.hits is not None
        found = simulated(best, sizes, on, work)
        seconds.append((best.hits, best.decode.seconds, found.decode.seconds))
    (hits, *often), (fewer, *seldom) = seconds
    assert hits == pytest.approx(1.0)
    assert fewer < 0.4
    assert all(a < 0.5 * b for a, b in zip(often, seldom, strict=True))


def test_made_up_texts_take_what_is_published_of_real_ones() -> None:
    routes = [(0, step[0, 0]) for step in islice(MadeUpRoutes(1, 256, 8).steps(1), 2000)]
    for slots, published in ((64, 0.67), (128, 0.81)):
        assert simulate(Lru([256]), routes, slots, 1000) == pytest.approx(published, abs=0.02)
    taken = Counter(number for _, numbers in routes for number in numbers.tolist())
    assert max(taken.values()) < 4 * 2000 * 8 / 256  # none is everybody's

"""The simulator moves the bytes that the engine moves, and is never faster than the bound."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qoff.checkpoint import Checkpoint
from qoff.engine.executor import CpuExecutor, Executor
from qoff.engine.simulated import Driver, Simulation, simulated
from qoff.engine.simulated.machine import VirtualLink, VirtualMachine
from qoff.engine.simulated.transfers import SimulatedReader, SimulatedReads
from qoff.kernels.processor import usable_threads
from qoff.kvcache import KVQuant
from qoff.kvcache.store.placement import KVPlacement
from qoff.kvcache.store.sparse import WRONG_GUESSES
from qoff.memory.instrumentation import PLAIN
from qoff.memory.io.disk import ReadRequest
from qoff.memory.io.runs import Run
from qoff.memory.io.virtual import VirtualClock
from qoff.memory.plan import Image
from qoff.plan import Plan
from qoff.plan.certify import TIERS, Certifier
from qoff.plan.cost import CostModel
from qoff.plan.native_sizes import NativeSizes
from qoff.plan.phase import Choices
from qoff.plan.search import find_plan
from qoff.plan.workload import Lengths, Workload
from qoff.quant import QuantConfig
from tests.plan.machines import GIB, LLAMA_405B, MIB, machine, sizes
from tests.tiny_families import FAMILIES, TINY

KIB = 1 << 10
WORK = Workload(Lengths.of(256), Lengths.of(64), 24)
PLAIN_PLAN = Plan(batch_size=3, batches=2, context=320, prefill_tokens=128, kv=KVQuant(window=16))


@contextmanager
def real(path: Path, plan: Plan) -> Iterator[Executor]:
    with ExitStack() as own:
        yield CpuExecutor(
            Checkpoint.open(path),
            plan,
            own,
            device=torch.device("cpu"),
            dtype=torch.float32,
            packing="rows16",
            instrumentation=PLAIN,
        )


def moved(driver: Driver) -> list[float]:
    """Bytes read, copied and spilled by rounds of prompts and of decoding, when all has arrived."""

    def rounds() -> list[float]:
        for _ in range(2):
            driver.read(2, 2, 64, 128)
        driver.begin(5, 200, 300)
        for _ in range(3):
            driver.decode()
        executor = driver.executor
        for load in executor.runtime.store._ring._loads:
            load.read.settle()
        for write in executor.blocks._writes.values():
            executor.instrumentation.clock.wait([write])
        return list(executor.counters()[3:])

    first = rounds()  # which compares files with their checksums, where there are any
    return list(np.subtract(rounds(), first))


def counted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[None]:
    """One more for each call of a method from now on."""
    calls, method = list[None](), getattr(owner, name)

    def call(self: object, *arguments: Any) -> Any:
        calls.append(None)
        return method(self, *arguments)

    monkeypatch.setattr(owner, name, call)
    return calls


def bounds(path: Path, plan: Plan, spare: int) -> Plan:
    """The plan with the least device memory it takes and some more."""
    total = 1 << 30
    with real(path, replace(plan, device_memory=total)) as executor:
        memory, weights = executor.memory, executor.runtime.residency.device_bytes
    return replace(plan, device_memory=memory.total("device") + weights - spare)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "sequential"},
        {"kv_placement": KVPlacement(0.0, 0.0), "slots": 3},
        {"kv_placement": KVPlacement(0.3, 0.3), "cpu_attention": "never"},
        {"kv_placement": KVPlacement(0.0, 0.0), "kv": KVQuant(window=16, attention_top=0.3)},
        {"kv_placement": KVPlacement(0.5, 0.0), "activations": "disk"},
        {"activations": "host", "host_memory": 256 * KIB},
    ],
    ids=["block", "sequential", "KV on disk", "KV everywhere", "sparse", "all on disk", "host"],
)
def test_bytes_are_those_of_the_engine(
    checkpoint: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    plan = bounds(checkpoint, replace(PLAIN_PLAN, spill_folder=tmp_path, **options), 100 * KIB)
    with real(checkpoint, plan) as executor:
        wanted = moved(Driver(executor))
    sizes_of = NativeSizes.of_checkpoint(Checkpoint.open(checkpoint))
    here = replace(machine(), cores=usable_threads())  # what ops share depends on these
    with Simulation(sizes_of, plan, here) as run:
        found = moved(run.driver)
    wrong = WRONG_GUESSES if "kv" in options else 0.0  # of which virtual time has none
    assert found == pytest.approx(wanted, rel=wrong, abs=0)
    assert wanted[0] > 0


@given(
    rate=st.sampled_from([1e7, 1e8, 1e9, 1e11]),
    memory=st.integers(6, 20),
    choice=st.tuples(
        st.sampled_from([1, 2, 4]), st.sampled_from([1, 3]), st.booleans(), st.booleans()
    ),
    on_disk=st.sampled_from([0.0, 0.5, 1.0]),
)
@settings(max_examples=20)
def test_rounds_are_never_shorter_than_what_the_busiest_resource_takes(
    rate: float, memory: int, choice: tuple[int, int, bool, bool], on_disk: float
) -> None:
    size, batches, block, parked = choice
    on = machine(device=memory * MIB)
    on = replace(on, disk_read=replace(on.disk_read, bytes_per_s=rate))
    work = replace(WORK, requests=size * batches)
    cost = CostModel(sizes(), on, work, KVQuant(), 4)
    template = Plan(context=work.context)
    certifier = Certifier(cost, template, torch.device("cpu"), torch.float32)
    choices = Choices(
        *(np.array([float(x)]) for x in (size, batches, 256)),
        np.array([block or parked]),
        np.array([True]),
        np.array([TIERS.index("disk") if parked and batches > 1 else 0]),
        np.array([False]),
    )
    found = certifier.certify(choices, 0.0, on_disk)
    if found is None:
        return
    timed = simulated(found, sizes(), on, work)
    rounded = 0.05 + 0.5 / cost.kv_blocks.mean * (on_disk > 0)  # virtual time has whole blocks
    for said, done in ((found.decode, timed.decode), (found.prefill, timed.prefill)):
        busiest = said.rounds * max(said.busy.values())
        assert done.seconds * done.rounds >= (1 - rounded) * busiest


def test_a_simulation_is_the_same_each_time() -> None:
    on = machine(device=6 * MIB)
    best = find_plan(sizes(), on, WORK)
    one, other = (simulated(best, sizes(), on, WORK) for _ in range(2))
    assert one.decode == other.decode
    assert one.prefill == other.prefill


def test_machines_that_are_not_here_are_simulated() -> None:
    """Layers of 3.2 billion parameters beside a GPU: nothing of them is allocated."""
    on = machine(True, device=8 * GIB, host=300 * GIB, disk=1000 * GIB)
    large = NativeSizes.of({**LLAMA_405B, "num_hidden_layers": 16})
    work = Workload(requests=8)
    best = find_plan(large, on, work)
    found = simulated(best, large, on, work)
    assert found.decode.seconds >= 0.97 * max(best.decode.busy.values())
    assert found.decode.seconds < 1.5 * best.decode.seconds


@pytest.mark.parametrize("on_gpu", [False, True])
def test_an_expert_that_is_kept_in_host_memory_takes_the_link_back(on_gpu: bool) -> None:
    on = machine(on_gpu, device=GIB, host=GIB)
    memory = torch.empty(MIB, dtype=torch.uint8)
    with Simulation(sizes(on_gpu), replace(PLAIN_PLAN, device_memory=GIB), on) as run:
        here = run.machine
        there, back, start = here.to_device.bytes, here.from_device.bytes, here.clock.now()
        run.executor.runtime.store._transfers.save(memory, memory)
        here.to_device.move(1)  # beside it on a GPU
        assert here.from_device.bytes - back == MIB
        assert here.to_device.bytes - there == 1
        arrives = start + MIB / here.profile.from_device.bytes_per_s
        assert here.from_device.free_at >= arrives
        assert (here.clock.now() >= arrives) != on_gpu


def test_a_request_is_as_many_steps_for_three_parts_as_for_three_thousand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the same time, and with the same bytes counted; in chunks where it is large."""
    steps = counted(monkeypatch, VirtualClock, "at")
    found = []
    for count, scattered in ((3, False), (3000, False), (3, True), (3000, True)):
        here = VirtualMachine(machine(), VirtualClock(), chunk=MIB)
        here.loading = False
        reader = SimulatedReader(here)
        dest = torch.empty(3000 * KIB, dtype=torch.uint8)
        each = len(dest) // count
        steps.clear()
        if scattered:
            runs = [Run(2 * i * each, i * each, each) for i in range(count)]
            request = reader.submit_runs(Path("there"), runs, dest)
        else:
            parts = [(2 * i * each, dest[i * each : (i + 1) * each]) for i in range(count)]
            request = reader.submit_parts("there", parts)
        here.clock.result(request)
        assert here.read.bytes == reader.stats.bytes == len(dest)
        found.append((len(steps), here.clock.now()))
    assert found[1:] == found[:1] * 3
    on = machine().disk_read
    assert found[0][0] == 6
    assert found[0][1] == pytest.approx(on.request_s + len(dest) / on.bytes_per_s)


def test_tiles_beside_a_gpu_take_steps_and_copies_for_each_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tile's scales are hundreds of parts, and what it leaves is memory nobody writes to."""
    steps = counted(monkeypatch, VirtualClock, "at")
    requests = counted(monkeypatch, VirtualLink, "ask")
    parts, copied = list[int](), list[int]()
    submit, copy = SimulatedReads._submit, torch.Tensor.copy_

    def submitted(self: SimulatedReads, image: Image, ranges: Any, memory: Any) -> ReadRequest:
        parts.append(len(ranges))
        return submit(self, image, ranges, memory)

    def copies(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        copied.append(self.nbytes)
        return copy(self, *arguments, **options)

    monkeypatch.setattr(SimulatedReads, "_submit", submitted)
    monkeypatch.setattr(torch.Tensor, "copy_", copies)
    large = NativeSizes.of({**LLAMA_405B, "num_hidden_layers": 2}, QuantConfig(packing="split32"))
    plan = replace(PLAIN_PLAN, kv_placement=KVPlacement(0.0, 0.0), cpu_attention="never")
    plan = replace(plan, device_memory=2 * GIB, host_memory=2 * GIB)
    on = machine(True, device=2 * GIB, host=2 * GIB, disk=1000 * GIB)
    with Simulation(large, plan, on) as run:
        for one in (steps, requests, parts, copied):
            one.clear()
        run.driver.read(2, 2, 64, 128)
        embedded = 2 * 2 * 64 * large.spec.hidden_size * 4
        assert sum(copied) < 1.1 * embedded  # the rows of the table, once
        run.driver.begin(6, 250, 320)
        run.driver.decode()
    assert sum(parts) > 50 * len(requests)
    assert len(steps) < 8 * len(requests)


def test_links_that_wait_for_each_other_take_longer_than_either() -> None:
    """With one sequence and two slots the seams of a round are seen."""
    on = machine(device=6 * MIB)
    work = replace(WORK, objective="latency")
    best = find_plan(sizes(), on, work)
    assert simulated(best, sizes(), on, work).decode.seconds > max(best.decode.busy.values())


def test_what_moves_meanwhile_makes_computing_longer() -> None:
    on = machine()
    costly = replace(on, disk_read=replace(on.disk_read, bytes_per_s=1e8, cpu_s_per_byte=2e-8))
    here = VirtualMachine(costly, VirtualClock())
    here.read.start(10**8)  # a second, in which half of the four cores is taken
    here.compute(0.25)
    assert here.clock.now() == pytest.approx(0.5)
    here.compute(0.5)
    assert here.clock.now() == pytest.approx(1.25)  # with nothing beside it in the end


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("placement", [KVPlacement(), KVPlacement(0.0, 0.5)], ids=["near", "far"])
def test_attention_to_what_an_index_chooses_is_shorter(
    on_gpu: bool, placement: KVPlacement
) -> None:
    plan = replace(PLAIN_PLAN, context=4096, kv_placement=placement)
    seconds = list[float]()
    for top in (64, 1024, 8192):
        config = {**TINY, **FAMILIES["glm-5"], "index_topk": top}
        of = NativeSizes.of(config, QuantConfig(packing="split32" if on_gpu else "rows16"))
        with Simulation(of, plan, machine(on_gpu, device=GIB, host=GIB)) as run:
            run.driver.begin(5, 2000, 4000)
            run.driver.decode()
            before = run.driver.executor.instrumentation.clock.now()
            run.driver.decode()
            seconds.append(run.driver.executor.instrumentation.clock.now() - before)
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[1] < seconds[2]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_is_queued_arrives_as_what_is_asked_for_one_by_one(on_gpu: bool) -> None:
    sizes, found = [3 * MIB, MIB, 5], []
    for queued in (True, False):
        here = VirtualMachine(machine(on_gpu), VirtualClock())
        for link in (here.read, here.to_device):
            link.start(MIB)
            if queued:
                arrivals = link.queue(np.array(sizes), 2)
            else:
                arrivals = np.zeros(3)
                for i, nbytes in enumerate(sizes):
                    link.ask()
                    link.ask()
                    arrivals[i] = link.start(nbytes)
            found.append(arrivals)
        here.compute(0.05)
        found.append(np.array([here.read.bytes, here.to_device.bytes, here.clock.now()]))
    for one, other in zip(found[:3], found[3:], strict=True):
        assert one == pytest.approx(other, rel=1e-5)  # what moving takes of a CPU is evenly spread

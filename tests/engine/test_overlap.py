"""Moves run beside the computation: in virtual time, over links as slow as one wants, a round takes
little longer than the slower of the two, and moves the bytes it should."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qoff.engine.simulated import SimulatedRound, Simulation
from qoff.kvcache import KVQuant
from qoff.kvcache.store.placement import KVPlacement
from qoff.plan import Plan
from qoff.plan.profile import Link, MachineProfile
from tests.plan.machines import GIB, SMALL, machine, sizes

LAYERS = SMALL["num_hidden_layers"]
BATCHES = 4
PLAN = Plan(batch_size=2, batches=BATCHES, context=1024, prefill_tokens=400, kv=KVQuant(window=16))
WIDE = 1.1  # what may be lost at the seams, beside one layer of each round


def simulated_round(plan: Plan, on: MachineProfile) -> SimulatedRound:
    """A round in which all places have sequences of 500 tokens that decode."""
    with Simulation(sizes(on.on_gpu), plan, on) as run:
        run.driver.begin(plan.batch_size * plan.batches, 500, 900)
        return run.measured(run.driver.decode)


def streaming(plan: Plan) -> Plan:
    """The plan with a device that holds about half of the weights."""
    with Simulation(sizes(), replace(plan, device_memory=GIB), machine(device=GIB)) as run:
        executor = run.executor
        weights = executor.runtime.residency.device_bytes // 2
        return replace(plan, device_memory=executor.memory.total("device") + weights)


def links(on: MachineProfile, rate: float) -> MachineProfile:
    """The machine with links of so many bytes per second, which take nothing else.

    Python takes no time: what it does between passes is longer than the layers of this model, of
    which no more than the next one can come beside it.
    """
    link, device = Link(rate), replace(on.device, call_s=0.0)
    return replace(
        on, device=device, disk_read=link, disk_write=link, to_device=link, from_device=link
    )


def check_overlap(
    plan: Plan, times: float = 1.0, on_gpu: bool = False, in_turn: bool = False
) -> None:
    """Over links that are occupied `times` as long as a round without them takes.

    in_turn: all links together, since one thread moves over one after another; otherwise the
    busiest one.
    """
    on = machine(on_gpu, device=GIB, host=GIB)
    alone = simulated_round(plan, links(on, 1e15))
    moved = list(alone.bytes.values())
    occupied = times * alone.seconds
    assert max(moved) > 0
    rate = (sum(moved) if in_turn else max(moved)) / occupied
    found = simulated_round(plan, links(on, rate))
    assert found.bytes == alone.bytes
    seams = (alone.seconds + sum(moved) / rate) / LAYERS  # a layer moved and computed in turn
    longer = max(alone.seconds, occupied)
    assert longer <= found.seconds * (1 + 1e-6)
    assert found.seconds <= WIDE * longer + seams, (alone, found)


@pytest.mark.parametrize("times", [0.3, 1, 5])
@pytest.mark.parametrize("schedule", ["block", "sequential"])
def test_weights_come_beside_the_computation(schedule: str, times: float) -> None:
    check_overlap(streaming(replace(PLAN, schedule=schedule)), times)


def test_columns_read_weights_once_a_round_and_rows_once_a_batch() -> None:
    on = links(machine(device=GIB), 1e8)  # the weights are what a round takes
    plan = streaming(PLAN)
    column = simulated_round(plan, on)
    row = simulated_round(replace(plan, schedule="sequential"), on)
    rows_of_embedding = 0.01  # are read once for each batch, by both
    wanted = pytest.approx(BATCHES, rel=rows_of_embedding)
    assert row.bytes["disk read"] / column.bytes["disk read"] == wanted
    assert row.seconds / column.seconds == pytest.approx(BATCHES, rel=0.1)


@pytest.mark.parametrize(
    ("on_gpu", "tier", "schedule"),
    [
        (False, "disk", "block"),
        (False, "disk", "sequential"),
        (True, "disk", "block"),
        (True, "host", "block"),
        (True, "host", "sequential"),
    ],
)
def test_blocks_come_while_others_are_attended_to(on_gpu: bool, tier: str, schedule: str) -> None:
    """Weights are resident; each pass attends to blocks that are far."""
    check_overlap(far(tier, schedule), on_gpu=on_gpu)


def far(tier: str, schedule: str = "block") -> Plan:
    placement = KVPlacement(0, 1.0 if tier == "host" else 0.0)
    return replace(PLAN, kv_placement=placement, cpu_attention="never", schedule=schedule)


@pytest.mark.parametrize("plan", [far("host"), replace(PLAN, activations="host")])
def test_a_cpu_copies_what_is_in_memory_instead_of_computing(plan: Plan) -> None:
    on = links(machine(device=GIB), 1e15)
    found, alone = simulated_round(plan, on), simulated_round(PLAN, on)
    nbytes = found.bytes["to device"] + found.bytes["from device"]
    copied = nbytes / on.device.bytes_per_s
    assert nbytes > 0
    assert found.seconds == pytest.approx(alone.seconds + copied, rel=0.01)


def test_weights_and_blocks_share_a_link() -> None:
    check_overlap(streaming(replace(PLAN, kv_placement=KVPlacement(0, 0))))


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_hidden_states_come_and_go_beside_the_computation(tier: str) -> None:
    """Each pass moves its hidden states out and in again, in each layer."""
    check_overlap(replace(PLAN, activations=tier), on_gpu=tier == "host", in_turn=True)

"""What rounds take beside their busiest resource, because weights come in pieces through slots."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from qoff.engine.simulated import simulated
from qoff.kvcache import KVQuant
from qoff.plan import Plan
from qoff.plan.certify import Certified, Certifier, choices_of
from qoff.plan.cost import CostModel
from qoff.plan.phase import round_seconds
from qoff.plan.profile import Link, MachineProfile
from qoff.plan.search import forecast_on
from qoff.plan.workload import Lengths, Workload

from .machines import GIB, MIB, machine, sizes

WORK = Workload(Lengths.of(128), Lengths.of(64), 8)
READS_TAKE = 1e-3  # seconds of a request


def certified(
    batch_size: int, batches: int, part: float, on_gpu: bool = False
) -> tuple[Certified, MachineProfile]:
    """A plan of the small model on a machine that holds this part of the weights, and all else."""

    def on(device: int) -> tuple[Certified, MachineProfile]:
        there = machine(on_gpu, device=device, host=64 * MIB * on_gpu)
        cost = CostModel(sizes(on_gpu), there, WORK, KVQuant(), 4)
        template = Plan(context=WORK.context, batch_size=batch_size, batches=batches)
        certifier = Certifier(cost, template, torch.device("cpu"), torch.float32)
        found = certifier.certify(choices_of(template), 0.0, 0.0)
        assert found is not None
        return found, there

    whole = on(GIB)[0]
    weights = whole.residency.device_bytes
    return on(whole.memory.total("device") + int(part * weights))


def by_work_alone(one: Certified) -> float:
    """Seconds of a decoding round, as if weights came at any time and in any number of pieces."""
    units = sizes().spec.num_layers + 1
    return float(round_seconds(np.array(list(one.decode.busy.values())), units))


@pytest.mark.parametrize("part", [0.5, 0.7, 0.8])
@pytest.mark.parametrize(("batch_size", "batches"), [(8, 1), (2, 4), (1, 8)])
def test_rounds_are_as_long_as_in_virtual_time(batch_size: int, batches: int, part: float) -> None:
    found, there = certified(batch_size, batches, part)
    assert found.residency.streamed
    timed = simulated(found, sizes(), there, WORK).decode.seconds
    assert found.decode.seconds == pytest.approx(timed, rel=0.07)
    if batches > 1:  # which work alone does not say
        assert timed > 1.07 * by_work_alone(found)


def test_small_pieces_take_a_request_each() -> None:
    found, there = certified(8, 1, 0.9)
    slow = Link(there.disk_read.bytes_per_s, READS_TAKE)
    longer = forecast_on(replace(there, disk_read=slow), sizes(), WORK, found)
    pieces = len(found.residency.streamed)
    assert pieces == sizes().spec.num_layers
    more = longer.decode.busy["disk read"] - found.decode.busy["disk read"]
    assert more == pytest.approx(pieces * (READS_TAKE - there.disk_read.request_s))

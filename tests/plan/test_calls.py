"""What bytes cost where they are: on a CPU, memory of the host is its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from qoff.kvcache import KVQuant
from qoff.plan.calls import as_used, call_s
from qoff.plan.certify import choices_of
from qoff.plan.cost import CostModel
from qoff.plan.manual import Plan
from qoff.plan.mixture import Array
from qoff.plan.native_sizes import NativeSizes
from qoff.plan.phase import PLACED, RESOURCES
from qoff.plan.profile import Link, MachineProfile
from qoff.plan.workload import Lengths, Workload

from .machines import machine, mixture, sizes

WORK = Workload(Lengths.of(512), Lengths.of(64), 4)
MOVED = Plan(batch_size=2, batches=2, context=576, cpu_attention="never")


def busy(of: NativeSizes, on: MachineProfile, part: str, plan: Plan = MOVED) -> dict[str, float]:
    """Seconds more of each resource in a round of decoding, with all of a part elsewhere."""
    cost = CostModel(of, on, WORK, KVQuant(), 4)
    each: Array = cost.decode(choices_of(plan)).each[0, :, PLACED.index(part)]
    return {name: float(s) for name, s in zip(RESOURCES, each, strict=True) if s}


def test_a_cpu_computes_with_weights_in_host_memory() -> None:
    assert not busy(sizes(), machine(), "weights on host")
    assert "to device" in busy(sizes(True), machine(True), "weights on host")
    assert "to device" in busy(mixture(), machine(), "weights on host")  # experts are copied


def test_jobs_that_bring_blocks_are_part_of_what_a_cpu_computes() -> None:
    on = machine()
    found = busy(sizes(), on, "KV on host")
    assert found.keys() == {"to device", "cpu"}
    jobs = 3 * call_s(on) * MOVED.batches * sizes().spec.num_layers
    assert found["cpu"] == pytest.approx(found["to device"] + jobs)
    assert not busy(sizes(), on, "KV on host", replace(MOVED, cpu_attention="auto"))


def test_what_is_read_for_a_cpu_takes_no_copy_and_no_python() -> None:
    disk = Link(1e8, 1e-4, 1e-10, 1e-3)
    on = replace(machine(), disk_read=disk, disk_write=replace(disk, cpu_s_per_request=0.0))
    for part in ("weights on disk", "KV on disk"):
        found = busy(sizes(), on, part)
        links = found.keys() - {"cpu"}
        assert links <= {"disk read", "disk write"}
        moved = sum(found[name] for name in links)
        assert 0 < found["cpu"] <= moved * disk.bytes_per_s * disk.cpu_s_per_byte / on.cores


@pytest.mark.parametrize(("of", "on_gpu"), [(sizes, True), (mixture, False)])
def test_links_are_as_measured_where_python_asks_or_a_gpu_computes(
    of: Callable[[bool], NativeSizes], on_gpu: bool
) -> None:
    on = machine(on_gpu)
    assert as_used(on, of(on_gpu)) == on

"""What calls take beside their work: ops as launches or as jobs of lists, passes, what moves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from .phase import RESOURCES
from .processor import Array
from .profile import Link, MachineProfile
from .sizes import Sizes

_PASS_CALLS = 30  # of an op: what Python does for a pass on a CPU
_UNIT_CALLS = 5  # what it does for each unit, where passes take turns: no step follows another
_SPILLED_CALLS = 20  # the same, and what a list of each unit takes and the thread that moves
_JOB_CALLS = 1 / 8  # of an op: what a job of a list takes there beside its work
_COPY_JOBS = 3  # that bring what a layer needs: it comes, it is copied, its place is given back


def call_s(machine: MachineProfile) -> float:
    """Seconds of an op beside its work: a launch, or a job of a list on a CPU."""
    return machine.device.call_s * (1.0 if machine.on_gpu else _JOB_CALLS)


def pass_s(
    machine: MachineProfile, passes: Array, units: int, spilled: npt.NDArray[np.bool_] | bool
) -> Array:
    """Seconds of a pass beside its ops, in a round of so many; a GPU's launches run ahead.

    spilled: whether its hidden states wait on disk, where no list goes on from unit to unit.
    """
    each = np.where(spilled, _SPILLED_CALLS, np.where(passes > 1, _UNIT_CALLS, 0))
    calls = _PASS_CALLS + each * units
    found: Array = calls * (0.0 if machine.on_gpu else machine.device.call_s)
    return found


def copied_by_jobs(machine: MachineProfile, sizes: Sizes) -> bool:
    """Whether what moves in memory is copied by jobs, and the links to the device are not used."""
    return not machine.on_gpu and sizes.native and sizes.experts is None


def as_used(machine: MachineProfile, sizes: Sizes, activations: str = "device") -> MachineProfile:
    """The machine with links as a plan uses them: on a CPU by the jobs of its lists.

    All threads copy together, and compute nothing meanwhile. Python has asked for what is read, so
    that it takes no more of the CPU than its bytes do. Links are as they were measured beside a
    GPU, and where experts come one by one, or modules wait for their weights: Python asks for each,
    and a thread copies it. So they are in rounds whose hidden states wait on disk, which have no
    lists of all units.

    activations: where hidden states wait.
    """
    if activations == "disk" or not copied_by_jobs(machine, sizes):
        return machine
    cores, rate = machine.cores, machine.device.bytes_per_s
    copies = Link(rate, 0.0, cores / rate, cores * _COPY_JOBS * call_s(machine))
    reads = replace(machine.disk_read, cpu_s_per_request=0.0)
    return replace(machine, disk_read=reads, to_device=copies, from_device=copies)


def on_links(machine: MachineProfile, nbytes: Array, requests: Array) -> Array:
    """Seconds that each resource is busy with what moves, and takes of the CPU.

    nbytes, requests: [plans, links, parts], links being the first of `RESOURCES`. Returns [plans,
    RESOURCES, parts].
    """
    links = (machine.disk_read, machine.disk_write, machine.to_device, machine.from_device)
    plans, _, parts = nbytes.shape
    busy = np.zeros((plans, len(RESOURCES), parts))
    for number, link in enumerate(links):
        moved, asked = nbytes[:, number], requests[:, number]
        busy[:, number] = moved / link.bytes_per_s + asked * link.request_s
        taken = moved * link.cpu_s_per_byte + asked * link.cpu_s_per_request
        busy[:, RESOURCES.index("cpu")] += taken / machine.cores
    return busy

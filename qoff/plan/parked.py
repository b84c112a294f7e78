"""Hidden states that wait off the device: what moves, and how long the moves take in a row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qoff.memory import DiskReader
from qoff.memory.arena import PAGE

from .mixture import Array
from .phase import Choices
from .profile import MachineProfile


@dataclass(frozen=True)
class Parked:
    """What the hidden states of plans take in a round, an element of each array a plan.

    copied: bytes each way between device and host. spilled: bytes each way between host and disk,
    whole pages. moves: of either way, once for each unit and pass. in_a_row: seconds of those that
    a thread makes one after another, where nothing else is read. behind: seconds more where all
    that it waits behind comes from disk.
    """

    copied: Array
    spilled: Array
    moves: Array
    in_a_row: Array
    behind: Array

    @classmethod
    def of(
        cls,
        c: Choices,
        machine: MachineProfile,
        by_jobs: bool,
        hidden: Array,
        last: Array,
        passes: Array,
        units: int,
        unit: float,
    ) -> Parked:
        """by_jobs: whether a CPU's jobs copy what stays in memory, and no thread. hidden: bytes of
        all passes before each unit but the head, last: before that. unit: bytes of its weights.
        """
        away, on_disk = c.activations > 0, c.activations == 2
        moves = np.where(away, passes * units, 0.0)
        copied = np.where(away, hidden * (units - 1) + last, 0.0)
        pages = np.ceil(hidden / passes / PAGE) * (units - 1) + np.ceil(last / passes / PAGE)
        spilled = np.where(on_disk, passes * PAGE * pages, 0.0)
        read, write = machine.disk_read, machine.disk_write
        links = 1 / machine.to_device.bytes_per_s + 1 / machine.from_device.bytes_per_s
        in_a_row = np.where(on_disk | (not by_jobs), copied * links, 0.0)
        in_a_row = in_a_row + spilled * (1 / read.bytes_per_s + 1 / write.bytes_per_s)
        alone = np.where(on_disk, moves * (read.small_s + write.small_s), 0.0)
        behind = np.where(on_disk, 2 * moves * _under_way(unit) / read.bytes_per_s, 0.0)
        return cls(copied, spilled, moves, in_a_row + alone, behind)


def _under_way(unit: float) -> float:
    """Bytes that are read before a request that comes while a unit is read, on average.

    Disks take requests in their order: those of all threads are under way, or what is left of the
    unit where that is less.
    """
    most = DiskReader.IN_FLIGHT
    return unit / 2 if unit < most else most - most**2 / (2 * unit)

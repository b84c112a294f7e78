"""What a placement says of a round beyond the parts that are away: in which pieces weights come.

Small pieces take a request each, however little of a layer is away. While a head that stays is
computed and passes begin, links bring no more than slots take; and passes that begin with rows from
disk wait until that was read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qoff.kvcache.store.placement import DISK, HOST
from qoff.memory.plan import EMBEDDING, HEAD, Residency

from .mixture import Array
from .phase import PLACED, RESOURCES, Phase
from .profile import Link, MachineProfile

_WEIGHTS = {HOST: PLACED.index("weights on host"), DISK: PLACED.index("weights on disk")}
_READ, _IN, _CPU = (RESOURCES.index(name) for name in ("disk read", "to device", "cpu"))


@dataclass(frozen=True)
class Sweeps:
    """The units that stream through a plan's slots, all of them so many times a round.

    machine: with links as the plan uses them.
    """

    machine: MachineProfile
    residency: Residency
    times: float

    def asked(self, phase: Phase, placed: Array) -> Array:
        """Seconds that each resource is busy with requests beyond those for as much of all units.

        placed: parts, [1, PLACED]. Returns [1, RESOURCES].
        """
        found = np.zeros((1, len(RESOURCES)))
        if self.residency.expert_slots:
            return found
        near = sum(unit in self.residency.host for unit in self.residency.streamed)
        counts = {HOST: near, DISK: len(self.residency.streamed) - near}
        for number, link, tiers in self._links():
            for tier in tiers:
                counted = phase.units * placed[0, _WEIGHTS[tier]]
                more = self.times * max(0.0, counts[tier] - counted)
                found[0, number] += more * link.request_s
                found[0, _CPU] += more * link.cpu_s_per_request / self.machine.cores
        return found

    def idle(self, phase: Phase, placed: Array) -> Array:
        """Seconds that each link waits for slots, because no unit streams then, [1, RESOURCES]."""
        found, plan = np.zeros((1, len(RESOURCES))), self.residency
        if plan.expert_slots or not plan.streamed:
            return found
        seconds = phase.each[0] * phase.moved(placed)[0]
        head_streams = HEAD in plan.streamed or HEAD in plan.tiled
        head, starts = 0.0 if head_streams else float(phase.head[0]), float(phase.starts[0])
        rows_near = EMBEDDING in plan.resident or EMBEDDING in plan.host
        behind, beside = (0.0, head + starts) if rows_near else (starts, head)
        for number, _, tiers in self._links():
            busy = float(seconds[number, [_WEIGHTS[tier] for tier in tiers]].sum())
            if busy > 0:
                ahead = plan.slots * busy / len(plan.streamed)
                found[0, number] = behind + max(0.0, beside - ahead)
        return found

    def _links(self) -> list[tuple[int, Link, tuple[str, ...]]]:
        """Those that weights come over, each with the tiers that they come from."""
        machine = self.machine
        links: list[tuple[int, Link, tuple[str, ...]]] = [(_READ, machine.disk_read, (DISK,))]
        return links + [(_IN, machine.to_device, (HOST, DISK))] * machine.on_gpu

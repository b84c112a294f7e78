"""The plans that the cost model likes best, compared in virtual time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from qoff.kvcache.store.placement import DISK, HOST

from .certify import Certified, Certifier, choices_of

Simulate: TypeAlias = Callable[[Certified], Certified]
NEAR = 1.1  # times the seconds of the best that the model finds
EXPERTS = 2048  # of all layers
_SIMULATED, _SIMULATION_S = 3, 2.0  # plans, and seconds after which no other one is begun


def fastest_simulated(
    certifier: Certifier, finalists: list[Certified], simulate: Simulate
) -> Certified:
    """Of those that the model thinks almost as good as the first, the fastest in virtual time.

    And of the first with a slot more, which only virtual time can tell. Those that keep a bound on
    latency there, too, come first. Where more than `EXPERTS` come one by one it is the first: each
    takes a millisecond.
    """
    token_s = certifier.cost.workload.token_s or np.inf
    first, mixture = finalists[0], certifier.cost.mixture
    if first.hits is not None and mixture is not None and mixture.total > EXPERTS:
        return first
    near = [one for one in finalists if one.seconds <= NEAR * first.seconds][:_SIMULATED]
    near[1:1] = [one for one in (_with_another_slot(certifier, first),) if one is not None]
    start, timed = time.perf_counter(), list[tuple[bool, float, Certified]]()
    for one in near:
        if timed and time.perf_counter() - start > _SIMULATION_S:
            break
        found = simulate(one)
        timed.append((found.decode.seconds > token_s, found.seconds, replace(one, simulated=found)))
    return min(timed, key=lambda one: one[:2])[2]


def _with_another_slot(certifier: Certifier, one: Certified) -> Certified | None:
    """The same choices, so that more is read ahead; None where no weights stream, or none fits."""
    if not one.weights[HOST] + one.weights[DISK]:
        return None
    place, slots = one.plan.kv_placement, one.plan.slots + 1
    more = replace(certifier, template=replace(certifier.template, slots=slots))
    disk = 1 - place.device_fraction - place.host_fraction
    return more.certify(choices_of(one.plan), place.host_fraction, disk)

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
LAYER_PASSES = 1024  # of a round; half as many where experts come one by one
_SIMULATED, _SIMULATION_S = 6, 2.0  # plans, and seconds after which no other one is begun


def fastest_simulated(
    certifier: Certifier, finalists: list[Certified], simulate: Simulate
) -> Certified:
    """Of those that the model thinks almost as good as the first, the fastest in virtual time.

    And of the first with a slot more, which only virtual time can tell; but where experts come one
    by one, slots are for few bytes, and virtual time is long. Those that keep a bound on
    latency there, too, come first. It is the first where that has more than `LAYER_PASSES` layers
    of passes: each takes some 4 ms, or 8 where experts come one by one.
    """
    token_s = certifier.cost.workload.token_s or np.inf
    first = finalists[0]
    layers = certifier.cost.sizes.num_layers
    most = LAYER_PASSES if first.hits is None else LAYER_PASSES // 2
    finalists = [one for one in finalists if one.plan.batches * layers <= most]
    if first not in finalists:
        return first
    near = [one for one in finalists if one.seconds <= NEAR * first.seconds][:_SIMULATED]
    more = None if first.hits is not None else _with_another_slot(certifier, first)
    near[1:1] = [] if more is None else [more]
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

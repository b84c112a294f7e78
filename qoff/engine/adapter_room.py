"""Which factors of adapters are on the device: those of weights that are, if there is room."""

from __future__ import annotations

from collections.abc import Callable

from qoff.checkpoint import Checkpoint
from qoff.errors import BudgetError
from qoff.kvcache.store.placement import HOST
from qoff.memory import Residency
from qoff.memory.plan import local_names
from qoff.models.adapter_layers import Place
from qoff.plan import Memory

_SETTLES = 8  # times that weights make room for the factors that stay with them

Planned = Callable[[frozenset[Place]], tuple[Memory, Residency]]


def settled(
    places: frozenset[Place], checkpoint: Checkpoint, host_memory: int | None, planned: Planned
) -> tuple[frozenset[Place], Memory, Residency]:
    """Those of `places` whose factors are on the device, with what a plan takes then.

    planned: what it takes beside the weights, and which weights stay, with factors of some matrices
    on the device; raises BudgetError. The others are in host memory, of which `host_memory` bytes
    may be used (None: as many as needed): without room there all are on the device.
    """
    found = planned(frozenset())
    if not places:
        return places, *found
    if host_memory is not None and found[0].total(HOST) > host_memory:
        return places, *planned(places)
    near = places & _staying(checkpoint, found[1])
    for _ in range(_SETTLES):
        try:
            more = planned(near)
        except BudgetError:
            break
        still = near & _staying(checkpoint, more[1])
        if still == near:
            return near, *more
        near = still
    return frozenset(), *found


def _staying(checkpoint: Checkpoint, residency: Residency) -> frozenset[Place]:
    """The weights of layers that stay on the device."""
    return frozenset(
        (layer, local)
        for layer, file in enumerate(checkpoint.layers)
        for name, local in local_names(layer, file.weights).items()
        if name in residency.resident
    )

"""Why a machine is too small for a workload: found before anything is searched."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

import numpy as np

from qoff.kvcache.store.placement import DEVICE, DISK, HOST
from qoff.units import format_size

from .certify import Certified, Certifier
from .phase import Choices

_STEPS = [1.05**n for n in range(1, 240)]  # of memory that is tried
_PLACES = ((0, 0), (1, 0), (0, 1))  # of the KV cache: parts on host and on disk


def smallest(choices: Choices) -> list[int]:
    """The choices of one sequence at a time, in the shortest pieces.

    No other takes less memory on any tier, or has shorter rounds of decoding.
    """
    places = choices.batch_size * choices.batches + choices.prefill_tokens / 1e6
    return [int(i) for i in np.flatnonzero(places == places.min())]


def least(certifier: Certifier, choices: Choices) -> list[Certified]:
    """The smallest plans that fit, none where none does."""
    found = (
        certifier.certify(choices.one(index), *parts)
        for index in smallest(choices)
        for parts in _PLACES
    )
    return [one for one in found if one is not None]


def too_slow(token_s: float, fastest: float) -> str:
    """Why no plan gives tokens often enough."""
    return (
        f"no plan that fits gives each sequence a token every {token_s:g} s; one sequence alone "
        f"takes {fastest:.3g} s: allow more, or use shorter requests"
    )


def too_small(certifier: Certifier, choices: Choices) -> str:
    """Why no plan fits: tier, bytes wanted and there, and the nearest setting that does."""
    machine, workload = certifier.cost.machine, certifier.cost.workload
    one = choices.one(smallest(choices)[0])
    for tier in (DEVICE, HOST, DISK):
        usable = machine.usable[tier]

        def fits(step: float, tier: str = tier, usable: int = usable) -> bool:
            more = machine.with_memory(**{tier: int(max(usable, 1 << 20) * step)})
            larger = replace(certifier, cost=replace(certifier.cost, machine=more))
            return bool(least(larger, one))

        found = bisect_left(_STEPS, True, key=fits)
        if found < len(_STEPS):
            needed = int(max(usable, 1 << 20) * _STEPS[found])
            return (
                f"{tier} memory: one sequence of {workload.context:,} tokens takes about "
                f"{format_size(needed)}, {format_size(needed - usable)} more than the "
                f"{format_size(usable)} there; raise it to that, or use shorter sequences"
            )
    return (
        f"one sequence of {workload.context:,} tokens fits neither "
        + ", ".join(f"{format_size(machine.usable[t])} of {t} memory" for t in (DEVICE, HOST, DISK))
        + " nor more of any one of them; use shorter sequences, or more of several"
    )

"""How often experts would have to be read, of which two tiers hold some, on given routes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qoff.memory.experts.policy import Keys, Policy
from qoff.memory.experts.simulator import Routes


def simulate_tiers(
    policy: Policy, routes: Routes, device: int, host: int, exclusive: bool = True, skip: int = 0
) -> tuple[float, float]:
    """The parts of the requested experts that are on the device, and in host memory.

    device, host: slots. exclusive: what leaves the device stays in host memory if it is worth more
    than the least there, and what comes from there leaves it; else all that is read is on both.
    """
    on_device, in_host = (np.zeros(int(policy.first[-1]), dtype=bool) for _ in range(2))
    found = [0, 0, 0]  # on the device, in host memory, all
    for at, (layer, numbers) in enumerate(routes):
        keys = policy.first[layer] + np.asarray(numbers, dtype=np.int64)
        policy.use(layer, keys)
        missing = keys[~on_device[keys]]
        if at >= skip:
            there = len(keys) - len(missing), int(in_host[missing].sum()), len(keys)
            found = [a + b for a, b in zip(found, there, strict=True)]
        left = _bring(policy, on_device, missing, keys, device)
        if exclusive:
            in_host[missing] = False
            in_host[left] = True
            _leave(policy, in_host, int(in_host.sum()) - host, np.flatnonzero(in_host))
        else:
            _bring(policy, in_host, missing[~in_host[missing]], keys, host)
    return found[0] / max(found[2], 1), found[1] / max(found[2], 1)


def _bring(policy: Policy, held: NDArray[np.bool_], missing: Keys, keys: Keys, slots: int) -> Keys:
    """Have `missing` held as far as others than `keys` can leave for them; returns what left."""
    others = held.copy()
    others[keys] = False
    left = _leave(policy, held, int(held.sum()) + len(missing) - slots, np.flatnonzero(others))
    held[missing[: max(slots - int(held.sum()), 0)]] = True
    return left


def _leave(policy: Policy, held: NDArray[np.bool_], count: int, among: Keys) -> Keys:
    """Let `count` of `among` leave, or all of them; returns them."""
    count = min(count, len(among))
    left = among[policy.leaving(among, count)] if count > 0 else among[:0]
    held[left] = False
    return left

"""What the page and `curl /stats` show of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qoff.engine import LLM
from qoff.engine.round_stats import RoundStats
from qoff.kvcache.store.placement import DEVICE, DISK, HOST
from qoff.memory.plan.units import unit_files

WINDOW_S = 5.0
_MOST = 4096  # rounds that are looked at


def recent(rounds: Sequence[RoundStats], now: float, began: float | None = None) -> dict[str, Any]:
    """Rates per second, shares of the time and what limits, of rounds in the last seconds.

    now: of `time.perf_counter`. A round that takes longer than the window is spread over its time.
    began: when the round began that is under way, if one is. What it does is known when it ends, so
    the seconds are those before it; where nothing was computed in them, it counts as computing.
    """
    now = now if began is None else began
    last = [one for one in rounds[-_MOST:] if now - WINDOW_S < one.ended <= now]
    start = min([now - WINDOW_S, *(one.ended - one.seconds for one in last[:1])])
    whole = now - start
    shares = {
        "weights": sum(one.weights_wait_s for one in last) / whole,
        "kv": sum(one.kv_wait_s for one in last) / whole,
        "activations": sum(one.activations_wait_s for one in last) / whole,
    }
    first = began is not None and not last
    busy = 1.0 if first else min(1.0, sum(one.seconds for one in last) / whole)
    shares = {"compute": max(0.0, busy - sum(shares.values())), **shares, "idle": 1 - busy}
    read = sum(one.disk_bytes for one in last)
    limit = max(list(shares)[:-1], key=shares.__getitem__) if busy else "idle"
    if limit == "weights":
        limit = "disk" if read else "link"
    rates = {
        "generated_tokens": sum(one.generated for one in last) / whole,
        "prompt_tokens": sum(one.read for one in last) / whole,
        "rounds": len(last) / whole,
        "disk_bytes": read / whole,
        "link_bytes": sum(one.host_bytes for one in last) / whole,
        "spilled_bytes": sum(one.spilled_bytes for one in last) / whole,
    }
    return {"seconds": whole, "rates": rates, "shares": shares, "limit": limit}


def memory(llm: LLM) -> dict[str, Any]:
    """Bytes by tier: the budget (None: no bound), what is used, and for what.

    On a CPU what plans call host is the device's memory, too, and another plan divides the same
    memory in another way: it is told as one.
    """
    budgets = {DEVICE: llm.plan.device_memory, HOST: llm.plan.host_memory}
    tiers = llm.memory_by_tier()
    residency = llm.residency
    moved = residency.device_weight_bytes - residency.resident_bytes
    tiers[DEVICE] = {"weights": tiers[DEVICE]["weights"] - moved, "weights on the move": moved,
                     **{k: v for k, v in tiers[DEVICE].items() if k != "weights"}}  # fmt: skip
    if llm.device.type == "cpu":
        host = tiers.pop(HOST)
        whats = [*tiers[DEVICE], *(host.keys() - tiers[DEVICE].keys())]
        tiers[DEVICE] = {x: tiers[DEVICE].get(x, 0) + host.get(x, 0) for x in whats}
        if budgets[DEVICE] is not None:
            budgets[DEVICE] += budgets[HOST] or 0
    if residency.streamed or residency.expert_slots:
        files = {file.path: file.nbytes for file in unit_files(llm.checkpoint).values()}
        kept = residency.resident_bytes + residency.host_weight_bytes
        tiers[DISK]["weights"] = max(0, sum(files.values()) - kept)  # but for what is repacked
    return {
        tier: {"budget": budgets.get(tier), "used": sum(purposes.values()), "purposes": purposes}
        for tier, purposes in tiers.items()
    }

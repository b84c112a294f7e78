"""The linear program of a choice: where the weights and the KV cache are, in parts of all."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qoff.kvcache.store.placement import DEVICE, DISK, HOST

from .certify import STAGING, Certifier
from .mixture import Array, Moves
from .phase import PLACED, RESOURCES, Choices, Phase


class Program(NamedTuple):
    """Least of goal @ x with rows @ x <= limits and x >= 0; `fixed` seconds are added to it.

    slots: bytes of them on the device, of which it takes the part of the weights that streams.
    """

    goal: Array
    rows: Array
    limits: Array
    fixed: float
    slots: float


def program(
    certifier: Certifier, choices: Choices, index: int, prefill: Phase, decode: Phase
) -> Program | None:
    """The linear program of a choice; None where its sequences do not fit without weights.

    Variables are the parts `PLACED`, and the seconds of the busiest resource in each phase; of a
    mixture of experts also the parts of the weights that each phase moves from host and disk. Where
    the CPU computes what is on the host, nothing else is there, and it does not move.
    """
    cost, machine = certifier.cost, certifier.cost.machine
    mixed = 0.0 if cost.mixture is None else cost.mixture.share
    one, stays = choices.one(index), bool(choices.cpu_experts[index])
    weights, usable = cost.weight_bytes, machine.usable
    tiers = [certifier.plan_of(one, *parts) for parts in ((0, 0), (1, 0), (0, 1))]
    near, host, far = (certifier.memory_of(plan) for plan in tiers)
    least = min(memory.total(DEVICE) for memory in (near, host, far))
    if mixed and least + weights > usable[DEVICE]:  # experts come one by one
        near, host, far = (certifier.memory_of(plan, tiled=True) for plan in tiers)
    if min(memory.total(DEVICE) for memory in (near, host, far)) > usable[DEVICE]:
        return None
    slots = certifier.template.slots * weights / cost.units  # if all of them stream
    if mixed or near.total(DEVICE) + slots > usable[DEVICE]:
        slots = 0.0  # they stream in tiles, or experts alone do
    rows: list[list[float]] = [[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0]]
    limits: list[float] = [1.0, 0.0 if certifier.kv_stays(one) else 1.0]
    staged = STAGING * weights * (1 - mixed) / cost.units if machine.on_gpu else 0.0
    streams: dict[str, list[float]] = {
        DEVICE: [slots - weights, slots - weights],
        HOST: [weights + staged, staged],
        DISK: [0, 0],
    }
    for tier in (DEVICE, HOST, DISK):
        moved = [memory.total(tier) - near.total(tier) for memory in (host, far)]
        stay = weights if tier == DEVICE else 0
        rows.append([*streams[tier], *moved, 0, 0])
        limits.append(usable[tier] - near.total(tier) - stay)
    if not machine.on_gpu:  # one memory, of which the device is the larger part
        rows[2] = [a + b for a, b in zip(rows[2], rows[3], strict=True)]
        limits[2] += limits[3]
        rows[3], limits[3] = [1, 0, 1, 0, 0, 0], 0.0
    if stays:
        rows.append([1, 1, 0, 0, 0, 0])
        limits.append(mixed)
    first = len(PLACED) + 2  # of what is moved
    width = first + (4 if mixed else 0)
    rows = [[*row, *[0.0] * (width - first)] for row in rows]
    goal = np.zeros(width)
    fixed = 0.0

    def row_of(number: int, each: Array, longest: float) -> list[float]:
        """What parts and the longest of a phase are multiplied by."""
        row = np.zeros(width)
        row[: len(PLACED)] = each
        if mixed:
            at = first + 2 * number
            row[at + stays : at + 2], row[stays:2] = row[stays:2], 0.0
        row[len(PLACED) + number] = longest
        found: list[float] = row.tolist()
        return found

    for number, phase in enumerate((prefill, decode)):
        base, each, rounds = phase.base[index], phase.each[index], float(phase.rounds[index])
        for resource in range(len(RESOURCES)):
            rows.append(row_of(number, each[resource], -1))
            limits.append(-base[resource])
        # seconds = longest + (sum - longest) / units
        goal += row_of(number, rounds * each.sum(0) / phase.units, rounds * (1 - 1 / phase.units))
        fixed += rounds * base.sum() / phase.units
        if mixed:
            moving = _beside if stays else _moved
            rows += moving(phase.moves, index, first + 2 * number, width)
            limits += [*-phase.moves.offsets[index]] * (1 if stays else 2)
    if cost.workload.token_s is not None:
        each = decode.each[index].sum(0) / decode.units
        rows.append(row_of(1, each, 1 - 1 / decode.units))
        limits.append(cost.workload.token_s - decode.base[index].sum() / decode.units)
    return Program(goal, np.array(rows), np.array(limits), float(fixed), slots)


def _moved(moves: Moves, index: int, at: int, width: int) -> list[list[float]]:
    """Rows of a program: what is moved, from `at` on, is what is away has moved, at least.

    From both tiers what is away from the device; from the disk what is on neither.
    """
    rows = list[list[float]]()
    for away, moved in (((0, 1), (at, at + 1)), ((1,), (at + 1,))):
        for slope in moves.slopes[index]:
            row = np.zeros(width)
            row[list(away)], row[list(moved)] = slope, -1.0
            rows.append(row.tolist())
    return rows


def _beside(moves: Moves, index: int, at: int, width: int) -> list[list[float]]:
    """The same where what is on the host stays there: less is left to want of what is on disk."""
    rows = list[list[float]]()
    for slope, offset in zip(moves.slopes[index], moves.offsets[index], strict=True):
        row = np.zeros(width)
        row[0], row[1], row[at + 1] = -offset / moves.share, slope, -1.0
        rows.append(row.tolist())
    return rows

"""The plan that the cost model likes best: a bound for all choices, LPs for some, exact bytes last.

Discrete choices are enumerated. Where weights and KV cache are is continuous, and an LP for each
choice, in the order of a bound that costs nothing. The plans of the best LPs are rounded to what
the placement of tensors and blocks does, and counted exactly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt
import torch

from qoff.budgets import CPU
from qoff.errors import ArgumentError, BudgetError
from qoff.kvcache import PackedCache
from qoff.kvcache.store.placement import DEVICE, DISK, HOST

from .certify import Certified, Certifier, Counted, choices_of
from .cost import CostModel
from .drafting import with_drafts
from .finalists import NEAR, Simulate, fastest_simulated
from .manual import Plan
from .mixture import Array
from .phase import Choices, Phase
from .profile import MachineProfile
from .program import Program, program
from .sizes import Sizes
from .too_small import least, smallest, too_slow, too_small
from .workload import Workload

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_BATCHES = (1, 2, 3, 4, 6, 8, 16, 32)
_PREFILL = (64, 256, 512, 1024, 2048, 4096)
# LPs by their bounds; of each number of sequences; of about as many as the best plan has.
_LPS = (50, 40, 40)
# Of LPs, of them with as many sequences, of these in as many batches: whose bytes are counted.
_FINALISTS, _ALIKE, _SAME = 12, 4, 2
_ABOUT = (0.7, 1.2)  # times as many


def find_plan(
    sizes: Sizes,
    machine: MachineProfile,
    workload: Workload,
    template: Plan | None = None,
    dtype: torch.dtype | None = None,
    simulate: Simulate | None = None,
    like: Plan | None = None,
    counted: Counted | None = None,
    places: int = 1,
) -> Certified:
    """The best plan for a workload within the memory of a machine.

    template: what is not searched: form of the KV cache, slots, spill folder; drafted tokens, where
    the workload does not say how many are accepted. dtype: of hidden states on a GPU. simulate:
    gives a plan the seconds of its rounds in virtual time, by which the best ones are compared
    then. like: only plans that cut prompts into pieces as long as this one's and attend to the
    cache in the same place, on which roundings depend. counted: by searches for this model on
    machines that differ in memory and rates alone; this one's are added. places: for sequences,
    that a plan has at least, however few requests there are. Raises BudgetError in a line, with
    tier, bytes and the nearest setting, where no plan fits, and ArgumentError for sequences longer
    than the model's.
    """
    template = replace(template or Plan(), context=workload.context)
    if workload.acceptance:
        template = replace(template, draft_tokens=0)  # `with_drafts` chooses them
    sizes.check_positions(workload.context)
    certifier = _certifier(sizes, machine, workload, template, dtype, counted)
    cost = certifier.cost
    on_cpu = cost.mixture is not None and cost.weight_bytes > machine.usable[DEVICE]
    on_cpu &= sizes.native
    if not sizes.native and (workload.acceptance or template.draft_tokens):
        raise ArgumentError(
            "transformers' modules draft no tokens; leave out draft_tokens (--acceptance)"
        )
    limits = Limits.of(sizes, workload, machine.on_gpu)
    choices = choices_for(workload, machine.on_gpu, like, on_cpu, places, limits)
    prefill, decode = cost.prefill(choices), cost.decode(choices)
    possible = _possible(certifier, choices, prefill, decode)
    bounds = lower_bounds(certifier, choices, prefill, decode)
    order = [int(i) for i in np.argsort(bounds, kind="stable") if np.isfinite(bounds[i])]
    fits = np.ones(len(choices), dtype=bool)
    finalists = list[Certified]()
    bound = np.inf
    for most, arranged in zip(_LPS, (_as_they_are, _spread, _about_the_best), strict=True):
        found, head = list[_Relaxed | None](), 0
        order = arranged(choices, order, finalists)
        for index in order:
            head += 1
            lp = program(certifier, choices, index, prefill, decode) if fits[index] else None
            if lp is not None:
                found.append(_solved(lp, index))
            elif fits[index]:
                fits &= ~_no_less(choices, index)
            if len(found) == most * (1 + on_cpu):  # for as many choices
                break
        order = sorted((i for i in order[head:] if fits[i]), key=bounds.__getitem__)
        relaxed = sorted((one for one in found if one is not None), key=lambda one: one.seconds)
        bound = min([bound, *(one.seconds for one in relaxed)])
        finalists += _certified(certifier, choices, relaxed)
        finalists.sort(key=lambda one: one.seconds)
        unseen = bounds[order[0]] if order else np.inf
        if finalists and unseen >= finalists[0].seconds / NEAR:
            break
    bound = min(bound, unseen)
    finalists = finalists or possible
    if not finalists:
        alone = min(one.decode.seconds for one in least(certifier, choices))
        raise BudgetError(too_slow(workload.token_s or 0.0, alone))
    best = finalists[0]
    if simulate is not None:
        best = fastest_simulated(certifier, finalists, simulate)
    return with_drafts(certifier, replace(best, bound=float(min(bound, best.seconds))))


def forecast_on(
    machine: MachineProfile, sizes: Sizes, workload: Workload, one: Certified
) -> Certified:
    """A plan as it is, on a machine with other rates."""
    certifier = _certifier(sizes, machine, workload, one.plan)
    return certifier.forecast(choices_of(one.plan), one.plan, one.memory, one.residency)


def _certifier(
    sizes: Sizes,
    machine: MachineProfile,
    workload: Workload,
    template: Plan,
    dtype: torch.dtype | None = None,
    counted: Counted | None = None,
) -> Certifier:
    number = dtype or (torch.float16 if machine.on_gpu else torch.float32)
    bits = template.activation_bits
    frees = template.frees(machine.on_gpu)
    how = template.kv, number.itemsize, bits, frees, template.cpu_expert_tokens
    cost = CostModel(sizes, machine, workload, *how)
    cuda = machine.on_gpu and torch.cuda.is_available()
    place = torch.device("cuda") if cuda else CPU
    return Certifier(cost, template, place, number, {} if counted is None else counted)


def _possible(
    certifier: Certifier, choices: Choices, prefill: Phase, decode: Phase
) -> list[Certified]:
    """Plans of one sequence at a time that fit and are fast enough, the best first.

    Raises BudgetError at once where there can be none, and so no other plan.
    """
    found = sorted(least(certifier, choices), key=lambda one: one.seconds)
    if not found:
        raise BudgetError(too_small(certifier, choices))
    token_s = certifier.cost.workload.token_s or np.inf
    fastest = min(one.decode.seconds for one in found)
    alone = (relax(certifier, choices, index, prefill, decode) for index in smallest(choices))
    if fastest > token_s and all(one is None for one in alone):
        raise BudgetError(too_slow(token_s, fastest))
    return [one for one in found if one.decode.seconds <= token_s]


def _as_they_are(choices: Choices, order: list[int], finalists: list[Certified]) -> list[int]:
    return order


def _spread(choices: Choices, order: list[int], finalists: list[Certified]) -> list[int]:
    """The first of each number of sequences, then the second of each, and so on.

    LPs know no blocks: all with as many sequences may come out worse than their LPs say.
    """
    before = Counter[float]()
    ranks = list[int]()
    for index in order:
        ranks.append(before[choices.sequences[index]])
        before[choices.sequences[index]] += 1
    return [order[place] for place in np.argsort(ranks, kind="stable")]


def _about_the_best(choices: Choices, order: list[int], finalists: list[Certified]) -> list[int]:
    """Those first that have about as many sequences as the best plan that was found."""
    if not finalists:
        return order
    best = finalists[0].plan.batch_size * finalists[0].plan.batches

    def differs(index: int) -> bool:
        return not _ABOUT[0] <= choices.sequences[index] / best <= _ABOUT[1]

    return sorted(order, key=differs)


@dataclass(frozen=True)
class _Relaxed:
    """A choice with the best fractions of its KV cache on host and disk; seconds of the LP."""

    index: int
    seconds: float
    host: float
    disk: float


@dataclass(frozen=True)
class Limits:
    """What of the choices a model leaves.

    least_piece: tokens of a prompt that have to be read in one pass; 0: any. attends_there: a GPU
    attends to all of its cache. parks: numbers of tiers where hidden states may wait.
    """

    least_piece: int = 0
    attends_there: bool = False
    parks: tuple[int, ...] = (0, 1, 2)

    @classmethod
    def of(cls, sizes: Sizes, workload: Workload, on_gpu: bool) -> Limits:
        """Of a model; an index chooses tokens where they are attended to, on a GPU there."""
        there = on_gpu and (sizes.index_top is not None or not sizes.shapes)
        piece = workload.prompt.most if sizes.whole_prompts else 0
        return cls(piece, there, (0, 1, 2) if sizes.native else (0,))


def choices_for(
    workload: Workload,
    on_gpu: bool,
    like: Plan | None = None,
    cpu_experts: bool = False,
    places: int = 1,
    limits: Limits | None = None,
) -> Choices:
    """The discrete choices for a workload: none with more places than requests, but for `places`.

    like, places: as for `find_plan`. cpu_experts: whether there are experts that may stay in host
    memory. limits: of the model.
    """
    count, limits = workload.at_once, limits or Limits()
    tokens = max(1, int(workload.prompt.mean * count))
    pieces = list(_PREFILL[: 1 + bisect_left(_PREFILL, tokens)])  # the last one may take all
    pieces = [n for n in pieces if n > limits.least_piece]
    pieces = [limits.least_piece, *pieces] if limits.least_piece else pieces
    attending: tuple[bool, ...] = (False,) if limits.attends_there else (True, False)
    if like is not None:
        pieces = [like.prefill_tokens]
        attending = (like.attends_on_cpu,) if on_gpu else attending
    computing = (False, True) if on_gpu and cpu_experts and like is None else (False,)
    rows = [
        (*row, experts)
        for row in product(_SIZES, _BATCHES, pieces, (True, False), attending, limits.parks)
        if _sensible(row, max(count, places), on_gpu) and row[0] * row[1] >= places
        for experts in computing
    ]
    columns = list(zip(*rows, strict=True))
    size, batches, prefill, block, attends, parked, experts = columns
    return Choices(
        np.array(size, float),
        np.array(batches, float),
        np.array(prefill, float),
        np.array(block),
        np.array(attends),
        np.array(parked),
        np.array(experts),
    )


def _sensible(row: tuple[int, int, int, bool, bool, int], count: int, on_gpu: bool) -> bool:
    size, batches, _, block, attends, parked = row
    if size * batches > 1 and size * batches >= 2 * count:
        return False
    if batches == 1 and (not block or parked):
        return False  # there is nothing to interleave, nothing waits
    if not on_gpu and (not attends or parked == 1):
        return False  # host and device are one memory
    return block or not parked


def _no_less(choices: Choices, index: int) -> npt.NDArray[np.bool_]:
    """Which choices take as much memory as one, or more."""
    found = np.ones(len(choices), dtype=bool)
    for more in (choices.batch_size, choices.batches, choices.prefill_tokens):
        found &= more >= more[index]
    kinds = (choices.block, choices.attends_on_cpu, choices.activations, choices.cpu_experts)
    for same in kinds:
        found &= same == same[index]
    return found


def lower_bounds(certifier: Certifier, choices: Choices, prefill: Phase, decode: Phase) -> Array:
    """Seconds that no plan of each choice takes less than, of bytes that cannot be near alone.

    Infinite where what has to be on the device does not fit there, or the rest nowhere.
    """
    cost = certifier.cost
    one = certifier.memory_of(certifier.plan_of(choices.one(smallest(choices)[0])))
    unpacked = one.purposes[DEVICE]["recent KV"] * choices.batch_size * choices.batches
    blocks = PackedCache.blocks_of(cost.workload.context, cost.kv.window, cost.kv.sinks)
    kv = cost.kv_blocks.bytes_of(blocks) * choices.batch_size * choices.batches
    usable = cost.machine.usable
    nbytes = np.stack([np.full_like(kv, cost.weight_bytes)] * 2 + [kv] * 2, -1)
    room = usable[DEVICE] - unpacked
    off = np.maximum(0.0, cost.weight_bytes + kv - room)
    far = np.maximum(0.0, off - usable[HOST])
    lost = (room < 0) | (far > usable[DISK] + cost.weight_bytes)
    total: Array = np.where(lost, np.inf, 0.0)
    for phase in (prefill, decode):
        per_byte = phase.each / np.maximum(nbytes, 1)[:, None, :]
        least_moved = np.stack([phase.moves.least] * 2, -1)
        least_moved[phase.cpu_experts, 0] = 1.0  # all of them are computed with
        per_byte[:, :, :2] *= least_moved[:, None, :]
        gained = np.minimum(0.0, phase.each[:, :, 2:].min(-1))  # less to attend to
        gained += phase.moves.share * np.minimum(0.0, phase.each[:, :, 0])  # less to multiply
        away = off[:, None] * np.maximum(0.0, per_byte.min(-1))
        on_disk = far[:, None] * np.maximum(0.0, per_byte[:, :, [1, 3]].min(-1))
        # What is more than all of the KV cache is weights.
        moved, read = (
            phase.least_moved(np.maximum(0.0, more - kv) / cost.weight_bytes)[:, None]
            for more in (off, far)
        )
        weights = np.maximum(phase.each[:, :, :2].min(-1) * moved, phase.each[:, :, 1] * read)
        busy = phase.base + gained + np.maximum(np.maximum(away, on_disk), weights)
        total += phase.rounds * busy.max(-1)
    return total


def relax(
    certifier: Certifier, choices: Choices, index: int, prefill: Phase, decode: Phase
) -> _Relaxed | None:
    """Solve the LP of a choice; None where no fractions fit the memory."""
    lp = program(certifier, choices, index, prefill, decode)
    return None if lp is None else _solved(lp, index)


def _solved(lp: Program, index: int) -> _Relaxed | None:
    from scipy.optimize import linprog  # which a machine with little more than torch has not

    found = linprog(lp.goal, A_ub=lp.rows, b_ub=lp.limits, method="highs")
    if found.status != 0:
        return None
    on_host, on_disk = found.x[2:4]
    return _Relaxed(index, float(found.fun + lp.fixed), float(on_host), float(on_disk))


def _certified(
    certifier: Certifier, choices: Choices, relaxed: list[_Relaxed]
) -> Iterator[Certified]:
    """The exact plans of the best relaxed ones, until enough fit, or the next is not near them."""
    alike, same, best = Counter[float](), Counter[tuple[float, float]](), np.inf
    token_s = certifier.cost.workload.token_s
    for one in relaxed:
        if alike.total() >= _FINALISTS or one.seconds > NEAR * best:
            return
        sequences, batches = choices.sequences[one.index], choices.batches[one.index]
        if alike[sequences] >= _ALIKE or same[sequences, batches] >= _SAME:
            continue
        found = certifier.certify(choices.one(one.index), one.host, one.disk)
        if found is not None and (token_s is None or found.decode.seconds <= token_s):
            alike[sequences] += 1
            same[sequences, batches] += 1
            best = min(best, found.seconds)
            yield found

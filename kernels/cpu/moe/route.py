"""Which experts compute for each token, and how much each counts: one small job on the pool."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.pool import default_pool
from qoff.kernels.cpu.jit.pool_threads import take
from qoff.kernels.cpu.operands import address, check_dense, check_rows, int64s, offsets
from qoff.kernels.layout.routing import NEVER_ZERO, Routing

from .scratch import route_bytes

_OF_ALL, _OF_CHOSEN, _SIGMOID, _MIXER = range(4)
_SHARES = {"all": _OF_ALL, "topk": _OF_CHOSEN, "sigmoid": _SIGMOID, "mixer": _MIXER}


class RouteArguments(ctypes.Structure):
    """Addresses, a stride in bytes, sizes, what scores become, and a factor.

    correction, gains: 0 for none. scratch: of each thread, float32 [2, E], for what each expert's
    score becomes, and for that as experts are chosen by it; 0 where both are the scores.
    """

    _fields_ = (
        *int64s("scores", "stride", "tokens", "experts", "top_k", "ids", "weights"),
        *int64s("kind", "normalized", "groups", "top_groups", "correction", "scratch"),
        *int64s("group_best", "gains"),
        ("scale", ctypes.c_float),
        ("jitter", ctypes.c_float),
    )


(
    SCORES, STRIDE, M, EXPERTS, TOP_K, IDS, WEIGHTS,
    KIND, NORMALIZED, GROUPS, TOP_GROUPS, CORRECTION, SCRATCH, GROUP_BEST, GAINS, SCALE,
    JITTER,
) = offsets(RouteArguments)  # fmt: skip


@inner
def _next_best(scores, experts, number, score):
    """The expert that comes behind one of this number and score: of equal ones the first is first.

    -1 where there is none: some scores are NaN.
    """
    best = -1
    for e in range(experts):
        s = simd.peek_f32(scores + 4 * e)
        behind = s < score or (s == score and e > number)
        if behind and (best < 0 or s > simd.peek_f32(scores + 4 * best)):
            best = e
    return best


@inner
def _judge(args, scores, shares, merits):
    """Write each expert's share, and that with its correction."""
    experts, correction = simd.peek_i64(args + EXPERTS), simd.peek_i64(args + CORRECTION)
    kind = simd.peek_i64(args + KIND)
    largest, total = np.float32(-np.inf), np.float32(0.0)
    for e in range(experts):
        largest = max(largest, simd.peek_f32(scores + 4 * e))
    for e in range(experts):
        score = simd.peek_f32(scores + 4 * e)
        if kind == _SIGMOID:
            score = np.float32(1.0) / (np.float32(1.0) + np.exp(-score))
        elif kind == _OF_ALL:
            score = np.exp(score - largest)
            total += score
        simd.poke_f32(shares + 4 * e, score)
    for e in range(experts):
        share = simd.peek_f32(shares + 4 * e)
        if kind == _OF_ALL:
            share /= total
            simd.poke_f32(shares + 4 * e, share)
        if correction != 0:
            share += simd.peek_f32(correction + 4 * e)
        simd.poke_f32(merits + 4 * e, share)


@inner
def _group_value(merits, first, each, count):
    """The sum of the two best merits of a group, or (count 1) the best."""
    best, second = np.float32(-np.inf), np.float32(-np.inf)
    for e in range(first, first + each):
        merit = simd.peek_f32(merits + 4 * e)
        if merit > best:
            best, second = merit, best
        elif merit > second:
            second = merit
    return best if count == 1 else best + second


@inner
def _keep_best_groups(args, merits):
    """Make the merits of all but the best groups minus infinity; of equal ones the first stay."""
    groups, experts = simd.peek_i64(args + GROUPS), simd.peek_i64(args + EXPERTS)
    each = experts // groups
    for _ in range(groups - simd.peek_i64(args + TOP_GROUPS)):
        worst, least = -1, np.float32(0.0)
        for g in range(groups):
            value = _group_value(merits, g * each, each, simd.peek_i64(args + GROUP_BEST))
            if value > -np.inf and (worst < 0 or value <= least):
                worst, least = g, value
        if worst >= 0:
            for e in range(worst * each, (worst + 1) * each):
                simd.poke_f32(merits + 4 * e, np.float32(-np.inf))


@inner
def _divisor(args, scores, total, largest, judged):
    """What the weights of the chosen, whose sum is `total`, are divided by."""
    kind, normalized = simd.peek_i64(args + KIND), simd.peek_i64(args + NORMALIZED) != 0
    if kind == _OF_CHOSEN or (normalized and not judged):
        return total
    if normalized:
        return total + np.float32(NEVER_ZERO)
    total *= np.float32(0.0)
    if judged:
        return total + np.float32(1.0)
    for e in range(simd.peek_i64(args + EXPERTS)):
        total += np.exp(simd.peek_f32(scores + 4 * e) - largest)
    return total


@inner
def _mix(args, scores, ids, weights, total):
    """Write the weights of the chosen, best first, by SparseMixer; what they are divided by.

    total: 0, or NaN if any score is.
    """
    twice = np.float32(2.0) * simd.peek_f32(args + JITTER)
    sum_of_weights = total
    for t in range(simd.peek_i64(args + TOP_K)):
        best = simd.peek_f32(scores + 4 * simd.peek_i64(ids + 8 * t))
        close = total
        for e in range(simd.peek_i64(args + EXPERTS)):
            score = simd.peek_f32(scores + 4 * e)
            left = best - score <= twice * max(abs(score), best)
            for before in range(t):
                left = left and simd.peek_i64(ids + 8 * before) != e
            if left:
                close += np.exp(score - best)
        weight = np.float32(1.0) / close  # which has that of the expert itself, 1
        sum_of_weights += weight
        simd.poke_f32(weights + 4 * t, weight)
    if simd.peek_i64(args + NORMALIZED) != 0:
        return sum_of_weights + np.float32(NEVER_ZERO)
    return total + np.float32(1.0)


@inner
def _route_token(args, token, scratch):
    experts, top_k = simd.peek_i64(args + EXPERTS), simd.peek_i64(args + TOP_K)
    scores = simd.peek_i64(args + SCORES) + token * simd.peek_i64(args + STRIDE)
    ids = simd.peek_i64(args + IDS) + 8 * token * top_k
    weights = simd.peek_i64(args + WEIGHTS) + 4 * token * top_k
    shares = merits = scores
    judged = scratch != 0
    if judged:
        shares, merits = scratch, scratch + 4 * experts
        _judge(args, scores, shares, merits)
        if simd.peek_i64(args + GROUPS) > 1:
            _keep_best_groups(args, merits)
    total = np.float32(0.0)  # NaN if any score is
    for e in range(experts):
        total += simd.peek_f32(scores + 4 * e) * np.float32(0.0)
    number, merit, largest = -1, np.float32(np.inf), np.float32(0.0)
    for t in range(top_k):
        number = _next_best(merits, experts, number, merit)
        if number < 0:
            number = 0
        merit = simd.peek_f32(merits + 4 * number)
        weight = simd.peek_f32(shares + 4 * number)
        if not judged or simd.peek_i64(args + KIND) == _OF_CHOSEN:
            if t == 0:
                largest = weight
            weight = np.exp(weight - largest)
        total += weight
        simd.poke_i64(ids + 8 * t, number)
        simd.poke_f32(weights + 4 * t, weight)
    if simd.peek_i64(args + KIND) == _MIXER:
        total = _mix(args, scores, ids, weights, np.float32(0.0) * total)
    else:
        total = _divisor(args, scores, total, largest, judged)
    scale, gains = simd.peek_f32(args + SCALE), simd.peek_i64(args + GAINS)
    for t in range(top_k):
        weight = simd.peek_f32(weights + 4 * t) / total
        if gains != 0:
            weight *= simd.peek_f32(gains + 4 * simd.peek_i64(ids + 8 * t))
        simd.poke_f32(weights + 4 * t, weight * scale)


@job
def route_job(pool, thread, threads, args):
    """The whole op; its arguments are the fields above."""
    tokens, scratch = simd.peek_i64(args + M), simd.peek_i64(args + SCRATCH)
    if scratch != 0:
        scratch += 8 * simd.peek_i64(args + EXPERTS) * thread
    token = take(pool, 0)
    while token < tokens:
        _route_token(args, token, scratch)
        token = take(pool, 0)


def route(
    scores: Tensor,
    routing: Routing,
    correction: Tensor | None = None,
    gains: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Experts of each token, int64 [M, top_k], best first, and their weights, float32 [M, top_k].

    scores: float32 [M, E], rows contiguous; of equal ones the first expert's is the better.
    correction, gains: float32 [E]. The weights are as in `reference.experts.route`; NaN where any
    score of the token is NaN or infinite. Raises OpError.
    """
    tokens, experts = scores.shape
    check_rows("route", "scores", scores, tokens, experts)
    routing.check(experts)
    for name, vector in (("correction", correction), ("gains", gains)):
        if vector is not None:
            check_dense("route", name, vector, (experts,))
    ids = torch.empty(tokens, routing.top_k, dtype=torch.int64)
    weights = torch.empty(tokens, routing.top_k)
    if not tokens:
        return ids, weights
    pool, judged = default_pool(), routing.judged(correction is not None)
    with pool.lock:
        nbytes = route_bytes(pool.threads, experts, judged)
        scratch = pool.workspace(nbytes) if judged else 0
        arguments = RouteArguments(
            scores.data_ptr(), 4 * scores.stride(0), tokens, experts, routing.top_k,
            ids.data_ptr(), weights.data_ptr(), _SHARES[routing.shares], routing.normalized,
            routing.groups, routing.top_groups, address(correction),
            scratch, routing.group_best, address(gains), routing.scale,
            routing.jitter,
        )  # fmt: skip
        pool.run(route_job.address, arguments)
    return ids, weights

"""Which experts compute for each token, and how much each counts: one small job on the pool."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.pool import default_pool, take
from qoff.kernels.cpu.operands import check_rows, fail, int64s, offsets


class RouteArguments(ctypes.Structure):
    """Addresses, a stride in bytes, sizes, and whether weights are shares of all experts."""

    _fields_ = int64s("scores", "stride", "tokens", "experts", "top_k", "ids", "weights", "of_all")


SCORES, STRIDE, M, EXPERTS, TOP_K, IDS, WEIGHTS, OF_ALL = offsets(RouteArguments)


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
def _route_token(args, token):
    experts, top_k = simd.peek_i64(args + EXPERTS), simd.peek_i64(args + TOP_K)
    scores = simd.peek_i64(args + SCORES) + token * simd.peek_i64(args + STRIDE)
    ids = simd.peek_i64(args + IDS) + 8 * token * top_k
    weights = simd.peek_i64(args + WEIGHTS) + 4 * token * top_k
    number, score, largest = -1, np.float32(np.inf), np.float32(0.0)
    total = np.float32(0.0)  # NaN if any score is
    for e in range(experts):
        total += simd.peek_f32(scores + 4 * e) * np.float32(0.0)
    for t in range(top_k):
        number = _next_best(scores, experts, number, score)
        if number < 0:
            number = 0
        score = simd.peek_f32(scores + 4 * number)
        if t == 0:
            largest = score
        weight = np.exp(score - largest)
        total += weight
        simd.poke_i64(ids + 8 * t, number)
        simd.poke_f32(weights + 4 * t, weight)
    if simd.peek_i64(args + OF_ALL) != 0:
        total *= np.float32(0.0)
        for e in range(experts):
            total += np.exp(simd.peek_f32(scores + 4 * e) - largest)
    for t in range(top_k):
        simd.poke_f32(weights + 4 * t, simd.peek_f32(weights + 4 * t) / total)


@job
def route_job(pool, thread, threads, args):
    """The whole op; its arguments are the fields above."""
    tokens = simd.peek_i64(args + M)
    token = take(pool, 0)
    while token < tokens:
        _route_token(args, token)
        token = take(pool, 0)


def route(
    scores: Tensor, top_k: int, softmax: str = "all", normalized: bool = False
) -> tuple[Tensor, Tensor]:
    """Experts of each token, int64 [M, top_k], best first, and their weights, float32 [M, top_k].

    scores: float32 [M, E], rows contiguous; of equal ones the first expert's is the better. The
    weights are as in `reference.experts.route`; NaN where any score of the token is NaN or
    infinite. Raises OpError.
    """
    tokens, experts = scores.shape
    check_rows("route", "scores", scores, tokens, experts)
    if not 1 <= top_k <= experts:
        fail("route", f"a token chooses 1 to {experts} experts, not {top_k}")
    ids = torch.empty(tokens, top_k, dtype=torch.int64)
    weights = torch.empty(tokens, top_k)
    if tokens:
        of_all = softmax == "all" and not normalized
        arguments = RouteArguments(
            scores.data_ptr(), 4 * scores.stride(0), tokens, experts, top_k, ids.data_ptr(),
            weights.data_ptr(), of_all,
        )  # fmt: skip
        default_pool().run(route_job.address, arguments)
    return ids, weights

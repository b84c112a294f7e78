"""Tokens from logits, for many rows at once, on the device where the logits are.

Rows have `columns(V)` columns: the logits of V tokens, and -inf behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cpu.sampling.scratch import GROUP, columns
from .layout.distribution import Shape

_BINS = 1 << 10  # by a third of a weight's bits
_TOGETHER = 1 << 20  # logits that are worked on at once
_BYTES = 32  # of working space for each of them: weights in float64, places, sums, masks
DRAWS_AHEAD = 6  # of a sequence, whose random numbers are there at once
_RANKED_BYTES = 36  # for each of those that are sorted
# On a CPU jobs draw, in memory of their own. What is left to torch: logits with penalties; ranks
# and log-probabilities, of a copy of fewer logits at once.
_SCORED = 1 << 18
_MASK_BYTES = 9  # of the row whose rank is counted: masks of 1 and 8 bytes
_QUEUED_BYTES = 16  # of the row that torch ranks: rounds keep it on one thread


def noise_size(vocab_size: int) -> int:
    """Random numbers that a draw takes: one for each token of a group, one for each group."""
    return GROUP + columns(vocab_size) // GROUP


@dataclass(frozen=True)
class Warp:
    """How logits become a distribution, for R rows; in vLLM's order.

    numbers: float32 [3, R, 1], of temperature (not 0), min_p and top_p. top_k: int64 [R, 1], from 1
    on; None: all tokens, of each row. ranked: the largest top_k. nucleus: whether a top_p is below
    1.
    """

    numbers: Tensor
    nucleus: bool
    top_k: Tensor | None = None
    ranked: int = 0


def likeliest(logits: Tensor) -> list[int]:
    """The likeliest token of each row of float32 [R, V]; on the CPU the first of several.

    -1 where logits are not finite: NaN, infinity, or -inf in the whole row.
    """
    if logits.is_cpu:
        return likeliest_of(logits.unbind())
    return likeliest_there(logits).tolist()


def likeliest_there(logits: Tensor) -> Tensor:
    """As `likeliest`, int64 [R], where the logits are: nothing waits for it."""
    value, token = logits.max(1)  # NaN if one is
    return token.masked_fill_(~value.isfinite(), -1)


def likeliest_of(rows: Sequence[Tensor]) -> list[int]:
    """As `likeliest`, of rows on the CPU, float32 [V] each, that need not lie together."""
    from .cpu.sampling.sampling import likeliest as compiled

    return compiled(rows)


def draw(rows: Sequence[Tensor], shapes: Sequence[Shape], noise: Tensor) -> list[int]:
    """What `draw_` draws, of rows on the CPU, float32 [V]; -1 as in `likeliest`.

    noise: float64 [R, noise_size], contiguous.
    """
    from .cpu.sampling.sampling import draw as compiled

    return compiled(rows, shapes, noise)


def follows_torch() -> bool:
    """Whether `multinomial` knows how torch draws; it may differ by version and processor."""
    from .cpu.sampling.sampling import follows_torch as known

    return known()


def multinomial(rows: Sequence[Tensor], shape: Shape) -> list[int]:
    """A token of each row, float32 [V] on the CPU, by torch's generator; see `kernels.cpu`."""
    from .cpu.sampling.sampling import multinomial as compiled

    return compiled(rows, shape)


def rows_together(vocab_size: int, ranked: int = 0) -> int:
    """How many rows are worked on at once, of which so many logits are sorted.

    What they take is within `sampling_bytes`.
    """
    return max(1, _TOGETHER // (columns(vocab_size) + _RANKED_BYTES // _BYTES * ranked + _BINS))


def rows_scored(vocab_size: int, ranked: int, on_cpu: bool) -> int:
    """Of how many rows `log_probabilities` are found at once, with so many tokens each."""
    if not on_cpu:
        return rows_together(vocab_size, ranked)
    return max(1, _SCORED // (columns(vocab_size) + ranked))


def sampling_bytes(vocab_size: int, rows: int, context: int, on_cpu: bool = False) -> int:
    """The most bytes that choosing tokens for so many sequences allocates, beside their logits.

    context: tokens of a sequence, all of which may be penalized. on_cpu: beside what ops share.
    """
    row, noise = columns(vocab_size) + _BINS, 8 * noise_size(vocab_size)
    together = min(rows, rows_together(vocab_size))
    ahead = DRAWS_AHEAD * noise
    if on_cpu:
        scored = min(rows, rows_scored(vocab_size, 0, on_cpu))
        most = row * max(4 * together, 4 * scored + max(4 * scored, _MASK_BYTES, _QUEUED_BYTES))
        # Rows with log-probabilities or penalties have nothing ahead, and take more.
        drawn, ahead_of = 2 * ahead * (rows + 2), ahead * (rows - scored)
    else:
        sorted_alone = (_BYTES + _RANKED_BYTES) * row
        most = max(min(_BYTES * rows * row, _BYTES * _TOGETHER), sorted_alone)
        drawn, ahead_of = 0, 2 * ahead * (rows + 2)
    penalties = together * context * 40  # ids in int64, logits, their new values
    return max(drawn, most + penalties + 4 * together * noise + ahead_of)


def penalize_(
    logits: Tensor, history: Tensor, prompts: Tensor, by: Tensor, vocab_size: int
) -> None:
    """Apply vLLM's penalties to float32 logits [R, columns].

    history: int64 [R, L], the tokens of prompt and answer, `vocab_size` behind them. prompts: int64
    [R, 1], tokens of the prompt. by: float32 [3, R, 1]: repetition (1: none), presence, frequency
    penalty (0: none).
    """
    repetition, presence, frequency = by
    # Tokens that come more than once are written as often, the same each time.
    were = logits.gather(1, history)
    logits.scatter_(1, history, torch.where(were > 0, were / repetition, were * repetition))
    places = torch.arange(history.shape[1], device=history.device)
    answer = history.masked_fill(places < prompts, vocab_size)
    logits.scatter_(1, answer, logits.gather(1, answer) - presence)
    logits.scatter_add_(1, answer, (-frequency).expand(answer.shape))
    logits[:, vocab_size:] = -torch.inf


def draw_(logits: Tensor, noise: Tensor, warp: Warp) -> Tensor:
    """Draw a token of each row, int64 [R], from float32 logits [R, columns], which are overwritten.

    noise: float64 [R, noise_size], uniform between 0 and 1, neither included. The same noise gives
    the same token on all devices, but for logits that differ in rounding: the likelier they leave a
    token, the likelier it stays the one that is drawn.
    """
    weights = _weights(logits, warp)
    groups = weights.view(len(weights), -1, GROUP)
    # Of exponential clocks of these rates, each rings first as often as its rate says.
    clocks = noise.log().neg_()
    group = (clocks[:, GROUP:] / groups.sum(2, dtype=torch.float64)).argmin(1)
    inside = groups[torch.arange(len(groups), device=group.device), group]
    return group * GROUP + (clocks[:, :GROUP] / inside).argmin(1)


def log_probabilities(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, ...]:
    """Of the tokens int64 [R], and of the `count` likeliest ones, for float32 logits [R, V].

    Returns the tokens' log-probabilities and ranks, [R] each, the likeliest tokens' and their ids,
    [R, min(count, V)] each. A rank is one more than tokens are likelier.
    """
    total = logits.logsumexp(1, keepdim=True)
    value = logits.gather(1, tokens[:, None])
    # On a CPU row by row, in a mask of one.
    some = zip(logits.split(1), value.split(1), strict=True) if logits.is_cpu else [(logits, value)]
    rank = torch.cat([(rows > own).sum(1) for rows, own in some]) + 1
    best, ids = logits.topk(min(count, logits.shape[1]), 1)
    return (value - total)[:, 0], rank, best - total, ids


def _weights(logits: Tensor, warp: Warp) -> Tensor:
    """What a token's probability is in proportion to, 1 for the likeliest; in the same memory."""
    temperature, min_p, top_p = warp.numbers
    weights = logits.div_(temperature)
    weights.sub_(weights.amax(1, keepdim=True)).exp_()
    weights.masked_fill_(weights < min_p, 0)
    if warp.top_k is None and not warp.nucleus:
        return weights
    wanted = top_p * weights.sum(1, keepdim=True, dtype=torch.float64)
    if warp.top_k is None:
        least = torch.where(top_p < 1, _least_of_top_p(weights, wanted), 0)
    else:
        values = weights.topk(warp.ranked, 1).values
        least = values.gather(1, warp.top_k - 1)
        if warp.nucleus:
            reached = values.masked_fill_(values < least, 0).cumsum(1, dtype=torch.float64)
            last = torch.searchsorted(reached, top_p * reached[:, -1:])
            below = values.gather(1, last.clamp_(max=warp.ranked - 1))
            least = torch.where(top_p < 1, torch.maximum(least, below), least)
    return weights.masked_fill_(weights < least, 0)


def _least_of_top_p(weights: Tensor, wanted: Tensor) -> Tensor:
    """The largest number such that the weights from it on add up to `wanted` > 0, [R, 1].

    Bits of numbers that are not negative are in the order of the numbers: sums by their first ones,
    then, of the weights that have those found, by the next ones.
    """
    bits = weights.view(torch.int32)
    weights, found = weights.double(), torch.zeros_like(wanted, dtype=torch.int32)
    for shift in (20, 10, 0):
        some = (bits >> shift & (_BINS - 1)).long()
        sums = weights.new_zeros(len(weights), _BINS).scatter_add_(1, some, weights)
        from_here = sums.flip(1).cumsum(1).flip(1)
        last = (from_here >= wanted).sum(1, keepdim=True).sub_(1).clamp_(min=0)
        wanted = wanted - (from_here - sums).gather(1, last)
        weights.masked_fill_(some != last, 0)
        found += (last << shift).int()
    return found.view(torch.float32)

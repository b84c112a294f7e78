"""How many tokens to draft: what a pass over more tokens costs, beside the passes that it saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from .adapt import Load, RunningPlan
from .certify import Certified, Certifier, choices_of

_TRIED = (1, 2, 3, 4, 6, 8, 12, 16)

PassSeconds = Callable[[int], Sequence[float]]


def pass_seconds(plan: RunningPlan, drafts: RunningPlan | None = None) -> PassSeconds:
    """Seconds of a round by the sequences of a batch: where each has 0, 1, ... drafted tokens.

    Of all batches, with sequences half as long as they may become. drafts: of a model that drafts
    in a pass a token.
    """
    opened = plan.plan
    tokens = max(1, opened.context // 2)

    def seconds(of: RunningPlan, sequences: int, batches: int, drafted: int) -> float:
        load = Load(sequences * batches, batches, tokens, drafted=drafted)
        return of.seconds(load, opened.schedule)

    @lru_cache(opened.batch_size)
    def each(sequences: int) -> tuple[float, ...]:
        one = 0.0
        if drafts is not None:
            one = opened.batches * seconds(drafts, sequences, 1, 0)
        return tuple(
            seconds(plan, sequences, opened.batches, drafted) + drafted * one
            for drafted in range(opened.draft_tokens + 1)
        )

    return each


def with_drafts(certifier: Certifier, best: Certified) -> Certified:
    """A plan with as many drafted tokens as are the fastest for its workload; maybe none."""
    work = certifier.cost.workload
    if not work.acceptance:
        return best
    limit = work.token_s
    found = best
    for drafted in _TRIED:
        plan = replace(best.plan, draft_tokens=drafted)
        fit = certifier.fit(plan)
        if isinstance(fit, str):  # more rows of logits take memory, too
            continue
        one = certifier.forecast(choices_of(plan), *fit)
        if one.seconds < found.seconds and (limit is None or one.decode.seconds <= limit):
            found = one
    fewer = work.tokens_of_pass(max(_TRIED))  # passes of any plan, at most so many times
    return replace(found, bound=min(found.seconds, best.bound / fewer))

"""How many tokens of prompts a batch reads in a pass, where a plan has a least number of them."""

from __future__ import annotations

from dataclasses import replace

from .adapt import Load, RunningPlan

_WORTH = 1.5  # times as long, at most, a round may take that reads twice as many


def prompt_tokens(running: RunningPlan) -> int:
    """`least_prefill_tokens`, or twice, four times, ... as many, up to `prefill_tokens`.

    Each doubling makes a round with all answers at most half as long again. So pieces of prompts
    are small where arithmetic is what takes time, and others' answers go on meanwhile; and large
    where rounds wait for weights, however few tokens they read. It follows from the plan and the
    rates of the machine, not from what is computed: how prompts are cut decides what is rounded.
    """
    plan = running.plan
    if plan.least_prefill_tokens is None:
        return plan.prefill_tokens
    answers = Load(plan.batches * plan.batch_size, plan.batches, max(1, plan.context // 2))

    def seconds(tokens: int) -> float:
        load = replace(answers, reads=plan.batches, read=tokens)
        return running.seconds(load, plan.schedule)

    size = min(plan.least_prefill_tokens, plan.prefill_tokens)
    while size < plan.prefill_tokens:
        more = min(2 * size, plan.prefill_tokens)
        if seconds(more) > _WORTH * seconds(size):
            break
        size = more
    return size

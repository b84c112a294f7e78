"""A round: one pass of every batch, or several decode steps of the only one."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from qoff.kernels.sampling import DRAWS_AHEAD
from qoff.models.forward_pass import ForwardPass

from .batch import BatchSlots, Continuation
from .opened import Opened
from .places import Places
from .round_stats import Counts, RoundStats

_TOGETHER = 64  # steps of a round, at most


class Round(NamedTuple):
    """What a round was. several: it had as many steps as each sequence has new tokens."""

    passes: list[ForwardPass]
    stats: RoundStats
    several: bool


def compute(opened: Opened, places: Places, number: int, reads: int) -> Round:
    """A token more of each sequence, or more of its prompt.

    Where several steps can be done together, several tokens more. reads: batches that may read
    prompts, in turn by the round's number.
    """
    executor = opened.executor
    clock = executor.instrumentation.clock
    start, before, looked_up = clock.now(), executor.counters(), opened.looked_up
    passes: list[tuple[BatchSlots, ForwardPass]] = []
    batches = opened.batches
    first = number % len(batches) if reads < len(batches) else 0
    for index in (*range(first, len(batches)), *range(first)):
        batch = batches[index]
        decode = batch.decode()
        read = batch.read(opened.prompt_tokens) if reads else None
        reads -= read is not None
        for place, run in enumerate((decode, read), 2 * index):
            if run is None:
                continue
            run.name, run.workspace = f"pass {len(passes)}", executor.workspace
            if executor.activations is not None:
                run.activations = executor.activations.of_pass(place)
            passes.append((batch, run))
    alone = len(passes) == 1 and passes[0][1].ragged.is_decode
    generated = _steps(opened, places, *passes[0]) if alone else None
    if generated is not None:
        tokens = Counts(0, generated, 0, 0)
    else:
        if alone:
            passes[0][1].logit_rows = None  # no other pass will use their memory
        tokens = _step(opened, places, passes)
    spent = (after - was for after, was in zip(executor.counters(), before, strict=True))
    weights_s, kv_s, activations_s, disk, host, spilled = spent
    ended = clock.now()
    queried, shared = (x - y for x, y in zip(opened.looked_up, looked_up, strict=True))
    stats = RoundStats(
        number=number,
        seconds=ended - start,
        ended=ended,
        weights_wait_s=weights_s,
        kv_wait_s=kv_s,
        activations_wait_s=activations_s,
        disk_bytes=disk,
        host_bytes=host,
        spilled_bytes=spilled,
        queried=queried,
        shared=shared,
        **tokens._asdict(),
    )
    return Round([run for _, run in passes], stats, generated is not None)


def _step(opened: Opened, places: Places, passes: list[tuple[BatchSlots, ForwardPass]]) -> Counts:
    """Do each pass once."""
    read, continued = 0, list[Continuation]()
    found = opened.schedule.round([run for _, run in passes])
    for (batch, run), logits in zip(passes, found, strict=True):
        tokens, more = batch.take(run, logits)
        read, continued = read + tokens, continued + more
    if any(run.states is not None for _, run in passes):
        places.finish_done()
    return _continue(opened, places, continued, read)


def _continue(opened: Opened, places: Places, found: list[Continuation], read: int) -> Counts:
    """Choose tokens, after a drafted one that is accepted the one that follows, too."""
    generated, drafted, accepted = 0, sum(len(draft) for _, draft in found), list[int]()
    drafts = sum(bool(draft) for _, draft in found)
    while found:
        generated += opened.sampler.draw([rows[0] for rows, _ in found])
        places.finish_done()
        found = [
            Continuation(rows[1:], draft[1:])
            for rows, draft in found
            if draft and not rows[0].sequence.ended
            if rows[0].sequence.answer[-1] == draft[0]
        ]
        accepted.append(len(found))
    for batch in opened.batches:
        batch.forget_rejected()
    return Counts(read, generated, drafted, sum(accepted), drafts, tuple(filter(None, accepted)))


def _steps(opened: Opened, places: Places, batch: BatchSlots, run: ForwardPass) -> int | None:
    """Do several steps of the only pass: how many tokens were generated; None where it cannot.

    Sequences are independent: those that go on take no notice of one whose text ends it.
    """
    if run.cache.ended is None:
        return None
    rows = batch.places(run)
    choice = opened.sampler.choice(rows)
    if choice is None:
        return None
    most, noise = min(one.max_tokens - len(one.answer) for _, one in rows), None
    if choice.shapes is not None:
        most, noise = min(most, DRAWS_AHEAD), partial(opened.sampler.noise, rows)
    steps = opened.schedule.steps(run, choice, min(most, _TOGETHER), noise)
    if not steps:
        return None
    generated = 0
    for tokens in steps:
        for (place, sequence), token in zip(rows, tokens, strict=True):
            if not sequence.ended:
                opened.sampler.chose(place, sequence, token)
                generated += token >= 0
        places.finish_done()
    return generated

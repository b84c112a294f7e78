"""Decode steps whose experts come one by one: a whole pass as one recording.

Its jobs ask for the experts that tokens choose and wait for them, so no Python runs between layers.
"""

from __future__ import annotations

from torch import Tensor

from qoff.memory import HEAD, WeightStore
from qoff.models.forward_pass import ForwardPass

from .decoder import Decoder
from .rows import taken
from .whole import given


def mixed_pass(decoder: Decoder, store: WeightStore, run: ForwardPass) -> Tensor | None:
    """The logits of a pass, as `Decoder.steps` returns them, where it can be one recording.

    None, and nothing is computed, where other weights move, or it does not only decode. Raises what
    went wrong in reading.
    """
    replays, experts = decoder.replays, decoder.spec.experts
    assert experts is not None
    if replays is None or not replays.while_done or store.experts is None or not store.complete:
        return None
    from qoff.memory.experts.jobs import jobs_of  # compiled when it is imported

    jobs = jobs_of(store.experts, len(run.tokens) * experts.top_k)
    if jobs is None:
        return None
    run.begun = begun = decoder.begin(run)
    if begun.key is None or not begun.stays or run.states is not None:
        return None
    rows = decoder.embedded(begun.ids, run)
    if run.per_layer is not None:
        run.begun = begun._replace(rows=rows)
        return None
    run.begun = None
    weights = [store.acquire(unit) for unit in [*range(decoder.spec.num_layers), HEAD]]
    assert run.cached is not None
    for places in decoder.spec.cache_places:
        for place in places:
            run.cached.arrive(place)
    run.expert_jobs = jobs

    def work(x: Tensor) -> Tensor:
        return given(decoder.units(run, x), weights)

    key = (jobs.key, *map(id, weights), begun.key)
    with jobs:
        logits = replays.run(key, weights, rows, work, using=jobs.run)
    run.expert_jobs = run.hidden = None
    run.cached.end()
    return taken(logits, run.logit_rows)

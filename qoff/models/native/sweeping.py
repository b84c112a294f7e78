"""Decode steps over weights that stream: the layers of all passes of a round as one recording.

Its jobs wait for the slots that weights come to, so no Python runs between layers or batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qoff.memory.sweep import Sweep
from qoff.models.forward_pass import Begun, ForwardPass

from .decoder import Decoder
from .graphs import Replays


def sweep_layers(
    decoder: Decoder, runs: Sequence[ForwardPass], begin: Callable[[], Sweep | None]
) -> None:
    """Compute the layers of all passes, where they can be one recording; `steps` does the rest.

    Each layer is computed for all passes before the next. Nothing is computed where weights are all
    resident, where hidden states or KV blocks move, or a pass does not only decode. begin: begins a
    sweep over the layers, if there can be one. Raises what went wrong in it.
    """
    replays = decoder.replays
    if replays is None or not replays.while_done or decoder.resident:
        return
    begun = []
    for run in runs:
        run.begun = decoder.begin(run)
        if run.begun.key is None or not run.begun.stays:
            return
        begun.append(run.begun)
    # Rows that are read from disk come now: later the threads that read wait for slots.
    for run, one in zip(runs, begun, strict=True):
        run.begun = one._replace(rows=decoder.embedded(one.ids, run))
    begun = [run.begun for run in runs if run.begun is not None]
    sweep = begin()
    if sweep is None:
        return
    for run, one in zip(runs, begun, strict=True):
        run.begun = one._replace(rows=None)
    with sweep:
        _swept(decoder, runs, begun, sweep, replays)


def _swept(
    decoder: Decoder,
    runs: Sequence[ForwardPass],
    begun: Sequence[Begun],
    sweep: Sweep,
    replays: Replays,
) -> None:
    counts = [len(one.ids) for one in begun]
    steady: Tensor | None = None
    if runs[0].per_layer is not None:
        rows = [run.per_layer for run in runs if run.per_layer is not None]
        steady = replays.steady("per layer", torch.cat(rows))
        for run, part in zip(runs, steady.split(counts), strict=True):
            run.per_layer = part

    def work(hidden: Tensor) -> Tensor:
        for run, rows in zip(runs, hidden.split(counts), strict=True):
            run.hidden = rows
        for layer, weights in enumerate(sweep.weights):
            sweep.take(layer)
            for run in runs:
                assert next(decoder.layer.steps(layer, weights, run), None) is None  # no tiles
            sweep.give_back(layer)
        return hidden

    for run, count in zip(runs, counts, strict=True):
        run.workspace = (run.workspace or decoder.steady_workspace(count)).upto(count)
        assert run.cached is not None
        for layer in range(len(sweep.weights)):
            run.cached.arrive(
                decoder.spec.kv_layers[layer]
            )  # nothing moves, but states are written to from here on
    x = torch.cat([one.rows for one in begun if one.rows is not None])
    place = 0 if steady is None else steady.data_ptr()
    key = (*map(id, sweep.weights), place, *((one.key, len(one.ids)) for one in begun))
    hidden = replays.run(key, sweep.weights, x, work, using=sweep.run)
    for run, rows in zip(runs, hidden.split(counts), strict=True):
        run.hidden, run.per_layer, run.swept = None, None, True
        run.activations.store(rows)

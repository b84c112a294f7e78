"""Decode steps over what moves: the layers of all passes of a round as one recording.

Its jobs wait for the slots that weights and KV blocks come to, and copy hidden states, so no Python
runs between layers or batches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from qoff.kvcache.store.sweep import BlockSweep
from qoff.memory.activations import ParkedActivations
from qoff.memory.sweep import Sweep
from qoff.models.forward_pass import ForwardPass

from .decoder import Decoder
from .graphs import Replays


def sweep_layers(
    decoder: Decoder, runs: Sequence[ForwardPass], begin: Callable[[], Sweep | None]
) -> None:
    """Compute the layers of all passes, where they can be one recording; `steps` does the rest.

    Each layer is computed for all passes before the next. Nothing is computed where nothing moves,
    what moves cannot be moved by jobs, or a pass does not only decode. begin: begins a sweep over
    the layers, if there can be one. Raises what went wrong in it.
    """
    replays = decoder.replays
    if replays is None or not replays.while_done:
        return
    begun = []
    for run in runs:
        run.begun = decoder.begin(run)
        parked = isinstance(run.activations, ParkedActivations) and not run.activations.by_jobs
        if run.begun.key is None or parked:
            return
        begun.append(run.begun)
    if decoder.resident and all(one.stays for one in begun):
        return
    # Rows that are read from disk come now: later the threads that read wait for slots.
    for run, one in zip(runs, begun, strict=True):
        run.begun = one._replace(rows=decoder.embedded(one.ids, run))
    with ExitStack() as stack:
        moving = next((run.cached for run in runs if run.cached and run.cached.moves), None)
        blocks = None if moving is None else moving.begin_sweep()
        if blocks is not None:
            stack.enter_context(blocks)
        sweep = begin() if moving is None or blocks is not None else None
        if sweep is None:
            return
        stack.enter_context(sweep)
        _Round(decoder, runs, replays, sweep, blocks).compute()


class _Round:
    """The layers of all passes, from the rows that they begin with to those that they leave."""

    def __init__(
        self,
        decoder: Decoder,
        runs: Sequence[ForwardPass],
        replays: Replays,
        sweep: Sweep,
        blocks: BlockSweep | None,
    ) -> None:
        self._decoder, self._runs, self._replays = decoder, runs, replays
        self._sweep, self._blocks = sweep, blocks
        begun = [run.begun for run in runs if run.begun is not None]
        self._keys = [(one.key, len(one.ids)) for one in begun]
        self._rows = [one.rows for one in begun if one.rows is not None]
        self._counts = [len(rows) for rows in self._rows]

    def compute(self) -> None:
        """Do all of it, as a recording if there is one."""
        addresses: list[Hashable] = [self._steady_per_layer()]
        for run, count in zip(self._runs, self._counts, strict=True):
            assert run.begun is not None
            run.begun = run.begun._replace(rows=None)
            run.workspace = (run.workspace or self._decoder.steady_workspace(count)).upto(count)
        self._begin_caches()
        addresses += self._park()
        words = []
        if self._blocks is not None:
            self._blocks.start()
            addresses.append(self._blocks.key)
            words.append(self._blocks.words)
        x = torch.cat(self._rows)
        self._rows.clear()
        weights = self._sweep.weights
        key = (*map(id, weights), *addresses, *self._keys)
        hidden = self._replays.run(
            key, weights, x, self._layers, using=lambda replay: self._sweep.run(replay, *words)
        )
        for run, rows in zip(self._runs, self._split(hidden), strict=True):
            run.hidden, run.per_layer, run.swept = None, None, True
            if rows is not None:
                run.activations.store(rows)

    def _steady_per_layer(self) -> int:
        """Have what layers add of the embeddings stay where it is; the address."""
        rows = [run.per_layer for run in self._runs if run.per_layer is not None]
        if not rows:
            return 0
        steady = self._replays.steady("per layer", torch.cat(rows))
        for run, part in zip(self._runs, steady.split(self._counts), strict=True):
            run.per_layer = part
        return steady.data_ptr()

    def _begin_caches(self) -> None:
        """Have caches know that layers are computed from here on, and what is to come to them."""
        for layer in range(len(self._sweep.weights)):
            kv_layer = self._decoder.spec.kv_layers[layer]
            for run in self._runs:
                assert run.cached is not None
                if run.cached.moves:
                    assert self._blocks is not None
                    run.cached.sweep(kv_layer, self._blocks)
                else:
                    run.cached.arrive(kv_layer)

    def _park(self) -> list[Hashable]:
        """Take hidden states that move to where they wait; the addresses."""
        addresses = list[Hashable]()
        for i, run in enumerate(self._runs):
            if isinstance(run.activations, ParkedActivations):
                addresses.append(run.activations.begin_jobs(self._rows[i]))
                self._rows[i] = self._rows[i][:0]
        return addresses

    def _split(self, hidden: Tensor) -> list[Tensor | None]:
        """The rows of each pass; None where they are moved."""
        start, found = 0, list[Tensor | None]()
        for run, count in zip(self._runs, self._counts, strict=True):
            stay = not isinstance(run.activations, ParkedActivations)
            found.append(hidden[start : start + count] if stay else None)
            start += count * stay
        return found

    def _layers(self, hidden: Tensor) -> Tensor:
        """Compute all layers."""
        rows = self._split(hidden)
        for layer, weights in enumerate(self._sweep.weights):
            self._sweep.take(layer)
            for run, there in zip(self._runs, rows, strict=True):
                states = run.activations
                parked = states if isinstance(states, ParkedActivations) else None
                run.hidden = there if parked is None else parked.load_by_job()
                steps = self._decoder.layer.steps(layer, weights, run)
                assert next(steps, None) is None  # no tiles
                if parked is not None:
                    parked.store_by_job()
            self._sweep.give_back(layer)
        return hidden

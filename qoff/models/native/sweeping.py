"""Decode steps over what moves: all passes of a round as one recording.

Its jobs wait for the slots that weights and KV blocks come to, and copy hidden states, so no Python
runs between layers or batches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from qoff.kvcache.store.sweep import BlockSweep
from qoff.memory import Unit
from qoff.memory.activations import ParkedActivations
from qoff.memory.sweep import Sweep
from qoff.models.forward_pass import ForwardPass

from .decoder import Decoder
from .graphs import Replays
from .rows import taken


def sweep_passes(
    decoder: Decoder,
    runs: Sequence[ForwardPass],
    begin: Callable[[int], Sweep | None],
    together: bool = True,
) -> list[Tensor] | None:
    """The logits of all passes, as `Decoder.steps` returns them, where they can be one recording.

    None, and nothing is computed, where nothing moves, what moves cannot be moved by jobs, or a
    pass does not only decode. begin: begins a sweep over so many times all units, if there can be
    one. together: each unit is used by all passes before the next comes; else the passes go through
    all units one after another. Raises what went wrong in the sweep.
    """
    replays = decoder.replays
    if replays is None or not replays.while_done:
        return None
    begun = []
    for run in runs:
        run.begun = decoder.begin(run)
        parked = isinstance(run.activations, ParkedActivations) and not run.activations.by_jobs
        # Layers of a cache are to be opened in the order in which a sweep is told of them.
        of_two = decoder.spec.index is not None and run.cached is not None and run.cached.moves
        if run.begun.key is None or parked or of_two:
            return None
        begun.append(run.begun)
    if decoder.resident and all(one.stays for one in begun):
        return None
    # Rows that are read from disk come now: later the threads that read wait for slots.
    for run, one in zip(runs, begun, strict=True):
        run.begun = one._replace(rows=decoder.embedded(one.ids, run))
    with ExitStack() as stack:
        moving = next((run.cached for run in runs if run.cached and run.cached.moves), None)
        blocks = None if moving is None else moving.begin_sweep()
        if blocks is not None:
            stack.enter_context(blocks)
        groups = [range(len(runs))] if together else [range(i, i + 1) for i in range(len(runs))]
        sweep = begin(len(groups)) if moving is None or blocks is not None else None
        if sweep is None:
            return None
        stack.enter_context(sweep)
        return _Round(decoder, runs, groups, replays, sweep, blocks).compute()


class _Round:
    """All passes, from the rows that they begin with to their logits.

    groups: passes that use each unit together.
    """

    def __init__(
        self,
        decoder: Decoder,
        runs: Sequence[ForwardPass],
        groups: Sequence[range],
        replays: Replays,
        sweep: Sweep,
        blocks: BlockSweep | None,
    ) -> None:
        self._decoder, self._runs, self._replays = decoder, runs, replays
        self._groups, self._sweep, self._blocks = groups, sweep, blocks
        begun = [run.begun for run in runs if run.begun is not None]
        self._keys = [(one.key, len(one.ids)) for one in begun]
        self._rows = [one.rows for one in begun if one.rows is not None]
        self._counts = [len(rows) for rows in self._rows]

    def compute(self) -> list[Tensor]:
        """Do all of it, as a recording if there is one."""
        addresses: list[Hashable] = [self._steady_per_layer()]
        for run in self._runs:
            run.begun = None
        self._begin_caches()
        addresses += self._moved_by_jobs()
        words = []
        if self._blocks is not None:
            self._blocks.start()
            addresses.append(self._blocks.key)
            words.append(self._blocks.words)
        x = torch.cat(self._rows)
        self._rows.clear()
        weights = self._sweep.weights
        key = (len(self._groups), *map(id, weights), *addresses, *self._keys)
        logits = self._replays.run(
            key, weights, x, self._logits, using=lambda replay: self._sweep.run(replay, *words)
        )
        found = []
        for run, some in zip(self._runs, logits, strict=True):
            assert run.cached is not None
            run.hidden = run.per_layer = None
            run.cached.end()
            found.append(taken(some, run.logit_rows))
        return found

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
        for group in self._groups:
            for places in self._decoder.spec.cache_places:
                for run in map(self._runs.__getitem__, group):
                    assert run.cached is not None
                    for place in places:
                        if run.cached.moves:
                            assert self._blocks is not None
                            run.cached.sweep(place, self._blocks)
                        else:
                            run.cached.arrive(place)

    def _moved_by_jobs(self) -> list[Hashable]:
        """Have jobs move hidden states that do not stay; the addresses."""
        addresses = list[Hashable]()
        for run, count in zip(self._runs, self._counts, strict=True):
            if isinstance(run.activations, ParkedActivations):
                run.activations = moved = run.activations.moved_by_jobs(count)
                addresses.append(moved.addresses)
        return addresses

    def _logits(self, x: Tensor) -> list[Tensor]:
        """Compute all passes; x: their rows, which may be overwritten."""
        rows, found = x.split(self._counts), list[Tensor]()
        for group in self._groups:
            steps = [self._decoder.units(self._runs[i], rows[i]) for i in group]
            unit = [next(step) for step in steps][-1]  # the same for all
            logits = list[Tensor]()
            try:
                while not logits:
                    weights, following = self._sweep.take(unit), list[Unit]()
                    for step in steps:
                        try:
                            following.append(step.send(weights))
                        except StopIteration as finished:
                            logits.append(finished.value)
                    self._sweep.give_back()
                    unit = following[-1] if following else unit
            finally:
                for step in steps:
                    step.close()
            found += logits
        return found

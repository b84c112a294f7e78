"""Which experts a text takes, and how often caches of several sizes would have them.

The routes are those of a run within a budget, token by token, which a simulator replays.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.hf.load import open_runtime
from qoff.kernels.layout.ragged import Ragged
from qoff.kvcache.base import KVCache
from qoff.memory.experts.simulator import rates
from qoff.models.forward_pass import ForwardPass
from qoff.models.runtime import Runtime
from qoff.units import format_size

from .tables import comma_separated, markdown

_SIZES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)  # of caches, in parts of all experts


@dataclass(frozen=True)
class ExpertRoutes:
    """What a run recorded.

    counts: experts of each layer. expert_bytes: of one of them. slots: that the run had, and
    hit_rate, of what was asked for in its decoding. routes: a layer and its chosen experts, of
    `tokens` tokens.
    """

    counts: tuple[int, ...]
    expert_bytes: int
    slots: int
    hit_rate: float
    routes: tuple[tuple[int, tuple[int, ...]], ...]
    tokens: int

    def rows(self) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        """The header and the rows of the table: what each size of the cache would have.

        The first half of the routes only fills the caches.
        """
        sizes = sorted({max(1, int(sum(self.counts) * part)) for part in _SIZES} | {self.slots})
        skip = len(self.routes) // 2
        found = rates(self.counts, self.routes, sizes, skip)
        asked = sum(len(numbers) for _, numbers in self.routes) / self.tokens
        best = found["next use"]
        return ("slots", "bytes", *found, "bytes read a token"), [
            (
                size,
                size * self.expert_bytes,
                *(rate[i] for rate in found.values()),
                int(asked * (1 - best[i]) * self.expert_bytes),
            )
            for i, size in enumerate(sizes)
        ]

    def markdown(self) -> str:
        """The table, with percents and sizes."""
        header, rows = self.rows()
        cells = [
            [
                f"{slots:,}",
                format_size(nbytes),
                *(f"{100 * rate:.1f} %" for rate in hit_rates),
                format_size(read),
            ]
            for slots, nbytes, *hit_rates, read in rows
        ]
        return markdown(header, cells, right=len(header))

    def csv(self) -> str:
        """The table as CSV."""
        return comma_separated(*self.rows())


def record(path: Path, ids: Tensor, prompt: int, **options: Any) -> ExpertRoutes:
    """Read `prompt` tokens of `ids` (int64 [n]) at once, the others one by one, and record.

    options: of `open_runtime`, with a `device_memory` that does not hold all experts. Raises its
    errors, and ArgumentError where experts do not come one by one.
    """
    opened = open_runtime(path, context=len(ids) + 1, **options)
    with opened.runtime as runtime:
        experts = runtime.store.experts
        if experts is None:
            bound = options.get("device_memory")
            within = "without a bound" if bound is None else f"in {bound}"
            raise ArgumentError(
                f"{path}: no expert comes on its own {within}: the model has none, or all of them "
                "fit; give a mixture of experts and less --device-memory"
            )
        cache = runtime.new_cache(1)
        _read(runtime, ids[:prompt], cache)
        experts.record, before = [], experts.stats
        for one in ids[prompt:].split(1):
            _read(runtime, one, cache)
        asked = sum(len(numbers) for _, numbers in experts.record)
        return ExpertRoutes(
            tuple(experts.counts),
            runtime.residency.expert_bytes,
            runtime.residency.expert_slots,
            (experts.stats.hits - before.hits) / max(asked, 1),
            tuple(experts.record),
            len(ids) - prompt,
        )


def _read(runtime: Runtime, fresh: Tensor, cache: KVCache) -> None:
    ragged = Ragged.of([len(fresh)], cache.lengths)
    with torch.inference_mode():
        runtime.forward(ForwardPass(fresh, ragged, cache, ragged.last_rows))

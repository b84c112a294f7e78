"""Passes of the decoder on a GPU wait for no value of it, and mix no tensor of it with the host's.

On the meta device, where tensors have no values to read; kernels of Triton are not launched.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qoff.kernels.embedding import embedding
from qoff.kernels.layout.low_rank import LowRank, LowRanks
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.ragged import Ragged, Span
from qoff.kvcache import KVQuant
from qoff.memory import HEAD
from qoff.memory.plan import LM_HEAD, PER_LAYER
from qoff.models.forward_pass import AdaptedRows, ForwardPass
from qoff.models.native.graphs import Replays
from tests.models.test_replays import again
from tests.models.test_triton_decoder import checkpoint, interpreted
from tests.tiny_models import PlainRun
from tests.triton_module import triton_module

triton_ops = triton_module("ops")
META = torch.device("meta")
SLOTS = 3
# Prompts, a token each, with a block that is complete, of some slots, and pieces of prompts.
PASSES = [{0: 78, 1: 5, 2: 70}, *[{0: 1, 1: 1, 2: 1}] * 4, {0: 1, 2: 1}, {2: 1}, {0: 70, 1: 3}]


@pytest.fixture(autouse=True)
def no_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = pytest.importorskip("triton.runtime.interpreter").GridExecutor
    monkeypatch.setattr(executor, "__call__", lambda *_, **__: None)


def there(x: Any) -> Any:
    """A weight without values."""
    if isinstance(x, QTensor):
        return replace(x, codes=x.codes.to(META), scale_min=x.scale_min.to(META))
    return x.to(META)


class Unread(PlainRun):
    """The decoder on weights without values."""

    def __init__(self, path: Path, resident: bool) -> None:
        self.replays = Replays(META, again)
        super().__init__(path, triton_ops, device=META, dtype=torch.float16, replays=self.replays)
        self._units = {
            unit: {name: there(x) for name, x in weights.items()}
            for unit, weights in self._units.items()
        }
        self.decoder.resident, outer = resident, self._units[HEAD]
        self.decoder._embed = lambda ids, scale: embedding(ids, outer[LM_HEAD], scale=scale)
        count = self.decoder.spec.num_layers
        self.decoder._embed_layers = lambda ids, scale: embedding(
            ids, outer[PER_LAYER], scale=scale, rows_each=count
        ).view(len(ids), -1)

    def passes(self, top: float, adapters: Any = None) -> None:
        kv = KVQuant(8, 8, window=16, attention_top=top)
        cache: Any = self.decoder.new_cache(SLOTS, kv=kv)
        for counts in PASSES:
            spans, at = list[Span](), 0
            for slot, count in counts.items():
                spans.append(Span(slot, at, count, cache.lengths[slot]))
                at += count
            ragged, tokens = Ragged(tuple(spans)), torch.arange(at) % 20
            run = ForwardPass(tokens, ragged, cache, ragged.last_rows)
            if adapters is not None:
                key = tuple(i % 2 - 1 for i in range(at))
                run.adapters = AdaptedRows(key, torch.tensor(key), adapters)
            logits = self.forward(run)
            assert (logits.device, len(logits)) == (META, len(counts))
        cache.select([2, 0, 0])


@interpreted
@pytest.mark.parametrize(
    "family",
    [
        *("gemma2", "gemma3n", "deepseek-v3", "opt"),
        *("qwen3-next-head64", "kimi-linear", "ling3", "olmo-hybrid", "lfm2", "falcon-h1"),
    ],
)
def test_no_pass_waits_for_a_value(family: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, family)
    for resident in (True, False):
        run = Unread(path, resident)
        run.passes(top=1.0 if family in ("deepseek-v3", "kimi-linear", "ling3") else 0.3)
        # Embeddings of layers lie anywhere where weights move.
        assert (run.replays.recorded > 0) == (resident or family != "gemma3n")


@interpreted
def test_adapters_are_chosen_without_a_wait(tmp_path: Path) -> None:
    run = Unread(checkpoint(tmp_path), resident=True)
    matrix = run._units[0]["mlp.down_proj"]
    assert isinstance(matrix, QTensor)

    def empty(shape: tuple[int, ...], dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    down, up, first, times = LowRank.shapes(*matrix.shape, [4])
    one = LowRank(empty(down), empty(up), empty(first, torch.int64), empty(times, torch.float32))
    ranks = LowRanks([None])
    ranks.each = (one,)
    run.passes(1.0, [{"mlp.down_proj": ranks}] * run.decoder.spec.num_layers)

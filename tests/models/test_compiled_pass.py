"""A decode pass of every family is compiled jobs alone: torch allocates and takes views.

What is computed between jobs by torch could not be recorded and replayed as one list of jobs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qoff.kernels.cpu import ops as cpu
from qoff.kernels.layout.ragged import Ragged
from qoff.models.forward_pass import ForwardPass
from tests.tiny_models import FAMILIES, PlainRun, tiny_checkpoint

aten = torch.ops.aten
# `_taken` copies the rows whose logits are wanted; a recorded pass takes all of them.
_ALLOWED = {aten.empty, aten.new_empty, aten.empty_like, aten.index_select}


class ComputingOps(TorchDispatchMode):
    """Notes what torch computes between the embedding and the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.listens = False
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        returns = [r.alias_info for r in func._schema.returns]
        is_view = bool(returns) and all(a is not None and not a.is_write for a in returns)
        if self.listens and not is_view and func.overloadpacket not in _ALLOWED:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_computes_nothing(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = PlainRun(tiny_checkpoint(tmp_path_factory.getbasetemp(), family, "split32"), cpu)
    decoder, computing = run.decoder, ComputingOps()
    embed, cache = decoder._embed, decoder.new_cache(2, capacity=16)

    def listening(ids: Tensor, scale: float) -> Tensor:
        computing.listens = True
        return embed(ids, scale)

    decoder._embed = listening
    for counts in ([3, 1], [1, 1]):
        ragged = Ragged.of(counts, cache.lengths)
        computing.listens, computing.found = False, []
        with computing:
            run.forward(
                ForwardPass(
                    torch.randint(3, 100, (ragged.tokens,)),
                    ragged,
                    cache,
                    torch.arange(ragged.tokens),
                )
            )
    assert not computing.found

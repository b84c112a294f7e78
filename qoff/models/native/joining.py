"""Passes of a round as one, whose rows go through the matrices together; each attends by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qoff.models.forward_pass import AdaptedRows, ForwardPass


def join(runs: Sequence[ForwardPass]) -> ForwardPass:
    """The rows of passes one after another; its logits are those of all of them.

    Of each, the rows are named whose logits are wanted. Cache and sequences are the first one's:
    whoever attends asks the parts.
    """
    first, start, wanted = runs[0], 0, list[Tensor]()
    for run in runs:
        assert run.logit_rows is not None
        wanted.append(run.logit_rows + start)
        start += len(run.tokens)
    return ForwardPass(
        torch.cat([run.tokens for run in runs]),
        first.ragged,
        first.cache,
        torch.cat(wanted),
        workspace=first.workspace,
        name=" and ".join(run.name for run in runs),
        adapters=_adapted(runs),
        positions=_of_all([run.positions for run in runs if run.positions is not None]),
        joined=tuple(runs),
        wants_final=any(run.wants_final for run in runs),
    )


def _adapted(runs: Sequence[ForwardPass]) -> AdaptedRows | None:
    """The adapters of all rows, of which a part may have none; None: there are none."""
    some = next((run.adapters for run in runs if run.adapters is not None), None)
    if some is None:
        return None
    none = AdaptedRows((), some.which[:0], some.layers)
    rows = [run.adapters or none.padded(len(run.tokens)) for run in runs]
    key = tuple(adapter for one in rows for adapter in one.key)
    return AdaptedRows(key, torch.cat([one.which for one in rows]), some.layers)


def _of_all(rows: Sequence[Tensor]) -> Tensor | None:
    return torch.cat(list(rows)) if rows else None

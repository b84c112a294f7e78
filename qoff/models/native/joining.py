"""Passes of a round as one, whose rows go through the matrices together; each attends by itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from qoff.models.forward_pass import AdaptedRows, ForwardPass


def join(runs: Sequence[ForwardPass]) -> ForwardPass:
    """The rows of passes one after another; its logits are those of all of them.

    Of each, the rows are named whose logits are wanted. Cache and sequences are the first one's:
    whoever attends asks the parts.
    """
    starts = accumulate((len(run.tokens) for run in runs[:-1]), initial=0)
    rows = zip(starts, [run.logit_rows for run in runs], strict=True)
    wanted = [each + start for start, each in rows if each is not None]
    first = runs[0]
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
    )


def _adapted(runs: Sequence[ForwardPass]) -> AdaptedRows | None:
    """The adapters of all rows; None: there are none."""
    rows = [run.adapters for run in runs if run.adapters is not None]
    if not rows:
        return None
    key = tuple(adapter for one in rows for adapter in one.key)
    return AdaptedRows(key, torch.cat([one.which for one in rows]), rows[0].layers)


def _of_all(rows: Sequence[Tensor]) -> Tensor | None:
    return torch.cat(list(rows)) if rows else None

"""Scoring a text by a model: token by token, and against a reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.eval.texts import digest

from .metrics import Scores
from .reference import Reference, ReferenceMeta, write_reference
from .subjects import Predictions, Subject
from .windows import Window

Progress = Callable[[int, int], None]  # windows done, windows in all
_ROWS = 16  # scored at a time, in less memory than the budget has for logits


class Sample:
    """A tokenized text and its windows."""

    def __init__(self, ids: Tensor, windows: Sequence[Window], prefix: int | None = None) -> None:
        """ids: int64 [n]. prefix: the end-of-text token, which windows of lm_eval begin with.

        Raises ArgumentError where they need one that the tokenizer does not have.
        """
        self.ids, self.windows, self.prefix = ids, tuple(windows), prefix
        if prefix is None and any(window.prefix for window in windows):
            raise ArgumentError(
                "this tokenizer has no end-of-text token; lm_eval's windows need it"
            )
        self.digest = digest(ids, self.windows, prefix)

    def tokens(self, window: Window) -> Tensor:
        """What a window reads and predicts, int64 [T]."""
        return window.tokens(self.ids, self.prefix)


def predictions(
    subject: Subject, sample: Sample, batch: int = 1, progress: Progress | None = None
) -> Iterator[tuple[int, Predictions, Tensor]]:
    """(window, predictions, the tokens they are of), windows in turn, up to `batch` read together.

    Windows that are read together come piece by piece.
    """
    done = 0
    numbered = enumerate(sample.windows)
    for (_, place), group in groupby(numbered, key=lambda x: (x[1].stop - x[1].start, x[1].place)):
        members = list(group)
        for start in range(0, len(members), batch):
            part = members[start : start + batch]
            tokens = torch.stack([sample.tokens(window) for _, window in part])
            for found in subject.predict(tokens, place):
                wanted = tokens[found.window, found.place : found.place + len(found.logits)]
                yield part[found.window][0], found, wanted
            done += len(part)
            if progress is not None:
                progress(done, len(sample.windows))


def evaluate(
    subject: Subject,
    sample: Sample,
    reference: Reference | None = None,
    *,
    batch: int = 1,
    progress: Progress | None = None,
) -> Scores:
    """Score every scored token of the windows, `batch` of which are read together.

    Raises ArgumentError for a reference of another text, tokenizer or model.
    """
    if reference is not None:
        _check(subject, sample, reference)
    starts = np.cumsum([0, *(window.scored for window in sample.windows)])
    nll, kl = np.zeros(starts[-1]), np.zeros(starts[-1])
    same = np.zeros(starts[-1], dtype=bool)
    for number, found, tokens in predictions(subject, sample, batch, progress):
        first = int(starts[number]) + found.place - sample.windows[number].place
        for start in range(0, len(tokens), _ROWS):
            wanted, logits = (x[start : start + _ROWS] for x in (tokens, found.logits))
            rows = slice(first + start, first + start + len(wanted))
            logs = torch.log_softmax(logits.cpu().float(), dim=-1)
            nll[rows] = -logs.gather(1, wanted[:, None])[:, 0].double().numpy()
            if reference is not None:
                truth = reference.log_probabilities(rows.start, len(wanted))
                kl[rows] = (truth.exp() * (truth - logs)).sum(1).clamp_min(0).double().numpy()
                same[rows] = (truth.argmax(1) == logs.argmax(1)).numpy()
    if not np.isfinite(nll).all():
        raise ArgumentError(f"{subject.name}: predictions that are not finite")
    if reference is None:
        return Scores(nll)
    return Scores(nll, reference.nll, kl, same)


def make_reference(
    subject: Subject, sample: Sample, path: Path, progress: Progress | None = None
) -> Reference:
    """Write a reference of this text at `path`, in place of what is there, and open it."""
    meta = ReferenceMeta(subject.name, subject.vocab_size, sample.digest)
    found = predictions(subject, sample, 1, progress)
    write_reference(path, meta, ((rows.logits, tokens) for _, rows, tokens in found))
    return Reference(path)


def _check(subject: Subject, sample: Sample, reference: Reference) -> None:
    meta = reference.meta
    if meta.vocab_size != subject.vocab_size:
        raise ArgumentError(
            f"the reference {meta.model} has {meta.vocab_size} tokens, {subject.name} has "
            f"{subject.vocab_size}: they are not the same model"
        )
    if meta.text != sample.digest:
        raise ArgumentError(
            f"the reference {meta.model} was computed on other tokens: another text, other windows "
            "or another tokenizer"
        )

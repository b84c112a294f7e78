"""Scoring a text by a model: token by token, and against another model or what one predicted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.eval.texts import digest
from qoff.units import counted

from .metrics import Scores
from .records import Arrays, Records
from .reference import DRAWN, LIKELIEST, VERSION, Compared, Reference, Rows, stored_rows
from .subjects import Predictions, Subject
from .windows import Window

# Told after every piece: tokens scored, tokens in all, and the scores of the windows that are done.
Tell = Callable[[int, int, "Scores | None"], None]
_ROWS = 16  # scored at a time, in less memory than the budget has for logits


class Sample:
    """A tokenized text and its windows."""

    def __init__(
        self,
        ids: Tensor,
        windows: Sequence[Window],
        prefix: int | None = None,
        first: int | None = None,
    ) -> None:
        """ids: int64 [n]. prefix: what the first window of lm_eval's begins with. first: what each
        window reads instead of its first token, which must not be scored.

        Raises ArgumentError where they need a prefix that the tokenizer does not have.
        """
        self.ids, self.windows, self.prefix, self.first = ids, tuple(windows), prefix, first
        if prefix is None and any(window.prefix for window in windows):
            raise ArgumentError(
                "this tokenizer has no token that begins or ends a text; lm_eval's windows need one"
            )
        parts = (ids, self.windows, prefix)
        self.digest = digest(*parts) if first is None else digest(*parts, first)

    def tokens(self, window: Window) -> Tensor:
        """What a window reads and predicts, int64 [T]."""
        tokens = window.tokens(self.ids, self.prefix)
        if self.first is None:
            return tokens
        assert window.place > 0
        return torch.cat((torch.tensor([self.first]), tokens[1:]))

    @property
    def longest(self) -> int:
        """Tokens of the longest window."""
        return max(len(self.tokens(window)) for window in self.windows)


def predictions(
    subject: Subject,
    sample: Sample,
    batch: int = 1,
    done: Collection[int] = (),
    begin: Callable[[list[int], Tensor, int], None] | None = None,
) -> Iterator[tuple[int, Predictions, Tensor]]:
    """(window, predictions, the tokens they are of), windows in turn, up to `batch` read together.

    Windows that are read together come piece by piece. done: windows that are left out. begin: is
    called with the numbers of windows, their tokens and the place of the first that is scored,
    before they are read.
    """
    numbered = [x for x in enumerate(sample.windows) if x[0] not in done]
    for (_, place), group in groupby(numbered, key=lambda x: (x[1].stop - x[1].start, x[1].place)):
        members = list(group)
        for start in range(0, len(members), batch):
            part = members[start : start + batch]
            tokens = torch.stack([sample.tokens(window) for _, window in part])
            if begin is not None:
                begin([number for number, _ in part], tokens, place)
            for found in subject.predict(tokens, place):
                wanted = tokens[found.window, found.place : found.place + len(found.logits)]
                yield part[found.window][0], found, wanted


class Truth(Protocol):
    """What a model is compared with: `Original`, or a stored `Reference`."""

    name: str
    vocab_size: int

    def begin(self, numbers: list[int], tokens: Tensor, place: int) -> None:
        """Windows that are read next: their numbers, tokens [B, T], the first scored place."""

    def compare(self, number: int, first: int, logits: Tensor, logs: Tensor) -> Compared:
        """Compare a window's scored tokens from number `first` on, those after the last call's.

        logits: of the model, float32 [r, vocab_size]; logs: their log-probabilities, float64.
        """


class Original:
    """Another model, which reads each window beside the one that is scored; nothing is kept."""

    def __init__(self, subject: Subject) -> None:
        self.name, self.vocab_size = subject.name, subject.vocab_size
        self._subject = subject

    def begin(self, numbers: list[int], tokens: Tensor, place: int) -> None:
        self._numbers, self._tokens = numbers, tokens
        self._found = self._subject.predict(tokens, place)
        self._held = dict[int, tuple[Tensor, Tensor]]()  # predicted and not asked for yet

    def compare(self, number: int, first: int, logits: Tensor, logs: Tensor) -> Compared:
        truth, wanted = self._next(number, len(logs))
        theirs = torch.log_softmax(truth.double(), dim=-1)
        kl = (theirs.exp() * (theirs - logs)).sum(1).clamp_min(0)
        same = theirs.argmax(1) == logs.argmax(1)
        return Compared(
            -theirs.gather(1, wanted[:, None])[:, 0], kl, same, torch.zeros_like(kl), kl, kl
        )

    def _next(self, number: int, count: int) -> tuple[Tensor, Tensor]:
        """The next predictions of a window, and the tokens that they are of."""
        while number not in self._held or len(self._held[number][0]) < count:
            found = next(self._found)
            wanted = self._tokens[found.window, found.place : found.place + len(found.logits)]
            new, window = (found.logits.cpu(), wanted), self._numbers[found.window]
            held = self._held.get(window)
            if held is not None and len(held[0]):
                new = torch.cat((held[0], new[0])), torch.cat((held[1], new[1]))
            self._held[window] = new
        logits, wanted = self._held[number]
        self._held[number] = logits[count:], wanted[count:]
        return logits[:count], wanted[:count]


def evaluate(
    subject: Subject,
    sample: Sample,
    truth: Truth | None = None,
    *,
    batch: int = 1,
    journal: Records | None = None,
    tell: Tell | None = None,
) -> Scores:
    """Score every scored token of the windows, `batch` of which are read together.

    journal: windows that are in it are not read again, and others are added when they are done.
    Raises ArgumentError for a truth of another text, tokenizer or model.
    """
    if truth is not None:
        _check(subject, sample, truth)
    scored: dict[int, Arrays] = {}
    if journal is not None:
        scored = {number: journal.read(number) for number in journal.windows}
    total, count = sum(window.scored for window in sample.windows), 0
    done = sum(sample.windows[number].scored for number in scored)
    open_: dict[int, list[Arrays]] = defaultdict(list)
    begin = None if truth is None else truth.begin
    so_far = _scores(scored) if scored else None
    for number, found, wanted in predictions(subject, sample, batch, scored.keys(), begin):
        window = sample.windows[number]
        first = found.place - window.place
        for start in range(0, len(wanted), _ROWS):
            rows = slice(start, start + _ROWS)
            part = _score(truth, number, first + start, found.logits[rows], wanted[rows])
            _check_finite(part["nll"], subject.name)
            if truth is not None:
                _check_finite(part["reference_nll"], f"the reference {truth.name}")
            open_[number].append(part)
        count += len(wanted)
        if first + len(wanted) == window.scored:
            scored[number] = _joined(open_.pop(number))
            so_far = _scores(scored)
            if journal is not None:
                journal.append(number, scored[number])
        if tell is not None:
            tell(done + count, total, so_far)
    assert so_far is not None  # there is a window
    return so_far


def _score(
    truth: Truth | None, number: int, first: int, logits: Tensor, wanted: Tensor
) -> dict[str, Any]:
    """Columns of `Scores` for some rows."""
    logits = logits.cpu()
    logs = torch.log_softmax(logits.double(), dim=-1)
    nll = -logs.gather(1, wanted[:, None])[:, 0].numpy()
    if truth is None:
        return {"nll": nll}
    found = truth.compare(number, first, logits, logs)
    names = ("reference_nll", "kl", "same_top", "kl_error", "kl_low", "kl_high")
    return {"nll": nll, **{n: x.numpy() for n, x in zip(names, found, strict=True)}}


def _check_finite(nll: Any, name: str) -> None:
    if not np.isfinite(nll).all():
        raise ArgumentError(f"{name}: predictions that are not finite")


def _joined(parts: Sequence[Arrays]) -> dict[str, Any]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _scores(scored: Mapping[int, Arrays]) -> Scores:
    """Of windows, in their order."""
    return Scores(**_joined([scored[number] for number in sorted(scored)]))


def reference_records(
    path: Path, name: str, sample: Sample, made_of: str = "", drawn: int = DRAWN
) -> Records:
    """The file of a model's predictions, to add windows; the model need not be open.

    made_of: a digest of the model's files. Raises ArgumentError for a file of something else.
    """
    says = {
        "kind": "reference",
        "version": VERSION,
        "model": name,
        "made_of": made_of,
        "text": sample.digest,
        "drawn": drawn,
    }
    return Records(path, says)


def make_reference(
    subject: Subject,
    sample: Sample,
    file: Path | Records,
    *,
    batch: int = 1,
    likeliest: int = LIKELIEST,
    drawn: int = DRAWN,
    tell: Tell | None = None,
) -> Reference:
    """Write what a model predicts of a text, or go on with a file that has some windows.

    file: a path, or what `reference_records` gave for it, which is closed with what is returned.
    Raises ArgumentError for a file of something else, or predictions that are not finite.
    """
    records = file
    if not isinstance(records, Records):
        records = reference_records(records, subject.name, sample, drawn=drawn)
    try:
        vocab_size = subject.vocab_size
        records.agree({"vocab_size": vocab_size, "likeliest": min(likeliest, vocab_size)})
        rows: dict[int, list[Rows]] = defaultdict(list)
        total = sum(window.scored for window in sample.windows)
        count = sum(sample.windows[number].scored for number in records.windows)
        for number, found, wanted in predictions(subject, sample, batch, records.windows):
            window = sample.windows[number]
            first = found.place - window.place
            seed = number * len(sample.ids) + first
            part = Rows.of(found.logits.cpu(), wanted, likeliest, drawn, seed)
            _check_finite(part.nll.numpy(), f"the reference {subject.name}")
            rows[number].append(part)
            if first + len(wanted) == window.scored:
                records.append(number, stored_rows(rows.pop(number)))
            count += len(wanted)
            if tell is not None:
                tell(count, total, None)
        records.share()
        return Reference(records)
    except BaseException:
        records.close()
        raise


def _check(subject: Subject, sample: Sample, truth: Truth) -> None:
    if truth.vocab_size != subject.vocab_size:
        raise ArgumentError(
            f"the reference {truth.name} has {truth.vocab_size} tokens, {subject.name} has "
            f"{subject.vocab_size}: they are not the same model"
        )
    if not isinstance(truth, Reference):
        return
    if other := other_tokens(truth, sample):
        raise ArgumentError(
            f"{truth.path}: {other}; evaluate with the same --text, --window and --limit, or make "
            f"another file with --reference MODEL, which was {truth.name}"
        )
    if lacking := truth.lacks(len(sample.windows)):
        raise ArgumentError(
            f"{truth.path}: lacks {lacking} of {counted(len(sample.windows), 'window')}; name the "
            "model (--reference), and they are added"
        )


def other_tokens(reference: Reference, sample: Sample) -> str | None:
    """How the tokens of a stored reference differ, as far as it is known; None: they do not."""
    if reference.text == sample.digest:
        return None
    windows, scored = reference.size()
    asked = len(sample.windows), sample.windows[0].scored
    differs = []
    if windows != asked[0]:
        differs.append(f"{counted(windows, 'window')} in it, {asked[0]} asked for")
    if scored != asked[1]:
        differs.append(f"{counted(scored, 'scored token')} a window in it, {asked[1]} asked for")
    why = ", ".join(differs) or "another text, other windows or another tokenizer"
    return f"is of other tokens: {why}"

"""Log-probabilities of continuations, read in ragged batches.

Like lm-eval's model for transformers, a context that is too long is cut on the left, and
continuations that differ in their last token alone share one reading. Others share the reading of
what they begin with (`beginnings`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.eval.perplexity.subjects import Batch, read_together
from qoff.hf.budget import COMPARED_ROWS, Room
from qoff.kernels.torch_threads import one_torch_thread
from qoff.models.modules.decoder import ModuleDecoder
from qoff.models.runtime import Runtime

from .beginnings import common_tokens, groups
from .once import Fits, Size, can_read_once, read_once, size_of

Pair = tuple[list[int], list[int]]  # tokens of a context, and of what follows
Score = tuple[float, bool]  # log-probability in nats; whether each token was the likeliest


@dataclass
class _Reading:
    """A sequence to read, and the continuations that end with its last tokens and one more."""

    tokens: list[int]
    ends: list[tuple[int, list[int]]] = field(default_factory=list)  # number of a pair; its tokens
    scores: list[float] = field(default_factory=list)  # log-probabilities of the last tokens
    likeliest: list[int] = field(default_factory=list)  # in their place, and after them
    last: dict[int, float] = field(default_factory=dict)  # of what comes after them, by the token

    @property
    def place(self) -> int:
        """Of the first token of the longest continuation."""
        return len(self.tokens) + 1 - max(len(tokens) for _, tokens in self.ends)

    def add(self, place: int, logits: Tensor) -> None:
        """Take the logits [r, vocab_size] of tokens from a place on, in their order."""
        logits = logits.cpu()
        for start in range(0, len(logits), COMPARED_ROWS):
            rows = logits[start : start + COMPARED_ROWS].float()
            totals, own = rows.logsumexp(-1).tolist(), self.tokens[place + start :]
            scored = zip(rows, totals, own, strict=False)
            self.scores += [float(row[token]) - total for row, total, token in scored]
            self.likeliest += rows.argmax(-1).tolist()
        if place + len(logits) > len(self.tokens):
            for _, tokens in self.ends:
                self.last[tokens[-1]] = float(rows[-1, tokens[-1]]) - totals[-1]

    def results(self) -> Iterator[tuple[int, Score]]:
        """The scores of its continuations, by their numbers."""
        for place, tokens in self.ends:
            before = self.scores[len(self.scores) + 1 - len(tokens) :]
            total = sum(before) + self.last[tokens[-1]]
            yield place, (total, self.likeliest[-len(tokens) :] == tokens)


def score(
    runtime: Runtime,
    pairs: Sequence[Pair],
    *,
    max_length: int,
    room: Callable[[int, int], Room],
    fits: Fits,
    at_once: int,
    done: Callable[[int], object] = lambda count: None,
) -> list[Score]:
    """Score continuations, each with one token of context and of its own at least.

    max_length: tokens that are read of a pair, the last ones. at_once: longer sequences are read in
    several passes, together as `room` says: of sequences of so many tokens, so many of which are
    predicted. Shorter ones are read in one pass, as many as `fits` has room for, and where they
    begin alike in two: first what they share. Models that run through transformers' modules read
    each sequence whole. done: called with how many pairs are scored, as they are. Raises
    ArgumentError for a continuation longer than max_length.
    """
    readings = _readings(pairs, max_length)
    long, short = list[_Reading](), list[_Reading]()
    for one in readings:
        alone = len(one.tokens), len(one.tokens) + 1 - one.place, 1, len(one.tokens)
        once = can_read_once(runtime) and len(one.tokens) <= at_once and fits(Size(*alone))
        (short if once else long).append(one)
    scores: dict[int, Score] = {}
    with torch.inference_mode(), one_torch_thread():
        for some in (_in_passes(runtime, long, room, max_length), _in_one(runtime, short, fits)):
            for reading in some:
                scores.update(reading.results())
                done(len(reading.ends))
    return [scores[place] for place in range(len(pairs))]


def _in_passes(
    runtime: Runtime, readings: list[_Reading], room: Callable[[int, int], Room], max_length: int
) -> Iterator[_Reading]:
    """Read the longest first; yields those that are done."""
    readings.sort(key=lambda reading: (-len(reading.tokens), reading.tokens))
    whole = isinstance(runtime.decoder, ModuleDecoder)
    start = 0
    while start < len(readings):
        predicted = max(len(one.tokens) + 1 - one.place for one in readings[start:])
        there = room(len(readings[start].tokens), predicted)
        count = there.sequences * there.batches
        sweep, start = readings[start : start + count], start + count
        split = [sweep[at : at + there.sequences] for at in range(0, len(sweep), there.sequences)]
        batches = [
            Batch([torch.tensor(x.tokens) for x in some], [x.place for x in some]) for some in split
        ]
        piece = max_length if whole else there.pass_tokens
        for number, found in read_together(runtime, batches, piece):
            split[number][found.window].add(found.place, found.logits)
        yield from sweep


def _in_one(runtime: Runtime, readings: list[_Reading], fits: Fits) -> Iterator[_Reading]:
    """Read as many neighbours at a time as fit, those that begin alike next to each other."""
    readings.sort(key=lambda reading: reading.tokens)
    common = common_tokens([one.tokens for one in readings])
    lengths, places = [len(one.tokens) for one in readings], [one.place for one in readings]
    start = 0

    def size(count: int) -> Size:
        some = slice(start, start + count)
        return size_of(groups(lengths[some], common[some]), lengths[some], places[some])

    while start < len(readings):
        left, count = len(readings) - start, 1
        while count < left and fits(size(min(left, 2 * count))):
            count = min(left, 2 * count)
        more = min(left, 2 * count) - 1 if count < left else count
        while count < more:
            middle = (count + more + 1) // 2
            count, more = (middle, more) if fits(size(middle)) else (count, middle - 1)
        sweep = readings[start : start + count]
        found = groups(lengths[start : start + count], common[start : start + count])
        start += count
        tokens = [one.tokens for one in sweep]
        for number, place, logits in read_once(runtime, tokens, [x.place for x in sweep], found):
            sweep[number].add(place, logits)
        yield from sweep


def _readings(pairs: Sequence[Pair], max_length: int) -> list[_Reading]:
    """What to read for the pairs."""
    found: dict[tuple[int, ...], _Reading] = {}
    for place, (context, continuation) in enumerate(pairs):
        if not context or not 0 < len(continuation) <= max_length:
            raise ArgumentError(
                f"a continuation of {len(continuation)} tokens after {len(context)}: there must be "
                f"1 to {max_length} after 1 at least"
            )
        tokens = [*context, *continuation][:-1][-max_length:]
        reading = found.setdefault(tuple(tokens), _Reading(tokens))
        reading.ends.append((place, continuation))
    return list(found.values())

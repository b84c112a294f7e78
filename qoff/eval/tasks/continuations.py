"""Log-probabilities of continuations, read in ragged batches.

Like lm-eval's model for transformers, a context that is too long is cut on the left, and
continuations that differ in their last token alone share one reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.eval.perplexity.subjects import Batch, Predictions, read_together
from qoff.hf.budget import Room
from qoff.hf.torch_threads import one_torch_thread
from qoff.models.modules.decoder import ModuleDecoder
from qoff.models.runtime import Runtime

Pair = tuple[list[int], list[int]]  # tokens of a context, and of what follows
Score = tuple[float, bool]  # log-probability in nats; whether each token was the likeliest


@dataclass
class _Reading:
    """A sequence to read, and the continuations that end with its last tokens and one more."""

    tokens: list[int]
    ends: list[tuple[int, list[int]]] = field(default_factory=list)  # number of a pair; its tokens
    scores: list[float] = field(default_factory=list)  # log-probabilities of the last tokens
    likeliest: list[int] = field(default_factory=list)  # in their place, and after them
    last: Tensor | None = None  # log-probabilities [vocab_size] of what comes after them

    @property
    def place(self) -> int:
        """Of the first token of the longest continuation."""
        return len(self.tokens) + 1 - max(len(tokens) for _, tokens in self.ends)

    def add(self, found: Predictions) -> None:
        logits = found.logits.cpu().float()
        logs, own = logits.log_softmax(-1), self.tokens[found.place :]
        self.scores += [float(row[token]) for row, token in zip(logs, own, strict=False)]
        self.likeliest += logits.argmax(-1).tolist()
        self.last = logs[-1].clone()

    def results(self) -> Iterator[tuple[int, Score]]:
        """The scores of its continuations, by their numbers."""
        assert self.last is not None
        for place, tokens in self.ends:
            before = self.scores[len(self.scores) + 1 - len(tokens) :]
            total = sum(before) + float(self.last[tokens[-1]])
            yield place, (total, self.likeliest[-len(tokens) :] == tokens)


def score(
    runtime: Runtime,
    pairs: Sequence[Pair],
    *,
    max_length: int,
    room: Callable[[int, int], Room],
    done: Callable[[int], object] = lambda count: None,
) -> list[Score]:
    """Score continuations, each with one token of context and of its own at least.

    max_length: tokens that are read of a pair, the last ones. room: what is read together of
    sequences of so many tokens, so many of which are predicted. Models that run through
    transformers' modules read a sequence in one pass. done: called with how many pairs are scored,
    as they are. Raises ArgumentError for a continuation longer than max_length.
    """
    scores: dict[int, Score] = {}
    readings = _readings(pairs, max_length)
    whole = isinstance(runtime.decoder, ModuleDecoder)
    start = 0
    with torch.inference_mode(), one_torch_thread():
        while start < len(readings):
            predicted = max(len(one.tokens) + 1 - one.place for one in readings[start:])
            there = room(len(readings[start].tokens), predicted)
            count = there.sequences * there.batches
            sweep, start = readings[start : start + count], start + count
            split = [
                sweep[at : at + there.sequences] for at in range(0, len(sweep), there.sequences)
            ]
            batches = [
                Batch([torch.tensor(x.tokens) for x in some], [x.place for x in some])
                for some in split
            ]
            piece = max_length if whole else there.pass_tokens
            for number, found in read_together(runtime, batches, piece):
                split[number][found.window].add(found)
            for reading in sweep:
                scores.update(reading.results())
                done(len(reading.ends))
    return [scores[place] for place in range(len(pairs))]


def _readings(pairs: Sequence[Pair], max_length: int) -> list[_Reading]:
    """What to read for the pairs, longest first."""
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
    return sorted(found.values(), key=lambda reading: (-len(reading.tokens), reading.tokens))

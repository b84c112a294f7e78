"""Log-probabilities of continuations: contexts that are the same are read once, in ragged batches.

Like lm-eval's model for transformers, a context that is too long is cut on the left, and what
differs in its last token alone shares one reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.hf.torch_threads import one_torch_thread
from qoff.kernels.layout.ragged import Ragged
from qoff.models.forward_pass import ForwardPass
from qoff.models.modules.decoder import ModuleDecoder
from qoff.models.runtime import Runtime

Pair = tuple[list[int], list[int]]  # tokens of a context, and of what follows
Score = tuple[float, bool]  # log-probability in nats; whether each token was the likeliest


@dataclass
class _Reading:
    """A sequence to read, and the continuations that end with its last tokens and one more."""

    tokens: list[int]
    ends: list[tuple[int, list[int]]] = field(default_factory=list)  # place of a pair; continuation

    @property
    def wanted(self) -> int:
        """How many of its last tokens need logits."""
        return max(len(tokens) for _, tokens in self.ends)


@dataclass
class _Row:
    """What a token says of the next one."""

    score: float  # log-probability of the next token of the reading, if there is one
    likeliest: int
    last: Tensor | None  # log-probabilities [vocab_size] after the reading's end


def score(
    runtime: Runtime,
    pairs: Sequence[Pair],
    *,
    max_length: int,
    batch_size: int,
    pass_tokens: int,
    done: Callable[[int], object] = lambda count: None,
) -> list[Score]:
    """Score continuations, each with one token of context and of its own at least.

    max_length: tokens that are read of a pair, the last ones. batch_size: sequences that are read
    together, those of similar lengths. pass_tokens: of a sequence in one forward pass; what comes
    later attends to what a packed cache holds. Models that run through transformers' modules read
    all in one. done: called with how many pairs are scored, as they are. Raises ArgumentError for a
    continuation longer than max_length.
    """
    found: dict[int, Score] = {}
    readings = _readings(pairs, max_length)
    with torch.inference_mode(), one_torch_thread():
        for start in range(0, len(readings), batch_size):
            batch = readings[start : start + batch_size]
            for reading, rows in zip(batch, _rows(runtime, batch, pass_tokens), strict=True):
                found.update(_scores(reading, rows))
                done(len(reading.ends))
    return [found[place] for place in range(len(pairs))]


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


def _scores(reading: _Reading, rows: Sequence[_Row]) -> Iterator[tuple[int, Score]]:
    """The scores of a reading's continuations; rows: of its last `wanted` tokens."""
    last = rows[-1].last
    assert last is not None
    for place, tokens in reading.ends:
        before = rows[len(rows) - len(tokens) : -1]
        total = sum(row.score for row in before) + float(last[tokens[-1]])
        likeliest = [*(row.likeliest for row in before), rows[-1].likeliest]
        yield place, (total, likeliest == tokens)


def _rows(runtime: Runtime, batch: Sequence[_Reading], pass_tokens: int) -> list[list[_Row]]:
    """Read a batch, longest first: rows of the last `wanted` tokens of each reading."""
    lengths = [len(reading.tokens) for reading in batch]
    if isinstance(runtime.decoder, ModuleDecoder):
        pass_tokens = max(lengths)
    cache = runtime.new_cache(len(batch))
    found: list[list[_Row]] = [[] for _ in batch]
    for start in range(0, max(lengths), pass_tokens):
        now = [reading for reading in batch if len(reading.tokens) > start]  # the first ones
        pieces = [reading.tokens[start : start + pass_tokens] for reading in now]
        ragged = Ragged.of([len(piece) for piece in pieces], [start] * len(pieces))
        places: list[tuple[int, int]] = []  # reading and position of each row of logits
        rows: list[int] = []
        for i, (reading, span) in enumerate(zip(now, ragged.spans, strict=True)):
            first = max(start, len(reading.tokens) - reading.wanted)
            for position in range(first, start + span.count):
                places.append((i, position))
                rows.append(span.start + position - start)
        tokens = torch.tensor([token for piece in pieces for token in piece])
        # A pass that wants no logits still needs a row to ask for.
        wanted = torch.tensor(rows or [0])
        logits = runtime.forward(ForwardPass(tokens, ragged, cache, wanted)).cpu().float()
        for (i, position), row in zip(places, logits, strict=False):
            found[i].append(_row(row, batch[i].tokens, position))
    return found


def _row(logits: Tensor, tokens: Sequence[int], position: int) -> _Row:
    scores, likeliest = logits.log_softmax(-1), int(logits.argmax())
    if position + 1 < len(tokens):
        return _Row(float(scores[tokens[position + 1]]), likeliest, None)
    return _Row(0.0, likeliest, scores)

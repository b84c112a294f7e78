"""The next tokens of sequences from their logits: all of a round together, on the device."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qoff.kernels.layout.distribution import Choice, Shape
from qoff.kernels.sampling import (
    Warp,
    columns,
    draw,
    draw_,
    likeliest_of,
    log_probabilities,
    noise_size,
    penalize_,
    rows_scored,
    rows_together,
)
from qoff.kernels.upload import on_device
from qoff.models.forward_pass import NOT_FINITE

from .logits_processors import processed_by
from .request import Logprob, SamplingParams, Sequence


class LogitsRow(NamedTuple):
    """What a token of a sequence is chosen from. place: the sequence's, among all."""

    place: int
    sequence: Sequence
    logits: Tensor  # float32 [vocab_size]; stay as they are: forks draw from them, too


class Sampler:
    """Chooses the next tokens of sequences, by their seeds and samples alone, or takes given ones.

    places: of sequences, at most. context: tokens of each. device: of the logits. What it takes
    there is bounded by `kernels.sampling.sampling_bytes`; it waits for the device once a call.
    """

    def __init__(self, vocab_size: int, places: int, context: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._history_shape = places, context
        self._history: Tensor | None = None  # int32, tokens of those with penalties
        self._noise: dict[int, _Noise] = {}  # by place
        self._ahead: tuple[list[Sequence], Choice | None] = [], None  # of which rows, and how

    @torch.inference_mode()
    def begin(self, place: int, sequence: Sequence) -> None:
        """Take note of a sequence at a place, in place of the one before."""
        if sequence.params.temperature > 0:
            self._noise[place] = _Noise(sequence, noise_size(self._vocab_size))
        if _penalizes(sequence.params):
            if self._history is None:
                shape = self._history_shape
                self._history = torch.empty(shape, dtype=torch.int32, device=self._device)
            tokens = torch.tensor([*sequence.prompt, *sequence.answer], dtype=torch.int32)
            tokens.clamp_(max=self._vocab_size)  # a head may have fewer rows than the embedding
            self._history[place].fill_(self._vocab_size)[: len(tokens)] = self._there(tokens)

    @torch.inference_mode()
    def draw(self, rows: Many[LogitsRow]) -> int:
        """Choose a token of each row and append it to the sequence's answer; how many that were.

        Notes its log-probability, too, if asked for, or if the token was given. A sequence whose
        logits are not finite gets an error instead.
        """
        rows = sorted(rows, key=_kind)
        chosen = [self._choose(some) for some in self._chunks(rows)]
        if not chosen:
            return 0
        tokens = torch.cat(chosen) if len(chosen) > 1 else chosen[0]
        if any(row.sequence.given for row in rows):
            given = [_given(row.sequence) for row in rows]
            known = self._there(torch.tensor(given))
            tokens = torch.where((tokens >= 0) & (known >= 0), known, tokens)
        asked = [i for i, row in enumerate(rows) if _logprobs(row.sequence) is not None]
        found = list(self._log_probabilities([rows[i] for i in asked], tokens, asked))
        tokens, *found = self._fetch([tokens, *found])
        numbers = tokens.tolist()
        self._note(rows, numbers, asked, found)
        return len(numbers) - numbers.count(-1)

    def choice(self, rows: Many[tuple[int, Sequence]]) -> Choice | None:
        """How several tokens of sequences at places are chosen one after another.

        None where each token needs more than its logits. What came of it is told to `chose`.
        """
        sequences = [sequence for _, sequence in rows]
        if any(
            _early(one) or one.grammar or one.params.logits_processors or one.params.logit_bias
            for one in sequences
        ):
            return None
        if sequences != self._ahead[0]:
            self._ahead = sequences, _choice(sequences)
        return self._ahead[1]

    def noise(self, rows: Many[tuple[int, Sequence]], draws: int) -> Tensor:
        """What the next tokens of sequences at places are drawn by, float64 [draws, R, size]."""
        found = np.empty((draws, len(rows), noise_size(self._vocab_size)))
        for i, (place, _) in enumerate(rows):
            found[:, i] = self._noise[place].next(draws)
        return torch.from_numpy(found)

    def chose(self, place: int, sequence: Sequence, token: int) -> None:
        """This is the next token of a sequence; -1 where its logits are not finite."""
        if sequence.params.temperature > 0:
            self._noise[place].used(1)
        _append(sequence, token)

    def _chunks(self, rows: Many[LogitsRow]) -> Iterator[list[LogitsRow]]:
        """Rows that are treated alike, as many as there is working space for."""
        for _, group in groupby(rows, _kind):
            alike = list(group)
            most = max(row.sequence.params.top_k for row in alike)
            step = rows_together(self._vocab_size, min(max(most, 0), self._vocab_size))
            yield from (alike[i : i + step] for i in range(0, len(alike), step))

    def _choose(self, rows: Many[LogitsRow]) -> Tensor:
        """The token of each row, -1 where its logits are not finite."""
        params, on_cpu = [row.sequence.params for row in rows], self._device.type == "cpu"
        early = [(i, end) for i, row in enumerate(rows) for end in self._forbidden(row.sequence)]
        matched = [(i, row.sequence.grammar) for i, row in enumerate(rows) if row.sequence.grammar]
        processed = [i for i, each in enumerate(params) if each.logits_processors]
        biased = [(i, *each) for i, one in enumerate(params) for each in _biases(one)]
        if on_cpu and not (early or matched or processed or biased or _penalizes(params[0])):
            return self._compiled([row.logits for row in rows], rows)
        size = self._vocab_size
        logits = torch.empty(len(rows), columns(size), device=self._device)
        torch.stack([row.logits for row in rows], out=logits[:, :size])
        logits[:, size:] = -torch.inf
        finite = logits.amax(1).isfinite()  # NaN if one is
        if biased:
            at = self._there(torch.tensor([(i, token) for i, token, _ in biased])).T
            logits[at[0], at[1]] += self._there(torch.tensor([by for *_, by in biased]))
        if _penalizes(params[0]):
            self._penalize(logits, rows)
        if early:
            at = self._there(torch.tensor(early)).T
            logits[at[0], at[1]] = -torch.inf
        for i in processed:
            logits[i, :size] = processed_by(rows[i].sequence, logits[i, :size])
        for i, grammar in matched:
            logits[i, :size].masked_fill_(self._there(~grammar.allowed(size)), -torch.inf)
        if on_cpu:
            tokens = self._compiled(logits[:, :size].unbind(), rows)
        elif params[0].temperature == 0:
            tokens = logits.argmax(1)
        else:
            tokens = draw_(logits, self._there(self._drawn_by(rows)), self._warp(rows))
        return torch.where(finite, tokens, -1)

    @torch.inference_mode()
    def score_prompt(self, sequence: Sequence, logits: Tensor, first: int) -> None:
        """Note the log-probabilities of a prompt's tokens from `first` + 1 on.

        logits: float32 [R, vocab_size], after token `first` and those that follow it.
        """
        if not sequence.prompt_logprobs:
            sequence.prompt_logprobs.append(None)
        tokens = sequence.prompt[first + 1 : first + 1 + len(logits)]
        most = min(sequence.params.prompt_logprobs or 0, self._vocab_size)
        step = rows_scored(self._vocab_size, most, self._device.type == "cpu")
        for at in range(0, len(tokens), step):
            some = tokens[at : at + step]
            rows = logits[at : at + len(some)]
            found = log_probabilities(rows, self._there(torch.tensor(some)), most)
            each = zip(some, *(x.tolist() for x in self._fetch(list(found))), strict=True)
            for token, value, rank, best, ids in each:
                sequence.prompt_logprobs.append(_step(token, value, rank, best, ids, most))

    def _compiled(self, logits: Many[Tensor], rows: Many[LogitsRow]) -> Tensor:
        """The token of each row of logits [vocab_size], in one job of the CPU."""
        if rows[0].sequence.params.temperature == 0:
            return torch.tensor(likeliest_of(logits))
        shapes = [_shape(row.sequence.params) for row in rows]
        return torch.tensor(draw(logits, shapes, self._drawn_by(rows)))

    def _forbidden(self, sequence: Sequence) -> list[int]:
        """The ends of an answer that is too short."""
        if not _early(sequence):
            return []
        return [token for token in sequence.ends if token < self._vocab_size]

    def _penalize(self, logits: Tensor, rows: Many[LogitsRow]) -> None:
        """Bring the newest tokens to the histories; those before are there."""
        assert self._history is not None
        counts, by = [], []
        for place, one, _ in rows:
            length = len(one.prompt) + len(one.answer)
            newest = min((one.answer or one.prompt)[-1], self._vocab_size)
            counts.append((place, length - 1, newest, len(one.prompt)))
            params = one.params
            by.append(
                (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            )
        places, last, newest, prompts = self._there(torch.tensor(counts)).T
        self._history[places, last] = newest.int()
        longest = 1 + max(count[1] for count in counts)
        history = self._history[places, :longest].long()
        numbers = self._there(torch.tensor(by)).T[..., None]
        penalize_(logits, history, prompts[:, None], numbers, self._vocab_size)

    def _drawn_by(self, rows: Many[LogitsRow]) -> Tensor:
        """What one token of each is drawn by, float64 [R, noise_size]."""
        streams = [self._noise[row.place] for row in rows]
        found = np.concatenate([one.next(1) for one in streams])
        for one in streams:
            one.used(1)
        return torch.from_numpy(found)

    def _warp(self, rows: Many[LogitsRow]) -> Warp:
        each = [row.sequence.params for row in rows]
        numbers = torch.tensor([(one.temperature, one.min_p, one.top_p) for one in each])
        warp = Warp(self._there(numbers).T[..., None], any(one.top_p < 1 for one in each))
        if each[0].top_k <= 0:
            return warp
        top_k = [min(one.top_k, self._vocab_size) for one in each]
        return replace(warp, top_k=self._there(torch.tensor(top_k))[:, None], ranked=max(top_k))

    def _log_probabilities(
        self, rows: Many[LogitsRow], tokens: Tensor, places: Many[int]
    ) -> Iterator[Tensor]:
        """What `log_probabilities` finds of some rows, whose tokens are at `places`, in chunks."""
        if not rows:
            return
        mine = tokens[self._there(torch.tensor(places))].clamp_(min=0)
        most = max(_logprobs(row.sequence) or 0 for row in rows)
        on_cpu = self._device.type == "cpu"
        step = rows_scored(self._vocab_size, min(most, self._vocab_size), on_cpu)
        for first in range(0, len(rows), step):
            logits = torch.stack([row.logits for row in rows[first : first + step]])
            yield from log_probabilities(logits, mine[first : first + step], most)

    def _note(
        self, rows: Many[LogitsRow], tokens: list[int], asked: Many[int], found: list[Tensor]
    ) -> None:
        """Write down what was chosen. found: of the rows `asked`, of `_log_probabilities`."""
        for row, token in zip(rows, tokens, strict=True):
            _append(row.sequence, token)
        parts = [torch.cat(found[i::4]).tolist() for i in range(4)] if asked else [[]] * 4
        for i, value, rank, best, ids in zip(asked, *parts, strict=True):
            sequence, token = rows[i].sequence, tokens[i]
            if token >= 0:
                count = _logprobs(sequence) or 0
                sequence.logprobs.append(_step(token, value, rank, best, ids, count))

    def _there(self, host: Tensor) -> Tensor:
        return on_device(host, self._device)

    def _fetch(self, found: list[Tensor]) -> list[Tensor]:
        """In host memory."""
        if self._device.type != "cuda":
            return found
        pinned = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in found]
        for host, x in zip(pinned, found, strict=True):
            host.copy_(x, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return pinned


class _Noise:
    """What the tokens of a sequence are drawn by; NumPy's Philox streams never change."""

    def __init__(self, sequence: Sequence, size: int) -> None:
        self._generator = _generator(sequence)
        self._ahead = np.empty((0, size), np.uint64)  # not used so far

    def next(self, draws: int) -> np.ndarray:
        """Of the next draws: uniform between 0 and 1, float64 [draws, size]."""
        missing, size = draws - len(self._ahead), self._ahead.shape[1]
        if missing > 0:
            more = self._generator.random_raw(missing * size).reshape(missing, size)
            self._ahead = np.concatenate([self._ahead, more])
        return ((self._ahead[:draws] >> np.uint64(12)) + 0.5) * 2.0**-52

    def used(self, draws: int) -> None:
        """So many have been."""
        self._ahead = self._ahead[draws:]


def _kind(row: LogitsRow) -> tuple[bool, bool, bool]:
    """Rows of one kind are treated together."""
    params = row.sequence.params
    return (_penalizes(params), params.temperature > 0, params.top_k > 0)


def _choice(sequences: Many[Sequence]) -> Choice | None:
    """How several tokens of each are chosen one after another, if their logits are enough."""
    params = [one.params for one in sequences]
    drawn = {one.temperature > 0 for one in params}
    more = any(_penalizes(one.params) or _logprobs(one) is not None for one in sequences)
    if more or len(drawn) > 1:
        return None
    ends = frozenset().union(*(one.ends for one in sequences))
    return Choice([_shape(one) for one in params] if True in drawn else None, tuple(ends))


def _shape(params: SamplingParams) -> Shape:
    return Shape(params.temperature, max(params.top_k, 0), params.top_p, params.min_p)


def _early(sequence: Sequence) -> bool:
    """Whether the answer is too short to end."""
    return len(sequence.answer) < sequence.params.min_tokens


def _step(
    token: int, value: float, rank: int, best: list[float], ids: list[int], count: int
) -> dict[int, Logprob]:
    """A token's log-probability, and those of the `count` likeliest."""
    found = {token: Logprob(value, rank)}
    for place, (other, at) in enumerate(zip(ids[:count], best, strict=False), 1):
        found.setdefault(other, Logprob(at, place))
    return found


def _append(sequence: Sequence, token: int) -> None:
    """Note a token that was chosen, -1 for none; one that the grammar refuses is none."""
    wrong = NOT_FINITE if token < 0 else ""
    if sequence.grammar is not None and not wrong:
        wrong = sequence.grammar.take(token)
    if wrong:
        sequence.error = sequence.error or wrong
    else:
        sequence.answer.append(token)


def _biases(params: SamplingParams) -> Iterable[tuple[int, float]]:
    return () if params.logit_bias is None else params.logit_bias.items()


def _penalizes(params: SamplingParams) -> bool:
    asked = params.presence_penalty or params.frequency_penalty
    return bool(asked) or params.repetition_penalty != 1


def _given(sequence: Sequence) -> int:
    return sequence.given[len(sequence.answer)] if sequence.given else -1


def _logprobs(sequence: Sequence) -> int | None:
    """How many of the likeliest tokens' are wanted beside the token's own; None: not even that."""
    return (sequence.params.logprobs or 0) if sequence.given else sequence.params.logprobs


def _generator(sequence: Sequence) -> np.random.Philox:
    """Of counters: as many numbers for each token."""
    seed = sequence.params.seed
    if seed is None:
        return np.random.Philox(key=secrets.randbits(64))
    return np.random.Philox(key=(seed + sequence.sample) % 2**63)  # as in vLLM

"""Tokens per second of a model: prompts read and tokens generated, at any depth.

What is timed is the runtime alone: no tokenizer, no sampling but the likeliest token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from qoff.budgets import resolve_device
from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError, QoffError
from qoff.hf.budget import Budget, working_bytes
from qoff.hf.load import Opened, open_runtime
from qoff.kernels.layout.distribution import Choice
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.ops import ops_for
from qoff.kernels.sampling import likeliest
from qoff.kernels.torch_threads import one_torch_thread
from qoff.kvcache import KVQuant
from qoff.models.forward_pass import NOT_FINITE, ForwardPass
from qoff.models.modules.decoder import ModuleDecoder, is_modules
from qoff.models.native.caches import head_shapes
from qoff.models.runtime import Runtime
from qoff.models.spec import DecoderSpec
from qoff.system_memory import check_free, refusals

from .cases import AUTO, FLOAT, Case, Setup
from .samples import Samples

_PIECE = 2048  # tokens of a pass that only fills the cache


@dataclass(frozen=True)
class ModelRate:
    """One case in one setup: tokens per second of all sequences together.

    disk_bytes_per_token: read while it was timed. kv_bytes: of the cache, after it.
    """

    setup: Setup
    case: Case
    tokens_per_s: Samples
    disk_bytes_per_token: float
    kv_bytes: int


def backend_of(device: str) -> str:
    """Return "cpu" or the GPU's name; device: as for `qoff.load`.

    Raises ArgumentError for what is no device, OpError for one that is not there.
    """
    where = resolve_device(device)
    ops_for(where)
    return "cpu" if where.type == "cpu" else torch.cuda.get_device_name(where)


def check(path: Path, setups: Sequence[Setup], cases: Sequence[Case], **options: Any) -> None:
    """Raise, before anything is measured, the error that a setup or a case would end in.

    ArgumentError for more tokens than the model takes, or bits of a layer there is not; BudgetError
    for too little memory; OpError for a head size that cannot be packed. options: as for `rates`.
    """
    checkpoint = Checkpoint.open(path)
    if not is_modules(checkpoint):  # which are known to their own decoder alone
        spec = DecoderSpec.from_config(checkpoint.config)
        longest = max(cases, key=lambda case: case.positions)
        limit = spec.position_limit
        if limit is not None and longest.positions > limit:
            raise ArgumentError(
                f"{longest} has sequences of {longest.positions} tokens; this {spec.model_type} "
                f"model is run up to {limit}: give less depth or fewer tokens"
            )
        for setup in setups:
            if isinstance(setup.kv, KVQuant):
                setup.kv.forms(head_shapes(spec))
    for setup in setups[1:]:  # the first is opened next
        if setup.budget is not None:
            _opened(path, setup, cases, options).runtime.close()


def _opened(path: Path, setup: Setup, cases: Sequence[Case], options: Mapping[str, Any]) -> Opened:
    """The model in one setup, with room for the largest of the cases where memory is bounded."""
    largest = max(cases, key=lambda case: (case.batch * case.positions, case.batch))
    return open_runtime(
        path,
        device_memory=setup.budget,
        activation_bits=setup.activation_bits,
        kv=setup.kv,
        context=largest.positions + 1,
        batch_size=largest.batch,
        **options,
    )


def rates(
    path: Path,
    setup: Setup,
    cases: Sequence[Case],
    repetitions: int,
    done: Callable[[], object] = lambda: None,
    **options: Any,
) -> list[ModelRate]:
    """Measure a checkpoint in one setup: each case once to warm up, then `repetitions` times.

    Cases that follow each other with the same depth and number of sequences share one cache, which
    is filled once and goes back after each repetition. A packed cache packs no token twice, so it
    goes back to blocks of some tokens that would still be in its window. Models whose states may
    not go back, with linear attention or through transformers' modules, and those with sliding
    windows that are shorter than a repetition fill a new one each time. Where the setup bounds
    memory, prompts without room for one pass are read in pieces, as `qoff.load` does. done: called
    after each repetition, warm-ups too. options: more for `open_runtime`, whose errors it raises;
    BudgetError also where there is no memory for the cache.
    """
    found: list[ModelRate] = []
    model = _opened(path, setup, cases, options)
    with model.runtime, one_torch_thread(), torch.inference_mode():
        if setup.kv == AUTO:
            setup = replace(setup, kv_bits=FLOAT if model.runtime.kv is None else "4")
        for _, group in groupby(cases, key=lambda case: (case.batch, case.depth)):
            together = list(group)
            start = _Start(model, max(together, key=lambda case: case.tokens))
            for case in together:
                found.append(_measure(model.runtime, setup, case, start, repetitions, done))
    return found


class Sequences:
    """Sequences of equal length in one cache, with room for `capacity` tokens each at once.

    budget: what bounds the memory of the runtime, if anything does.
    """

    def __init__(
        self, runtime: Runtime, count: int, capacity: int, budget: Budget | None = None
    ) -> None:
        self._runtime, self._budget = runtime, budget
        self.tokens = runtime.new_cache(count, capacity if budget is None else 0)
        self.length = self.room = 0
        self._at_once(capacity, 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        return self.tokens.nbytes

    def read(self, tokens: Tensor) -> Tensor:
        """Read int64 [B, T]: the likeliest token after each sequence, int64 [B].

        Raises QoffError for logits that are not finite.
        """
        found = likeliest(self.logits(tokens))  # which waits for a GPU
        if min(found) < 0:
            raise self._not_finite()
        return torch.tensor(found)

    def generate(self, last: Tensor, count: int) -> Iterator[list[list[int]]]:
        """Generate `count` tokens behind int64 [B], which are read: the likeliest, as they come.

        A list of some steps at a time, each with a token of each sequence: those that are computed
        without Python in between. Raises QoffError for logits that are not finite.
        """
        while count > 0:
            steps = self._together(last, count) or [self.read(last[:, None]).tolist()]
            if min(steps[-1]) < 0:
                raise self._not_finite()
            yield steps
            last = torch.tensor(steps[-1])
            count -= len(steps)

    def _together(self, last: Tensor, most: int) -> list[list[int]]:
        """Up to `most` steps without Python; none where it is needed."""
        if self.tokens.ended is None:
            return []
        batch = len(last)
        self._at_once(self.length + 1, 1)
        ragged = Ragged.of([1] * batch, [self.length] * batch)
        run = ForwardPass(last, ragged, self.tokens, ragged.last_rows)
        steps = self._runtime.tokens(run, Choice(), most)
        self.length += len(steps)
        return steps

    def _not_finite(self) -> QoffError:
        return QoffError(f"{self._runtime.checkpoint.path}: {NOT_FINITE}")

    def logits(self, tokens: Tensor) -> Tensor:
        """Read int64 [B, T]: logits after each sequence, float32 [B, vocab_size].

        It takes one pass, unless a budget has no room for it.
        """
        batch, count = tokens.shape
        for part in tokens.split(self._at_once(self.length + count, count), dim=1):
            ragged = Ragged.of([part.shape[1]] * batch, [self.length] * batch)
            logits = self._runtime.forward(
                ForwardPass(part.flatten(), ragged, self.tokens, ragged.last_rows)
            )
            self.length += part.shape[1]
        return logits

    def _at_once(self, longest: int, count: int) -> int:
        """How many of `count` new tokens are read in one pass; there is room for `longest` then."""
        if self._budget is None:
            return count
        rows = self.tokens.sequences
        return self._budget.admit(self, longest + 1, [count] * rows, rows)

    def forget(self, tokens: int) -> bool:
        """Go back by so many tokens, if what is needed then is there."""
        if not self.tokens.can_forget([tokens] * self.tokens.sequences):
            return False
        self.tokens.forget(tokens)
        self.length -= tokens
        return True


class _Start:
    """Sequences of some depth, and the way back to it. longest: the case with the most tokens."""

    def __init__(self, model: Opened, longest: Case) -> None:
        self._runtime, self._budget, self._longest = model.runtime, model.budget, longest
        decoder = self._runtime.decoder
        self._anew = isinstance(decoder, ModuleDecoder) or decoder.spec.recurrent is not None
        self._sequences: Sequences | None = None

    def sequences(self) -> Sequences:
        """The sequences, as deep as at the start, with nothing under way."""
        depth = self._longest.depth
        there = None if self._anew else self._sequences
        if there is not None and there.forget(there.length - depth):
            return there
        self._sequences = None  # before there is another one
        case, runtime = self._longest, self._runtime
        _check_free(runtime, case)
        with refusals():
            self._sequences = Sequences(runtime, case.batch, case.positions, self._budget)
        if depth:
            of_modules = isinstance(runtime.decoder, ModuleDecoder)
            piece = depth if of_modules else max(1, _PIECE // case.batch)
            for part in tokens(runtime, case.batch, depth).split(piece, dim=1):
                self._sequences.read(part)
        return self._sequences


def _check_free(runtime: Runtime, case: Case) -> None:
    """Raise BudgetError for a case on a CPU that the free memory does not do for."""
    decoder, count = runtime.decoder, case.tokens if case.kind == "pp" else 1
    if decoder.device.type == "cpu":
        cache = case.batch * runtime.new_cache(1).bytes_for(case.positions)
        work = working_bytes(
            decoder, runtime.kv, case.batch, count, case.batch, case.positions, False
        )
        what = f"{case}: a KV cache and a pass"
        check_free(cache + work, what, "its batch size, tokens or depth")


def tokens(runtime: Runtime, batch: int, count: int) -> Tensor:
    """Pseudo-random token ids of the model, int64 [batch, count]."""
    decoder = runtime.decoder
    if isinstance(decoder, ModuleDecoder):
        vocab = int(decoder.config.get_text_config(decoder=True).vocab_size)
    else:
        vocab = decoder.spec.vocab_size
    return (1000 + torch.arange(batch * count) * 7919).remainder(vocab).view(batch, count)


def _measure(
    runtime: Runtime,
    setup: Setup,
    case: Case,
    start: _Start,
    repetitions: int,
    done: Callable[[], object],
) -> ModelRate:
    ids = tokens(runtime, case.batch, case.tokens if case.kind == "pp" else 1)
    all_tokens = case.batch * case.tokens
    found, disk_bytes, kv_bytes = [], 0, 0
    for repetition in range(1 + repetitions):
        sequences = start.sequences()
        before, began = runtime.stats().disk_bytes, perf_counter()
        if case.kind == "pp":
            sequences.read(ids)
        else:
            deque(sequences.generate(ids[:, 0], case.tokens), maxlen=0)
        seconds = perf_counter() - began
        if repetition:
            found.append(all_tokens / seconds)
            disk_bytes += runtime.stats().disk_bytes - before
        kv_bytes = sequences.nbytes
        done()
    per_token = disk_bytes / (repetitions * all_tokens)
    return ModelRate(setup, case, Samples(tuple(found)), per_token, kv_bytes)

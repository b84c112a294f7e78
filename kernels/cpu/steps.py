"""Steps of decoding that a recording does again and again, without Python between them.

Before each step the positions in memory are counted up. After it a token of each row is chosen, and
put where the next step's embedding finds it. A token that ends an answer ends the list.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from qoff.kernels.layout.distribution import Choice

from .jit import simd
from .jit.compiled import inner, job
from .jit.pool import JobList
from .jit.pool_threads import end_list, take
from .jit.recorder import JobReplay
from .operands import address, int64s, offsets
from .sampling.job import ROW_BYTES, TOKEN, SamplingArguments
from .sampling.sampling import arguments, torch_state


class Counter(ctypes.Structure):
    """Numbers in memory, int64, so many bytes apart."""

    _fields_ = int64s("first", "count", "stride")


class CountArguments(ctypes.Structure):
    """Addresses and sizes: so many `Counter`s."""

    _fields_ = int64s("counters", "count")


class PassOnArguments(ctypes.Structure):
    """Addresses and sizes: rows as `sampling.job.Row`, where their tokens go, which ones end.

    found: where the next step's go. noise: address of what the job that chooses is told of it;
    each step's is `noise_bytes` further.
    """

    _fields_ = int64s("rows", "count", "ids", "found", "ends", "end_count", "noise", "noise_bytes")


FIRST, NUMBERS, STRIDE = offsets(Counter)
_COUNTER_BYTES = ctypes.sizeof(Counter)
COUNTERS, COUNTER_COUNT = offsets(CountArguments)
ROWS, COUNT, IDS, FOUND, ENDS, END_COUNT, NOISE, NOISE_BYTES = offsets(PassOnArguments)


@job
def count_job(pool, thread, threads, args):
    """Add one to each number."""
    if take(pool, 0) > 0:
        return
    for i in range(simd.peek_i64(args + COUNTER_COUNT)):
        counter = simd.peek_i64(args + COUNTERS) + i * _COUNTER_BYTES
        at, stride = simd.peek_i64(counter + FIRST), simd.peek_i64(counter + STRIDE)
        for _ in range(simd.peek_i64(counter + NUMBERS)):
            simd.poke_i64(at, simd.peek_i64(at) + 1)
            at += stride


@inner
def _ends(args, token):
    """Whether no step follows a token."""
    ends = simd.peek_i64(args + ENDS)
    for i in range(simd.peek_i64(args + END_COUNT)):
        if simd.peek_i64(ends + 8 * i) == token:
            return True
    return token < 0


@job
def pass_on_job(pool, thread, threads, args):
    """Hand the tokens that were chosen to the next step."""
    if take(pool, 0) > 0:
        return
    count, found = simd.peek_i64(args + COUNT), simd.peek_i64(args + FOUND)
    last = False
    for i in range(count):
        token = simd.peek_i64(simd.peek_i64(args + ROWS) + i * ROW_BYTES + TOKEN)
        simd.poke_i64(simd.peek_i64(args + IDS) + 8 * i, token)
        simd.poke_i64(found + 8 * i, token)
        last = last or _ends(args, token)
    simd.poke_i64(args + FOUND, found + 8 * count)
    noise = simd.peek_i64(args + NOISE)
    simd.poke_i64(noise, simd.peek_i64(noise) + simd.peek_i64(args + NOISE_BYTES))
    if last:
        end_list(pool)


class Steps:
    """Does the steps that follow a recorded one, as long as that is not stale.

    counters: int64 [n] each, one larger in each step. ids: int64 [R], where a step finds its
    tokens. logits: float32 [R, V], where it leaves those of the next. All stay where they are.
    """

    def __init__(
        self, replay: JobReplay, counters: Sequence[Tensor], ids: Tensor, logits: Tensor
    ) -> None:
        self._replay, self.ids, self.logits = replay, ids, logits
        each = (Counter(one.data_ptr(), len(one), 8 * one.stride(0)) for one in counters)
        self._counters = (Counter * len(counters))(*each)
        count = CountArguments(ctypes.addressof(self._counters), len(counters))
        self._count = count_job.address, count
        self._jobs = replay.jobs.between([self._count], [])
        self._choosing: _Choosing | None = None

    overshoots = False

    def put(self, tokens: Tensor) -> None:
        """These are the next step's."""
        self.ids.copy_(tokens)

    def chooses(self, choice: Choice) -> bool:
        """Any way."""
        return True

    def step(self) -> bool:
        """Do the next one, of the tokens that lie where it finds them; False where it is stale."""
        return self._replay.run(self._jobs)

    def tokens(self, choice: Choice, most: int, noise: Tensor | None = None) -> list[list[int]]:
        """Do up to `most`, the first of the tokens that are there: those chosen after each.

        One a row; nothing is done where it is stale. noise: float64 [most, R, noise_size], what
        they are drawn by; None: torch's generator. A token that ends an answer is in the last step,
        as is -1, where logits are not finite.
        """
        if self._replay.stale:
            return []
        rows, pool = len(self.ids), self._replay.pool
        found = torch.empty(most, rows, dtype=torch.int64)
        of_torch = choice.shapes is not None and noise is None
        with torch_state() if of_torch else nullcontext() as state, pool.lock:
            if self._choosing is None or self._choosing.choice is not choice:
                self._choosing = self._prepared(choice, noise, state)
            _, jobs, args, passing, _ = self._choosing
            args.noise, args.state = address(noise), address(state)
            passing.found = found.data_ptr()
            passing.noise_bytes = 0 if noise is None else 8 * noise.stride(0)
            if not self._replay.run(jobs, most):
                return []
        return found[: (passing.found - found.data_ptr()) // (8 * rows)].tolist()

    def _prepared(self, choice: Choice, noise: Tensor | None, state: Tensor | None) -> _Choosing:
        first = None if noise is None else noise[0]
        rows, ends = self.logits.unbind(), torch.tensor(choice.ends, dtype=torch.int64)
        pool = self._replay.pool
        chooser, args, found = arguments(rows, choice.shapes, pool, first, state)
        passing = PassOnArguments(
            ctypes.addressof(found), len(rows), self.ids.data_ptr(), 0, ends.data_ptr(), len(ends),
            ctypes.addressof(args) + SamplingArguments.noise.offset,
        )  # fmt: skip
        after = [(chooser, args), (pass_on_job.address, passing)]
        jobs = self._replay.jobs.between([self._count], after)
        return _Choosing(choice, jobs, args, passing, (found, ends))


class _Choosing(NamedTuple):
    """The jobs of steps that choose tokens in one way."""

    choice: Choice
    jobs: JobList
    args: SamplingArguments
    passing: PassOnArguments
    kept: object  # what these have the address of

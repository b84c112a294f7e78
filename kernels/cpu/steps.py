"""Steps of decoding that a recording does again and again, without Python between them.

Before each step the positions in memory are counted up. After it a token of each row is chosen, and
put where the next step's embedding finds it. A token that ends an answer ends the list.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from qoff.kernels.layout.distribution import Choice

from .jit import simd
from .jit.compiled import inner, job
from .jit.pool import default_pool, end_list, take
from .jit.recorder import JobReplay
from .operands import int64s, offsets
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

    found: where the next step's go. noise: address of what the job that chooses is told of it, 0
    for none; each step's is `noise_bytes` further.
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
    if noise != 0:
        simd.poke_i64(noise, simd.peek_i64(noise) + simd.peek_i64(args + NOISE_BYTES))
    if last:
        end_list(pool)


class Counting:
    """What counts up int64 numbers [n] in memory that stays where it is, before each step."""

    def __init__(self, numbers: Sequence[Tensor]) -> None:
        self._numbers = numbers
        each = (Counter(one.data_ptr(), len(one), 8 * one.stride(0)) for one in numbers)
        self._counters = (Counter * len(numbers))(*each)
        self._arguments = CountArguments(ctypes.addressof(self._counters), len(numbers))
        self.call = count_job.address, self._arguments


def next_step(replay: JobReplay, counting: Counting) -> bool:
    """Do the next step, of the tokens that lie where it finds them; False where it is stale."""
    return replay(before=[counting.call])


def next_tokens(
    replay: JobReplay, counting: Counting, ids: Tensor, logits: Tensor, choice: Choice, most: int
) -> list[list[int]]:
    """Do up to `most` steps: the tokens of each, one a row; nothing where the replay is stale.

    ids: int64 [R], where a step finds its tokens; the first one's are there. logits: float32
    [R, V], where it leaves those of the next. A token that ends an answer is in the last step, as
    is -1, where logits are not finite.
    """
    pool, rows, noise = default_pool(), len(ids), choice.noise
    found, ends = (
        torch.empty(most, rows, dtype=torch.int64),
        torch.tensor(choice.ends, dtype=torch.int64),
    )
    of_torch = choice.shapes is not None and noise is None
    with torch_state() if of_torch else nullcontext() as state, pool.lock:
        first = None if noise is None else noise[0]
        chooser, args, described = arguments(logits.unbind(), choice.shapes, pool, first, state)
        passing = PassOnArguments(
            ctypes.addressof(described), rows, ids.data_ptr(), found.data_ptr(),
            ends.data_ptr(), len(ends),
        )  # fmt: skip
        if noise is not None:
            passing.noise = ctypes.addressof(args) + SamplingArguments.noise.offset
            passing.noise_bytes = 8 * noise.stride(0)
        after = [(chooser, args), (pass_on_job.address, passing)]
        if not replay(most, [counting.call], after):
            return []
    return found[: (passing.found - found.data_ptr()) // (8 * rows)].tolist()

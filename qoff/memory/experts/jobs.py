"""ExpertJobs: requests for experts as jobs of a list, on the state of an `ExpertCache`.

Most of that is memory which both know. The rest is brought to the jobs and back, around a pass and
where the cache has to do what jobs cannot: see `ended`.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil
from typing import Any, NamedTuple, Self
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from qoff.kernels.cpu.expert_cache import jobs
from qoff.kernels.cpu.expert_cache.words import CacheWords, RequestWords
from qoff.kernels.cpu.jit.pool import JobList, default_pool
from qoff.kernels.cpu.jit.recorder import JobReplay
from qoff.kernels.cpu.jit.slots import run_for_a_while, run_waiting
from qoff.kernels.cpu.operands import address
from qoff.kernels.layout.qexperts import QExperts
from qoff.memory.plan import ChosenExperts, Expert

from .cache import ExpertCache
from .policy import Keys, NextUse
from .queued_moves import QueuedMoves, int64_array
from .state import AGE, FEW, LEAST_ACCURACY, NEARLY_ALL

_COUNTED = ("hits", "misses", "bytes", "guesses", "right", "guessed", "wrong")


class Asked(NamedTuple):
    """What the jobs compute with that follow: the slot of each pair, and what is in all slots."""

    slots: Tensor  # int64, like the ids
    gate_up: QExperts
    down: QExperts
    biases: tuple[Tensor, Tensor]


class _Request:
    """The words of a request, and memory that they have the address of."""

    def __init__(self, words: RequestWords, memory: object) -> None:
        self.words, self._memory = words, memory
        self.chosen: Keys = np.zeros(1 + words.pairs, dtype=np.int64)
        words.chosen = self.chosen.ctypes.data

    @property
    def keys(self) -> Keys:
        """Those of the experts that it asks for, ascending."""
        return self.chosen[1 : 1 + self.chosen[0]]

    def wanted(self) -> ChosenExperts:
        """What the cache would be asked, while it is at work."""
        words = self.words
        numbers = sorted(set(int64_array(words.ids, words.pairs).tolist()))
        votes = int64_array(words.guesses, words.pairs).tolist() if words.guesses else []
        guesses = sorted(dict.fromkeys(votes), key=lambda number: -votes.count(number))
        return ChosenExperts(
            words.layer, tuple(numbers), tuple(Expert(words.following, n) for n in guesses)
        )


def jobs_of(cache: ExpertCache, pairs: int) -> ExpertJobs | None:
    """What asks a cache for experts of so many pairs of a token and an expert, if jobs can."""
    policy, moves = cache.policy, cache.moves
    if cache.closed or not isinstance(policy, NextUse) or not isinstance(moves, QueuedMoves):
        return None
    if cache.jobs is None:
        cache.jobs = ExpertJobs(cache, policy, moves)
    jobs: ExpertJobs = cache.jobs
    return jobs if jobs.can_serve(pairs) else None


class ExpertJobs:
    """The jobs that a pass uses a cache by, in a `with` block; for one pass at a time."""

    def __init__(self, cache: ExpertCache, policy: NextUse, moves: QueuedMoves) -> None:
        self._cache, self._policy, self._moves = cache, policy, moves
        state, layers = cache.now, len(cache.counts)
        slots, keys = len(state.keys), len(state.slots)
        sizes = {"free": slots, "reading": slots, "guesses": keys, "doubtful": keys}
        sizes |= {"asked": layers, "nothing": 0}
        self._lists = {name: np.zeros(1 + n, dtype=np.int64) for name, n in sizes.items()}
        self._arrived = np.zeros(layers, dtype=np.int64)  # whether some came in this pass
        self._places = torch.zeros(FEW, dtype=torch.int64)  # of the request at work
        arrays: dict[str, np.ndarray[Any, Any]] = {
            "slots": state.slots,
            "sizes": state.nbytes,
            "keys": state.keys,
            "fixed": state.fixed,
            "guessed": state.guessed,
            "came": state.came,
            "layers": policy.layer,
            "shares": policy.share,
            "ranks": policy.ranks,
            "grows": policy.grows,
            "late": policy.late,
            "first": policy.first,
            "arrived": self._arrived,
            "leaving": np.zeros(slots, dtype=np.int64),
            "worths": np.zeros(slots),
            **moves.arrays(),
            **self._lists,
        }
        self._words = CacheWords(
            **{name: array.ctypes.data for name, array in arrays.items()},
            **moves.memory_words(),
            count=slots,
            num_layers=layers,
            age=AGE,
            share_age=policy.age,
        )
        self._kept = arrays
        self._requests = WeakValueDictionary[int, _Request]()
        self._numbers = itertools.count()
        self._fresh = list[_Request]()  # of this pass

    @property
    def key(self) -> int:
        """What tells recordings apart that use jobs of different caches."""
        return ctypes.addressof(self._words)

    def can_serve(self, pairs: int) -> bool:
        """Whether jobs can serve requests of so many pairs of a token and an expert."""
        few = pairs <= min(FEW, len(self._cache.now.keys))
        ready = self._cache.now.given_up < 0 and self._moves.alive
        return few and ready and self._moves.all_queued()

    def __enter__(self) -> Self:
        self._cache.begin_pass()
        self._bring()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        words, state = self._words, self._cache.now
        last = self._requests.get(words.request)
        if error is not None and last is not None:  # what it asked for may leave when it is there
            slots = state.slots[last.keys]
            slots = slots[slots >= 0]
            state.fixed[slots[state.came[slots]]] = False
        words.noted = words.resolved = 0
        self._bring_back()
        self._cache.trial.arrived(self._cache.mark)
        self._fresh.clear()
        arrived = np.flatnonzero(self._arrived).tolist()
        self._arrived[:] = 0
        if error is None:
            self._moves.check_files(arrived)

    def ask(
        self,
        layer: int,
        ids: Tensor,
        following: int | None,
        guesses: Tensor | None,
        biases: Sequence[Tensor | None],
    ) -> Asked:
        """Have experts come, by jobs, that are not there, and read ahead what is guessed.

        ids, guesses: contiguous int64 [M, T], of the layer and of the one that follows. biases: of
        all its experts, float32 [experts, rows], of gate_up and of down.
        """
        gate_up, down, places = self._cache.of_layer(layer)
        words = RequestWords(
            cache=self.key,
            number=next(self._numbers),
            layer=layer,
            pairs=ids.numel(),
            ids=ids.data_ptr(),
            guesses=address(guesses),
            following=0 if following is None else following,
            places=self._places.data_ptr(),
            nearly_all=ceil(NEARLY_ALL * self._cache.counts[layer]),
            bias_0=address(biases[0]),
            bias_1=address(biases[1]),
            to_0=address(places[0]),
            to_1=address(places[1]),
            bias_bytes_0=4 * places[0].shape[1],
            bias_bytes_1=4 * places[1].shape[1],
        )
        request = _Request(words, (self, biases, places))
        self._requests[words.number] = request
        self._fresh.append(request)
        self._run(jobs.ask_job, request)
        self._run(jobs.arrive_job, request)
        return Asked(self._places[: ids.numel()].view(ids.shape), gate_up, down, places)

    def release(self) -> None:
        """Give what was asked for last back."""
        self._run(jobs.release_job, self._fresh[-1])

    def run(self, replay: JobReplay) -> bool:
        """Run recorded jobs, and say True; False, and nothing is done, where they are stale."""
        return run_waiting(replay, [self])

    def arm(self, until_ns: int) -> None:
        """See `slots.Waited`."""
        self._words.ended, self._words.until = -1, until_ns

    def ended(self) -> int | None:
        """Where the list goes on, if it ended early; the cache has done what jobs could not.

        Raises what went wrong in reading.
        """
        words = self._words
        if words.ended < 0:
            return None
        if words.why == jobs.AGAIN:
            self._moves.check()
        else:
            self._ask_cache(self._requests[words.request])
        at: int = words.ended
        return at

    def _ask_cache(self, request: _Request) -> None:
        """Have the cache bring what jobs could not."""
        words, left, noted = self._words, request.wanted(), self._words.noted
        self._bring_back()
        nothing = -1, frozenset[int]()  # the request is in the middle of a pass
        counted = left.layer, frozenset(left.numbers)
        self._cache.now.waiting = counted if noted else nothing
        try:
            while left.numbers:
                there = set(self._cache.bring(left)[0].tolist())
                numbers = tuple(number for number in left.numbers if number not in there)
                left = ChosenExperts(left.layer, numbers, left.guesses)
        finally:
            self._bring()
        words.noted, words.resolved = noted, 1

    def _bring(self) -> None:
        """Have jobs know what they share no memory of."""
        state, words = self._cache.now, self._words
        some = {"free": state.free, "reading": state.reading}
        lists: Mapping[str, Any] = some | {"guesses": state.guesses, "doubtful": state.doubtful}
        for name, numbers in lists.items():
            memory = self._lists[name]
            memory[0] = len(numbers)
            memory[1 : 1 + len(numbers)] = numbers
        words.accuracy, words.unread, words.at = state.accuracy, state.unread, self._policy.at
        words.least_accuracy = LEAST_ACCURACY if self._cache.trial.reads else float("inf")
        for name in _COUNTED:
            setattr(words, f"num_{name}", state.counted[name])

    def _bring_back(self) -> None:
        """Have the cache know it again."""
        cache, state, words = self._cache, self._cache.now, self._words
        lists = {name: some[1 : 1 + some[0]].copy() for name, some in self._lists.items()}
        state.free, state.reading = lists["free"].tolist(), lists["reading"]
        state.guesses, state.doubtful = lists["guesses"], lists["doubtful"]
        state.accuracy, state.unread = words.accuracy, bool(words.unread)
        self._policy.at = words.at
        for name in _COUNTED:
            state.counted[name] = getattr(words, f"num_{name}")
        cache.wait_s += words.waited * 1e-9
        words.waited = 0
        for number in lists["asked"].tolist():
            request = self._requests[number]
            cache.wanted += len(request.keys)
            if cache.record is not None:
                layer = request.words.layer
                numbers = request.keys - self._policy.first[layer]
                cache.record.append((layer, tuple(numbers.tolist())))
        self._lists["asked"][0] = 0
        self._moves.taken_over(state.free, np.flatnonzero((state.keys >= 0) & ~state.came))

    def _run(self, job: Any, request: _Request) -> None:
        """Run a job, as often as it takes; a recording has it once."""
        pool, args = default_pool(), request.words
        with pool.lock:
            run = partial(pool.run, job.address, args, request)
            again = partial(pool.run_all, JobList([(job.address, bytes(args), request)]))
            while run_for_a_while([self], run) is not None:
                run = again

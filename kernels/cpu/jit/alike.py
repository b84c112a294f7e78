"""Layers that are alike: Python tells the jobs of the first ones, and those of others follow.

A job's arguments say what a pass has, such as rows, sizes and working space, and what a layer has
of its own, such as weights and its part of a cache. The latter is in the fields that their class
names in `OF_LAYER`. Once the jobs of all layers of a pass were told, the next pass of its kind
tells those of one layer of each kind: of the others, what they have of their own is known, and the
rest is that of the told layer of their kind. A layer is told if the class of one of its jobs
names no fields.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import cache
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .pool import Pool, Told, default_pool, room

Words: TypeAlias = NDArray[np.uint32]  # arguments of a layer's jobs, one after another
Layers: TypeAlias = Sequence[Sequence[Told]]  # the jobs of each

_MOST = 32  # kinds of passes that are known


class AlikeLayers:
    """What is known of the passes of one model. count: its layers, of which the last is told."""

    def __init__(self, pool: Pool, count: int) -> None:
        self.pool, self.last = pool, count - 1
        self._known = dict[Hashable, KnownJobs | None]()  # None: there is nothing to be known
        self.followed = 0  # layers that were not told

    @property
    def stale(self) -> bool:
        """Whether the pool's threads are those of another process."""
        return self.pool is not default_pool()

    def of_pass(self, kind: Hashable) -> PassLayers:
        """The layers of a pass of this kind, whose jobs are deferred meanwhile."""
        return PassLayers(self, kind)

    def find(self, kind: Hashable) -> KnownJobs | None:
        """Raises KeyError for a kind of passes that there was none of so far."""
        return self._known[kind]

    def learn(self, kind: Hashable, layers: Layers) -> None:
        """Know passes of a kind from one whose layers were all told, but the last."""
        while len(self._known) >= _MOST:
            del self._known[next(iter(self._known))]
        self._known[kind] = KnownJobs.of(layers)


class _Doing(Enum):
    """What becomes of the jobs of a layer that is told."""

    LEARN = auto()  # kept, until those of all layers are known
    CHECK = auto()  # kept, until there is a layer of each kind: what the others do is known
    NOTHING = auto()  # the pool has them


class PassLayers:
    """The layers of one pass, from the first to the last: each is told, or was done."""

    def __init__(self, layers: AlikeLayers, kind: Hashable) -> None:
        self._layers, self._kind = layers, kind
        self._doing = _Doing.LEARN
        self._told: list[Sequence[Told]] = []
        self._known: KnownJobs | None = None  # while checking
        self.until = 0  # layers before this one are done

    @contextmanager
    def telling(self, layer: int) -> Iterator[None]:
        """Tell the jobs of a layer; then those that follow may be done, see `until`."""
        self.until = layer + 1
        if self._doing is _Doing.NOTHING or layer == self._layers.last:
            yield
            return
        with self._layers.pool.noting() as jobs:
            yield
        self._told.append(jobs)
        self._doing = self._next(jobs)

    def _next(self, jobs: Sequence[Told]) -> _Doing:
        """What is done from now on; jobs: of the layer that was told last."""
        if not jobs:  # somebody waited for them, or computed without them
            return _Doing.NOTHING
        doing = self._begun(jobs) if len(self._told) == 1 else self._doing
        if doing is _Doing.CHECK:
            assert self._known is not None
            if self._known.leading > len(self._told):
                return doing
            if self._known.update(self._told):
                self._follow(self._known)
                return _Doing.NOTHING
            doing = _Doing.LEARN  # something lies elsewhere now
        if doing is _Doing.LEARN and len(self._told) == self._layers.last:
            self._layers.learn(self._kind, self._told)
        return doing

    def _begun(self, first: Sequence[Told]) -> _Doing:
        """What is done after the first layer, whose jobs are part of the kind."""
        self._kind = self._kind, _functions(first)
        try:
            self._known = self._layers.find(self._kind)
        except KeyError:
            return _Doing.LEARN
        return _Doing.NOTHING if self._known is None else _Doing.CHECK

    def _follow(self, known: KnownJobs) -> None:
        self._layers.pool.run_list(known.address, known.count)
        self.until = self._layers.last
        self._layers.followed += known.layers


class KnownJobs:
    """The jobs of layers behind the first ones, in memory as the threads read them.

    leading: how many are told. Each kind of layers has one among them.
    """

    def __init__(self, layers: Layers, rows: Sequence[Words], kinds: Sequence[int]) -> None:
        self.leading = max(kinds) + 1
        self.layers = len(layers) - self.leading
        self._kinds, where = list[_Kind](), dict[int, int]()
        for first in sorted(set(kinds)):
            mine = [layer for layer, kind in enumerate(kinds) if kind == first]
            kind = _Kind(layers[first], [rows[layer] for layer in mine], first)
            self._kinds.append(kind)
            where |= zip(mine, kind.addresses, strict=True)
        steps = list[int]()
        for layer in range(self.leading, len(layers)):
            for job, at in zip(layers[layer], _starts(layers[layer]), strict=False):
                steps += job.function, where[layer] + at
        self._steps = (ctypes.c_int64 * len(steps))(*steps)
        self.address, self.count = ctypes.addressof(self._steps), len(steps) // 2

    @staticmethod
    def of(layers: Layers) -> KnownJobs | None:
        """From the jobs of each layer; None where few of them are alike."""
        rows, kinds = [_words(jobs) for jobs in layers], list[int]()
        for layer in range(len(layers)):
            same = (first for first in sorted(set(kinds)) if _alike(layers, rows, first, layer))
            kinds.append(next(same, layer))
        if 2 * (max(kinds, default=0) + 1) > len(layers):
            return None
        return KnownJobs(layers, rows, kinds)

    def update(self, first: Layers) -> bool:
        """Have all layers know what the first ones are told; False where these are others."""
        given = [(kind, _words(first[kind.first])) for kind in self._kinds]
        if not all(kind.knows(first[kind.first], words) for kind, words in given):
            return False
        for kind, words in given:
            kind.update(words)
        return True


class _Kind:
    """Layers whose jobs are the same, but for what these have of their own."""

    def __init__(self, jobs: Sequence[Told], rows: Sequence[Words], first: int) -> None:
        self.first = first
        self._functions = _functions(jobs)
        self._rows = np.stack(rows)
        self._own = _own(_types(jobs)) & (self._rows != self._rows[0]).any(0)
        self._given = np.flatnonzero(~self._own)
        base, stride = self._rows.ctypes.data, self._rows.strides[0]
        self.addresses = [base + i * stride for i in range(len(rows))]

    def knows(self, jobs: Sequence[Told], words: Words) -> bool:
        """Whether a layer with these jobs is the first of the kind, and has what it had."""
        return _functions(jobs) == self._functions and np.array_equal(
            words[self._own], self._rows[0][self._own]
        )

    def update(self, words: Words) -> None:
        """All have what the pass has."""
        self._rows[:, self._given] = words[self._given]


def _alike(layers: Layers, rows: Sequence[Words], first: int, other: int) -> bool:
    """Whether what tells two layers apart is only what each has of its own."""
    types = _types(layers[first])
    if _functions(layers[first]) != _functions(layers[other]) or types != _types(layers[other]):
        return False
    if not all(hasattr(kind, "OF_LAYER") for kind in types):
        return False  # it may have the address of what it was told
    given = ~_own(types)
    return np.array_equal(rows[first][given], rows[other][given])


def _functions(jobs: Sequence[Told]) -> tuple[int, ...]:
    return tuple(job.function for job in jobs)


def _types(jobs: Sequence[Told]) -> tuple[Any, ...]:
    return tuple(type(job.args) for job in jobs)


def _starts(jobs: Sequence[Told]) -> list[int]:
    """Where the arguments of each job lie in a row, in bytes, and where it ends."""
    return list(accumulate((room(ctypes.sizeof(job.args)) for job in jobs), initial=0))


def _words(jobs: Sequence[Told]) -> Words:
    parts = (bytes(job.args) for job in jobs)
    padded = (part.ljust(room(len(part)), b"\0") for part in parts)
    return np.frombuffer(b"".join(padded), np.uint32)


@cache
def _own(types: tuple[Any, ...]) -> NDArray[np.bool_]:
    """Which words of a row a layer may have of its own."""
    found = list[NDArray[np.bool_]]()
    for kind in types:
        words = np.zeros(room(ctypes.sizeof(kind)) // 4, bool)
        for name in getattr(kind, "OF_LAYER", ()):
            first, count = _place(kind, name)
            words[first // 4 : (first + count) // 4] = True
        found.append(words)
    return np.concatenate(found)


def _place(kind: Any, name: str) -> tuple[int, int]:
    """Where a field lies, which may be one of a field, like "rows.norm", and its bytes."""
    outer, _, inner = name.partition(".")
    field = getattr(kind, outer)
    if not inner:
        return field.offset, field.size
    first, count = _place(dict(kind._fields_)[outer], inner)
    return field.offset + first, count

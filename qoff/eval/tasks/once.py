"""Sequences that are read in one sweep over the weights, without a KV cache that stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from qoff.engine.schedule import Schedule
from qoff.kernels.layout.ragged import Ragged
from qoff.kvcache import PassingCache
from qoff.kvcache.host.recent import RecentWorkspace
from qoff.models.forward_pass import ForwardPass
from qoff.models.native.decoder import Decoder
from qoff.models.runtime import Runtime

from .beginnings import Group


class Size(NamedTuple):
    """Of what is read together. sequences, longest: of a pass, at most."""

    tokens: int
    rows: int  # of logits
    sequences: int
    longest: int


Fits = Callable[[Size], bool]


class _Part(NamedTuple):
    """Tokens of a sequence in one of two passes, and from which on their logits are wanted."""

    first: int
    stop: int
    wanted: int
    sequence: int  # that has them
    begins: int = 0  # which sequence of the pass before has those before


def can_read_once(runtime: Runtime) -> bool:
    """Whether a pass over a model needs nothing but keys and values, of a layer at a time."""
    decoder = runtime.decoder
    if not isinstance(decoder, Decoder) or decoder.caches_on_device:
        return False
    return decoder.spec.recurrent is None and not decoder.spec.shared_kv


def size_of(groups: Sequence[Group], lengths: Sequence[int], places: Sequence[int]) -> Size:
    """Of sequences of so many tokens, predicted from these places on."""
    both = _parts(groups, lengths, places)
    wanted = (sum(part.stop - part.wanted for part in parts) for parts in both if parts)
    return Size(
        sum(part.stop - part.first for part in chain(*both)),
        sum(max(1, rows) for rows in wanted),  # as `read_once` asks for
        max(map(len, both)),
        max(lengths),
    )


@torch.inference_mode()
def read_once(
    runtime: Runtime,
    sequences: Sequence[list[int]],
    places: Sequence[int],
    groups: Sequence[Group],
) -> Iterator[tuple[int, int, Tensor]]:
    """Read sequences, the beginnings that those of a group share before the rest of each.

    Yields of each sequence its number, a place, and logits float32 [r, vocab_size] of the tokens
    from there on: from `places` on, up to the one behind its last, in their order.
    """
    decoder = runtime.decoder
    assert isinstance(decoder, Decoder)
    both = _parts(groups, [*map(len, sequences)], places)
    passes, before = list[ForwardPass](), None
    for parts in filter(None, both):
        ragged = Ragged.of([x.stop - x.first for x in parts], [x.first for x in parts])
        begins = [part.begins for part in parts if before]
        before = PassingCache(decoder.head_shapes, RecentWorkspace(), before, begins)
        tokens = chain(*(sequences[x.sequence][x.first : x.stop] for x in parts))
        ends = zip(ragged.spans, parts, strict=True)
        rows = [range(s.start + s.count - (x.stop - x.wanted), s.start + s.count) for s, x in ends]
        wanted = torch.tensor([*chain(*rows)] or [0])  # a pass without any still asks for one
        name = f"pass {len(passes)}"
        passes.append(ForwardPass(torch.tensor([*tokens]), ragged, before, wanted, name=name))
    if len(passes) > 1:
        most = max(run.ragged.tokens for run in passes)
        shared = decoder.new_workspace(most)
        for run in passes:
            run.workspace = shared
    logits = Schedule(decoder, runtime.store, "block").round(passes)
    first, rest = both
    followed: list[list[int]] = [[] for _ in first]
    for part in rest:
        followed[part.begins].append(part.sequence)
    for part, some, by in zip(first, _split(logits[0], first), followed, strict=True):
        for sequence in by or [part.sequence]:
            own = some[max(0, places[sequence] - 1 - part.wanted) :]
            if len(own):
                yield sequence, part.stop + 1 - len(own), own
    for part, some in zip(rest, _split(logits[-1], rest), strict=True):
        yield part.sequence, part.wanted + 1, some


def _split(logits: Tensor, parts: Sequence[_Part]) -> Sequence[Tensor]:
    """The rows of each part."""
    counts = [part.stop - part.wanted for part in parts]
    return logits[: sum(counts)].split(counts)


def _parts(
    groups: Sequence[Group], lengths: Sequence[int], places: Sequence[int]
) -> tuple[list[_Part], list[_Part]]:
    """What is read first, beginnings and sequences for themselves; and the rest."""
    first, rest = list[_Part](), list[_Part]()
    for shared, start, stop in groups:
        begins, end = len(first), shared or lengths[start]
        wanted = min(min(places[i] for i in range(start, stop)) - 1, end)
        first.append(_Part(0, end, wanted, start))
        for i in range(start, stop) if shared else ():
            rest.append(_Part(shared, lengths[i], max(shared, places[i] - 1), i, begins))
    return first, rest

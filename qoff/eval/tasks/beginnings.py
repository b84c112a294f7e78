"""Which sequences are read from a beginning that several of them share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_WORTH = 8  # tokens that sharing has to save: a short sequence more takes as long as some tokens


class Group(NamedTuple):
    """Neighbouring sequences that begin alike. shared: with so many tokens; 0: one alone."""

    shared: int
    first: int
    stop: int


def common_tokens(sequences: Sequence[Sequence[int]]) -> list[int]:
    """With how many tokens each sequence begins as the one before it; the first one: 0."""
    common = [0] * len(sequences)
    for i in range(1, len(sequences)):
        before, own = sequences[i - 1], sequences[i]
        most = min(len(before), len(own))
        different = (n for n in range(most) if before[n] != own[n])
        common[i] = next(different, most)
    return common


def groups(lengths: Sequence[int], common: Sequence[int]) -> list[Group]:
    """Groups of sequences in lexicographical order, such that the fewest tokens are read.

    A shared beginning is read once, and each of its sequences has a token of its own at least.
    lengths: tokens of each; common: of `common_tokens`, whose first number does not count.
    """
    open_ = [_Node(0, 0)]
    for i, length in enumerate(lengths):
        before = common[i] if i else 0
        while open_[-1].depth > before:
            node = open_.pop()
            if open_[-1].depth < before:
                open_.append(_Node(before, node.first))
            open_[-1].add(node, i)
        after = common[i + 1] if i + 1 < len(lengths) else 0
        if after > open_[-1].depth:
            open_.append(_Node(after, i))
        leaf = _Node(length, i, length, 1, length, length, [Group(0, i, i + 1)])
        open_[-1].add(leaf, i + 1)
    while len(open_) > 1:
        node = open_.pop()
        open_[-1].add(node, len(lengths))
    return open_[0].groups


@dataclass
class _Node:
    """Sequences from `first` on that begin alike, with `depth` tokens."""

    depth: int
    first: int
    tokens: int = 0  # of all of them
    count: int = 0
    shortest: int = 0
    read: int = 0  # tokens, where parts of them share beginnings
    groups: list[Group] = field(default_factory=list)

    def add(self, part: _Node, stop: int) -> None:
        """Take over some of the sequences, up to `stop`, as they are read best."""
        read, found = part.read, part.groups
        shared = min(part.depth, part.shortest - 1)
        saved = read - (part.tokens - shared * (part.count - 1))
        if part.count > 1 and saved >= _WORTH:
            read, found = read - saved, [Group(shared, part.first, stop)]
        self.shortest = min(self.shortest or part.shortest, part.shortest)
        self.tokens += part.tokens
        self.count += part.count
        self.read += read
        self.groups += found

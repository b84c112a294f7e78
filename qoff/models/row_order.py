"""Where the rows of a Hugging Face tensor go in a weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ROW_BLOCK = 16

Order = Callable[[Tensor], Tensor]  # from rows of a tensor, int64, to those of the weight


def in_order(rows: Tensor) -> Tensor:
    """As they are."""
    return rows


def after(first: int) -> Order:
    """Rows in their order, from a row on."""
    return lambda rows: rows + first


def in_turn(rows: Tensor, part: int | Tensor) -> Tensor:
    """Rows of the gate (0) or of the up matrix (1), in blocks of 16 in turn."""
    return (rows // ROW_BLOCK * 2 + part) * ROW_BLOCK + rows % ROW_BLOCK


def from_halves(inner: int) -> Order:
    """From gate above up."""
    return lambda rows: in_turn(rows % inner, rows // inner)


def from_pairs(rows: Tensor) -> Tensor:
    """From rows of gate and up in turn."""
    return in_turn(rows // 2, rows % 2)


def from_heads(heads: int, dim: int) -> Order:
    """From query, key and value of one head after the other."""

    def order(rows: Tensor) -> Tensor:
        head, inside = rows // (3 * dim), rows % (3 * dim)
        return (inside // dim * heads + head) * dim + inside % dim

    return order


def with_gates(dim: int, gates: int) -> Order:
    """From query and gate of one head after the other to queries, and gates from a row on."""

    def order(rows: Tensor) -> Tensor:
        head, inside = rows // (2 * dim), rows % (2 * dim)
        return head * dim + inside % dim + inside // dim * gates

    return order


def from_groups(sizes: tuple[int, ...], groups: int) -> Order:
    """From parts of these sizes of one group after the other to one part of all groups."""

    def order(rows: Tensor) -> Tensor:
        group, inside = rows // sum(sizes), rows % sum(sizes)
        found, begin = rows, 0
        for size in sizes:
            there = groups * begin + group * size + inside - begin
            found = torch.where(inside >= begin, there, found)
            begin += size
        return found

    return order


def indexed(dim: int, turned: int, pairs: bool) -> Order:
    """From heads whose first `turned` channels rotate to halves of the others and of these.

    pairs: neighbouring channels rotate together; otherwise they are in halves themselves.
    """

    def order(rows: Tensor) -> Tensor:
        channel, others = rows % dim, dim - turned
        if pairs:
            upper, inside = channel % 2, channel // 2
        else:
            upper, inside = channel // (turned // 2), channel % (turned // 2)
        rotates = upper * (dim // 2) + others // 2 + inside
        still = channel - turned
        stays = still // (others // 2) * (dim // 2) + still % (others // 2)
        return rows - channel + torch.where(channel < turned, rotates, stays)

    return order


def unpaired(first: int, dim: int, turned: int, until: int, start: int = 0) -> Order:
    """From heads of which `turned` channels rotate in neighbouring pairs to halves that do.

    until: rows from here on do not rotate. start: the first channel that does.
    """

    def order(rows: Tensor) -> Tensor:
        channel = rows % dim - start
        half = channel % 2 * (turned // 2) + channel // 2
        pairs = (channel >= 0) & (channel < turned) & (rows < until)
        return first + rows - channel + torch.where(pairs, half, channel)

    return order

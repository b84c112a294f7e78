"""States of recurrent layers, and passes of sequences that have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from qoff.kernels.layout.ragged import Ragged, Span
from qoff.kernels.layout.states import DeviceLayerStates, LayerStates, StateShape
from qoff.kvcache.device.tables import DeviceTables, pass_tables

SLOTS = 4
CPU = torch.device("cpu")


def states_of(shape: StateShape) -> tuple[Tensor, Tensor]:
    """With anything in all slots."""
    conv, memory = torch.empty(SLOTS, *shape.conv_shape), torch.empty(SLOTS, *shape.memory_shape)
    return conv.fill_(torch.nan), memory.fill_(torch.nan)


def states(shape: StateShape, ragged: Ragged, slots: list[int]) -> LayerStates:
    """Of sequences in these slots, with anything in all of them."""
    rows = [(span.start, span.count, slots[span.slot]) for span in ragged.spans]
    return LayerStates(*states_of(shape), torch.tensor(rows))


def spans_of(ragged: Ragged) -> Tensor:
    """As a `LayerStates` has them."""
    return torch.tensor([(span.start, span.count, span.slot) for span in ragged.spans])


def passes(lengths: dict[int, int], each: Iterable[Sequence[int]]) -> Iterator[tuple[Ragged, bool]]:
    """Passes of so many new tokens of each slot; whether a pass has the tables of a graph.

    lengths: of slots, in the order of their sequences in a batch, which a graph's is not.
    """
    for counts in each:
        spans, start, steady = [], 0, max(counts) == 1
        for slot, count in zip(sorted(lengths) if steady else lengths, counts, strict=True):
            if count:
                spans.append(Span(slot, start, count, lengths[slot]))
                start += count
                lengths[slot] += count
        yield Ragged(tuple(spans)), steady


def device_states(
    kept: tuple[Tensor, Tensor], ragged: Ragged, steady: bool = False
) -> DeviceLayerStates:
    spans = sorted(ragged.spans, key=lambda span: span.slot)
    nothing = [0] * SLOTS
    step = pass_tables(
        DeviceTables(SLOTS, CPU), spans, ragged, packed=nothing, new={}, resident_from=nothing,
        offloads=False, steady=steady,
    )  # fmt: skip
    return DeviceLayerStates(*kept, step)

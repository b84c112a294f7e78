"""Recurrent states of sequences with drafts, whose rejected tokens must leave nothing in them.

A pass over drafts computes on copies of the states, a layer's at a time, and keeps what the op is
given of each token. The next pass first gives the states those tokens that were accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qoff.kernels.layout.device_cache import PassTables
from qoff.kernels.layout.ragged import Ragged, Span
from qoff.kernels.layout.states import DeviceLayerStates, LayerStates, StateShape

AnyStates = LayerStates | DeviceLayerStates


def drafted_bytes(shape: StateShape, layers: int, most: int, itemsize: int) -> int:
    """Bytes of a sequence: copies of a layer's states, and what is kept of 1 + `most` tokens."""
    kept = layers * (1 + most) * shape.operands * itemsize
    return shape.state_bytes + kept


class DraftedStates:
    """What passes over drafts keep in a cache of so many sequences.

    most: drafted tokens of a sequence in a pass. waiting: of each sequence, tokens that were
    accepted, in the order of a pass, and that its states do not yet have.
    """

    def __init__(self, sequences: int, most: int) -> None:
        self.most = most
        self.waiting = [0] * sequences
        self._kept: dict[int, list[Tensor]] = {}  # of each layer, [sequences, 1 + most, width]
        self._copies: tuple[Tensor, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        kept = [x for layer in self._kept.values() for x in layer]
        return sum(x.nbytes for x in (*kept, *(self._copies or ())))

    def concerns(self, ragged: Ragged) -> bool:
        """Whether a pass has drafts, or follows one that had: not one over prompts."""
        spans = ragged.spans
        if any(span.count > 1 + self.most or not span.past for span in spans):
            return False
        return any(span.count > 1 or self.waiting[span.slot] for span in spans)

    def begin(self, ragged: Ragged) -> DraftedPass:
        """A pass that this concerns."""
        return DraftedPass(self, ragged)

    def copies(self, conv: Tensor, memory: Tensor, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Copies of a layer's states in these slots; they are valid until the next ones."""
        if self._copies is None:
            self._copies = torch.empty_like(conv), torch.empty_like(memory)
        for part, copied in zip((conv, memory), self._copies, strict=True):
            if len(slots) == len(part):
                copied.copy_(part)
                continue
            for slot in slots:
                copied[slot].copy_(part[slot])
        return self._copies

    def keep(self, layer: int, ragged: Ragged, rows: Sequence[Tensor]) -> None:
        """Keep what the op is given of the tokens of a pass."""
        if layer not in self._kept:
            size = len(self.waiting), 1 + self.most
            self._kept[layer] = [x.new_empty(*size, x.shape[1]) for x in rows]
        for kept, x in zip(self._kept[layer], rows, strict=True):
            for span in ragged.spans:
                kept[span.slot, : span.count] = x[span.start : span.start + span.count]

    def kept(self, layer: int, ragged: Ragged) -> list[Tensor]:
        """What was kept of the first tokens of the sequences, as rows of a pass over these."""
        spans = ragged.spans
        return [
            torch.cat([kept[span.slot, : span.count] for span in spans])
            for kept in self._kept[layer]
        ]

    def copy(self, source: int, target: int) -> None:
        """Give a sequence what another one has."""
        self.waiting[target] = self.waiting[source]
        for kept in (x for layer in self._kept.values() for x in layer):
            kept[target] = kept[source]


class DraftedPass:
    """A pass over drafts, or over what follows one."""

    def __init__(self, of: DraftedStates, ragged: Ragged) -> None:
        self._of, self.ragged = of, ragged
        self.slots = [span.slot for span in ragged.spans]
        self.drafts = any(span.count > 1 for span in ragged.spans)
        spans, start = list[Span](), 0
        for span in ragged.spans:
            if count := of.waiting[span.slot]:
                spans.append(Span(span.slot, start, count, span.past - count))
                start += count
        self.before = Ragged(tuple(spans)) if spans else None
        self._spans = None if self.before is None else _spans(self.before)
        self._tables: PassTables | None = None

    def open(self, layer: int, states: AnyStates) -> DraftedLayerStates:
        """Those of a layer; states: all, and the tables of the pass."""
        return DraftedLayerStates(self, layer, states)

    def end(self) -> None:
        """The pass is done: all its tokens wait, or nothing does."""
        for span in self.ragged.spans:
            self._of.waiting[span.slot] = span.count if self.drafts else 0

    def states_before(self, states: AnyStates) -> AnyStates:
        """The same states, for the pass over tokens that wait."""
        assert self.before is not None
        if isinstance(states, LayerStates):
            assert self._spans is not None
            return LayerStates(states.conv, states.memory, self._spans)
        if self._tables is None:
            self._tables = _tables(self.before, len(states.conv), states.conv.device)
        return DeviceLayerStates(states.conv, states.memory, self._tables)

    def compute(
        self,
        layer: int,
        states: AnyStates,
        op: Callable[..., Tensor],
        rows: Sequence[Tensor],
        out: Tensor | None,
    ) -> Tensor:
        """What the op gives for these rows; the states have what was accepted before."""
        of = self._of
        if self.before is not None:
            op(*of.kept(layer, self.before), states=self.states_before(states), ragged=self.before)
        if self.drafts:
            of.keep(layer, self.ragged, rows)
            conv, memory = of.copies(states.conv, states.memory, self.slots)
            if isinstance(states, LayerStates):
                states = LayerStates(conv, memory, states.spans)
            else:
                states = DeviceLayerStates(conv, memory, states.step)
        return op(*rows, states=states, ragged=self.ragged, out=out)


@dataclass(frozen=True, eq=False)
class DraftedLayerStates:
    """What a layer remembers in a pass over drafts."""

    of: DraftedPass
    layer: int
    states: AnyStates

    def compute(
        self, op: Callable[..., Tensor], rows: Sequence[Tensor], out: Tensor | None
    ) -> Tensor:
        """See `DraftedPass.compute`; op: is given states and a batch beside rows."""
        return self.of.compute(self.layer, self.states, op, rows, out)


def _spans(ragged: Ragged) -> Tensor:
    """As `LayerStates.spans`."""
    rows = [(span.start, span.count, span.slot) for span in ragged.spans]
    return torch.tensor(rows, dtype=torch.int64)


def _tables(ragged: Ragged, slots: int, device: torch.device) -> PassTables:
    """Tables of a pass that recurrent layers alone see."""
    counts, start = [0] * slots, [0] * slots
    for span in ragged.spans:
        counts[span.slot], start[span.slot] = span.count, span.past
    counted = torch.tensor([0, *counts]).cumsum(0)
    first, none = torch.tensor(start), torch.zeros(slots, dtype=torch.int32, device=device)

    def there(x: Tensor) -> Tensor:
        return x.to(device, torch.int32)

    return PassTables(
        start=there(first),
        row_start=there(counted),
        length=there(first + torch.tensor(counts)),
        packed=none,
        after=none,
        table=none[:, None],
        positions=there(ragged.positions),
        max_rows=max(counts),
        max_packed=0,
    )

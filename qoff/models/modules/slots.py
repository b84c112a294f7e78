"""What sequences in slots of a batch remember, for transformers' modules: K, V and states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from qoff.budgets import CPU
from qoff.kernels.layout.ragged import Ragged, Span
from qoff.kvcache import CachePass, DeviceCache, PackedCache
from qoff.kvcache.device.cache import DeviceCachePass
from qoff.kvcache.host.packed import PackedPass
from qoff.kvcache.slots import SlotCache, SlotPass

from .cache import StatesPass, right_aligned
from .sequence_memory import LayerMemory


class SlotStates:
    """K and V that are not packed, and recurrent states, of sequences of `context` tokens at most.

    config: of the model. attention: the layers whose K and V are in packed blocks instead. device:
    where they are.
    """

    def __init__(
        self,
        config: Any,
        layers: Sequence[LayerMemory],
        attention: Sequence[int],
        sequences: int,
        context: int,
        device: torch.device = CPU,
    ) -> None:
        self.config, self.attention = config, tuple(attention)
        self.tokens = {
            i: [
                torch.empty(sequences, heads, context, dim, dtype=layer.dtype, device=device)
                for heads, dim in layer.heads
            ]
            for i, layer in enumerate(layers)
            if layer.heads
        }
        self.states = {
            (i, *key): torch.empty(sequences, *state.shape, dtype=state.dtype, device=device)
            for i, layer in enumerate(layers)
            for key, state in layer.states.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts())

    def copy(self, source: int, target: int) -> None:
        """Give a slot what another one has."""
        for part in self._parts():
            part[target] = part[source]

    def _parts(self) -> list[Tensor]:
        return [*(part for pair in self.tokens.values() for part in pair), *self.states.values()]


class _ModuleSlots(SlotCache):
    """Slots of packed blocks for the layers `states.attention`; what is not packed is in `states`.

    The other arguments are those of the packed cache, whose layers these are, in their order.
    """

    padding = 1  # a pass computes what is padded, too

    def __init__(self, *arguments: Any, states: SlotStates, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.states = states
        # transformers' recurrent layers go on by single tokens.
        self.equal_prompts = bool(states.states)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.states.nbytes  # type: ignore[safe-super]

    def copy_recent(self, source: int, target: int) -> None:
        super().copy_recent(source, target)  # type: ignore[safe-super]
        self.states.copy(source, target)


class _ModuleSlotPass(SlotPass, StatesPass):
    """A forward pass of sequences in slots, as a padded batch whose rows end together."""

    _cache: _ModuleSlots

    def __init__(self, cache: Any, ragged: Ragged, slots: Sequence[int] | None) -> None:
        super().__init__(cache, ragged, slots)
        self.real = right_aligned([span.past + span.count for span in ragged.spans])
        self._rows = [span.slot if slots is None else slots[span.slot] for span in ragged.spans]
        new = max(span.count for span in ragged.spans)
        self.states = self._states(self.real.shape[1] - new)

    @property
    def tokens(self) -> CachePass | None:
        """Where attention of qoff's finds K and V; None: transformers attends."""
        return self if self._cache.states.attention else None

    def prefetch(self, layer: int) -> None:
        if layer in self._cache.states.attention:
            super().prefetch(self._cache.states.attention.index(layer))

    def end(self) -> None:
        for (layer, kind, i), kept in self._cache.states.states.items():
            kept[self._rows] = getattr(self.states.layers[layer], kind)[i]
        super().end()

    def _states(self, columns: int) -> Any:
        """A cache of transformers that has read so many columns."""
        held, found = self._cache.states, DynamicCache(config=self._cache.states.config)
        for i, layer in enumerate(found.layers):
            if isinstance(layer, DynamicLayer):
                parts = held.tokens.get(i)
                rows = None if parts is None else _Rows(parts, self.ragged.spans, self._rows)
                found.layers[i] = _in_slots(layer, columns, rows)
        if columns:
            for (i, kind, number), kept in held.states.items():
                into: Any = found.layers[i]
                getattr(into, kind)[number] = kept[self._rows]
                getattr(into, f"is_{kind}_initialized")[number] = True
                into.has_previous_state[number] = True
                if kind == "conv_states":
                    into.conv_kernel_size[number] = kept.shape[-1]
                into.dtype, into.device = kept.dtype, kept.device
        return found


class ModuleSlots(_ModuleSlots, PackedCache):
    """With blocks that a CPU attends to, or none."""

    def start(self, ragged: Ragged, slots: Sequence[int] | None = None) -> _HostPass:
        return _HostPass(self, ragged, slots)


class _HostPass(_ModuleSlotPass, PackedPass):
    """A pass whose attention is a CPU's."""

    _cache: ModuleSlots


class DeviceModuleSlots(_ModuleSlots, DeviceCache):
    """With blocks on a GPU, or that come there."""

    def start(self, ragged: Ragged, slots: Sequence[int] | None = None) -> _DevicePass:
        return _DevicePass(self, ragged, slots)


class _DevicePass(_ModuleSlotPass, DeviceCachePass):
    """A pass whose attention is a GPU's."""

    _cache: DeviceModuleSlots


@dataclass(frozen=True)
class _Rows:
    """K and V of the sequences of a pass. kept: of all slots, each [slots, heads, context, D]."""

    kept: Sequence[Tensor]
    spans: Sequence[Span]
    slots: Sequence[int]

    def append(self, new: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Keep what is new, [B, heads, T, D] each; all there is then, [B, heads, columns, D]."""
        ends = [span.past + span.count for span in self.spans]
        for part, more in zip(self.kept, new, strict=True):
            for row, (span, slot, end) in enumerate(zip(self.spans, self.slots, ends, strict=True)):
                part[slot, :, span.past : end] = more[row, :, -span.count :]
        columns = max(ends)
        if min(ends) == columns and list(self.slots) == list(range(len(self.kept[0]))):
            return tuple(part[:, :, :columns] for part in self.kept)
        return tuple(self._gathered(part, ends, columns) for part in self.kept)

    def _gathered(self, part: Tensor, ends: Sequence[int], columns: int) -> Tensor:
        found = part.new_zeros(len(ends), part.shape[1], columns, part.shape[3])
        for row, (slot, end) in enumerate(zip(self.slots, ends, strict=True)):
            found[row, :, columns - end :] = part[slot, :, :end]
        return found


class _SlotLayer(DynamicLayer):
    """K and V of `rows`, after so many columns; rows None: attention appends them to blocks."""

    columns: int
    rows: _Rows | None

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the new columns."""
        self.columns += key_states.shape[-2]
        if self.rows is None:
            return key_states, value_states
        keys, values = self.rows.append((key_states, value_states))
        return keys, values

    def get_seq_length(self) -> int:
        return self.columns


class _HybridLayer(_SlotLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc,override]
    """With recurrent states beside them."""


def _in_slots(layer: Any, columns: int, rows: _Rows | None) -> DynamicLayer:
    """A layer of transformers' cache with K and V, as one that has read so many columns."""
    found = _SlotLayer()
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        found = _HybridLayer(layer.number_of_states)
    found.is_sliding, found.columns, found.rows = layer.is_sliding, columns, rows
    return found

"""Packed caches in slots, of models some of whose layers have states in place of K and V."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from qoff.errors import ArgumentError
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.states import DeviceLayerStates, LayerStates
from qoff.kvcache.store.sweep import BlockSweep

from .device.cache import DeviceCache, DeviceCachePass
from .drafted_states import DraftedLayerStates, DraftedPass
from .host.packed import PackedCache, PackedPass
from .slots import SlotCache, SlotPass
from .states import NO_WAY_BACK, StateCache, StatePass, drafted_pass, goes_back, places


class _Stateful(SlotCache):
    """K and V of the layers that attend, packed, and `states` of those that are `linear`.

    linear: of each layer of the model. The other arguments are those of the cache without states,
    whose layers attend. Sequences are copied, but go back to their beginning only. One that adopts
    blocks needs the states behind them, too (`StateCache.load`).
    """

    def __init__(
        self, *arguments: Any, states: StateCache, linear: Sequence[bool], **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.states, self.places = states, places(linear)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.states.nbytes  # type: ignore[safe-super]

    def bytes_for(self, tokens: int) -> int:
        return super().bytes_for(tokens) + self.states.bytes_for(tokens)

    def copy_recent(self, source: int, target: int) -> None:
        super().copy_recent(source, target)  # type: ignore[safe-super]
        self.states.copy(source, target)

    def select(self, sequences: Sequence[int]) -> None:
        super().select(sequences)
        self.states.select(sequences)

    def reset(self, slot: int, expected_tokens: int = 0) -> None:
        super().reset(slot, expected_tokens)
        self.states.reset(slot)
        if not any(self.lengths):  # what a pass left half-way is forgotten
            self.states.spoiled = False

    def can_forget(self, tokens: Sequence[int]) -> bool:
        return super().can_forget(tokens) and not goes_back(self.lengths, self._summed(tokens))

    def forget_each(self, tokens: Sequence[int]) -> None:
        """As `SlotCache.forget_each`. Raises ArgumentError for what states have summed up."""
        if goes_back(self.lengths, self._summed(tokens)):
            raise ArgumentError(NO_WAY_BACK)
        super().forget_each(tokens)
        self.states.take_back(tokens)

    def _summed(self, tokens: Sequence[int]) -> list[int]:
        """Tokens to forget of sequences that would have to forget some that states have."""
        drafted = map(self.states.drafted, range(len(tokens)))
        return [0 if n <= of_draft else n for n, of_draft in zip(tokens, drafted, strict=True)]


class _StatefulPass(SlotPass):
    """A forward pass on both."""

    _cache: _Stateful
    _touched = False
    drafted: DraftedPass | None = None

    @property
    def in_place(self) -> bool:
        return self.drafted is None and super().in_place

    def _states_key(self) -> Hashable | None:
        """As `replay_key`, of the states."""
        raise NotImplementedError

    def _open_states(self, index: int) -> LayerStates | DeviceLayerStates | DraftedLayerStates:
        raise NotImplementedError

    def replay_key(self) -> Hashable | None:
        keys = super().replay_key(), self._states_key()
        return None if None in keys or self.drafted is not None else keys

    @property
    def spoils(self) -> bool:
        return self._touched or super().spoils  # type: ignore[safe-super]

    def end(self) -> None:
        super().end()
        self._cache.states.spoiled = False
        if self.drafted is not None:
            self.drafted.end()
            self._cache.ended = None  # what follows is another recording

    @property
    def takes_back(self) -> bool:
        return False  # states sum up all tokens

    def going_on(self) -> None:
        self._cache.states.spoiled = True

    def advance(self, steps: int) -> None:
        super().advance(steps)
        self._cache.states.spoiled = False

    def arrive(self, layer: int) -> Hashable:
        of_states, index = self._cache.places[layer]
        self._touched |= of_states
        return None if of_states else super().arrive(index)

    def sweep(self, layer: int, sweep: BlockSweep) -> None:
        of_states, index = self._cache.places[layer]
        self._touched |= of_states
        if not of_states:
            super().sweep(index, sweep)

    def prefetch(self, layer: int) -> None:
        of_states, index = self._cache.places[layer]
        if not of_states:
            super().prefetch(index)

    def open(self, layer: int) -> Any:
        of_states, index = self._cache.places[layer]
        if not of_states:
            return super().open(index)  # type: ignore[safe-super]
        self._touched = True
        return self._open_states(index)

    def close(self, layer: int) -> None:
        of_states, index = self._cache.places[layer]
        if not of_states:
            super().close(index)


class StatefulCache(_Stateful, PackedCache):
    """In host memory."""

    def start(self, ragged: Ragged, slots: Sequence[int] | None = None) -> StatefulPass:
        """As `SlotCache.start`. Raises ArgumentError where the states are worthless."""
        self.states.check(ragged)
        return StatefulPass(self, ragged, slots)


class StatefulPass(_StatefulPass, PackedPass):
    """A forward pass in host memory."""

    _cache: StatefulCache

    def __init__(self, cache: StatefulCache, ragged: Ragged, slots: Sequence[int] | None) -> None:
        super().__init__(cache, ragged, slots)
        self._states = StatePass(cache.states, self.ragged, slots)
        self.drafted = drafted_pass(cache.states, self.ragged, slots)

    def layers_key(self) -> Hashable | None:
        key = super().layers_key()
        return None if key is None else (key, self._states.layers_key())

    def _states_key(self) -> Hashable | None:
        return self._states.replay_key()

    def _open_states(self, index: int) -> LayerStates | DraftedLayerStates:
        states = self._states.open(index)
        return states if self.drafted is None else self.drafted.open(index, states)


class StatefulDeviceCache(_Stateful, DeviceCache):
    """In the memory of a GPU."""

    def start(self, ragged: Ragged, slots: Sequence[int] | None = None) -> StatefulDevicePass:
        """As `SlotCache.start`. Raises ArgumentError where the states are worthless."""
        self.states.check(ragged)
        begun = StatefulDevicePass(self, ragged, slots)
        begun.drafted = drafted_pass(self.states, ragged, slots)
        return begun


class StatefulDevicePass(_StatefulPass, DeviceCachePass):
    """A forward pass on a GPU."""

    _cache: StatefulDeviceCache

    def replay_key(self) -> Hashable | None:
        key = super().replay_key()
        self._touched |= key is not None  # a replay opens no layer
        return key

    def _states_key(self) -> Hashable:
        return self._cache.states.addresses

    def _open_states(self, index: int) -> DeviceLayerStates | DraftedLayerStates:
        of = self._cache.states
        states = DeviceLayerStates(of.conv[index], of.memory[index], self._step)
        return states if self.drafted is None else self.drafted.open(index, states)


def device_cache(
    *arguments: Any, states: tuple[StateCache | None, Sequence[bool]], **options: Any
) -> DeviceCache:
    """A cache on a GPU, with states and the layers that have them, if any do."""
    found, linear = states
    if found is None:
        return DeviceCache(*arguments, **options)
    return StatefulDeviceCache(*arguments, states=found, linear=linear, **options)

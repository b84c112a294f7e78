"""The cache in host memory that a `KVQuant` asks for; some of its layers may not be packed."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import compress
from weakref import proxy

from torch import Tensor

from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.states import LayerStates
from qoff.kernels.layout.steady import SteadyMemory
from qoff.kvcache.base import CachePass, KVCache
from qoff.kvcache.quant import KVQuant
from qoff.kvcache.states import StateCache

from .packed import PackedCache
from .plain import PlainCache


def host_cache(
    shapes: Sequence[HeadShape],
    sequences: int,
    kv: KVQuant | None,
    capacity: int = 0,
    states: StateCache | None = None,
    linear: Sequence[bool] = (),
    lent: Collection[int] = (),
) -> KVCache:
    """An empty cache of layers of these shapes: float32 without `kv`, else packed as it says.

    One in float32 has room for `capacity` tokens of each sequence at once. states: an empty one of
    the layers that `linear` names among all; shapes are of the others. lent: see `PackedCache`.
    Raises OpError for a head
    size that cannot be packed, ArgumentError for bits of a layer there is not.
    """
    forms = [None] * len(shapes) if kv is None else kv.forms(shapes)
    is_packed = [form is not None for form in forms]
    parts: dict[str, KVCache] = {} if states is None else {"states": states}
    if kv is not None and any(is_packed):
        parts["packed"] = PackedCache(
            list(compress(shapes, is_packed)),
            [form for form in forms if form is not None],
            sequences,
            window=kv.window,
            sinks=kv.sinks,
            attention_top=kv.attention_top,
            values_rotated=kv.values_rotated,
            frees=kv.frees(on_gpu=False),
            lent=[sum(is_packed[:layer]) for layer in lent if is_packed[layer]],
        )
    plain = [shape for shape, there in zip(shapes, is_packed, strict=True) if not there]
    if plain:
        room = capacity if len(plain) == len(shapes) else 0
        parts["plain"] = PlainCache(plain, sequences, room)
    if len(parts) == 1:
        return next(iter(parts.values()))
    of_rest = iter("packed" if there else "plain" for there in is_packed)
    if states is None:
        return MixedCache(parts, list(of_rest))
    return MixedCache(parts, ["states" if one else next(of_rest) for one in linear])


class MixedCache(KVCache):
    """Caches of some layers each; layers: which of them each layer is in."""

    def __init__(self, parts: Mapping[str, KVCache], layers: Sequence[str]) -> None:
        self._parts = list(parts.values())
        names = list(parts)
        # Which part each layer is in, and its number there.
        self._where = [
            (names.index(name), layers[:layer].count(name)) for layer, name in enumerate(layers)
        ]
        self.lengths = list(self._parts[0].lengths)
        self._steady = SteadyMemory()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def bytes_for(self, tokens: int) -> int:
        return sum(part.bytes_for(tokens) for part in self._parts)

    def reserve(self, tokens: int) -> None:
        self.ended = None
        for part in self._parts:
            part.reserve(tokens)

    def begin(self, ragged: Ragged) -> CachePass:
        self.ended = None
        if ragged.is_decode:
            ragged = ragged.kept_in(self._steady)
        # States last: they are worthless from there on, until the pass ends.
        passes = [part.begin(ragged) for part in reversed(self._parts)][::-1]
        layers = [(passes[part], layer) for part, layer in self._where]
        return _MixedPass(self, ragged, passes, layers)

    def select(self, sequences: Sequence[int]) -> None:
        self.ended = None
        for part in self._parts:
            part.select(sequences)
        self.lengths = list(self._parts[0].lengths)

    def lose(self) -> None:
        for part in self._parts:
            part.lose()

    def can_forget(self, tokens: Sequence[int]) -> bool:
        return all(part.can_forget(tokens) for part in self._parts)

    def forget_each(self, tokens: Sequence[int]) -> None:
        self.ended = None
        # Those that may refuse come before those that never do.
        for part in self._parts:
            part.forget_each(tokens)
        self.lengths = list(self._parts[0].lengths)


class _MixedPass(CachePass):
    """layers: of each layer, the pass on its part and its number there."""

    def __init__(
        self,
        cache: MixedCache,
        ragged: Ragged,
        passes: Sequence[CachePass],
        layers: Sequence[tuple[CachePass, int]],
    ) -> None:
        self._cache: MixedCache = proxy(cache)  # which keeps the pass when it has ended
        self.ragged = ragged
        self._passes, self._layers = passes, layers

    def replay_key(self) -> Hashable | None:
        keys = [part.replay_key() for part in self._passes]
        return None if None in keys else tuple(keys)

    def layers_key(self) -> Hashable | None:
        keys = [part.layers_key() for part in self._passes]
        return None if None in keys else tuple(keys)

    @property
    def moves(self) -> bool:
        return any(part.moves for part in self._passes)

    @property
    def in_place(self) -> bool:
        return all(part.in_place for part in self._passes)

    def arrive(self, layer: int) -> Hashable:
        part, index = self._layers[layer]
        return part.arrive(index)

    def prefetch(self, layer: int) -> None:
        part, index = self._layers[layer]
        part.prefetch(index)

    def open(self, layer: int) -> LayerCache | DeviceLayerCache | LayerStates:
        part, index = self._layers[layer]
        return part.open(index)

    def close(self, layer: int) -> None:
        part, index = self._layers[layer]
        part.close(index)

    def end(self) -> None:
        for part in self._passes:
            part.end()
        self._cache.lengthen(self.ragged)

        self._cache.ended = self if self.ragged.is_decode else None

    def steps_ahead(self, ragged: Ragged) -> int:
        return min(part.steps_ahead(ragged) for part in self._passes)

    def counters(self) -> list[Tensor]:
        return [self.ragged.positions, *(n for part in self._passes for n in part.counters())]

    def going_on(self) -> None:
        for part in self._passes:
            part.going_on()

    def advance(self, steps: int) -> None:
        self._cache.lengthen(self.ragged, steps)
        for part in reversed(self._passes):  # states last, which are worthless until then
            part.advance(steps)

    def abandon(self) -> None:
        for part in self._passes:
            part.abandon()

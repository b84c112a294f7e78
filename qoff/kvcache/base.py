"""What a decoder needs of a cache, whatever its form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.states import LayerStates

from .layers import LayerView
from .store.sweep import BlockSweep


class CachePass(LayerView[LayerCache | DeviceLayerCache | LayerStates]):
    """One forward pass on a cache: what its attention reads, and where its new tokens go.

    After all layers the pass ends, or is abandoned, which does nothing when it has ended. ragged:
    the new tokens; of a decode step, in memory that stays where it is, where a cache has such.
    """

    ragged: Ragged

    def replay_key(self) -> Hashable | None:
        """What kernels are told in this pass, beside the values in memory: addresses and sizes.

        None where no other pass will be told the same. Where it `moves`, `arrive` has the rest.
        """
        return None

    @property
    def moves(self) -> bool:
        """Whether some of what is read comes layer by layer."""
        return False

    @property
    def takes_back(self) -> bool:
        """Whether steps that were computed, and that `advance` does not count, left nothing."""
        return True

    @property
    def in_place(self) -> bool:
        """Whether kernels alone read and write what is in it, and torch, until it ends."""
        return False

    def layers_key(self) -> Hashable | None:
        """What tells passes apart whose layers are told alike, see `cpu.jit.alike`.

        Where each layer has its own part of the cache, among others. None where the jobs of a layer
        are no sign of those of the next.
        """
        return None

    def arrive(self, layer: int) -> Hashable:
        """Have what moves ready for the kernels of a layer, until `close`; where it is, or None."""
        return None

    def begin_sweep(self) -> BlockSweep | None:
        """Begin a sweep by which what moves may come, if there can be one: no `arrive` then."""
        return None

    def sweep(self, layer: int, sweep: BlockSweep) -> None:
        """Have what moves come by jobs that open a layer, the next after what `sweep` has so far.

        Of a pass that `moves`, from the first layer to the last.
        """

    @abstractmethod
    def end(self) -> None:
        """All layers are done: the new tokens are remembered."""

    def steps_ahead(self, ragged: Ragged) -> int:
        """How many steps follow from `ragged` on, itself one, of which kernels are told the same.

        But for `counters`, which are one larger in each.
        """
        return 0

    def counters(self) -> list[Tensor]:
        """Numbers in memory, int64 [n], that are one larger in a step that follows.

        On a GPU int32 [2, n]: numbers, and how much larger each is.
        """
        return []

    def going_on(self) -> None:
        """Steps ahead are about to be computed; `advance` says how many were, perhaps none."""

    def advance(self, steps: int) -> None:
        """So many steps ahead have been computed: their tokens are remembered."""
        raise NotImplementedError


class KVCache(ABC):
    """Keys and values of every layer for a number of sequences, in slots 0, 1, ...

    `lengths[i]` is how many tokens of sequence i are remembered. ended: the pass that was the last
    thing to happen to the cache, if that can be advanced.
    """

    lengths: list[int]
    ended: CachePass | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the pass, which is told where this cache lies."""
        return {**self.__dict__, "ended": None}

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated, used or not."""

    @abstractmethod
    def bytes_for(self, tokens: int) -> int:
        """The most bytes allocated while room is made for `tokens` tokens of each sequence."""

    @abstractmethod
    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens of each sequence, and not for more."""

    @abstractmethod
    def begin(self, ragged: Ragged) -> CachePass:
        """Make room for the new tokens of a forward pass."""

    def lengthen(self, ragged: Ragged, passes: int = 1) -> None:
        """Count the new tokens of a pass that ends, or of several."""
        for span in ragged.spans:
            self.lengths[span.slot] += span.count * passes

    @abstractmethod
    def select(self, sequences: Sequence[int]) -> None:
        """Keep the given sequences, in this order; one may be named more than once."""

    def forget(self, tokens: int) -> None:
        """Forget the newest `tokens` tokens of each sequence, or all it has."""
        self.forget_each([tokens] * self.sequences)

    def lose(self) -> None:  # noqa: B027 - most can always forget
        """What is remembered is of no use; passes are refused until all of it is forgotten."""

    def can_forget(self, tokens: Sequence[int]) -> bool:
        """Whether what is left without the newest `tokens[i]` tokens of sequence i is all there."""
        return True

    @abstractmethod
    def forget_each(self, tokens: Sequence[int]) -> None:
        """Forget the newest `tokens[i]` tokens of sequence i, or all it has.

        Raises ArgumentError where a cache can only forget as many of every sequence, and where
        it has not kept what is needed then (`can_forget`).
        """

    def undo(self, tokens: Sequence[int]) -> None:
        """Forget the newest tokens of each sequence, of passes that are to be made again.

        Where that cannot be, what follows is refused.
        """
        if self.can_forget(tokens):
            self.forget_each(tokens)
        else:
            self.lose()

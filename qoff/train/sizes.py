"""What a training is made of: the units of a run, its batches, and what is kept of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .cuts import Tile
from .gradients import Dtypes
from .layout import FlatUnit, StateForm


@dataclass(frozen=True)
class Sizes:
    """The units of a run, decoder layers first and what is outside of them last, and its batches.

    hidden: bytes of the hidden states of a micro-batch, at most. logits: bytes of those that are
    there at once, where head and loss are fused. clips: gradients of all units are
    kept until their norm is known. factored: elements of each unit's moments by rows and columns.
    delayed: gradients are kept until the next step, and weights lie twice. tiles: of matrices that
    are larger than the device; their forms are behind those of the units. frozen: bytes that
    do not learn, nor stream, and have to be on a GPU. gradient: what layers' gradients are kept as.
    swaps: activations may go to disk.
    """

    units: Sequence[FlatUnit]
    forms: Sequence[StateForm]
    micro_batches: int
    hidden: int
    logits: int
    clips: bool
    factored: Sequence[int] = ()
    delayed: bool = False
    tiles: Sequence[Tile] = ()
    frozen: int = 0
    gradient: torch.dtype = torch.float32
    swaps: bool = False

    @property
    def gradients(self) -> Dtypes:
        """Those of one micro-batch are no sum; those of more are rounded once."""
        several = self.micro_batches > 1
        return Dtypes(torch.float32 if several else self.gradient, self.gradient)

    def summed_in(self, tile: Tile) -> torch.dtype:
        """What the gradients of a tile are: outside of layers several modules may add to them."""
        return self.gradients.sums if tile.layer < len(self.units) - 1 else torch.float32

    @property
    def stepped(self) -> list[FlatUnit]:
        """What has states, in the order of the forms."""
        return [*self.units, *(tile.unit for tile in self.tiles)]

    @property
    def copies(self) -> int:
        """Of weights that lie in homes: the present ones, and where they are made a step late."""
        return 2 if self.delayed else 1

    @property
    def keeps(self) -> bool:
        """Whether gradients of all units have homes."""
        return self.clips or self.delayed

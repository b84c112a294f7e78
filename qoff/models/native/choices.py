"""What tokens of a pass want of a layer's experts, and what these gave so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(eq=False)
class Choice:
    """What the router chose for some tokens, and what their experts gave so far."""

    part: slice  # of the pass's tokens
    x: Tensor  # inputs of the experts, [M, W]
    ids: Tensor  # int64 [M, T], in host memory
    weights: Tensor  # [M, T]
    weighted: Tensor | None = None  # [M, T, W], if not all came at once
    on_cpu: Tensor | None = None  # bool [experts], those that the CPU computes; None: none
    before: Tensor | None = None  # what x is projected from, [M, hidden_size]; None: x is not

    @property
    def routed(self) -> Tensor:
        """What the router was given, and the shared expert is."""
        return self.x if self.before is None else self.before

    def slots(self, table: Tensor) -> Tensor:
        """Those of the experts in a wave, int64 [M, T]; -1 for others, and what the CPU computes.

        table: of the wave, int64 [experts].
        """
        return (table if self.on_cpu is None else table.where(~self.on_cpu, -1))[self.ids]


@dataclass(eq=False)
class Chosen:
    """What tokens of a pass want of a layer whose experts come one by one.

    guesses: of the next layer with any, int64 [M, T] in host memory; None: nothing is known.
    """

    choices: list[Choice]
    guesses: Tensor | None

    def copy(self) -> Chosen:
        """The same in memory of its own."""
        choices = [
            Choice(
                c.part,
                c.x.clone(),
                c.ids.clone(),
                c.weights.clone(),
                before=None if c.before is None else c.before.clone(),
            )
            for c in self.choices
        ]
        return Chosen(choices, None if self.guesses is None else self.guesses.clone())


class Pairs(NamedTuple):
    """Some tokens and experts of a choice that are computed, int64 [P] in host memory each."""

    choice: Choice
    places: Tensor  # among all of the choice
    slots: Tensor  # where the experts are

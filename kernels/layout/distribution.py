"""How a token's distribution is made from logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Shape(NamedTuple):
    """How the logits of a row become a distribution: the temperature, then what the others leave.

    top_k 0: all tokens. min_p: least probability, as a part of the likeliest token's.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class Choice:
    """How a token of each row of logits is chosen, step after step.

    shapes: what each is drawn from; None: the likeliest. ends: tokens after which there is no step.
    """

    shapes: Sequence[Shape] | None = None
    ends: Sequence[int] = ()

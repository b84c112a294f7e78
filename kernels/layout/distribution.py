"""How a token's distribution is made from logits."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """How the logits of a row become a distribution: the temperature, then what the others leave.

    top_k 0: all tokens. min_p: least probability, as a part of the likeliest token's.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

"""ExpertStats: what a cache of experts counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertStats:
    """What a cache of experts has done since it was opened."""

    hits: int = 0  # experts that were there when a pass asked for them
    misses: int = 0  # that came because a pass had asked for them
    from_host: int = 0  # that came from the slots in host memory, asked for or guessed
    saved: int = 0  # that left the device for these
    guesses: int = 0  # that were not there when the layer before guessed them
    right: int = 0  # of these, that the router then chose
    guessed: int = 0  # that came before a pass asked for them
    wrong: int = 0  # that were read, and left before any pass asked for them
    bytes: int = 0  # of all that came to the device
    on_cpu: int = 0  # pairs of a token and an expert that the CPU computed
    passed: int = 0  # experts of the CPU that came for a pass of many tokens

    @property
    def accuracy(self) -> float:
        """The part of the guesses that were right; 0 without any."""
        return self.right / max(self.guesses, 1)

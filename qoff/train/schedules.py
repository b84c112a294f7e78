"""Rates over the steps of a run: warm-up, then constant, or down to 0 linearly or as a cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qoff.errors import ArgumentError

from .optimizers import from_zero

KINDS = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class Schedule:
    """The rate of a step's number, from 0 on; a `Rate` of optimizers.

    It rises linearly in the first `warmup` steps, the last of which has `lr`, and falls to 0 behind
    the last of `steps`. Raises ArgumentError.
    """

    lr: float
    kind: str = "constant"
    warmup: int = 0
    steps: int | None = None

    def __post_init__(self) -> None:
        if not from_zero(self.lr):
            raise ArgumentError(f"lr is {self.lr!r}; use a number from 0, like 1e-4")
        for name, value in (("warmup", self.warmup), ("steps", self.steps or 0)):
            if not isinstance(value, int):
                raise ArgumentError(f"{name} is {value!r}; use a whole number")
        if self.kind not in KINDS:
            raise ArgumentError(f"schedule is {self.kind!r}; use {', '.join(KINDS)}")
        if self.warmup < 0 or (self.kind != "constant" and (self.steps or 0) <= self.warmup):
            raise ArgumentError(
                f"a {self.kind} schedule of {self.steps} steps, {self.warmup} of them warm-up; use "
                "fewer warm-up steps (0 or more), or more steps"
            )

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.kind == "constant" or self.steps is None:
            return self.lr
        done = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        share = 1 - done if self.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.lr * share

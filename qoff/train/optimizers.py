"""The optimizers of training, with the names and defaults that torch has for them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from qoff.errors import ArgumentError
from qoff.kernels.cpu.optim.update import Rule

_EPS = 2.0**-23  # of float32
Rate: TypeAlias = float | Callable[[int], float]  # or of a step's number, from 0 on


@dataclass(frozen=True)
class FactoredRule:
    """What a step does, as `torch.optim.Adafactor` says it.

    rate: times the root of the mean square of a parameter, or `eps[1]` if that is more. share: of
    this step's squares in the means. keep: of weights. size: of updates, root of mean square, at
    most.
    """

    rate: float
    share: float
    keep: float
    eps: tuple[float, float]
    size: float
    grad_scale: float


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """What all have. lr: a number, or a function of the step's number, from 0 on.

    bits: of the moments, 32 or 8 (`kernels.cpu.optim`). Raises ArgumentError.
    """

    lr: Rate
    weight_decay: float = 0.0
    bits: int = 32

    def __post_init__(self) -> None:
        if self.bits not in (8, 32):
            raise ArgumentError(f"bits of the moments is {self.bits!r}; use 32 or 8")
        if not callable(self.lr) and not from_zero(self.lr):
            raise ArgumentError(f"lr is {self.lr!r}; use a number from 0, like 1e-4")
        if not from_zero(self.weight_decay):
            raise ArgumentError(f"weight_decay is {self.weight_decay!r}; use a number from 0")

    @property
    def second(self) -> bool:
        """Whether there is a moment of squares."""
        return False

    def rate(self, step: int) -> float:
        """Of a step. Raises ArgumentError for what a function gives that is none."""
        found = float(self.lr(step) if callable(self.lr) else self.lr)
        if not 0 <= found < math.inf:
            raise ArgumentError(f"lr of step {step} is {found!r}; use a number from 0, like 1e-4")
        return found

    @property
    def factored(self) -> bool:
        """Whether moments are those of rows and columns, and stay in memory."""
        return False

    @abstractmethod
    def rule(self, step: int, rate: float, grad_scale: float) -> Rule | FactoredRule:
        """What step number `step`, from 0 on, does at a rate to gradients times `grad_scale`."""


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam, as `torch.optim.Adam`: decay is part of the gradient."""

    lr: Rate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_betas(self.betas)
        if not from_zero(self.eps):
            raise ArgumentError(f"eps is {self.eps!r}; use a number from 0, like 1e-8")

    @property
    def second(self) -> bool:
        return True

    def rule(self, step: int, rate: float, grad_scale: float) -> Rule:
        return self._rule(step, rate, grad_scale, 1.0, self.weight_decay)

    def _rule(self, step: int, rate: float, grad_scale: float, keep: float, l2: float) -> Rule:
        beta1, beta2 = self.betas
        rate /= 1 - beta1 ** (step + 1)
        root = (1 - beta2 ** (step + 1)) ** -0.5
        return Rule("adam", rate, beta1, beta2, keep, l2, root, self.eps, grad_scale=grad_scale)


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """AdamW, as `torch.optim.AdamW`: decay apart from the gradient."""

    weight_decay: float = 1e-2

    def rule(self, step: int, rate: float, grad_scale: float) -> Rule:
        return self._rule(step, rate, grad_scale, 1 - rate * self.weight_decay, 0.0)


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """SGD with momentum, as `torch.optim.SGD`."""

    lr: Rate = 1e-3
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ArgumentError(f"momentum is {self.momentum!r}; use a number from 0, below 1")
        if self.nesterov and not self.momentum:
            raise ArgumentError("nesterov needs momentum")

    def rule(self, step: int, rate: float, grad_scale: float) -> Rule:
        return Rule(
            "sgd",
            rate,
            self.momentum,
            l2=self.weight_decay,
            nesterov=self.nesterov,
            grad_scale=grad_scale,
        )


@dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """Lion (arXiv 2302.06675): steps by the sign of a mean."""

    lr: Rate = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_betas(self.betas)

    def rule(self, step: int, rate: float, grad_scale: float) -> Rule:
        keep = 1 - rate * self.weight_decay
        return Rule("lion", rate, *self.betas, keep=keep, grad_scale=grad_scale)


@dataclass(frozen=True, kw_only=True)
class Adafactor(Optimizer):
    """Adafactor, as `torch.optim.Adafactor`; eps[0] of None is that of float32."""

    lr: Rate = 1e-2
    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    d: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits != 32:
            raise ArgumentError(f"Adafactor has moments of 32 bits, not {self.bits}")
        if not self.beta2_decay <= 0 or not self.d > 0 or not self.eps[1] >= 0:
            raise ArgumentError(
                f"beta2_decay is {self.beta2_decay!r}, d {self.d!r}, eps {self.eps!r}; use numbers "
                "up to 0, above 0, and from 0"
            )

    @property
    def factored(self) -> bool:
        return True

    def rule(self, step: int, rate: float, grad_scale: float) -> FactoredRule:
        number = step + 1
        return FactoredRule(
            rate=min(rate, number**-0.5),
            share=number**self.beta2_decay,
            keep=1 - rate * self.weight_decay,
            eps=(_EPS if self.eps[0] is None else self.eps[0], self.eps[1]),
            size=self.d,
            grad_scale=grad_scale,
        )


def checked(optimizer: object) -> Optimizer:
    """An optimizer of this module. Raises ArgumentError for others, like torch's."""
    if not isinstance(optimizer, Optimizer):
        name = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise ArgumentError(
            f"the optimizer is {name}; use one of qoff.train, like qoff.train.AdamW(lr=1e-4)"
        )
    return optimizer


def from_zero(value: Any) -> bool:
    """Whether it is a finite number from 0."""
    try:
        return bool(0 <= value < math.inf)
    except TypeError:  # None, or text
        return False


def _check_betas(betas: tuple[float, float]) -> None:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ArgumentError(f"betas are {betas!r}; use two numbers from 0, below 1")

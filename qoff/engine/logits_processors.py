"""A caller's functions of logits, as vLLM has them."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from torch import Tensor

from qoff.errors import ArgumentError, raised_as

from .request import Sequence


def processed_by(sequence: Sequence, logits: Tensor) -> Tensor:
    """Logits, float32 [vocab_size], as the functions of a sequence leave them.

    Where one fails the sequence gets an error.
    """
    for function in sequence.params.logits_processors or ():
        given: list[Any] = [list(sequence.answer), logits]
        if _takes_prompt(function):
            given.insert(0, list(sequence.prompt))
        what, before = f"logits_processors: {function!r}", logits.amax().isfinite()
        try:
            with raised_as(ArgumentError, f"{what} failed"):
                found = function(*given)
                if not isinstance(found, Tensor) or found.shape != logits.shape:
                    raise ArgumentError(f"{what} returns no logits [{len(logits)}]")
                if before and not found.amax().isfinite():
                    raise ArgumentError(f"{what} leaves no token: the largest logit is not finite")
        except ArgumentError as error:
            sequence.error = str(error)
            return logits
        logits = found.to(logits)
    return logits


def _takes_prompt(function: Callable[..., object]) -> bool:
    """Whether it takes the prompt's tokens, too: three arguments."""
    try:
        return len(signature(function).parameters) == 3
    except (TypeError, ValueError):  # of a builtin
        return False

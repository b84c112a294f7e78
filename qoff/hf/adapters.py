"""Adapters that do not fit, refused in one line before torch finds out tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from qoff.errors import ArgumentError

_MARKER = "lora_"  # in the names of what PEFT adds to a module


def check_shapes(model: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """A hook of `load_state_dict`. Raises ArgumentError naming the first tensor of another shape.

    state: tensors by name, those of `model` behind `prefix`. PEFT loads adapters so; a rank that
    differs is no error there, as the adapter's own config says it.
    """
    there = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, own in there.items():
        given = state.get(prefix + name)
        if isinstance(given, Tensor) and given.shape != own.shape:
            what = "the adapter" if _MARKER in name else "what is loaded"
            raise ArgumentError(
                f"{prefix}{name}: has shape {list(given.shape)}, but this model's is "
                f"{list(own.shape)}; {what} is of another model, load one that was made from this"
            )

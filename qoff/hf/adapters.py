"""Adapters that do not fit, refused in one line before torch finds out tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from qoff.errors import ArgumentError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MARKER = "lora_"  # in the names of what PEFT adds to a module


def check_shapes(model: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """A hook of `load_state_dict`. Raises ArgumentError naming the first tensor of another shape.

    state: tensors by name, those of `model` behind `prefix`. PEFT loads adapters so.
    """
    there = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, own in there.items():
        given = state.get(prefix + name)
        if isinstance(given, Tensor) and given.shape != own.shape:
            raise _other_shape(prefix + name, given.shape, own.shape)


def load_adapter(self: PreTrainedModel, *arguments: Any, **options: Any) -> Any:
    """Load an adapter as transformers does; one of another model is named, and taken out again.

    Raises ArgumentError naming a tensor whose shape is another, unless `ignore_mismatched_sizes`.
    """
    ignored = options.pop("ignore_mismatched_sizes", False)
    before = set(getattr(self, "peft_config", {}))
    load = type(self).load_adapter
    found = load(self, *arguments, ignore_mismatched_sizes=True, **options)
    if found.mismatched_keys and not ignored:
        key, given, own = min(found.mismatched_keys)
        _take_out(self, set(self.peft_config) - before)
        raise _other_shape(key, given, own)
    return found


def _take_out(model: Any, names: Iterable[str]) -> None:
    """As transformers' `delete_adapter`, which since 5.24 refuses PEFT before 0.22."""
    from peft.functional import delete_adapter

    for name in names:
        kind = model.peft_config.pop(name).peft_type.value.lower()
        delete_adapter(model, adapter_name=name, prefix=f"{kind}_")
    if not model.peft_config:
        del model.peft_config
        model._hf_peft_config_loaded = False


def _other_shape(name: str, given: Iterable[int], own: Iterable[int]) -> ArgumentError:
    what = "the adapter" if _MARKER in name else "what is loaded"
    return ArgumentError(
        f"{name}: has shape {list(given)}, but this model's is {list(own)}; {what} is of another "
        "model, load one that was made from this"
    )

"""What a model's tensors hold, read only when each is placed: a checkpoint may exceed memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qoff.errors import ArgumentError
from qoff.hf.plugin.install import table_of, tensors_of


class Values:
    """The weights of a mapping take the place of a model's, which has them on the meta device then.

    dtype: of what floats; None: as the model has it. instead: names of weights that replace values
    of the model, where others give them to tensors without; None: all. The mapping is asked for a
    tensor when it is placed. Buffers count that a state dict has.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype | None = None,
        instead: Collection[str] | None = None,
    ) -> None:
        self._weights = weights
        self._names: dict[int, tuple[Tensor, str]] = {}
        found: dict[int, tuple[Tensor, list[tuple[dict[str, Any], str]], list[str]]] = {}
        for module, own, name in saved(model) if weights else ():
            table = table_of(module, own)
            _, places, names = found.setdefault(id(table[own]), (table[own], [], []))
            places.append((table, own))
            names.append(name)
        for x, places, names in found.values():
            known = [name for name in names if name in weights]
            if not known or not (x.is_meta or instead is None or known[0] in instead):
                continue
            kind = dtype if dtype is not None and x.is_floating_point() else x.dtype
            like = _same(x, torch.empty_like(x, dtype=kind, device="meta"))
            for table, own in places:
                table[own] = like
            self._names[id(like)] = (like, known[0])

    def has(self, x: Tensor) -> bool:
        return id(x) in self._names

    def of(self, x: Tensor) -> Tensor:
        """What a tensor holds. Raises ArgumentError where that has another shape."""
        if id(x) not in self._names:
            return x.detach()
        _, name = self._names[id(x)]
        value = self._weights[name]
        if value.shape != x.shape:
            raise ArgumentError(
                f"{name} has the shape {tuple(value.shape)}, and {tuple(x.shape)} in the model; "
                "use the config of this checkpoint"
            )
        return value.detach().to(x.dtype, copy=True)

    def place(self, places: Iterator[tuple[dict[str, Any], str]], device: torch.device) -> None:
        """Put tensors, by the dictionaries that they are in, on a device; tied ones stay tied."""
        placed: dict[int, Tensor] = {}
        for table, own in places:
            x = table[own]
            if not self.has(x):
                x.data = x.data.to(device)
                continue
            if id(x) not in placed:
                placed[id(x)] = _same(x, self.of(x).to(device))
            table[own] = placed[id(x)]


def saved(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Every place of a tensor that is saved: its module, its name there and in the model."""
    for path, module in model.named_modules(remove_duplicate=False):
        start = f"{path}." if path else ""
        for own in saved_of(module):
            yield module, own, f"{start}{own}"


def saved_of(module: nn.Module) -> list[str]:
    """The tensors that a module itself has, without what is not saved."""
    left_out = module._non_persistent_buffers_set
    return [own for own in tensors_of(module) if own not in left_out]


def _same(x: Tensor, value: Tensor) -> Tensor:
    """A value as a parameter where x is one."""
    return nn.Parameter(value, x.requires_grad) if isinstance(x, nn.Parameter) else value

"""Which parts of a model in memory stream, and how their weights lie in a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qoff.checkpoint import TensorEntry, WeightFile
from qoff.checkpoint.layout import ALIGNMENT
from qoff.errors import ArgumentError
from qoff.memory import Weights

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class ModelUnit:
    """A module whose weights come and go together.

    number: among the units. owned: by the name in a file, the module of each parameter and its
    attribute; nothing outside of the unit uses these. The order is that of the file: every tensor
    begins where its element type may, and at a cache line where the sizes of all allow.
    """

    path: str
    module: nn.Module
    number: int
    owned: dict[str, tuple[nn.Module, str]]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters as they are now."""
        found = {name: module._parameters[own] for name, (module, own) in self.owned.items()}
        return {name: x.data for name, x in found.items() if x is not None}

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors.values())

    def in_memory(self) -> WeightFile:
        """The file of these weights, as if there were one."""
        entries: dict[str, Any] = {}
        end = ALIGNMENT
        for name, x in self.tensors.items():
            entries[name] = TensorEntry(name, x.dtype, tuple(x.shape), end, x.nbytes)
            end += x.nbytes
        return WeightFile(Path(f"weights of {self.path}"), ALIGNMENT, end, "", entries)

    def take(self) -> dict[str, Tensor]:
        """The weights; the modules are left without."""
        taken = self.tensors
        place = UnitPlace(self)
        place.put(place.empty)
        return taken


class UnitPlace:
    """Puts the weights of a unit into its modules, and takes them back."""

    def __init__(self, unit: ModelUnit) -> None:
        self._places = [(n, m._parameters, own) for n, (m, own) in unit.owned.items()]
        self.empty = [_parameter(x.to("meta")) for x in unit.tensors.values()]

    def find(self, weights: Weights) -> list[nn.Parameter]:
        """The unit's parameters, in memory of `weights`."""
        found = [weights[name] for name, _, _ in self._places]
        return [_parameter(x) for x in found if isinstance(x, Tensor)]

    def put(self, values: list[nn.Parameter]) -> None:
        for (_, parameters, own), value in zip(self._places, values, strict=True):
            parameters[own] = value


def units_of(
    model: nn.Module,
    classes: Collection[str] | None = None,
    first_stays: bool = True,
    values: bool = True,
) -> list[ModelUnit]:
    """The parts of a model that can stream, in the order of its modules.

    They are the modules of these classes (None: those that transformers does not split,
    `_no_split_modules`), or else the members of its lists of modules. Parameters that others share
    stay where they are, and so does (`first_stays`) the part with the model's first parameter,
    whose device is the model's. values: False for a model of shapes alone. Raises ArgumentError for
    a model that is quantized, has no values where it should, or streams already.
    """
    if values:
        _check(model)
    users = Counter(_storage(p) for _, p in _all_parameters(model))
    first = next((id(p) for p in model.parameters()), None) if first_stays else None
    found: list[ModelUnit] = []
    if classes is None:
        classes = getattr(model, "_no_split_modules", None) or ()
    for path, part in _parts(model, frozenset(classes)):
        inside = Counter(_storage(p) for _, p in _all_parameters(part))
        owned = {
            (module, own): p
            for (module, own), p in _all_parameters(part)
            if inside[_storage(p)] == users[_storage(p)] == 1
            and p.is_contiguous()
            and not isinstance(module, nn.RNNBase)  # which keeps a list of its own of them
        }
        if not owned or any(id(p) == first for p in part.parameters()):
            continue
        order = sorted(owned.items(), key=lambda item: -_divisor(item[1].nbytes))
        number = len(found)
        names = {f"{number}/{i}": place for i, (place, _) in enumerate(order)}
        found.append(ModelUnit(path, part, number, names))
    return found


def others(model: nn.Module, units: Collection[ModelUnit]) -> Iterator[tuple[Any, str]]:
    """Dictionaries of parameters and buffers, and names in them, of all outside of these units."""
    streamed = {(id(module), own) for unit in units for module, own in unit.owned.values()}
    for module in model.modules():
        for kind in (module._parameters, module._buffers):
            for name, x in kind.items():
                if x is not None and (id(module), name) not in streamed:
                    yield kind, name


def _check(model: nn.Module) -> None:
    what = type(model).__name__
    for module in model.modules():
        if hasattr(module, "_hf_hook"):
            raise ArgumentError(
                f"this {what} is dispatched by Accelerate; take that back first "
                "(accelerate.hooks.remove_hook_from_submodules)"
            )
    for name, p in model.named_parameters():
        if p.is_meta:
            raise ArgumentError(
                f"this {what} has no values for {name}: it streams already, or was never loaded; "
                "load it into memory first"
            )
        if type(p) is not nn.Parameter or p.dtype not in DTYPES:
            raise ArgumentError(
                f"{name} of this {what} is a {type(p).__name__} of {p.dtype}; only models of "
                "float32, float16 and bfloat16 stream: use qoff.load for quantized ones"
            )


def _parts(model: nn.Module, whole: frozenset[str]) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules of these classes; where there is none, of the lists of modules."""
    known = any(type(module).__name__ in whole for module in model.modules())
    taken: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{before}.") for before in taken):
            continue
        if known and type(module).__name__ in whole and path:
            taken.append(path)
            yield path, module
        elif not known and isinstance(module, nn.ModuleList):
            taken.append(path)
            yield from _members(path, module)


def _members(path: str, parts: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a list, and of lists in it: a list has no forward that could bring weights."""
    for name, part in parts.named_children():
        if isinstance(part, nn.ModuleList | nn.ModuleDict):
            yield from _members(f"{path}.{name}", part)
        else:
            yield f"{path}.{name}", part


def _all_parameters(model: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], nn.Parameter]]:
    """Every place of a parameter, shared ones, and those of shared modules, once for each."""
    for _, module in model.named_modules(remove_duplicate=False):
        for name, p in module._parameters.items():
            if p is not None:
                yield (module, name), p


def _storage(p: Tensor) -> int:
    return int(p.untyped_storage()._cdata)


def _divisor(nbytes: int) -> int:
    """The largest power of two that divides it, up to a cache line."""
    return min(nbytes & -nbytes, 64) or 64


def _parameter(x: Tensor) -> nn.Parameter:
    return nn.Parameter(x, requires_grad=False)

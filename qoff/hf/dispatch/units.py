"""Which parts of a model in memory stream, and how their weights lie in a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from qoff.budgets import CPU
from qoff.checkpoint import TensorEntry, WeightFile
from qoff.checkpoint.layout import ALIGNMENT, DTYPE_NAMES
from qoff.errors import ArgumentError, StreamedError
from qoff.hf.plugin.install import table_of
from qoff.hf.plugin.offloaded import NOT_LOADED
from qoff.memory import Weights

from .values import Values, saved

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HOST, DISK = "cpu", "disk"  # as device maps call them
_DECOMPOSE = frozenset({"linalg_svd", "linalg_qr", "svd_lowrank"})  # adapters begin with the result
_ABSENT = (
    "something computes with a weight that streams while its module does not run, and only then is "
    "it there. Adapters that begin with the weights (PiSSA, OLoRA, DoRA) are added before "
    "qoff.dispatch. If a module computes with weights of one that it does not call, name "
    "the class of the first in no_split_modules, or in Accelerate's preload_module_classes"
)
Part: TypeAlias = tuple[str, nn.Module]  # a module and its name in the model


@dataclass(frozen=True, eq=False)
class ModelUnit:
    """A module whose weights come and go together.

    number: among the units. owned: by the name in a file, the modules of each tensor and its
    attribute in them; nothing outside of units uses these. The order is that of the file: every
    tensor begins where its element type may, and at a cache line where the sizes of all allow.
    """

    path: str
    module: nn.Module
    number: int
    owned: dict[str, tuple[tuple[nn.Module, str], ...]]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The weights as they are now."""
        found = {name: table_of(*places[0])[places[0][1]] for name, places in self.owned.items()}
        return {name: x for name, x in found.items() if x is not None}

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

    def take(self, values: Values) -> dict[str, Tensor]:
        """The weights; the modules are left without."""
        taken = {name: values.of(x) for name, x in self.tensors.items()}
        self.clear()
        return taken

    def clear(self) -> None:
        """Leave the modules without weights."""
        place = UnitPlace(self)
        place.put(place.empty)


class Absent(nn.Parameter):
    """What a module is without; torch would multiply by what happens to be in memory.

    It is said to be on the device that computes, where PEFT then puts what it adds to the module.
    """

    home = CPU

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> Self:
        if not data.is_meta:  # as Accelerate's load_checkpoint_in_model makes it
            raise StreamedError(f"a weight streams, {NOT_LOADED}")
        return super().__new__(cls, data, requires_grad)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.home

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StreamedError("a weight that streams cannot be saved; save it before qoff.dispatch")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = tree_leaves((args, kwargs))
        there = (isinstance(x, Tensor) and not isinstance(x, cls) and not x.is_meta for x in given)
        if any(there) or getattr(func, "__name__", "") in _DECOMPOSE:
            raise StreamedError(_ABSENT)
        try:  # that of tensors, which hands the class on to views
            return Tensor.__torch_function__.__func__(cls, func, types, args, kwargs or {})  # type: ignore[attr-defined]
        except NotImplementedError as error:  # it has no values
            raise StreamedError(_ABSENT) from error


class UnitPlace:
    """Puts the weights of a unit into its modules, and takes them back."""

    def __init__(self, unit: ModelUnit, device: torch.device = CPU) -> None:
        """device: where they are when they are there."""
        there = unit.tensors
        self._places = [
            (name, [(table_of(*place), place[1]) for place in places])
            for name, places in unit.owned.items()
        ]
        self._learn = [isinstance(there[name], nn.Parameter) for name in unit.owned]
        self.empty = [Absent(x.detach().to("meta"), False) for x in there.values()]
        for x in self.empty:
            x.home = device

    def find(self, weights: Weights) -> list[Tensor]:
        """The unit's tensors, in memory of `weights`."""
        found = [weights[name] for name, _ in self._places]
        return [_as(x, p) for x, p in zip(found, self._learn, strict=True) if isinstance(x, Tensor)]

    def put(self, values: Sequence[Tensor]) -> None:
        """Raises StreamedError, with nothing put, for a place where another tensor was set."""
        lent = values is not self.empty
        every = [
            (table, own, value)
            for (_, places), value in zip(self._places, values, strict=True)
            for table, own in places
        ]
        for table, own, value in every:
            now = table[own]
            if lent and not isinstance(now, Absent) and now is not value:  # it would be lost
                raise StreamedError(f"another {own} was set; the layer streams, {NOT_LOADED}")
        for table, own, value in every:
            table[own] = value


def units_of(model: nn.Module, values: bool = True) -> list[ModelUnit]:
    """The parts of a model that can stream, in the order of its modules.

    They are the modules that transformers does not split (`_no_split_modules`), or else the members
    of its lists of modules. Parameters that others share stay where they are. values: False for a
    model of shapes alone. Raises ArgumentError for a model that is quantized, has no values where
    it should, or streams already.
    """
    if values:
        check_values(model, Values(model, {}), learns=True)
    return units_from(model, layers_of(model), first_stays=False)


def units_from(
    model: nn.Module,
    parts: Iterable[Part],
    *,
    first_stays: bool,
    shared: bool = False,
    buffers: bool = False,
) -> list[ModelUnit]:
    """These parts as units, those aside that own nothing.

    first_stays: so do the parts with the first parameter and with embeddings of tokens, which
    programs and models call by themselves.
    shared: whether a tensor that several places share streams, if all of them are in these parts.
    buffers: whether those that a checkpoint has stream with the parameters.
    """
    parts = list({id(part): (path, part) for path, part in parts}.values())
    users = Counter(_storage(x) for _, x in _tensors(model, buffers))
    inside = Counter(_storage(x) for _, part in parts for _, x in _tensors(part, buffers))
    stay = _stay(model) if first_stays else frozenset[int]()
    found: list[ModelUnit] = []
    for path, part in parts:
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        tensors: dict[int, Tensor] = {}
        for (module, own), x in _tensors(part, buffers):
            alone = users[_storage(x)] == 1
            together = shared and inside[_storage(x)] == users[_storage(x)]
            if (alone or together) and _can_stream(module, x):
                places.setdefault(id(x), []).append((module, own))
                tensors[id(x)] = x
        if not places or any(id(p) in stay for p in part.parameters()):
            continue
        order = sorted(places, key=lambda key: -_divisor(tensors[key].nbytes))
        number = len(found)
        names = {f"{number}/{i}": tuple(places[key]) for i, key in enumerate(order)}
        found.append(ModelUnit(path, part, number, names))
    return found


def others(model: nn.Module, units: Collection[ModelUnit]) -> Iterator[tuple[Any, str]]:
    """Dictionaries of parameters and buffers, and names in them, of all outside of these units."""
    owned = (place for unit in units for places in unit.owned.values() for place in places)
    streamed = {(id(module), own) for module, own in owned}
    for module in model.modules():
        for kind in (module._parameters, module._buffers):
            for name, x in kind.items():
                if x is not None and (id(module), name) not in streamed:
                    yield kind, name


def check_values(model: nn.Module, values: Values, learns: bool = False) -> None:
    """Raise ArgumentError for a model that cannot stream, or has tensors without values.

    learns: it is trained, where weights are floats of at most 32 bits; buffers may be away then.
    """
    what = type(model).__name__
    for module in model.modules():
        if hasattr(module, "_hf_hook"):
            raise ArgumentError(
                f"this {what} is dispatched already; take that back first "
                "(accelerate.hooks.remove_hook_from_submodules)"
            )
    tensors = [*model.named_parameters(), *(() if learns else model.named_buffers())]
    for name, x in tensors:
        if x.is_meta and not values.has(x):
            raise ArgumentError(
                f"this {what} has no values for {name}: it streams already, or was never loaded; "
                "load it into memory first"
            )
    known = DTYPES if learns else tuple(DTYPE_NAMES)
    for name, p in model.named_parameters():
        if type(p) is not nn.Parameter or p.dtype not in known:
            raise ArgumentError(
                f"{name} of this {what} is a {type(p).__name__} of {p.dtype}; only parameters of "
                f"{', '.join(str(kind).removeprefix('torch.') for kind in known)} stream: use "
                "qoff.load for quantized models"
            )


def layers_of(model: nn.Module, classes: Collection[str] | None = None) -> list[Part]:
    """Modules of these classes, or of those that transformers does not split; or what is in lists.

    They are the outermost ones.
    """
    if classes is None:
        classes = getattr(model, "_no_split_modules", None) or ()
    whole = frozenset(classes)
    known = any(type(module).__name__ in whole for module in model.modules())
    taken: list[str] = []
    found: list[Part] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{before}.") for before in taken):
            continue
        if known and type(module).__name__ in whole and path:
            taken.append(path)
            found.append((path, module))
        elif not known and isinstance(module, nn.ModuleList):
            taken.append(path)
            found += _members(path, module)
    return found


def _members(path: str, parts: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a list, and of lists in it: a list has no forward that could bring weights."""
    for name, part in parts.named_children():
        if isinstance(part, nn.ModuleList | nn.ModuleDict):
            yield from _members(f"{path}.{name}", part)
        else:
            yield f"{path}.{name}", part


def _tensors(model: nn.Module, buffers: bool) -> Iterator[tuple[tuple[nn.Module, str], Tensor]]:
    """Every place of a parameter, or of a buffer that is saved, shared ones once for each place."""
    for module, own, _ in saved(model):
        if buffers or own in module._parameters:
            yield (module, own), table_of(module, own)[own]


def _stay(model: nn.Module) -> frozenset[int]:
    """The first parameter, which the device is read of, and the embeddings of tokens."""
    found = {id(p) for p in islice(model.parameters(), 1)}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            with suppress(NotImplementedError):  # of other inputs than tokens
                tokens = module.get_input_embeddings()
                if isinstance(tokens, nn.Embedding):
                    found.add(id(tokens.weight))
    return frozenset(found)


def _can_stream(module: nn.Module, x: Tensor) -> bool:
    flat = isinstance(module, nn.RNNBase)  # which keeps a list of its own of its parameters
    return x.dtype in DTYPE_NAMES and x.is_contiguous() and not flat


def _storage(p: Tensor) -> int:
    return int(p.untyped_storage()._cdata)


def _divisor(nbytes: int) -> int:
    """The largest power of two that divides it, up to a cache line."""
    return min(nbytes & -nbytes, 64) or 64


def _as(x: Tensor, learns: bool) -> Tensor:
    return nn.Parameter(x, requires_grad=False) if learns else x

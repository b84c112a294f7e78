"""Decoder layers of a transformers model whose weights stream from a qoff checkpoint.

Before transformers loads, `Streaming.leave_out` takes from it the parameters and files of offloaded
layers. After that, `Streaming.start` gives these layers packed modules that have codes only while
their layer runs. Their vectors stay in memory, as do embedding and head.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qoff.checkpoint import Checkpoint, read_weight
from qoff.checkpoint.layout import QuantEntry, TensorEntry, WeightFile
from qoff.errors import ArgumentError, BudgetError
from qoff.hf.device import check_packing
from qoff.hf.packed.module import PackedModule, packing_for
from qoff.kernels.layout.widening import read_bits
from qoff.memory import Residency, WeightStore, place_in_host, residency_of
from qoff.memory.plan import Unit, is_expert
from qoff.memory.plan.placement import spread_evenly
from qoff.models.runtime import transfers_to
from qoff.process import only_here

from .install import table_of
from .model_methods import StreamedMethods
from .offloaded import OffloadedLayer, packed_places
from .operations import Into, Unfuse
from .units import StoredWeight, stored_units


class Streaming:
    """Which layers of a model stream, and from where: host memory ("cpu", for a GPU) or disk."""

    def __init__(
        self, model: PreTrainedModel, folder: str, files: list[str], device: torch.device
    ) -> None:
        """files: transformers' own list of those that it will read. device: computes."""
        self.device = device
        self._model, self._files = model, files
        self._checkpoint = Checkpoint.open(folder)
        self._units = stored_units(self._checkpoint, model)
        self._paths = [_path_of(i, unit) for i, unit in enumerate(self._units[:-1])]
        self._hidden: dict[str, Tensor | None] = {}
        self._places: Mapping[int, str] = {}

    def within(self, budget: int, host: int) -> dict[int, str]:
        """The layers that do not fit, with where they come from.

        budget: bytes of the device for weights; host: of host memory. Raises BudgetError for a
        budget that is too small.
        """
        files = self._checkpoint.layers
        packing = packing_for(self.device)
        sizes: dict[Any, int] = {i: _nbytes(file, packing) for i, file in enumerate(files)}
        outer = _nbytes(self._checkpoint.outer, packing)
        everything = outer + sum(sizes.values())
        if everything <= budget:
            return {}
        plan = self._residency(range(len(files)))
        least = _least(self._checkpoint, plan, packing)
        if least > budget:
            raise BudgetError(
                f"max_memory: {budget:,} bytes of {self.device} are too few; with its layers "
                f"streamed the model takes {min(least, everything):,}: raise it to that, or use "
                "qoff.load, which streams embedding and head, too"
            )
        kept = spread_evenly(sizes, budget - least)
        streamed: dict[Any, int] = {i: plan.streamed[i] for i in sizes if i not in kept}
        room = max(0, host - plan.host_staging_bytes)
        in_host = spread_evenly(streamed, 0 if self.device.type == "cpu" else room)
        return {i: "cpu" if i in in_host else "disk" for i in streamed}

    def mapped(self, device_map: Mapping[str, Any]) -> dict[int, str]:
        """The layers that a device map offloads, with where to.

        Raises ArgumentError where it offloads something else by name.
        """
        places: dict[int, str] = {}
        used = set[str]()
        for i, path in enumerate(self._paths):
            names = [n for n in device_map if not n or f"{path}.".startswith(f"{n}.")]
            name = max(names, key=len, default=None)
            if name is not None and self._offloads(device_map[name]):
                places[i] = str(device_map[name])
                used.add(name)
        for name, place in device_map.items():
            if self._offloads(place) and name not in used:
                raise ArgumentError(
                    f"device_map: {name} is offloaded to {place}, but only whole decoder layers "
                    f"stream here; leave it on {self.device}, or use qoff.load(..., "
                    "device_memory='8GiB')"
                )
        return places

    def leave_out(self, places: Mapping[int, str]) -> None:
        """Hide these layers' parameters, stored buffers and files from transformers' loading.

        Raises ArgumentError for a checkpoint in the CPU's packing where a GPU computes.
        """
        check_packing(self._checkpoint.path, self._checkpoint.config, self.device)
        self._places = places
        for i in places:
            for name in {target for stored in self._units[i] for target in stored.targets}:
                module, own = self._owner(name)
                self._hidden[name] = table_of(module, own)[own]
                table_of(module, own)[own] = None
                module.__dict__["_is_hf_initialized"] = True  # transformers shall not fill it
            for module in self._model.get_submodule(self._paths[i]).modules():
                if not [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                    module.__dict__["_is_hf_initialized"] = True  # nor what is within, from it
        left_out = {self._checkpoint.layers[i].path.name for i in places}
        self._files[:] = [x for x in self._files if x.rpartition("/")[2] not in left_out]

    def start(self) -> WeightStore:
        """Open the store and let these layers take weights from it; it is closed with the model.

        Raises what `WeightStore` does.
        """
        model, numbers, files = self._model, list(self._places), self._checkpoint.layers
        for name, tensor in self._hidden.items():
            module, own = self._owner(name)
            table_of(module, own)[own] = tensor
        for i in numbers:
            self._read_kept(i)
        model.requires_grad_(False)
        plan = self._residency(numbers)
        store = WeightStore(self._part(numbers), plan, transfers=transfers_to(self.device))
        weakref.finalize(model, only_here(store.close))
        turn = threading.Lock()
        for unit, i in enumerate(numbers):
            streamed = [s for s in self._units[i] if self._streams(i, s)]
            places = list(packed_places(model, unit, streamed, files[i]))
            for place in places:
                if isinstance(place.module, PackedModule):
                    place.module.computes_on(self.device)
            OffloadedLayer(model.get_submodule(self._paths[i]), store, turn, unit, places)
        paths = {self._paths[i]: place for i, place in self._places.items()}
        model.hf_device_map = device_map(self.device, self._paths, paths)  # type: ignore[assignment]
        StreamedMethods(model, self.device, plan)
        return store

    def _offloads(self, place: Any) -> bool:
        return str(place) == "disk" or (str(place) == "cpu" and self.device.type != "cpu")

    def _owner(self, parameter: str) -> tuple[nn.Module, str]:
        path, _, own = parameter.rpartition(".")
        return self._model.get_submodule(path), own

    def _streams(self, i: int, stored: StoredWeight) -> bool:
        """Whether a weight of a layer's file is a matrix inside of the layer."""
        inside = all(target.startswith(f"{self._paths[i]}.") for target in stored.targets)
        return stored.packed and inside

    def _read_kept(self, i: int) -> None:
        """Read what does not stream, of the file of a layer that does."""
        file = self._checkpoint.layers[i]
        for stored in self._units[i]:
            if self._streams(i, stored):
                continue
            value = read_weight(file, file.weights[stored.name])
            tensors = [value] if isinstance(value, Tensor) else [value.codes, value.scale_min]
            found = {str(n): x.to(self.device) for n, x in enumerate(tensors)}
            for name, x in Unfuse(stored, []).load(found, Into(self._model)).items():
                module, own = self._owner(name)
                buffer = own in module._buffers
                kept = x if buffer else nn.Parameter(x, requires_grad=False)
                table_of(module, own)[own] = kept

    def _part(self, numbers: Sequence[int]) -> Checkpoint:
        """The checkpoint with these layers alone; files stream whole, so they are verified."""
        layers = tuple(self._checkpoint.layers[i] for i in numbers)
        return replace(self._checkpoint, layers=layers, outer=_empty(self._checkpoint))

    def _residency(self, numbers: Sequence[int]) -> Residency:
        """Two slots, and host memory for the layers whose place that is."""
        host = [u for u, i in enumerate(numbers) if self._places.get(i) == "cpu"]
        return streamed_residency(self._part(numbers), host, self.device)


@dataclass(frozen=True)
class Frozen:
    """Bytes of a checkpoint whose layers all stream.

    stays: in device memory, slots among them. layers: what streams of each.
    """

    stays: int
    layers: tuple[int, ...]


def frozen_of(checkpoint: Checkpoint, device: torch.device) -> Frozen:
    """What `from_pretrained(..., device_map="disk")` takes of a checkpoint that need not be there.

    device: that the layers are computed on.
    """
    plan = streamed_residency(replace(checkpoint, outer=_empty(checkpoint)), (), device)
    stays = _least(checkpoint, plan, packing_for(device))
    return Frozen(stays, tuple(plan.streamed[i] for i in range(len(checkpoint.layers))))


def _least(checkpoint: Checkpoint, plan: Residency, packing: str) -> int:
    """Bytes of the device where all layers stream."""
    files = checkpoint.layers
    vectors = sum(_nbytes(f, packing, lambda _, e: not isinstance(e, QuantEntry)) for f in files)
    copied = max(  # most that the parts of a layer's fused matrices take
        _nbytes(file, packing, lambda n, e: isinstance(e, QuantEntry) and not is_expert(n))
        for file in files
    )
    return _nbytes(checkpoint.outer, packing) + plan.device_bytes + vectors + copied


def _empty(checkpoint: Checkpoint) -> WeightFile:
    """The file of what is outside of layers, without weights: these are not the store's."""
    return replace(checkpoint.outer, weights={})


def streamed_residency(
    part: Checkpoint, host: Iterable[int], device: torch.device, slots: int = 2
) -> Residency:
    """All layers stream through slots, those of `host` from host memory, the others from disk."""
    plan = residency_of(part, (), slots, packing=packing_for(device))
    plan = place_in_host(part, plan, None, 2 if device.type != "cpu" else 0)
    units = frozenset[Unit](host)
    nbytes = sum(plan.streamed[unit] for unit in units)
    return replace(plan, host=units, host_weight_bytes=nbytes)


def _path_of(i: int, unit: Sequence[StoredWeight]) -> str:
    """The module of layer i, from the names of its parameters."""
    found = (re.match(rf"(.+?\.{i})\.", name) for stored in unit for name in stored.targets)
    return next(match[1] for match in found if match is not None)


def device_map(
    device: torch.device, layers: Iterable[str], places: Mapping[str, str]
) -> dict[str, str]:
    """Where layers are, as Accelerate writes it; PEFT looks for each, and for what computes.

    Only what "cpu" or "disk" is said of streams, so a CPU that computes is "cpu:0".
    """
    main = "cpu:0" if device.type == "cpu" else str(device)
    return {"": main, **dict.fromkeys(layers, main), **places}


def _nbytes(
    file: WeightFile,
    packing: str,
    counts: Callable[[str, QuantEntry | TensorEntry], bool] = lambda *_: True,
) -> int:
    """Bytes of the weights of a file that count, in the widths that kernels of a packing read."""
    total = 0
    for entry in (entry for name, entry in file.weights.items() if counts(name, entry)):
        total += entry.nbytes
        if isinstance(entry, QuantEntry):
            wider = read_bits(entry.bits, packing) - entry.bits
            total += entry.codes.nbytes * wider // entry.bits
    return total

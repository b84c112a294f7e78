"""`qoff.dispatch`: a transformers model in memory streams its layers from host memory and disk."""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from qoff.budgets import CPU, memory_bounds, resolve_device
from qoff.checkpoint import Checkpoint, CheckpointWriter, WeightFile
from qoff.checkpoint.layout import ALIGNMENT
from qoff.errors import ArgumentError, BudgetError
from qoff.hf.plugin.install import table_of
from qoff.hf.plugin.model_methods import StreamedMethods
from qoff.hf.plugin.offloaded import OffloadedLayer
from qoff.hf.plugin.streaming import device_map, streamed_residency
from qoff.memory import WeightStore
from qoff.memory.plan.placement import spread_evenly
from qoff.models.runtime import transfers_to
from qoff.process import only_here
from qoff.system_memory import refusals

from .parts import parts_of
from .units import (
    DISK,
    HOST,
    ModelUnit,
    UnitPlace,
    check_values,
    layers_of,
    others,
    units_from,
)
from .values import Values

Model = TypeVar("Model", bound=nn.Module)


def dispatch(
    model: Model,
    *,
    device: torch.device | str = "auto",
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_folder: str | PathLike[str] | None = None,
    slots: int = 2,
    no_split_modules: Collection[str] | None = None,
) -> Model:
    """Stream the layers of a model that is in memory; it computes as before, bit for bit.

    model: any of transformers', float32, float16 or bfloat16. It is changed, and returned. device:
    computes; "auto": a GPU if there is one. device_memory bounds the weights there, resident and in
    `slots` slots that the others pass through, in bytes or like "8GiB" (None: all stay); what the
    model computes comes on top. Whole layers stream, from host memory up to `host_memory` (None:
    all of them), and the rest from a file for each in a new folder in `offload_folder`, which goes
    with the model. max_memory: the same bounds as Accelerate writes them, {0: "12GiB", "cpu":
    "32GiB"}. no_split_modules: names of the classes that are layers; None: the model's
    `_no_split_modules`, or what is in its lists of modules. Weights that layers share, buffers and
    all outside of layers stay on the device.

    A model without layers streams by its outermost modules with parameters of their own.

    The model has no gradients then, and is neither moved nor cast. Raises ArgumentError for a model
    that cannot stream and for layers that go to disk without a folder, BudgetError with the bytes
    wanted, ConversionError where the folder cannot be written. If copying fails half-way, load the
    model again.
    """
    where = resolve_device(device)
    room, host = memory_bounds(device_memory, host_memory, max_memory, where)
    if where.type == "cpu" and max_memory is not None and host is None:
        host = 0  # it is the same memory
    values = Values(model, {})
    check_values(model, values)
    units = units_from(model, parts_of(model, no_split_modules), first_stays=True)
    places = chosen(model, units, where, room, host, slots)
    placed(model, places, where, offload_folder, values, slots)
    return model


def chosen(
    model: nn.Module,
    units: list[ModelUnit],
    device: torch.device,
    room: int | None,
    host: int | None,
    slots: int = 2,
) -> dict[ModelUnit, str]:
    """Where units stream from, HOST or DISK, so that `room` bytes of the device hold the weights.

    host: bytes of host memory. Units that are not named stay. Raises BudgetError.
    """
    sizes = {unit: unit.nbytes for unit in units}
    everything = _others_bytes(model, []) if room is not None else 0
    if room is None or everything <= room:
        return {}
    least = least_bytes(model, units, device, slots)
    if least > room:
        takes = f"with its layers streamed its weights take {least:,}, of {everything:,} in all"
        if least >= everything:
            takes = f"its weights take {everything:,}, and no less with its layers streamed"
        raise BudgetError(
            f"device memory: {room:,} bytes are too few for this {type(model).__name__}: {takes}; "
            "raise device_memory to that"
        )
    kept = _evenly(sizes, room - least)
    streamed = {unit: size for unit, size in sizes.items() if unit not in kept}
    in_host = _evenly(streamed, sum(streamed.values()) if host is None else host)
    return {unit: HOST if unit in in_host else DISK for unit in streamed}


@refusals()
def placed(
    model: nn.Module,
    places: Mapping[ModelUnit, str],
    device: torch.device,
    offload_folder: str | PathLike[str] | None,
    values: Values,
    slots: int = 2,
) -> Callable[[], None]:
    """Stream units from HOST or DISK, as `places` says; all else goes to the device.

    values: of the tensors that are on the meta device. Returns what takes all of it back: weights
    are in host memory then, or where they were.
    """
    units = list(places)
    on_disk = [unit for unit, place in places.items() if place == DISK]
    if on_disk and offload_folder is None:
        size = sum(unit.nbytes for unit in on_disk)
        raise ArgumentError(
            f"{len(on_disk)} layers of {size:,} bytes go to disk: say where with offload_folder, "
            "or raise device_memory or host_memory"
        )
    values.place(others(model, units), device)
    layers = [path for path, _ in layers_of(model)]
    streamed = {unit.path: place for unit, place in places.items()}
    model.hf_device_map = device_map(device, layers, streamed)  # type: ignore[assignment]
    if not units:
        return lambda: None
    back = _Back(model, units)
    model.requires_grad_(False)
    with ExitStack() as resources:
        files = {unit: unit.in_memory() for unit in units}
        if on_disk:
            assert offload_folder is not None
            files |= _written(on_disk, Path(offload_folder), values, resources)
        hosted = [unit for unit in units if unit not in on_disk]
        back.methods = _stream(model, files, hosted, device, values, slots, resources)
        back.close = weakref.finalize(model, only_here(resources.pop_all().close))
    for module in model.modules():
        if hasattr(module, "save_pretrained"):
            module.save_pretrained = _refuse_saving  # type: ignore[assignment]
    return back


class _Back:
    """Gives a model its weights again, and its own methods."""

    close: Callable[[], object]
    methods: StreamedMethods

    def __init__(self, model: nn.Module, units: list[ModelUnit]) -> None:
        self._model, self._units = model, units
        stay = {id(kind[name]): kind[name] for kind, name in others(model, units)}
        self._learning = [x for x in stay.values() if x.requires_grad]
        self._learns, self._devices = list[set[str]](), list[dict[str, torch.device]]()
        for unit in units:
            there = unit.tensors
            self._learns.append({name for name, x in there.items() if x.requires_grad})
            self._devices.append({n: CPU if x.is_meta else x.device for n, x in there.items()})

    def __call__(self) -> None:
        for unit, learns, devices in zip(self._units, self._learns, self._devices, strict=True):
            layer = unit.module.__dict__.get("_old_forward", unit.module.forward)
            assert isinstance(layer, OffloadedLayer)
            layer.hold()
            there = {n: x.detach().to(devices[n], copy=True) for n, x in unit.tensors.items()}
            kinds = {n: isinstance(x, nn.Parameter) for n, x in unit.tensors.items()}
            layer.give_back()
            layer.retire()
            for name, places in unit.owned.items():
                x = nn.Parameter(there[name], name in learns) if kinds[name] else there[name]
                for module, own in places:
                    table_of(module, own)[own] = x
            attribute = "_old_forward" if "_old_forward" in unit.module.__dict__ else "forward"
            del unit.module.__dict__[attribute]
            if attribute != "forward" or unit.module.forward != layer.own:
                setattr(unit.module, attribute, layer.own)
        for guard in self.methods.guards:
            guard.remove()
        for p in self._learning:
            p.requires_grad_()
        for module in self._model.modules():
            for name in ("_apply", "get_memory_footprint", "save_pretrained", "hf_device_map"):
                module.__dict__.pop(name, None)
        self.close()


def _refuse_saving(*_: Any, **__: Any) -> NoReturn:
    raise ArgumentError("a model whose layers stream cannot be saved; save it before qoff.dispatch")


def least_bytes(
    model: nn.Module, units: list[ModelUnit], device: torch.device, slots: int = 2
) -> int:
    """Bytes of the device that the weights take where all units stream."""
    part = _checkpoint({unit: unit.in_memory() for unit in units})
    plan = streamed_residency(part, (), device, slots)
    return _others_bytes(model, units) + plan.device_bytes


def _written(
    units: list[ModelUnit], folder: Path, values: Values, resources: ExitStack
) -> dict[ModelUnit, WeightFile]:
    """Write the weights of units to files, which go with `resources`, and take them from them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own = Path(tempfile.mkdtemp(prefix="qoff-", dir=folder))
    except OSError as error:
        raise ArgumentError(
            f"offload_folder: {folder} cannot be written ({error.strerror}); choose another place"
        ) from error
    resources.callback(shutil.rmtree, own, ignore_errors=True)
    total = sum(unit.nbytes for unit in units)
    with CheckpointWriter(own / "weights", expected_bytes=total) as writer:
        for i, unit in enumerate(units):
            writer.write_layer(i, unit.take(values))
        writer.write_outer({})
        writer.finish({})
    return dict(zip(units, Checkpoint.open(own / "weights").layers, strict=True))


def _stream(
    model: nn.Module,
    files: Mapping[ModelUnit, WeightFile],
    hosted: Collection[ModelUnit],
    device: torch.device,
    values: Values,
    slots: int,
    resources: ExitStack,
) -> StreamedMethods:
    """Let units take their weights from a store, which is closed with `resources`."""
    part, units = _checkpoint(files), list(files)
    plan = streamed_residency(part, [units.index(unit) for unit in hosted], device, slots)
    in_memory = {files[unit].path: partial(unit.take, values) for unit in hosted}
    store = WeightStore(
        part, plan, transfers=transfers_to(device), verify=False, in_memory=in_memory
    )
    in_memory.clear()  # they hold the modules, and the store outlives these
    resources.callback(store.close)
    turn = threading.Lock()
    for number, unit in enumerate(units):
        OffloadedLayer(unit.module, store, turn, number, [UnitPlace(unit, device)])
    return StreamedMethods(model, device, plan)


def _checkpoint(files: Mapping[ModelUnit, WeightFile]) -> Checkpoint:
    """Files of units as a checkpoint of layers alone."""
    nothing = WeightFile(Path("weights outside of layers"), ALIGNMENT, ALIGNMENT, "", {})
    return Checkpoint(Path("a model in memory"), {}, tuple(files.values()), nothing)


def _others_bytes(model: nn.Module, units: Collection[ModelUnit]) -> int:
    """Bytes of all that does not stream when these do; each tensor is moved on its own."""
    found = {id(kind[name]): kind[name].nbytes for kind, name in others(model, units)}
    return sum(found.values())


def _evenly(sizes: Mapping[ModelUnit, int], budget: int) -> set[ModelUnit]:
    """Units that fit, spread evenly among all."""
    chosen = spread_evenly({unit.number: size for unit, size in sizes.items()}, budget)
    return {unit for unit in sizes if unit.number in chosen}

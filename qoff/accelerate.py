"""Accelerate's functions for models larger than memory, with layers that stream while it computes.

Programs for Accelerate run with another import: `from qoff.accelerate import dispatch_model`. The
functions take Accelerate's arguments, and raise ArgumentError for those without a meaning here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from os import PathLike
from typing import Any, TypeVar

import torch
from accelerate import init_empty_weights, init_on_device, load_checkpoint_in_model
from accelerate.utils import get_max_memory, infer_auto_device_map
from torch import nn

from qoff.budgets import resolve_device
from qoff.errors import ArgumentError
from qoff.hf.dispatch import dispatch
from qoff.hf.dispatch.dispatch import DISK, HOST, placed
from qoff.hf.dispatch.units import ModelUnit, units_of

__all__ = [
    "cpu_offload",
    "disk_offload",
    "dispatch_model",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
]

Model = TypeVar("Model", bound=nn.Module)
_AUTO = ("auto", "balanced", "balanced_low_0", "sequential")  # the same on one GPU
_WHY = {
    "state_dict": "weights are those of the model",
    "offload_index": "weights are those of the model",
    "offload_buffers": "buffers stay on the device",
    "preload_module_classes": "layers come whole",
    "skip_keys": "a model computes on one device, and its inputs are not moved",
    "force_hooks": "only layers that stream are changed",
    "offload_state_dict": "a checkpoint is loaded into host memory",
    "full_state_dict": "there is one process",
    "broadcast_from_rank0": "there is one process",
}


def cpu_offload(
    model: Model,
    execution_device: torch.device | str | int | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Any] | None = None,
    preload_module_classes: Collection[str] | None = None,
) -> Model:
    """Stream all layers of a model from host memory; the rest stays on the device.

    execution_device: by default that of the model's first parameter. Raises as `qoff.dispatch`.
    """
    _refuse(
        offload_buffers=offload_buffers,
        state_dict=state_dict,
        preload_module_classes=preload_module_classes,
    )
    return placed(
        model, dict.fromkeys(units_of(model), HOST), _device(model, execution_device), None
    )


def disk_offload(
    model: Model,
    offload_dir: str | PathLike[str],
    execution_device: torch.device | str | int | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] | None = None,
) -> Model:
    """As `cpu_offload`, from files in a new folder in `offload_dir`, which goes with the model."""
    _refuse(offload_buffers=offload_buffers, preload_module_classes=preload_module_classes)
    device = _device(model, execution_device)
    return placed(model, dict.fromkeys(units_of(model), DISK), device, offload_dir)


def dispatch_model(
    model: Model,
    device_map: Mapping[str, Any],
    main_device: torch.device | str | int | None = None,
    state_dict: Mapping[str, Any] | None = None,
    offload_dir: str | PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
) -> Model:
    """Stream the layers that a device map has on "cpu" or "disk"; one device computes.

    main_device: that device; by default the first in the map that is neither. Raises ArgumentError
    for a map of several GPUs, for one that splits layers, and for one that offloads what is
    outside of layers.
    """
    _refuse(
        state_dict=state_dict,
        offload_index=offload_index,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )
    named = {str(place): place for place in device_map.values()}
    computing = [place for name, place in named.items() if name not in (HOST, DISK)]
    if len(computing) > 1:
        raise ArgumentError(
            f"device_map: has {', '.join(map(str, computing))}; a model computes on one device here"
        )
    named_main = [main_device] if main_device is not None else computing
    device = _device(model, next(iter(named_main), "cpu"))
    places = _places(model, device_map, device)
    return placed(model, places, device, offload_dir)


def load_checkpoint_and_dispatch(
    model: Model,
    checkpoint: str | PathLike[str],
    device_map: str | Mapping[str, Any] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Collection[str] | None = None,
    offload_folder: str | PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> Model:
    """Load a checkpoint into host memory, all of it, and stream its layers as a map says.

    device_map: "auto" and Accelerate's other strategies use a GPU, if there is one, up to
    `max_memory` (None: what is free), then host memory, then files in `offload_folder`; None: the
    model stays in host memory. For a model larger than host memory use `qoff.load`.
    """
    _refuse(
        offload_buffers=offload_buffers,
        offload_state_dict=offload_state_dict,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
        full_state_dict=not full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if isinstance(device_map, str) and device_map not in _AUTO:
        raise ArgumentError(
            f"device_map is {device_map!r}; use a dict, or one of {', '.join(_AUTO)}"
        )
    load_checkpoint_in_model(model, checkpoint, {"": "cpu"}, dtype=dtype, strict=strict)
    tie = getattr(model, "tie_weights", None)
    if callable(tie):
        tie()
    if device_map is None:
        return model
    if not isinstance(device_map, str):
        return dispatch_model(model, device_map, offload_dir=offload_folder)
    device = resolve_device("auto")
    if max_memory is None:
        found = get_max_memory()
        max_memory = {place: found[place] for place in (device.index, "cpu") if place in found}
    return dispatch(
        model,
        device=device,
        max_memory=max_memory,
        offload_folder=offload_folder,
        no_split_modules=no_split_module_classes,
    )


def _refuse(**given: Any) -> None:
    """Raise ArgumentError for the first that is set."""
    for name, value in given.items():
        if value not in (None, False):
            raise ArgumentError(f"{name} means nothing here: {_WHY[name]}; leave it out")


def _device(model: nn.Module, named: torch.device | str | int | None) -> torch.device:
    if named is None:
        first = next(model.parameters(), None)
        named = "cpu" if first is None else first.device
    return resolve_device(f"cuda:{named}" if isinstance(named, int) else named)


def _places(
    model: nn.Module, device_map: Mapping[str, Any], device: torch.device
) -> dict[ModelUnit, str]:
    """Where each layer streams from. Raises ArgumentError for a map that cannot be had."""
    away = {DISK} if device.type == "cpu" else {HOST, DISK}

    def place_of(name: str) -> str:
        above = [key for key in device_map if not key or f"{name}.".startswith(f"{key}.")]
        if not above:
            raise ArgumentError(
                f"device_map: says nothing of {name}; name it, or a module above it"
            )
        return str(device_map[max(above, key=len)])

    places: dict[ModelUnit, str] = {}
    inside = set[str]()
    for unit in units_of(model):
        names = {f"{unit.path}.{name}" for name, _ in unit.module.named_parameters()}
        inside |= names
        found = sorted({place_of(name) for name in names})
        if len(found) > 1:
            raise ArgumentError(
                f"device_map: splits {unit.path} among {', '.join(found)}; layers stream whole"
            )
        if found[0] in away:
            places[unit] = found[0]
    for name, _ in model.named_parameters():
        if name not in inside and place_of(name) in away:
            raise ArgumentError(
                f"device_map: offloads {name}, which is outside of layers and stays on {device}; "
                "map it there, or use qoff.dispatch with device_memory"
            )
    return places

"""Accelerate's functions for models larger than memory, with layers that stream while it computes.

Programs for Accelerate run with another import: `from qoff.accelerate import dispatch_model`. The
functions take Accelerate's arguments, and raise ArgumentError for those without a meaning here. All
else that Accelerate has is under the same names, as it is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeVar

import accelerate
import torch
from accelerate import (
    cpu_offload_with_hook,
    init_empty_weights,
    init_on_device,
    load_checkpoint_in_model,
)
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.utils import OffloadedWeightsLoader, get_max_memory, infer_auto_device_map
from torch import Tensor, nn
from transformers import PreTrainedModel

from qoff.budgets import CPU, memory_bounds, resolve_device
from qoff.errors import ArgumentError
from qoff.hf.dispatch.dispatch import chosen, placed
from qoff.hf.dispatch.files import weights_in
from qoff.hf.dispatch.parts import mapped, parts_of
from qoff.hf.dispatch.units import DISK, HOST, ModelUnit, check_values, units_from
from qoff.hf.dispatch.values import Values

__all__ = [
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
]

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)
_AUTO = ("auto", "balanced", "balanced_low_0", "sequential")  # the same on one GPU


def __getattr__(name: str) -> Any:
    try:
        return getattr(accelerate, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def cpu_offload(
    model: Model,
    execution_device: torch.device | str | int | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Collection[str] | None = None,
) -> Model:
    """Stream all layers of a model from host memory; the rest stays on the device.

    execution_device: by default that of the model's first parameter. A model without layers streams
    by its modules, see `qoff.dispatch`, all of them. state_dict: weights in place of the model's.
    offload_buffers: whether those of layers stream, too. preload_module_classes: names of classes
    whose modules come with all that is in them, in addition to layers. Raises as `qoff.dispatch`.
    """
    device = _device(model, execution_device)
    values = _offloaded(model, state_dict, None, None)
    units = _units(model, values, preload_module_classes, offload_buffers)
    return _without_map(_placed(model, dict.fromkeys(units, HOST), device, None, values))


def disk_offload(
    model: Model,
    offload_dir: str | PathLike[str],
    execution_device: torch.device | str | int | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] | None = None,
) -> Model:
    """As `cpu_offload`, from files in a new folder in `offload_dir`, which goes with the model.

    Weights that the model is without are read from what Accelerate wrote to `offload_dir`.
    """
    device = _device(model, execution_device)
    values = _offloaded(model, None, offload_dir, None)
    units = _units(model, values, preload_module_classes, offload_buffers)
    return _without_map(_placed(model, dict.fromkeys(units, DISK), device, offload_dir, values))


def dispatch_model(
    model: Model,
    device_map: Mapping[str, Any],
    main_device: torch.device | str | int | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: str | PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
) -> Model:
    """Stream the modules that a device map has on "cpu" or "disk"; one device computes.

    main_device: that device; by default the first in the map that is neither. Layers stream whole;
    one that the map splits streams by its modules. Parameters of a module around others that stream
    stay on the device, and those that are tied to one that stays. state_dict: weights in place of
    the model's. Weights that the model is without are read from what Accelerate wrote to
    `offload_dir`, or from where `offload_index` says. skip_keys: of inputs and results that are not
    moved to the device and back. force_hooks: move them where nothing streams, too. Raises
    ArgumentError for a map of several GPUs.
    """
    values = _offloaded(model, state_dict, offload_dir, offload_index)
    check_values(model, values)
    device, places = _places(device_map, main_device)
    where = _mapped(model, places, preload_module_classes, offload_buffers)
    _placed(model, where, device, offload_dir, values, skip_keys, force_hooks)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


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
    """Load a checkpoint into a model, and stream its layers as a map says.

    checkpoint: a file of safetensors or torch, an index of shards, or a folder with one of these.
    Its weights go one by one to where the map has them, so it may be larger than host memory;
    offload_state_dict is not needed for that. device_map: "auto" and Accelerate's other strategies
    use a GPU, if there is one and `max_memory` (None: what is free) names it, then host memory,
    then files in `offload_folder`; None: the model stays in memory, as Accelerate loads it. Others:
    see `dispatch_model`. Raises ArgumentError for weights of another shape, with `strict` for
    names that only one of model and checkpoint has, and as `dispatch_model` and `qoff.dispatch` do.
    """
    for name, given in {
        "full_state_dict=False": not full_state_dict,
        "broadcast_from_rank0": broadcast_from_rank0,
    }.items():
        if given and device_map is not None:
            raise ArgumentError(f"{name} means nothing here: there is one process; leave it out")
    if isinstance(device_map, str) and device_map not in _AUTO:
        raise ArgumentError(
            f"device_map is {device_map!r}; use a dict, or one of {', '.join(_AUTO)}"
        )
    tie = getattr(model, "tie_weights", None)
    if callable(tie):
        tie()
    if device_map is None:
        empty = any(x.is_meta for x in model.state_dict().values())
        load_checkpoint_in_model(
            model,
            fspath(checkpoint),
            {"": HOST} if empty else None,
            dtype=dtype,
            strict=strict,
            full_state_dict=full_state_dict,
            broadcast_from_rank0=broadcast_from_rank0,
        )
        return model
    weights = weights_in(checkpoint)
    kind = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    values = Values(model, weights, kind)
    _compare(model, weights, values, strict)
    check_values(model, values)
    if not isinstance(device_map, str):
        device, places = _places(device_map, None)
        where = _mapped(model, places, preload_module_classes, offload_buffers)
    else:
        device, bounds = _bounds(max_memory)
        parts = parts_of(model, no_split_module_classes, preload_module_classes)
        units = units_from(model, parts, first_stays=True, buffers=offload_buffers)
        where = chosen(model, units, device, *bounds)
    _placed(model, where, device, offload_folder, values, skip_keys, force_hooks)
    if not isinstance(device_map, str):
        model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


class _Streaming(AlignDevicesHook):
    """Moves inputs to the device and results back; the model has its weights when it is removed."""

    def __init__(
        self, device: torch.device, skip_keys: str | list[str] | None, back: Callable[[], None]
    ) -> None:
        super().__init__(execution_device=device, io_same_device=True, skip_keys=skip_keys)
        self._back = back

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self._back()
        return module


def _placed(
    model: Model,
    where: Mapping[ModelUnit, str],
    device: torch.device,
    folder: str | PathLike[str] | None,
    values: Values,
    skip_keys: str | list[str] | None = None,
    force_hooks: bool = False,
) -> Model:
    back = placed(model, where, device, folder, values)
    if where or force_hooks:
        add_hook_to_module(model, _Streaming(device, skip_keys, back))
    return model


def _without_map(model: Model) -> Model:
    """As Accelerate leaves it: PEFT gives a model back its weights where a map says they stream."""
    del model.hf_device_map
    return model


def _units(
    model: nn.Module, values: Values, whole: Collection[str] | None, buffers: bool
) -> list[ModelUnit]:
    """All that can stream; of a model of transformers the part stays that its device is read of."""
    check_values(model, values)
    parts = parts_of(model, None, whole)
    return units_from(model, parts, first_stays=isinstance(model, PreTrainedModel), buffers=buffers)


def _offloaded(
    model: nn.Module,
    state_dict: Mapping[str, Tensor] | None,
    folder: str | PathLike[str] | None,
    index: Mapping[str, Any] | None,
) -> Values:
    """Weights of a state dict, or those that Accelerate wrote to a folder, where there are none."""
    given = {name: x for name, x in (state_dict or {}).items() if not x.is_meta}
    if index is None and (folder is None or not (Path(folder) / "index.json").is_file()):
        return Values(model, given)
    return Values(model, OffloadedWeightsLoader(given, folder, index), instead=given.keys())


def _compare(model: nn.Module, weights: Collection[str], values: Values, strict: bool) -> None:
    """Raise ArgumentError for what the checkpoint should have; say what it has for nothing."""
    wanted = model.state_dict().keys()
    unused = sorted(set(weights) - wanted)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    absent = [
        n for n, x in tensors if not values.has(x) and (x.is_meta or (strict and n in wanted))
    ]
    if absent or (strict and unused):
        what = f"has nothing for {', '.join(absent)}" if absent else f"has {', '.join(unused)}, too"
        raise ArgumentError(f"the checkpoint {what}; make the model by its class and config")
    if unused:
        logger.warning("the checkpoint has for no use: %s", ", ".join(unused))


def _mapped(
    model: nn.Module, places: Mapping[str, str], whole: Collection[str] | None, buffers: bool
) -> dict[ModelUnit, str]:
    """What streams as a map says, and from where."""
    found = mapped(model, places, whole)
    parts = [(path, module) for path, (module, _) in found.items()]
    units = units_from(model, parts, first_stays=False, shared=True, buffers=buffers)
    return {unit: found[unit.path][1] for unit in units}


def _device(model: nn.Module, named: torch.device | str | int | None) -> torch.device:
    if named is None:
        first = next(model.parameters(), None)
        named = "cpu" if first is None or first.is_meta else first.device
    device = resolve_device(f"cuda:{named}" if isinstance(named, int) else named)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(f"torch sees no GPU, and the device is {named!r}; use 'cpu'")
    return device


def _places(
    device_map: Mapping[str, Any], main: torch.device | str | int | None
) -> tuple[torch.device, dict[str, str]]:
    """The device that computes, and what a map has elsewhere: HOST, DISK, or "" for the device."""
    named = [place for place in device_map.values() if str(place) not in (HOST, DISK)]
    kinds = {f"cuda:{place}" if isinstance(place, int) else str(place): place for place in named}
    if len(kinds) > 1:
        raise ArgumentError(
            f"device_map: has {', '.join(kinds)}; a model computes on one device here"
        )
    device = _device(nn.Module(), main if main is not None else next(iter(named), "cpu"))
    away = (DISK,) if device.type == "cpu" else (HOST, DISK)
    return device, {n: str(p) if str(p) in away else "" for n, p in device_map.items()}


def _bounds(
    max_memory: Mapping[int | str, int | str] | None,
) -> tuple[torch.device, tuple[int | None, int | None]]:
    """The device that computes, and the bytes of it and of host memory for weights."""
    device = resolve_device("auto")
    if max_memory is None:
        found = get_max_memory()
        max_memory = {place: found[place] for place in (device.index, HOST) if place in found}
    elif not any(isinstance(place, int) for place in max_memory):
        device = CPU
    room, host = memory_bounds(None, None, max_memory, device)
    return device, (room, 0 if device.type == "cpu" else host)

"""What neither learns nor streams: on a GPU, moved there when a training begins."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from qoff.errors import ArgumentError
from qoff.hf.packed.module import CodesModule
from qoff.memory.arena import PAGE, round_up

from .homes import Homes

_WHAT = "weights that do not learn"


def nbytes_of(model: nn.Module) -> int:
    """Of an arena that takes them."""
    return sum(round_up(x.nbytes, PAGE) for x in _elsewhere(model))


def move(model: nn.Module, homes: Homes) -> None:
    """Move them to the device's arena."""
    for x in _elsewhere(model):
        place = homes.device.alloc(round_up(x.nbytes, PAGE), _WHAT)
        x.data = place[: x.nbytes].view(x.dtype).view(x.shape).copy_(x.data)


def check(model: nn.Module, device: torch.device) -> None:
    """Raise ArgumentError for a model that is on another device, or packed for one."""
    here = {"cpu", str(device)}
    found = {str(p.device) for p in model.parameters() if not p.is_meta}
    if found - here:
        raise ArgumentError(
            f"training computes on {_name(device)}, and this model is on {min(found - here)}; "
            "move it there"
        )
    codes = [m for m in model.modules() if isinstance(m, CodesModule)]
    packed = {str(x.device) for m in codes for x in m.buffers(recurse=False) if not x.is_meta}
    if packed - {str(device)}:
        raise ArgumentError(
            f"training computes on {_name(device)}, and packed weights of this model are on "
            f"{min(packed - {str(device)})}; load it with device_map={str(device)!r}"
        )


def _name(device: torch.device) -> str:
    return "the CPU" if device.type == "cpu" else str(device)


def _elsewhere(model: nn.Module) -> Iterator[Tensor]:
    """Each once; what has no memory now streams."""
    seen = set[int]()
    for module in model.modules():
        packed = isinstance(module, CodesModule)  # which is there, or streams
        buffers = () if packed else module._buffers.values()
        for x in (*module._parameters.values(), *buffers):
            if x is None or x.requires_grad or x.is_meta or x.is_cuda or id(x) in seen:
                continue
            seen.add(id(x))
            yield x

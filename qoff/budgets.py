"""What all doors understand by a device, a dtype and bounds of memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from qoff.errors import ArgumentError, QoffError
from qoff.log import say_once
from qoff.units import parse_size

logger = logging.getLogger(__name__)
CPU = torch.device("cpu")
OLDEST_GPU = (7, 5)  # compute capability of a GPU that kernels are compiled for
_GPU_DTYPES = (torch.float16, torch.bfloat16)


def memory_size(name: str, value: int | str | None) -> int | None:
    """Bytes of a size like 4294967296 or "4GiB". Raises ArgumentError naming the option."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ArgumentError(f"{name} is {value!r}; use a number of bytes, or text like '4GiB'")
    try:
        return parse_size(value)
    except QoffError as error:
        raise ArgumentError(f"{name}: {error}") from error


class MemorySize:
    """A field of a dataclass that takes a size as number or text, and holds it in bytes."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object | None, owner: type) -> int | None:
        found: int | None = None if instance is None else vars(instance)[self._name]
        return found  # the class's own is the default

    def __set__(self, instance: object, value: int | str | None) -> None:
        vars(instance)[self._name] = memory_size(self._name, value)


def memory_bounds(
    device_memory: int | str | None,
    host_memory: int | str | None,
    max_memory: Mapping[int | str, int | str] | None,
    device: torch.device,
) -> tuple[int | None, int | None]:
    """(device_memory, host_memory) in bytes, each None where there is no bound.

    max_memory: as Accelerate takes it, {0: "12GiB", "cpu": "32GiB"}: a number is that GPU, "cpu"
    is host memory. On a CPU, "cpu" is the device's memory. Raises ArgumentError for what is no
    size, for a GPU that the model does not run on, and for a tier with two different bounds.
    """
    on_cpu = device.type == "cpu"
    bounds = {
        "device_memory": memory_size("device_memory", device_memory),
        "host_memory": memory_size("host_memory", host_memory),
    }
    if max_memory is not None and not isinstance(max_memory, Mapping):
        raise ArgumentError(f"max_memory is {max_memory!r}; use {{0: '12GiB', 'cpu': '32GiB'}}")
    for place, value in (max_memory or {}).items():
        size = memory_size(f"max_memory[{place!r}]", value)
        if place == "cpu":
            name = "device_memory" if on_cpu else "host_memory"
            others = tuple(bounds) if on_cpu else (name,)  # both are the memory of a CPU
        elif not on_cpu and place == (device.index or 0):
            name, others = "device_memory", ("device_memory",)
        else:
            raise ArgumentError(
                f"max_memory names {place!r}, but the model runs on {str(device)!r}; use "
                + ("'cpu' alone, or device='cuda'" if on_cpu else f"{device.index or 0} and 'cpu'")
            )
        for other in others:
            if bounds[other] not in (None, size):
                raise ArgumentError(
                    f"{other} is {bounds[other]} bytes and max_memory[{place!r}] {size}; "
                    "give one of the two"
                )
        bounds[name] = size
    return bounds["device_memory"], bounds["host_memory"]


def check_host_bound(
    device_memory: int | None, host_memory: int | None, device: torch.device
) -> None:
    """Raise ArgumentError for a bound of a CPU's host memory, alone, which would bind nothing."""
    if device.type == "cpu" and device_memory is None and host_memory is not None:
        raise ArgumentError(
            "host_memory holds what device_memory has no room for, and needs that bound, too; on a "
            "CPU device_memory alone bounds everything"
        )


def resolve_device(device: torch.device | str) -> torch.device:
    """The device of a name like "cuda:1"; "auto": a GPU that torch and qoff can use, else the CPU.

    "cuda" is the calling thread's current GPU; other threads may have another one, so the result
    has its number. Raises ArgumentError where torch knows no such name, or has no such GPU, and for
    other kinds of devices.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and _takes_kernels() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(
            f"no device is called {device!r}; use 'auto', 'cpu' or 'cuda'"
        ) from error
    if found.type not in ("cpu", "cuda"):
        raise ArgumentError(
            f"qoff computes on 'cpu' or 'cuda', not on {str(found)!r}; use one of them"
        )
    if found.type != "cuda" or not torch.cuda.is_available():
        return found
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= torch.cuda.device_count():
        raise ArgumentError(f"there is no GPU {index}; torch sees {torch.cuda.device_count()}")
    return torch.device("cuda", index)


def unusable_gpu(device: torch.device) -> str:
    """Why kernels cannot run on a GPU that torch has, whatever is installed; "" where they can."""
    if torch.version.hip is not None:
        return "qoff's kernels are for NVIDIA's GPUs, and this torch is a build for ROCm"
    found = torch.cuda.get_device_properties(device)
    if (found.major, found.minor) >= OLDEST_GPU:
        return ""
    return (
        f"{found.name} has compute capability {found.major}.{found.minor}, and qoff's kernels need "
        "{}.{}".format(*OLDEST_GPU)
    )


def _takes_kernels() -> bool:
    """Whether the current GPU is one that kernels run on; a line says why not, once."""
    why = unusable_gpu(torch.device("cuda", torch.cuda.current_device()))
    if why:
        say_once(logger, f"device 'auto' is the CPU: {why}")
    return not why


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the calling thread's current one: kernels, streams and events are then of it."""
    chosen = device.type == "cuda" and device.index is not None
    return torch.cuda.device(device) if chosen else nullcontext()


def give_back(device: torch.device) -> None:
    """Return a GPU's memory that torch keeps for later to the system: nothing refers to it."""
    if device.type == "cuda":
        with device_guard(device):
            torch.cuda.empty_cache()


def resolve_dtype(
    dtype: torch.dtype | str, config: Mapping[str, Any], device: torch.device
) -> torch.dtype:
    """The type of hidden states on a device, for a model of this config.json.

    A CPU computes in float32. On a GPU "auto" is the config's `dtype` or `torch_dtype`; for a
    model of another type, or of none, bfloat16. It is float16 where the GPU has no bfloat16, and a
    line says so of a bfloat16 model. Raises ArgumentError for a type that the device does not
    compute in.
    """
    wanted = _dtype_of(config) if dtype == "auto" else _named(dtype)
    if device.type == "cpu":
        if dtype != "auto" and wanted != torch.float32:
            raise ArgumentError(
                f"dtype is {dtype!r}, but a CPU computes in float32; use dtype='auto'"
            )
        return torch.float32
    with device_guard(device):
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    if dtype == "auto" and wanted not in _GPU_DTYPES:
        return torch.bfloat16 if has_bfloat16 else torch.float16
    if wanted not in _GPU_DTYPES:
        raise ArgumentError(f"hidden states on a GPU are float16 or bfloat16, not {dtype!r}")
    if wanted == torch.bfloat16 and not has_bfloat16:
        if dtype == "auto":
            say_once(
                logger, "dtype 'auto' is float16: the model is bfloat16, which this GPU has not"
            )
            return torch.float16
        raise ArgumentError("this GPU cannot multiply bfloat16; use dtype='float16'")
    assert wanted is not None
    return wanted


def _named(dtype: torch.dtype | str) -> torch.dtype:
    found = _torch_dtype(dtype)
    if found is None:
        raise ArgumentError(f"dtype is {dtype!r}; use 'auto', 'float16' or 'bfloat16'")
    return found


def _dtype_of(config: Mapping[str, Any]) -> torch.dtype | None:
    """The type that a config.json names, for the whole model or for its text part."""
    parts = [p for p in (config, config.get("text_config")) if isinstance(p, Mapping)]
    named = (_torch_dtype(part.get("dtype") or part.get("torch_dtype")) for part in parts)
    return next((dtype for dtype in named if dtype is not None), None)


def _torch_dtype(name: object) -> torch.dtype | None:
    found = getattr(torch, name, None) if isinstance(name, str) else name
    return found if isinstance(found, torch.dtype) else None

"""Have torch and Triton's interpreter take the late GPU for one."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _device
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import cuda, tensors
from .races import Uses
from .streams import DEVICE

_META, _CUDA, _TYPES = 14, 1, 24  # of c10::DeviceType
_library = None


def install(early_copies: bool = False) -> None:
    """early_copies: streams other than the default one do what they may at once.

    Raises RuntimeError where torch can use a GPU.
    """
    global _library
    if _library is None and torch.cuda.is_available():
        raise RuntimeError("there is a GPU: unset QOFF_LATE_GPU, and the tests run on it")
    DEVICE.early_copies = early_copies
    if _library is not None:
        return
    # A build for CPUs has no guard that makes a GPU the current one; that of `meta` does nothing.
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * _TYPES).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    if guards[_CUDA] is None:
        guards[_CUDA] = guards[_META]
    _library = torch.library.Library("_", "IMPL")
    _library.fallback(tensors.allocate, "CUDA")
    for name, stand_in in cuda.STAND_INS.items():
        setattr(torch.cuda, name, stand_in)
    _device._device_constructors()  # remembers them as they are
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    _pinning()
    _indexed_devices()
    _interpreter()


def _pinned(x: Tensor) -> Tensor:
    if x.nbytes:
        storage = x.untyped_storage()
        tensors.pin(storage.data_ptr(), storage.nbytes())
        weakref.finalize(storage, tensors.unpin, storage.data_ptr())
    return x


def _pinning() -> None:
    """Memory of the host that is said to be pinned."""

    def with_pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(make)
        def call(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            made = make(*args, **kwargs)
            return _pinned(made) if pin_memory else made

        return call

    for name in ("empty", "zeros", "ones", "full", "empty_like"):
        setattr(torch, name, with_pinning(getattr(torch, name)))
    for name in ("new_empty", "new_zeros"):
        setattr(Tensor, name, with_pinning(getattr(Tensor, name)))
    torch.Tensor.pin_memory = lambda self, device=None: _pinned(self.clone())  # type: ignore
    torch.Tensor.is_pinned = lambda self, device=None: (  # type: ignore
        not self.is_cuda and tensors.is_pinned(self)
    )
    from qoff.memory.io import copy_stream

    copy_stream.pinned_memory = lambda nbytes: _pinned(torch.empty(nbytes, dtype=torch.uint8))


def _indexed_devices() -> None:
    """torch asks the guard which GPU `cuda` is."""
    make_tensor, make_device_to = torch.tensor, torch.Tensor.to

    def indexed(x: Any) -> Any:
        named = isinstance(x, str) and x.startswith("cuda")
        if named or (isinstance(x, torch.device) and x.type == "cuda"):
            return tensors.GPU
        return x

    def tensor(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        if indexed(device) == tensors.GPU:
            return make_tensor(*args, device="cpu", **kwargs).to(tensors.GPU)
        made = make_tensor(*args, device=device, **kwargs)
        return _pinned(made) if pin_memory else made

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return make_device_to(
            self, *map(indexed, args), **{key: indexed(x) for key, x in kwargs.items()}
        )

    torch.tensor, torch.Tensor.to = tensor, to  # type: ignore
    torch.Tensor.cuda = lambda self, *_, **kwargs: to(self, tensors.GPU, **kwargs)  # type: ignore
    # These make an empty tensor, and have it resized.
    for name in ("arange", "linspace", "randperm", "eye"):
        make = getattr(torch, name)

        def on_host(*args: Any, device: Any = None, _make: Any = make, **kwargs: Any) -> Tensor:
            if indexed(device) != tensors.GPU:
                return _make(*args, device=device, **kwargs)
            return _make(*args, device="cpu", **kwargs).to(tensors.GPU)

        setattr(torch, name, wraps(make)(on_host))
    for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint"):
        make = getattr(torch, name)

        def call(*args: Any, device: Any = None, _make: Any = make, **kwargs: Any) -> Tensor:
            return _make(*args, device=indexed(device), **kwargs)

        setattr(torch, name, wraps(make)(call))


def _interpreter() -> None:
    """Kernels are queued."""
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        flat, spec = tree_flatten((args, kwargs))
        late = [x for x in flat if isinstance(x, tensors.LateTensor)]
        if not late:
            run(self, *args, **kwargs)
            return
        for x in flat:
            if isinstance(x, Tensor) and not isinstance(x, tensors.LateTensor):
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        there = tree_unflatten([getattr(x, "here", x) for x in flat], spec)
        memories = [x.memory for x in late]
        uses = Uses(kernel=[one.region for one in memories])
        name = self.fn.__name__
        DEVICE.submit(lambda: run(self, *there[0], **there[1]), memories, name, uses=uses)

    GridExecutor.__call__ = launch

"""Host memory pinned by the CUDA driver, for where memory of our own cannot be registered."""

from __future__ import annotations

import ctypes
import errno
import weakref

import torch
from torch import Tensor

_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned for all GPUs


def pinned_memory(nbytes: int) -> Tensor:
    """Pinned memory, uint8, aligned to a page, of this size: torch would take a power of two.

    It is given back when the last tensor over it dies, in whatever thread. For the thread's current
    GPU. Raises OSError when the driver refuses, or is not there.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    address, context = ctypes.c_void_p(), ctypes.c_void_p()
    code = driver.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(nbytes), _PORTABLE)
    if code or address.value is None:
        raise OSError(errno.ENOMEM, f"cuMemHostAlloc gave error {code}")
    driver.cuCtxGetCurrent(ctypes.byref(context))
    memory = (ctypes.c_uint8 * nbytes).from_address(address.value)
    free = weakref.finalize(memory, _free, driver, address, context)
    free.atexit = False  # the driver may be gone by then
    return torch.frombuffer(memory, dtype=torch.uint8)


def _free(driver: ctypes.CDLL, address: ctypes.c_void_p, context: ctypes.c_void_p) -> None:
    """Give memory back; a thread that has not used the GPU has no context, which that takes."""
    if driver.cuCtxPushCurrent_v2(context):
        return  # the context has been destroyed, and its memory with it
    driver.cuMemFreeHost(address)
    driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

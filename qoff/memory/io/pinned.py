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

    It is given back when the last tensor over it dies. For the thread's current GPU. Raises OSError
    when the driver refuses, or is not there.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    address = ctypes.c_void_p()
    code = driver.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(nbytes), _PORTABLE)
    if code or address.value is None:
        raise OSError(errno.ENOMEM, f"cuMemHostAlloc gave error {code}")
    memory = (ctypes.c_uint8 * nbytes).from_address(address.value)
    free = weakref.finalize(memory, driver.cuMemFreeHost, ctypes.c_void_p(address.value))
    free.atexit = False  # the driver may be gone by then
    return torch.frombuffer(memory, dtype=torch.uint8)

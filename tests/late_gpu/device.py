"""What torch's C++ asks about GPUs, where it was built without them.

Objects with virtual functions answer it. They get copies of their classes' tables of these, in
which a few are ours. Functions are known by their places in torch's headers.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch

_META, _CUDA, _TYPES = 14, 1, 24  # of c10::DeviceType
_MOST = 80  # functions: more than a table has
# c10/core/impl/DeviceGuardImplInterface.h. A c10::Device is its type and its index, a byte each; a
# c10::Stream has a number behind that.
_GUARD = {
    **dict.fromkeys((0, 1, 2), _CUDA),  # type, exchangeDevice, getDevice
    **dict.fromkeys((5, 6, 9), _CUDA),  # getStream, getDefaultStream, exchangeStream
}
# ATen/detail/AcceleratorHooksInterface.h, and the first of CUDAHooksInterface.h.
_HOOKS = {
    **dict.fromkeys((2, 3, 4, 16), True),  # isBuilt, isAvailable, hasPrimaryContext, hasCUDA
    **dict.fromkeys((5, 7), 0),  # init, setCurrentDevice
    6: 1,  # deviceCount
    **dict.fromkeys((8, 9, 10), 0),  # getCurrentDevice, exchangeDevice, maybeExchangeDevice
}
_kept: list[Any] = []


def make_device() -> None:
    """One GPU, always the current one, with one stream; autograd has a thread for it.

    There is no guard of GPUs: a copy of that of `meta`, which does nothing, says that it is one.
    Autograd wants it for gradients on the device; elsewhere than on x86-64 there are none.
    """
    libraries = Path(torch.__file__).parent / "lib"
    c10 = ctypes.CDLL(str(libraries / "libc10.so"))
    guards = (ctypes.c_void_p * _TYPES).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    if guards[_CUDA] is not None:
        return
    if platform.machine() != "x86_64":
        guards[_CUDA] = guards[_META]
        return
    guard = (ctypes.c_void_p * 1).from_buffer_copy(ctypes.string_at(guards[_META], 8))
    _answer(guard, _GUARD)
    guards[_CUDA] = ctypes.addressof(guard)
    hooks = ctypes.CDLL(str(libraries / "libtorch_cpu.so"))._ZN2at6detail12getCUDAHooksEv
    hooks.restype = ctypes.POINTER(ctypes.c_void_p)
    _answer(hooks(), _HOOKS)


@cache
def _key_set() -> int:
    """Where in c10::TensorImpl the dispatch keys are, in bytes."""
    x = torch.empty(1, device="meta")
    words = (ctypes.c_uint64 * 32).from_address(x._cdata)
    [at] = [at for at, word in enumerate(words) if word == torch._C._dispatch_keys(x).raw_repr()]
    return 8 * at


def give_keys(x: torch.Tensor, value: torch.Tensor) -> None:
    """Have a tensor be dispatched as another one: by Python or not, which `x.data = ...` keeps."""
    keys = ctypes.c_uint64.from_address(x._cdata + _key_set())
    keys.value = torch._C._dispatch_keys(value).raw_repr()


def _answer(made: Any, answers: dict[int, int]) -> None:
    """Replace virtual functions of an object by ones that return these integers."""
    before = 2 * ctypes.sizeof(ctypes.c_void_p)  # which a table has in front of its functions
    table = (ctypes.c_void_p * (_MOST + 2))()
    ctypes.memmove(table, made[0] - before, ctypes.sizeof(table))
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    start = ctypes.addressof(ctypes.c_char.from_buffer(code))
    for place, value in answers.items():
        # mov eax, value; xor edx, edx; ret
        code[16 * place : 16 * place + 8] = b"\xb8" + value.to_bytes(4, "little") + b"\x31\xd2\xc3"
        table[place + 2] = start + 16 * place
    _kept.extend((made, table, code))
    made[0] = ctypes.addressof(table) + before

"""No kernel touches a byte beyond its tensors: each lies between pages that cannot be accessed.

Tests of the ops are run again, in a forked child, with every tensor that torch makes and the pool's
workspace right before such a page, or right behind one. `python -m bench.sanitize --address`
looks at more of them, and at every instruction, where libasan is installed.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import mmap
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner
from qoff.kernels.cpu.jit.pool import Pool, default_pool
from tests.forks import in_child
from tests.kernels import (
    test_attention,
    test_cpu_sampling,
    test_delta,
    test_embedding,
    test_experts,
    test_pack_blocks,
    test_packed_attention,
    test_packed_select,
    test_rotated,
    test_short_conv,
    test_streams,
    test_w4_linear,
)

if sys.platform != "linux":
    pytest.skip("pages are protected as on Linux", allow_module_level=True)

_PAGE = mmap.PAGESIZE
_LINE = 128  # bytes that a workspace is aligned to
_TESTS = 10  # of a module, at most


def guarded(nbytes: int, end: bool, align: int = 1) -> Tensor:
    """Bytes that end right before a page without access, or begin right behind one."""
    whole = -(-nbytes // align) * align
    pages = -(-max(whole, 1) // _PAGE) + 2
    memory = mmap.mmap(-1, pages * _PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (0, pages - 1):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + page * _PAGE), _PAGE, 0) == 0
    offset = (pages - 1) * _PAGE - whole if end else _PAGE
    return torch.frombuffer(memory, dtype=torch.uint8)[offset : offset + nbytes]


class Guard(TorchDispatchMode):
    """Puts each tensor that torch makes between such pages."""

    def __init__(self, end: bool) -> None:
        super().__init__()
        self._end = end

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        known = {x.untyped_storage().data_ptr() for x in given}

        def move(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.untyped_storage().data_ptr() in known:
                return x
            storage = x.untyped_storage()
            memory = guarded(storage.nbytes(), self._end)
            if storage.nbytes():
                memory.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
            at = memory.storage_offset() + x.storage_offset() * x.element_size()
            placed = memory.untyped_storage()
            moved = torch.empty(0, dtype=torch.uint8).set_(
                placed, at, (memory.numel() - x.storage_offset() * x.element_size(),)
            )
            return moved.view(x.dtype).as_strided(x.shape, x.stride())

        return tree_map(move, func(*args, **(kwargs or {})))


def cases(module: ModuleType) -> Iterator[Callable[[], None]]:
    """Tests of a module that need no fixtures, each with parameters drawn from its own."""
    draw = random.Random(0)
    tests = [
        test
        for name, test in sorted(vars(module).items())
        if name.startswith("test_") and not name.endswith("refused")
        if not hasattr(test, "hypothesis")
    ]
    for test in draw.sample(tests, min(_TESTS, len(tests))):
        sets: list[list[dict[str, Any]]] = []
        for mark in getattr(test, "pytestmark", ()):
            names, values = mark.args[:2]
            names = names.replace(" ", "").split(",") if isinstance(names, str) else names
            sets.append(
                [dict(zip(names, v if len(names) > 1 else (v,), strict=True)) for v in values]
            )
        every = [
            {k: v for one in chosen for k, v in one.items()} for chosen in itertools.product(*sets)
        ]
        chosen = draw.choice(every)
        if chosen.keys() == inspect.signature(test).parameters.keys():
            yield partial(test, **chosen)


def run_guarded(works: Iterator[Callable[[], None]], end: bool, place: Path) -> int:
    """Do some work with memory between pages without access; how many. place: names the last."""
    kept: list[Tensor] = []

    def workspace(self: Pool, nbytes: int) -> int:
        kept.append(guarded(nbytes, end, _LINE))
        return kept[-1].data_ptr()

    Pool.workspace = workspace  # type: ignore[method-assign]
    default_pool()  # with as many threads as there are
    torch.set_num_threads(1)  # torch's own are not there after a fork
    done = 0
    with Guard(end):
        for work in works:
            place.write_text(str(work))
            work()
            done += 1
    return done


SHORT = [test_attention, test_cpu_sampling, test_delta, test_embedding, test_short_conv]
SHORT += [test_streams, test_w4_linear]
LONG = [test_experts, test_pack_blocks, test_packed_attention, test_packed_select, test_rotated]


@pytest.mark.parametrize(
    ("module", "end"),
    [(module, True) for module in SHORT + LONG] + [(module, False) for module in SHORT],
    ids=lambda x: x.__name__.rpartition("_")[2] if isinstance(x, ModuleType) else None,
)
def test_ops_stay_within_their_tensors(module: ModuleType, end: bool, tmp_path: Path) -> None:
    place = tmp_path / "case"
    told = in_child(lambda: run_guarded(cases(module), end, place))
    assert told.isdigit(), f"{told or 'fault'}: {place.read_text()}"
    assert int(told) > 0


@inner
def _reads_16(address):
    return simd.sum_f32(simd.load_f32(address))


@pytest.mark.parametrize("end", [True, False], ids=["before a page", "behind a page"])
def test_a_read_beyond_a_tensor_is_found(end: bool, tmp_path: Path) -> None:
    _reads_16(torch.ones(16).data_ptr())  # compiled

    def work() -> None:
        x = torch.ones(19)
        _reads_16(x.data_ptr() + (12 if end else 0))
        (tmp_path / "within").touch()
        _reads_16(x.data_ptr() + (16 if end else -4))

    assert in_child(lambda: run_guarded(iter([work]), end, tmp_path / "case")) == ""
    assert (tmp_path / "within").exists()

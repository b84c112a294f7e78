"""How the CPU kernels are compiled: numba decorators whose disk cache knows all their sources.

numba's own cache watches only the file that a function is in; these kernels inline code from the
other files of kernels/cpu, and constants of kernels/layout. The locator below stamps every cached
function with a hash of both folders, and keeps it under that hash: installations of one version
share what is compiled. `NUMBA_CACHE_DIR` moves the cache as it does for any numba function.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
from numba import types
from numba.core.caching import (
    CacheImpl,
    InTreeCacheLocator,
    UserProvidedCacheLocator,
    UserWideCacheLocator,
)

from .parts import compile_all

_FOLDER = Path(__file__).resolve().parents[1]  # kernels/cpu

logger = logging.getLogger(__name__)


@functools.cache
def stamp(*folders: Path) -> str:
    """A hash of all sources in these folders and the folders in them, by name and content."""
    digest = hashlib.sha256()
    for folder in folders:
        for source in sorted(folder.rglob("*.py")):
            digest.update(str(source.relative_to(folder)).encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def _locator(base: Any) -> type:
    class FolderLocator(base):
        """A numba cache locator for the files of kernels/cpu alone."""

        def get_source_stamp(self) -> str:
            return stamp(_FOLDER, _FOLDER.parent / "layout")

        @classmethod
        def get_suitable_cache_subpath(cls, py_file: str) -> str:
            folder = Path(py_file).resolve().parent.relative_to(_FOLDER)
            return str(Path("qoff", stamp(_FOLDER, _FOLDER.parent / "layout")[:16], folder))

        @classmethod
        def from_function(cls, py_func: Callable, py_file: str) -> Any:
            if _FOLDER not in Path(py_file).resolve().parents:
                return None
            return super().from_function(py_func, py_file)

    return FolderLocator


CacheImpl._locator_classes[:0] = [
    _locator(UserProvidedCacheLocator),
    _locator(UserWideCacheLocator),
    _locator(InTreeCacheLocator),
]

_announced = list[bool]()
_OUTLINED: dict[str, Any] = {}  # by symbol: their code is there as long as they are
JOB = types.void(types.int64, types.int64, types.int64, types.int64)


def _with_disk_cache(compile_: Callable[[bool], Any]) -> Any:
    """Compile with numba's disk cache, or without where no folder for it can be written."""
    try:
        return compile_(True)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        warnings.warn(  # always the same, from the same place: it is shown once
            "no folder for compiled CPU kernels can be written, so that they are compiled anew in "
            "every process; set NUMBA_CACHE_DIR to one that can be",
            stacklevel=1,
        )
        return compile_(False)


def inner(function: Callable, inlined: bool = False) -> Any:
    """Compile a function that jobs call."""
    options = {"nogil": True, "error_model": "numpy", "forceinline": inlined}
    return _with_disk_cache(lambda cache: numba.njit(cache=cache, **options)(function))


def inlined(function: Callable) -> Any:
    """Compile a function that is made a part of those that call it, whatever its size."""
    return inner(function, inlined=True)


def outlined(*params: Any) -> Callable[[Callable], Any]:
    """Compile a function that is not made a part of its callers, and so is compiled once.

    What numba compiles takes the code of all that it calls, down to the last, and optimizes it
    again: what is large and deep down would be compiled with each function above it. This one is
    called by a symbol. params: the numba types of its parameters; it returns nothing.
    """
    signature = types.void(*params)

    def wrap(function: Callable) -> Any:
        name = f"{function.__module__}.{function.__qualname__}"
        _OUTLINED[name] = compiled = _with_an_address(signature, function)
        llvm.add_symbol(name, compiled.address)
        return types.ExternalFunction(name, signature)

    return wrap


def job(function: Callable[[int, int, int, int], None]) -> Any:
    """Compile `function(pool, thread, threads, args)` so that a `Pool` can run it; see `pool`.

    The result has the compiled function's `address`. It is compiled here and now. The first that
    does not come from the cache is announced, for those who wait, and all others are compiled in
    processes of their own, see `parts`.
    """
    return _with_an_address(JOB, function)


def _with_an_address(signature: Any, function: Callable) -> Any:
    """Compile for callers that are not numba's."""
    compiled = _with_disk_cache(
        lambda cache: numba.cfunc(signature, nopython=True, cache=cache, error_model="numpy")(
            function
        )
    )
    if not compiled.cache_hits and not _announced:
        _announced.append(True)
        logger.warning("compiling the CPU kernels for this processor: one to two minutes, once")
        if compiled._cache.cache_path is not None:  # else what others compile is not kept
            from qoff.kernels.processor import usable_threads  # torch

            compile_all(Path(compiled._cache.cache_path), usable_threads())
    return compiled

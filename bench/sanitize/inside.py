"""Runs a module with instrumented kernels; see `bench.sanitize`, which starts it.

    python -m bench.sanitize.inside asan FILE -m MODULE ARGUMENTS

Appends where functions are to FILE, as lines of address and name.
"""

from __future__ import annotations

import atexit
import runpy
import sys
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from numba.core import codegen

from qoff.kernels import processor

from .instrument import Sanitizer, instrumented

_THREADS = 4  # of the pool: more than the machine may have, yet most of them run


def install(sanitizer: Sanitizer, places: Path) -> None:
    """Instrument what numba compiles in this process."""
    library = codegen.CPUCodeLibrary
    finalize: Any = library._finalize_final_module
    names: dict[str, Any] = {}

    def finalize_instrumented(self: Any) -> None:
        plain = self._final_module
        text = instrumented(str(plain), sanitizer)
        if self._shared_module is None and text != str(plain):
            self._finalized = True  # or it would be finalized first
            self._get_module_for_linking()  # others inline what is not instrumented yet
            self._finalized = False
            self._final_module = llvm.parse_assembly(text)
            self._final_module.verify()
        names.update(
            (f.name, self._codegen)
            for f in (self._shared_module or plain).functions
            if not f.is_declaration
        )
        finalize(self)

    def write() -> None:
        found = []
        for name, code in names.items():
            if code._engine.is_symbol_defined(name):
                found.append(f"{code._engine.get_function_address(name)} {name}\n")
        with places.open("a") as file:
            file.writelines(found)

    library._finalize_final_module = finalize_instrumented
    atexit.register(write)


def main() -> None:
    kind, places, _, module, *arguments = sys.argv[1:]
    install(Sanitizer(kind), Path(places))
    processor.usable_threads = lambda: _THREADS  # more than the machine may have
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

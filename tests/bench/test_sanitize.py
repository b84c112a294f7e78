"""Sanitizers are told of every access, with its address and size."""

from __future__ import annotations

import ctypes

import llvmlite.binding as llvm
import pytest
from numba.core.codegen import initialize_llvm

from bench.sanitize.instrument import Sanitizer, instrumented

# What kernels are made of: scalars, vectors, structures, copies, and the atomic operations.
MODULE = f"""
target triple = "{llvm.get_default_triple()}"
@constant = constant [3 x i8] zeroinitializer
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
define i64 @accesses(ptr noundef %p, i64 %n) #0 {{
first:
  %bits = load <16 x i1>, ptr %p, align 1
  %x = load <12 x i8>, ptr %p, align 1
  %y = load volatile {{ i64, ptr }}, ptr %p, align 8, !tbaa !0
  %z = load i8, ptr getelementptr inbounds (i8, ptr @constant, i64 2), align 1
  tail call void @llvm.prefetch.p0(ptr %p, i32 0, i32 2, i32 1)
  tail call void @llvm.memset.p0.i64(ptr nonnull align 8 %p, i8 0, i64 32, i1 false)
  %q = getelementptr i8, ptr %p, i64 %n
  call void @llvm.memcpy.p0.p0.i64(ptr noundef %q, ptr %p, i64 %n, i1 false)
  store <2 x half> <half 1.0, half 2.0>, ptr %p, align 2
  store atomic i64 5, ptr %q release, align 8
  %before = atomicrmw add ptr %q, i64 2 seq_cst
  %swapped = cmpxchg ptr %q, i64 7, i64 11 seq_cst seq_cst
  %done = extractvalue {{ i64, i1 }} %swapped, 1
  %one = zext i1 %done to i64
  %value = load atomic i64, ptr %q seq_cst, align 8
  %sum = add i64 %value, %one
  %all = add i64 %sum, %before
  ret i64 %all
}}
attributes #0 = {{ nounwind }}
!0 = !{{!1, !1, i64 0}}
!1 = !{{!"any", !2, i64 0}}
!2 = !{{!"root"}}
"""
READS = [("read", 0, 2), ("read", 0, 12), ("read", 0, 16), ("read", "constant", 1)]
COPIES = [("write", 0, 32), ("write", 64, 64), ("read", 0, 64), ("write", 0, 4)]
SEQUENTIAL, RELEASE = 5, 3


def told(sanitizer: Sanitizer) -> list[tuple]:
    """What the functions of a sanitizer are called with by MODULE; it returns 5 + 13 - 1."""
    memory = (ctypes.c_int64 * 32)()
    start, found = ctypes.addressof(memory), []

    def place(address: int) -> int | str:
        return address - start if 0 <= address - start < 256 else "constant"

    def note(*what: object) -> None:
        found.append(what)

    def says(what: str):
        return ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(
            lambda address, size: note(what, place(address), size)
        )

    def atomic(what: str, operands: int, change):
        def call(address: int, *values: int) -> int:
            note(what, place(address), *values)
            cell = memory[(address - start) // 8]
            memory[(address - start) // 8] = change(cell, *values[:operands])
            return cell

        orders = 2 if operands == 2 else 1
        kinds = [ctypes.c_int64] * (1 + operands) + [ctypes.c_int32] * orders
        return ctypes.CFUNCTYPE(ctypes.c_int64, *kinds)(call)

    functions = {
        "__asan_loadN_noabort": says("read"),
        "__asan_storeN_noabort": says("write"),
        "__tsan_read_range": says("read"),
        "__tsan_write_range": says("write"),
        "__tsan_func_entry": ctypes.CFUNCTYPE(None, ctypes.c_int64)(
            lambda _: found.append(("in",))
        ),
        "__tsan_func_exit": ctypes.CFUNCTYPE(None)(lambda: found.append(("out",))),
        "__tsan_atomic64_load": atomic("load", 0, lambda old: old),
        "__tsan_atomic64_store": atomic("store", 1, lambda old, new: new),
        "__tsan_atomic64_fetch_add": atomic("add", 1, lambda old, more: old + more),
        "__tsan_atomic64_compare_exchange_val": atomic(
            "swap", 2, lambda old, expected, new: new if old == expected else old
        ),
    }
    initialize_llvm()
    module = llvm.parse_assembly(instrumented(MODULE, sanitizer))
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine()
    with llvm.create_mcjit_compiler(module, machine) as engine:
        for function in module.functions:
            if function.name in functions:
                address = ctypes.cast(functions[function.name], ctypes.c_void_p).value
                engine.add_global_mapping(function, address)
        engine.finalize_object()
        run = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        assert run(engine.get_function_address("accesses"))(start, 64) == 11 + 1 + 5
    return found


def test_address_sanitizer_is_told_of_every_access() -> None:
    atomics = [("write", 64, 8), ("write", 64, 8), ("write", 64, 8), ("read", 64, 8)]
    assert told(Sanitizer.ADDRESS) == READS + COPIES + atomics


def test_thread_sanitizer_does_the_atomic_operations() -> None:
    atomics = [
        ("store", 64, 5, RELEASE),
        ("add", 64, 2, SEQUENTIAL),
        ("swap", 64, 7, 11, SEQUENTIAL, SEQUENTIAL),
        ("load", 64, SEQUENTIAL),
    ]
    assert told(Sanitizer.THREAD) == [("in",), *READS, *COPIES, *atomics, ("out",)]


def test_what_is_not_known_is_refused() -> None:
    gather = "  %x = call <2 x i8> @llvm.masked.gather.v2i8.v2p0(<2 x ptr> %p, i32 1)"
    with pytest.raises(ValueError, match="not known to sanitizers: %x = call <2 x i8>"):
        instrumented(f"\ndefine void @f() {{\n{gather}\n}}\n", Sanitizer.ADDRESS)

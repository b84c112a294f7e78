"""LLVM IR with the calls that AddressSanitizer and ThreadSanitizer need at every access to memory.

numba's LLVM has no pass that adds them, so it is done here: in the text of a module, after it is
optimized and before code is made of it. The functions called are those of LLVM's passes, which
libasan and libtsan export (compiler-rt/lib/asan/asan_interface_internal.h, tsan_interface.h).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from enum import Enum

_OPENING, _CLOSING = "([{<", ")]}>"
_BITS = {"half": 16, "bfloat": 16, "float": 32, "double": 64, "ptr": 64}
_ORDERS = {"monotonic": 0, "acquire": 2, "release": 3, "acq_rel": 4, "seq_cst": 5}
_COPIES = re.compile(r"call void @llvm\.(memcpy|memmove|memset)\.[^(]*\((.*)\)")
# Calls that get pointers and read or write nothing behind them.
_HARMLESS = re.compile(r"@llvm\.(prefetch|lifetime|assume|dbg|stacksave|stackrestore|invariant)")
_CHECKED = "bench.sanitize"  # of a module that has the calls


class Sanitizer(Enum):
    """What looks at accesses. The value is its library's name."""

    ADDRESS = "asan"
    THREAD = "tsan"


_DECLARED = {
    Sanitizer.ADDRESS: """
declare void @__asan_loadN_noabort(i64, i64)
declare void @__asan_storeN_noabort(i64, i64)
""",
    Sanitizer.THREAD: """
declare void @__tsan_read_range(ptr, i64)
declare void @__tsan_write_range(ptr, i64)
declare void @__tsan_func_entry(ptr)
declare void @__tsan_func_exit()
declare i64 @__tsan_atomic64_load(ptr, i32)
declare void @__tsan_atomic64_store(ptr, i64, i32)
declare i64 @__tsan_atomic64_fetch_add(ptr, i64, i32)
declare i64 @__tsan_atomic64_fetch_sub(ptr, i64, i32)
declare i64 @__tsan_atomic64_compare_exchange_val(ptr, i64, i64, i32, i32)
""",
}


def instrumented(ir: str, sanitizer: Sanitizer) -> str:
    """The text of a module, with calls before each load and store.

    Atomic operations become calls of ThreadSanitizer, which does them. Raises ValueError for an
    instruction that reads or writes memory in a way that is not known here.
    """
    if _CHECKED in ir or "\ndefine " not in ir:
        return ir
    found: list[str] = []
    numbers = iter(range(10**9))
    entered = ""  # the function that begins here
    for line in ir.splitlines():
        if line.startswith("define ") and sanitizer is Sanitizer.THREAD:
            entered = re.findall(r'@("[^"]*"|[^(]*)\(', line)[0]
        elif entered and not line.endswith(":"):  # the label of its first block
            found.append(f"  call void @__tsan_func_entry(ptr @{entered})")
            entered = ""
        found += _line(line, sanitizer, lambda: f"%checked.{next(numbers)}")
    return "\n".join(found) + f"\n{_DECLARED[sanitizer]}; {_CHECKED}\n"


def _line(line: str, sanitizer: Sanitizer, name: Callable[[], str]) -> Iterator[str]:
    """A line, with what comes before and after it, or what takes its place."""
    text = line.strip()
    threads = sanitizer is Sanitizer.THREAD
    if text.startswith(("declare ", "define ")):
        yield line
        return
    result, operation = text.split(" = ", 1) if text.startswith("%") else ("", text)
    operation = operation.removeprefix("tail ").removeprefix("musttail ")
    word = operation.split(" ", 1)[0]
    if word in ("load", "store", "atomicrmw", "cmpxchg"):
        if threads and (word in ("atomicrmw", "cmpxchg") or " atomic " in operation):
            yield from _atomic(word, result, operation, name)
            return
        yield from _access(word, operation, sanitizer, name)
    elif copy := _COPIES.search(operation):
        yield from _copy(copy[1], _parts(copy[2]), sanitizer, name)
    elif "@llvm." in operation and "ptr" in operation and not _HARMLESS.search(operation):
        raise ValueError(f"not known to sanitizers: {text}")
    elif word == "ret" and threads:
        yield "  call void @__tsan_func_exit()"
    yield line


def _access(
    word: str, operation: str, sanitizer: Sanitizer, name: Callable[[], str]
) -> Iterator[str]:
    first, second = _parts(operation)[:2]
    writes = word != "load"
    if word == "load":
        pointer, kind = second, first.removeprefix("load ")
    elif word == "store":
        pointer, kind = second, first.removeprefix("store ")
    else:  # an atomic change: where, and a value
        pointer, kind = first.split(" ptr ", 1)[1], second
        pointer = f"ptr {pointer}"
    kind = _first(kind.removeprefix("atomic ").removeprefix("volatile "))
    yield from _check(writes, pointer, _size(kind), sanitizer, name)


def _copy(
    what: str, operands: list[str], sanitizer: Sanitizer, name: Callable[[], str]
) -> Iterator[str]:
    to, source, size = operands[:3]
    size = size.split()[-1]
    yield from _check(True, to, size, sanitizer, name)
    if what != "memset":
        yield from _check(False, source, size, sanitizer, name)


def _check(
    writes: bool, pointer: str, size: int | str, sanitizer: Sanitizer, name: Callable[[], str]
) -> Iterator[str]:
    """The call before an access. pointer: with its type and attributes."""
    pointer = f"ptr {_value(pointer)}"
    if sanitizer is Sanitizer.THREAD:
        function = "__tsan_write_range" if writes else "__tsan_read_range"
        yield f"  call void @{function}({pointer}, i64 {size})"
    else:
        function = "__asan_storeN_noabort" if writes else "__asan_loadN_noabort"
        address = name()
        yield f"  {address} = ptrtoint {pointer} to i64"
        yield f"  call void @{function}(i64 {address}, i64 {size})"


def _atomic(word: str, result: str, operation: str, name: Callable[[], str]) -> Iterator[str]:
    """ThreadSanitizer's own operation on 64 bits in place of an atomic one."""
    parts = _parts(operation)
    if word == "load":
        pointer, order = parts[1].rsplit(" ", 1)
        yield f"  {result} = call i64 @__tsan_atomic64_load({pointer}, i32 {_ORDERS[order]})"
    elif word == "store":
        pointer, order = parts[1].rsplit(" ", 1)
        value = parts[0].removeprefix("store atomic ")
        yield f"  call void @__tsan_atomic64_store({pointer}, {value}, i32 {_ORDERS[order]})"
    elif word == "atomicrmw" and (change := operation.split()[1]) in ("add", "sub"):
        pointer = parts[0].removeprefix(f"atomicrmw {change} ")
        value, order = parts[1].rsplit(" ", 1)
        yield (
            f"  {result} = call i64 @__tsan_atomic64_fetch_{change}({pointer}, {value}, "
            f"i32 {_ORDERS[order]})"
        )
    elif word == "cmpxchg":
        pointer, expected = parts[0].removeprefix("cmpxchg "), parts[1]
        value, order, failed = parts[2].rsplit(" ", 2)
        found, same, both = name(), name(), name()
        yield (
            f"  {found} = call i64 @__tsan_atomic64_compare_exchange_val({pointer}, {expected}, "
            f"{value}, i32 {_ORDERS[order]}, i32 {_ORDERS[failed]})"
        )
        yield f"  {same} = icmp eq {expected}, {found}"
        yield f"  {both} = insertvalue {{ i64, i1 }} undef, i64 {found}, 0"
        yield f"  {result} = insertvalue {{ i64, i1 }} {both}, i1 {same}, 1"
    else:
        raise ValueError(f"not known to sanitizers: {operation}")


def _parts(text: str) -> list[str]:
    """What is between commas that are not in brackets or quotes."""
    found, depth, quoted, start = [], 0, False, 0
    for i, c in enumerate(text):
        if c == '"':
            quoted = not quoted
        elif not quoted:
            depth += (c in _OPENING) - (c in _CLOSING)
            if c == "," and depth == 0:
                found.append(text[start:i].strip())
                start = i + 1
    return [*found, text[start:].strip()]


def _first(text: str) -> str:
    """A word, or what is between brackets."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c in _OPENING) - (c in _CLOSING)
        if depth == 0 and (c == " " or c in _CLOSING):
            return text[: i + (c in _CLOSING)]
    return text


def _value(pointer: str) -> str:
    """A pointer alone: of `ptr noundef align 8 %x seq_cst` it is %x."""
    found = re.search(
        r"""[%@](?:"[^"]*"|[^\s,]+)|\bnull\b|(?:getelementptr|inttoptr)\b.*\)""", pointer
    )
    if found is None:
        raise ValueError(f"no pointer: {pointer}")
    return found[0]


def _size(kind: str) -> int | str:
    """Bytes of a type; of a structure, an expression."""
    if vector := re.fullmatch(r"<(\d+) x (\w+)>", kind):
        return (int(vector[1]) * _bits(vector[2]) + 7) // 8
    if kind[0] in "{[":
        return f"ptrtoint (ptr getelementptr ({kind}, ptr null, i32 1) to i64)"
    return (_bits(kind) + 7) // 8


def _bits(kind: str) -> int:
    return _BITS[kind] if kind in _BITS else int(kind.removeprefix("i"))

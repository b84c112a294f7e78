"""Triton's interpreter made several times as fast; what kernels compute stays the same.

What a function of `triton.language` does follows from its operands' types and constants alone: a
few steps of numpy, found by thousands of lines of Python. Here they are found once, and repeated
for other operands of the same types.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from types import NoneType, SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle, interpreter_builder, interpreter_semantic

# What the builder is asked for that is not the same each time, or is done for its effect.
_NOT_CONSTANT = frozenset(
    {
        "create_get_program_id",
        "create_get_num_programs",
        "create_assert",
        "create_assume",
        "create_barrier",
        "create_print",
    }
)
_MOST = 4096  # lists of steps that are kept of one function
_TENSOR = tl.tensor
_NEW: Any = object()


class _UnknownError(Exception):
    """An operand that is neither a tensor nor a constant."""


def _describe(x: Any, handles: list[TensorHandle]) -> Any:
    """The type of a tensor, whose handle is added to `handles`, or the value of a constant."""
    kind = type(x)
    if kind is tl.tensor:
        handles.append(x.handle)
        return x.type.name
    if kind in (int, bool, str, NoneType):
        return kind, x
    if kind is tl.constexpr:
        return kind, _describe(x.value, handles)
    if kind is float:
        return kind, x.hex()
    if kind is slice:
        return kind, *[_describe(y, handles) for y in (x.start, x.stop, x.step)]
    if kind in (tuple, list, tl.tuple):
        return kind, *[_describe(y, handles) for y in x]
    if isinstance(x, tl.dtype):
        return kind, x.name
    raise _UnknownError


class _Recorder:
    """The interpreter's builder, which notes what it does in one call of a function.

    Handles have numbers: the operands' come first, then those that the steps make.
    """

    def __init__(self, handles: list[TensorHandle]) -> None:
        # A method, its arguments, which of these are which handles, and how many it makes; 0: one,
        # which is not in a tuple.
        self.steps: list[tuple[Any, list[Any], dict[str, Any], list[tuple[int, int]], int]] = []
        self.operands = len(handles)
        self.complete = True  # the steps say all
        self._count = len(handles)
        self._numbers = {id(handle): number for number, handle in enumerate(handles)}
        self._constants: set[int] = set()
        self._alive: list[Any] = [*handles]  # so that an id stands for one of them

    def __getattr__(self, name: str) -> Any:
        found = getattr(interpreter_builder, name)
        return partial(self._call, name, found) if callable(found) else found

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        self._alive.append(result)
        made = result if isinstance(result, tuple) else (result,)
        fills = [(at, self._numbers[id(x)]) for at, x in enumerate(args) if id(x) in self._numbers]
        if fills or name in _NOT_CONSTANT:
            self.complete &= all(map(self._is_known, (*args, *kwargs.values())))
            self.complete &= not any(id(x) in self._numbers for x in kwargs.values())
            self.steps.append((method, [*args], kwargs, fills, len(made) * (made is result)))
            for one in made:
                if isinstance(one, TensorHandle):
                    self._numbers[id(one)] = self._count
                self._count += 1
        else:
            self._constants.update(id(one) for one in made if isinstance(one, TensorHandle))
        return result

    def _is_known(self, x: Any) -> bool:
        if isinstance(x, list | tuple):
            return not any(isinstance(y, TensorHandle) for y in x)
        return not isinstance(x, TensorHandle) or id(x) in self._numbers or id(x) in self._constants

    def place(self, result: Any) -> tuple[int | TensorHandle, Any]:
        """The number of a result's handle, or the handle if it is constant, and its type."""
        if type(result) is tl.tensor and self._is_known(result.handle):
            return self._numbers.get(id(result.handle), result.handle), result.type
        self.complete = False
        return 0, None


def _repeat(recorder: _Recorder, result: Any) -> Callable[..., Any] | None:
    """The recorded steps as a function of the operands' handles, if they can be repeated.

    Written as source and compiled: a kernel takes 100,000 of them, and each is a call or two.
    """
    several = type(result) in (tuple, list, tl.tuple)
    found = result if several else () if result is None else (result,)
    places = [recorder.place(x) for x in found]
    if not recorder.complete:
        return None
    scope: dict[str, Any] = {"new": object.__new__, "Tensor": _TENSOR, "kind": type(result)}

    def name(x: Any) -> str:
        scope[known := f"c{len(scope)}"] = x
        return known

    count = recorder.operands
    lines = [f"def repeated({', '.join(f'h{i}' for i in range(count))}):"]
    for method, args, kwargs, fills, made in recorder.steps:
        of = dict(fills)
        given = [f"h{of[at]}" if at in of else name(x) for at, x in enumerate(args)]
        given += [f"{key}={name(x)}" for key, x in kwargs.items()]
        targets = "".join(f"h{count + i}, " for i in range(made)) if made else f"h{count}"
        lines.append(f"{targets} = {name(method)}({', '.join(given)})")
        count += made or 1
    for i, (place, type_) in enumerate(places):
        lines.append(f"x{i} = new(Tensor)")
        said = {"handle": f"h{place}" if type(place) is int else name(place), "type": name(type_)}
        # What `make_fast` notes of a type.
        rest = zip(("shape", "numel", "dtype"), type_.of_tensors, strict=True)
        said |= {key: name(x) for key, x in rest}
        lines += [f"x{i}.{key} = {x}" for key, x in said.items()]
    all_of_them = ", ".join(f"x{i}" for i in range(len(places)))
    lines.append(f"return kind([{all_of_them}])" if several else f"return {all_of_them or None}")
    exec(_compiled("\n    ".join(lines)), scope)
    repeated: Callable[..., Any] = scope["repeated"]
    return repeated


@lru_cache(None)
def _compiled(source: str) -> Any:
    """Few are different: what they are about, they have names for."""
    return compile(source, "<steps>", "exec")


def _remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `triton.language` that finds the steps for operands of each types once."""
    known: dict[Any, Callable[..., Any] | None] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("_semantic", None)
        if interpreter_semantic.builder is not interpreter_builder:  # of a call that is recorded
            return function(*args, **kwargs, _semantic=interpreter_semantic)
        handles: list[TensorHandle] = []
        add = handles.append
        try:
            # Most operands are tensors, which need no call.
            key: Any = tuple(
                [
                    x.type.name
                    if type(x) is _TENSOR and not add(x.handle)
                    else _describe(x, handles)
                    for x in args
                ]
            )
            if kwargs:
                key += (*kwargs, *[_describe(x, handles) for x in kwargs.values()])
        except _UnknownError:
            return function(*args, **kwargs, _semantic=interpreter_semantic)
        count = len(handles)
        if (count == 2 and handles[0] is handles[1]) or (
            count > 2 and len({*map(id, handles)}) < count
        ):
            key += ("same", *[[id(x) for x in handles].index(id(handle)) for handle in handles])
        repeated = known.get(key, _NEW)
        if repeated is _NEW:
            recorder = _Recorder(handles)
            interpreter_semantic.builder = recorder
            try:
                result = function(*args, **kwargs, _semantic=interpreter_semantic)
            finally:
                interpreter_semantic.builder = interpreter_builder
            if len(known) == _MOST:
                known.clear()
            known[key] = _repeat(recorder, result)
            return result
        if repeated is not None:
            return repeated(*handles)
        return function(*args, **kwargs, _semantic=interpreter_semantic)

    return call


def _refuse_overflow(lhs: TensorHandle, rhs: TensorHandle, how: np.ufunc) -> None:
    """What the interpreter's own check does, which takes six steps."""
    exact = how(lhs.data, rhs.data, dtype=np.int64)
    least, most = lhs.dtype.get_int_min_value(), lhs.dtype.get_int_max_value()
    inside = exact.min() >= least and exact.max() <= most
    assert inside, f"int{lhs.dtype.int_bitwidth} overflow detected for operation {how.__name__}"


def _check_overflow(self: Any, lhs: Any, rhs: Any, operation: Callable[..., Any]) -> None:
    if lhs.dtype.int_bitwidth < 64:
        self.builder.refuse_overflow(lhs.handle, rhs.handle, _EXACT[operation.__name__])


_EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def make_fast() -> None:
    """Save most of the interpreter's time, in this process from now on.

    It patches `triton.language` at a launch, and then again for each call from one kernel function
    to another. Here a launch patches all that any of them may use. Types of blocks, and what a
    tensor says of its type, are made once, as are the steps of its functions.
    """
    patch, remembered = interpreter._patch_lang, lru_cache(None)(_remembered)
    everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    changes: list[tuple[Any, str, Any]] = []

    def patch_once(function: object) -> Any:
        """What a launch patches is found at the first, and set again at each."""
        if not changes:
            scope = patch(everything)
            names = {(id(owner), name): owner for owner, name, _ in scope._changes}
            changes.extend((owner, name, vars(owner)[name]) for (_, name), owner in names.items())
            return scope
        scope = interpreter._LangPatchScope()
        for owner, name, value in changes:
            scope.set_attr(owner, name, value)
        return scope

    interpreter._patch_lang = patch_once
    interpreter._patch_attr = lambda owner, name, member, builder, scope: scope.set_attr(
        owner, name, remembered(member)
    )
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **options: self.rewrite()(
        *args, **options
    )
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
    interpreter_builder.refuse_overflow = _refuse_overflow
    bytes_of: dict[str, int] = {}

    def fits(array: Any, dtype: Any) -> bool:
        if dtype.name not in bytes_of:
            wide = isinstance(dtype, tl.pointer_type)
            bytes_of[dtype.name] = 8 if wide else max(1, dtype.primitive_bitwidth // 8)
        return array.itemsize <= bytes_of[dtype.name]

    interpreter._validate_np_data_size = fits
    check = TensorHandle.__post_init__

    def handle(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > bytes_of.get(dtype.name, 0):
            check(self)

    TensorHandle.__init__ = handle
    builder, cast = interpreter.InterpreterBuilder, interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self: Any, src: TensorHandle, to: Any) -> TensorHandle:
        to_scalar = to.scalar
        kinds = src.dtype.scalar.name, to_scalar.name
        # numpy has no bfloat16: the interpreter takes 25 steps. It cuts off what does not fit.
        if kinds == ("bf16", "fp32"):
            return TensorHandle((src.data.astype(np.uint32) << 16).view(np.float32), to_scalar)
        if kinds == ("fp32", "bf16"):
            bits = np.ascontiguousarray(src.data).view(np.uint32) >> 16
            return TensorHandle(bits.astype(np.uint16), to_scalar)
        if "bf16" in kinds:
            return cast(self, src, to)
        return TensorHandle(src.data.astype(interpreter._get_np_dtype(to)), to_scalar)

    def expand_dims(self: Any, x: TensorHandle, axis: int) -> TensorHandle:
        return TensorHandle(x.data[(slice(None),) * axis + (None,)], x.dtype.scalar)

    builder.cast_impl, builder.create_expand_dims = cast_impl, expand_dims
    pointer, scalar = np.dtype(np.uint64), lru_cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: (
        pointer if isinstance(dtype.scalar, tl.pointer_type) else scalar(dtype.scalar)
    )
    blocks: dict[object, Any] = {}
    fill, describe = tl.block_type.__init__, tl.tensor.__init__

    def block(cls: type, element: Any, shape: Any) -> Any:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        return blocks.setdefault((cls, element.name, sizes), object.__new__(cls))

    def fill_once(self: Any, element: Any, shape: Any) -> None:
        if "name" not in vars(self):
            fill(self, element, shape)

    def tensor(self: Any, handle: object, type: Any) -> None:
        said = vars(type).get("of_tensors")
        if said is None:
            describe(self, handle, type)
            type.of_tensors = self.shape, self.numel, self.dtype
        else:
            self.handle, self.type = handle, type
            self.shape, self.numel, self.dtype = said

    tl.block_type.__new__, tl.block_type.__init__ = block, fill_once
    tl.tensor.__init__ = tensor

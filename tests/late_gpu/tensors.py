"""Tensors of the late GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from .races import Region, Uses
from .streams import DEVICE, Memory

aten = torch.ops.aten
GPU = torch.device("cuda", 0)
# The host has to know numbers before it can go on.
_WAITING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.allclose.default,
}
_pinned: dict[int, Region] = {}


def pin(start: int, nbytes: int) -> None:
    _pinned[start] = Region(start, nbytes)


def unpin(start: int) -> None:
    _pinned.pop(start, None)


def is_pinned(x: Tensor) -> bool:
    return bool(_places(x))


def _places(x: Any) -> list[tuple[Region, Tensor]]:
    """The memory of a tensor that streams may share."""
    if isinstance(x, LateTensor):
        return [(x.memory.region, x.here)]
    if not isinstance(x, Tensor):
        return []
    at = x.data_ptr()
    return [(one, x) for one in list(_pinned.values()) if one.start <= at < one.end][:1]


class LateTensor(Tensor):
    """A tensor on `cuda:0`. here: its numbers, where they are or will be. memory: its storage."""

    here: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, here: Tensor, memory: Memory) -> LateTensor:
        assert not isinstance(here, LateTensor)
        assert here.device.type == "cpu"
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            here.size(),
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=GPU,
        )
        made.here, made.memory = here, memory
        return made

    def __repr__(self) -> str:
        return f"LateTensor({tuple(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        return self.here.data_ptr()

    def untyped_storage(self) -> Any:
        return self.here.untyped_storage()

    def new_tensor(self, data: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype).to(GPU)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """In memory of its own, also where others share it."""
        return memo.setdefault(id(self), self.clone())

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_index(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, bool | int | float):  # torch would make a tensor of it, past Python
            value = torch.tensor(value, dtype=self.dtype)
        super().__setitem__(_index(index), value)

    def numpy(self) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def record_stream(self, stream: Any) -> None:
        self.memory.recorded.add(stream._late)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})


def _index(index: Any) -> Any:
    """An index whose lists are tensors of the host."""
    if isinstance(index, tuple):
        return tuple(map(_index, index))
    return (
        torch.tensor(index, dtype=None if index else torch.long)
        if isinstance(index, list)
        else index
    )


@torch.inference_mode(False)
def allocate(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Factories with a device `cuda`: the fallback of all ops that have no tensor there."""
    kwargs = {**kwargs, "device": torch.device("cpu")}
    kwargs.pop("pin_memory", None)
    return new(partial(op, *args, **kwargs))


def new(make: Callable[[], Tensor]) -> LateTensor:
    """Fresh memory, which holds nothing."""
    here = make()
    poison(here)
    graph = DEVICE.current.capturing
    storage = here.untyped_storage()
    memory = Memory(DEVICE.current, graph, Region(storage.data_ptr(), storage.nbytes()))
    if graph is not None:
        graph.own.append(here)
    return LateTensor(here, memory)


def poison(x: Tensor) -> None:
    bytes_ = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
    bytes_.fill_(0xFF)


@cache
def _is_composite(func: Any) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has(func.name(), "CompositeImplicitAutograd"))


def _inner(x: Any) -> Any:
    return x.here if isinstance(x, LateTensor) else x


@torch.inference_mode(False)
@torch.no_grad()
def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _is_composite(func):  # which inference mode leaves whole
        return func.decompose(*args, **kwargs)
    flat, spec = tree_flatten((args, kwargs))
    late = [x for x in flat if isinstance(x, LateTensor)]
    if func is aten.copy_.default:
        return _copy(*args, **kwargs)
    if func is aten._to_copy.default:
        return _to_copy(*args, **kwargs)
    if func is aten.detach.default or func is aten.alias.default:
        return LateTensor(args[0].here.detach(), args[0].memory)
    if func is aten.is_pinned.default:
        return False
    if func in (aten.record_stream.default,):
        return None
    if func.is_view:
        inner = tree_unflatten([_inner(x) for x in flat], spec)
        memory = late[0].memory
        return tree_map_only(Tensor, lambda x: LateTensor(x, memory), func(*inner[0], **inner[1]))
    if func in (aten.index.Tensor, aten.index_put_.default) and any(map(_is_mask, args[1])):
        DEVICE.synchronize(DEVICE.current, "index with a mask")
        if func is aten.index.Tensor:
            return _eager(func, flat, spec, "index with a mask")
    if func in _WAITING:
        return _eager(func, flat, spec, func.name())
    # Numbers of tensors of the host are read at once.
    flat = [
        x.clone() if isinstance(x, Tensor) and not isinstance(x, LateTensor) else x for x in flat
    ]
    flat = [torch.device("cpu") if isinstance(x, torch.device) else x for x in flat]
    inner_args, inner_kwargs = tree_unflatten([_inner(x) for x in flat], spec)
    memories = [x.memory for x in late]
    written = list(_written(func, args, kwargs).values()) if func._schema.is_mutable else []
    changed = [x for x in tree_flatten(written)[0] if isinstance(x, LateTensor)]
    uses = Uses(
        reads=[place for x in late if not any(x is one for one in changed) for place in _places(x)],
        writes=[place for x in changed for place in _places(x)],
    )
    if func._schema.is_mutable:
        DEVICE.submit(partial(func, *inner_args, **inner_kwargs), memories, func.name(), uses=uses)
        return _mutated(func, args, kwargs)
    try:
        shapes = _on(_meta, func, flat, spec)
    except NotImplementedError:
        return _eager(func, flat, spec, func.name())
    except RuntimeError:  # of torch's own, about a number of the host beside tensors of `meta`
        shapes = _on(_zeros, func, flat, spec)
    flat_shapes, out_spec = tree_flatten(shapes)
    outs = [
        new(partial(torch.empty_strided, x.size(), x.stride(), dtype=x.dtype))
        if isinstance(x, Tensor)
        else x
        for x in flat_shapes
    ]
    if not any(isinstance(x, Tensor) for x in outs):
        return func(*inner_args, **inner_kwargs)  # what is known of shapes

    targets = [_inner(x) for x in outs]
    if func in (aten._softmax.default, aten._log_softmax.default) and inner_args[2]:
        x, dim, _ = inner_args  # a CPU does not widen it on the way

        def compute() -> Tensor:
            return func(x.float(), dim, False)
    elif func is aten.histc.default:  # which a CPU has for floats only
        x, *bins = inner_args

        def compute() -> Tensor:
            return func(x.double(), *bins, **inner_kwargs)
    else:
        compute = partial(func, *inner_args, **inner_kwargs)

    def run() -> None:
        found = tree_flatten(compute())[0]
        for target, one in zip(targets, found, strict=True):
            if isinstance(target, Tensor):
                target.copy_(one)

    memories += [x.memory for x in outs if isinstance(x, LateTensor)]
    uses.writes += [place for x in outs if isinstance(x, LateTensor) for place in _places(x)]
    if any(x.numel() for x in targets if isinstance(x, Tensor)):
        DEVICE.submit(run, memories, func.name(), uses=uses)
    return tree_unflatten(outs, out_spec)


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _eager(func: Any, flat: list[Any], spec: Any, why: str) -> Any:
    """Do it now, behind the current stream's work."""
    if DEVICE.current.capturing is None:
        uses = Uses(
            reads=[place for x in flat if isinstance(x, LateTensor) for place in _places(x)]
        )
        DEVICE.submit(lambda: None, name=why, uses=uses)
    DEVICE.synchronize(DEVICE.current, why)
    DEVICE.eager[why] += 1
    flat = [torch.device("cpu") if isinstance(x, torch.device) else x for x in flat]
    args, kwargs = tree_unflatten([_inner(x) for x in flat], spec)
    found = func(*args, **kwargs)

    def wrap(x: Tensor) -> LateTensor:
        made = new(partial(torch.empty_like, x))
        made.here.copy_(x)
        return made

    return tree_map_only(Tensor, wrap, found)


def _meta(x: Any) -> Any:
    if isinstance(x, Tensor):
        here = _inner(x)
        return torch.empty_strided(here.size(), here.stride(), dtype=here.dtype, device="meta")
    return torch.device("meta") if isinstance(x, torch.device) else x


def _zeros(x: Any) -> Any:
    if isinstance(x, Tensor):
        here = _inner(x)
        return torch.empty_strided(here.size(), here.stride(), dtype=here.dtype).zero_()
    return x


def _on(stand_in: Callable[[Any], Any], func: Any, flat: list[Any], spec: Any) -> Any:
    """What an op gives for stand-ins of its arguments."""
    args, kwargs = tree_unflatten([stand_in(x) for x in flat], spec)
    return func(*args, **kwargs)


def _mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an op returns that writes to its arguments: these."""
    by_name = _written(func, args, kwargs)
    found = []
    for one in func._schema.returns:
        assert one.alias_info is not None, func
        found.append(by_name[next(iter(one.alias_info.before_set))])
    return None if not found else found[0] if len(found) == 1 else tuple(found)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that an op writes to, by their names in its schema's aliases."""
    found: dict[str, Any] = {}
    for at, argument in enumerate(func._schema.arguments):
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            found[next(iter(argument.alias_info.before_set), argument.name)] = value
    return found


def _copy(dest: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    memories = [x.memory for x in (dest, source) if isinstance(x, LateTensor)]
    to, origin = _inner(dest), _inner(source)
    if not isinstance(source, LateTensor):
        waits = is_pinned(source) and not non_blocking
        if not is_pinned(source):
            origin = source.clone()
    else:
        waits = not isinstance(dest, LateTensor) and not (non_blocking and is_pinned(dest))
    uses = Uses(reads=_places(source), writes=_places(dest))
    DEVICE.submit(partial(to.copy_, origin), memories, "copy", uses=uses)
    if waits:
        DEVICE.synchronize(DEVICE.current, "blocking copy")
    return dest


def _to_copy(
    source: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Tensor:
    where = (device or source.device).type
    like = torch.empty_like(
        _inner(source),
        dtype=dtype or source.dtype,
        device="meta" if where == "meta" else "cpu",
        memory_format=memory_format or torch.preserve_format,
    )
    if where == "meta":
        return like
    if where == "cuda":
        dest: Tensor = new(lambda: like)
    else:
        dest = like
        if non_blocking:  # torch makes it pinned
            pin(like.data_ptr(), like.nbytes)
    return _copy(dest, source, non_blocking)

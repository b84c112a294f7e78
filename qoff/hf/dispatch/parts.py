"""Which modules of any model can stream: its layers, or all with tensors of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import nn

from qoff.errors import ArgumentError

from .units import HOST, Part, layers_of
from .values import saved, saved_of

_LISTS = (nn.ModuleList, nn.ModuleDict)  # without a forward, as those of parameters
_PARAMETERS = (nn.ParameterList, nn.ParameterDict)
_ORDER = {"": 0, HOST: 1}  # from the fastest place to the slowest


def parts_of(
    model: nn.Module,
    classes: Collection[str] | None = None,
    whole: Collection[str] | None = None,
) -> list[Part]:
    """The layers of a model; of one without layers, the outermost modules with own tensors.

    classes: as `layers_of`. whole: further classes, whose modules come with all that is in them.
    """
    found = layers_of(model, classes) or list(leaves(model))
    named = [(path, m) for path, m in model.named_modules() if type(m).__name__ in (whole or ())]
    outer = [(path, m) for path, m in named if not _within(path, [p for p, _ in named])]
    paths = [path for path, _ in outer]
    found = [(p, m) for p, m in found if p not in paths and not _within(p, paths)]
    layers = [path for path, _ in found]
    return found + [(p, m) for p, m in outer if not _within(p, layers)]


def leaves(model: nn.Module, path: str = "", beside: Collection[str] = ()) -> Iterator[Part]:
    """The outermost modules with tensors of their own; those of the model itself are left out.

    But where it has no others. beside: paths of modules that are left out, with all around them.
    """
    inner = [(f"{path}.{n}" if path else n, m) for n, m in model.named_children() if _weighs(m)]
    around = any(_within(other, [path]) for other in beside)
    alone = _own(model) and not isinstance(model, _LISTS)
    if path in beside or not _weighs(model):
        return
    if alone and not around and (path or all(isinstance(m, _PARAMETERS) for _, m in inner)):
        yield path, model
        return
    for name, module in inner:
        yield from leaves(module, name, beside)


def mapped(
    model: nn.Module, device_map: Mapping[str, str], whole: Collection[str] | None
) -> dict[str, tuple[nn.Module, str]]:
    """The modules that a device map has elsewhere than on the device, by name, and where.

    device_map: places, "" for the device. A layer that it splits streams by its modules. One that
    cannot be split is whole in the slowest of the places. Raises ArgumentError where the map says
    nothing of a parameter.
    """
    places = {name: _place(device_map, name) for _, _, name in saved(model)}
    parts = parts_of(model, None, whole)
    known = [path for path, _ in parts]
    parts += [] if "" in known else leaves(model, "", known)
    found = {
        path: (module, place)
        for part, top in parts
        for path, module, place in _split(part, top, places, frozenset(whole or ()))
        if place
    }
    order = [path for path, _ in model.named_modules(remove_duplicate=False) if path in found]
    return {path: found[path] for path in order}


def _split(
    path: str, module: nn.Module, places: Mapping[str, str], whole: frozenset[str]
) -> Iterator[tuple[str, nn.Module, str]]:
    """A module if it has one place, or else those in it."""
    start = f"{path}." if path else ""
    own = [places[start + name] for _, _, name in saved(module)]
    if not own:
        return
    slowest = max(own, key=lambda place: _ORDER.get(place, 2))
    together = _own(module) or type(module).__name__ in whole
    if (together or len(set(own)) == 1) and not isinstance(module, _LISTS):
        yield path, module, slowest
        return
    for name, child in module.named_children():
        yield from _split(f"{start}{name}", child, places, whole)


def _place(device_map: Mapping[str, str], name: str) -> str:
    above = [key for key in device_map if not key or f"{name}.".startswith(f"{key}.")]
    if not above:
        raise ArgumentError(f"device_map: says nothing of {name}; name it, or a module above it")
    return device_map[max(above, key=len)]


def _own(module: nn.Module) -> bool:
    """Whether it has tensors that are not those of a module with a forward."""
    return bool(saved_of(module)) or any(
        isinstance(m, _PARAMETERS) and saved_of(m) for m in module.children()
    )


def _weighs(module: nn.Module) -> bool:
    return any(map(saved_of, module.modules()))


def _within(path: str, tops: Collection[str]) -> bool:
    """Whether a module is in one of these, and is none of them."""
    return any(path != top and (not top or path.startswith(f"{top}.")) for top in tops)

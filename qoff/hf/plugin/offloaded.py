"""A layer of a transformers model that has its weights only while it runs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from qoff.checkpoint.layout import QuantEntry, WeightFile
from qoff.errors import StreamedError
from qoff.hf.packed.module import CodesModule
from qoff.kernels.layout.packing import ROW_BLOCK, packed_shapes
from qoff.kernels.layout.qexperts import QExperts
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.upload import on_device
from qoff.memory import Weights, WeightStore
from qoff.memory.plan import local_names
from qoff.quant.rows import reordered

from .install import Packed, experts_module, install, tensors_of
from .units import StoredWeight

_Find = Callable[[Weights], Packed]
NOT_LOADED = "and nothing can be loaded into it; load the weights before the model streams"


class Place(Protocol):
    """A module, or some, that have their weights only while a layer runs."""

    @property
    def empty(self) -> Any:
        """What they have without."""

    @property
    def find(self) -> Callable[[Weights], Any]:
        """What gives them theirs, among those of their layer."""

    def put(self, value: Any, /) -> None:
        """Have them compute with it."""


class _Place(NamedTuple):
    """A packed module, what finds its codes among a layer's weights, and what it has without."""

    module: CodesModule
    find: _Find
    empty: Packed

    def put(self, packed: Packed) -> None:
        module = self.module
        module._buffers["codes"], module._buffers["scale_min"] = packed.codes, packed.scale_min
        module.__dict__["_packed"] = packed
        module.__dict__.pop("_dense", None)  # of a router


class OffloadedLayer:
    """Takes the place of a layer's `forward`, which cannot be copied then; `qoff.train` trains it.

    Raises StreamedError where a backward pass would need it, and for a second thread in any layer.
    """

    def __init__(
        self,
        layer: nn.Module,
        store: WeightStore,
        turn: threading.Lock,
        unit: int,
        places: Sequence[Place],
    ) -> None:
        """turn: one for all layers. unit: what the store calls this one."""
        self._layer, self.own = layer, layer.forward
        self.store, self._turn, self.unit = store, turn, unit
        self._places = places
        functools.update_wrapper(self, self.own)
        self._layer.forward = self
        self._guards = refusing_loads(layer.modules())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            given = [*args, *kwargs.values(), *self._layer.parameters()]
            _refuse_gradients(given)
        self.hold()
        try:
            result = self._to_keep(self.own(*args, **kwargs))
        finally:
            self.give_back()
        if torch.is_grad_enabled():
            _refuse_gradients(tree_leaves(result))  # of what a cache holds, as a learned prefix
        return result

    def _to_keep(self, result: Any) -> Any:
        """A result that has memory of its own: a layer may return weights, as of positions."""
        leaves, structure = tree_flatten(result)
        lent = [isinstance(x, Tensor) and self.store.has(x) for x in leaves]
        if not any(lent):
            return result
        kept = [x.clone() if its else x for x, its in zip(leaves, lent, strict=True)]
        return tree_unflatten(kept, structure)

    def hold(self) -> None:
        """Wait for the weights; `own` computes with them until `give_back`."""
        if not self._turn.acquire(blocking=False):
            raise StreamedError(
                "a model whose layers stream runs one forward pass at a time, and another thread "
                "is in one; take turns, or load it with qoff.LLM"
            )
        try:
            weights = self.store.acquire(self.unit)
        except BaseException:
            self._turn.release()
            raise
        done: list[Place] = []
        try:
            for place in self._places:
                place.put(place.find(weights))
                done.append(place)
        except StreamedError:  # by a place that has put nothing: what was set there stays
            self._release(done)
            raise
        except BaseException:
            self.give_back()
            raise

    def give_back(self) -> None:
        """Take the weights back: their slot may be read into again."""
        self._release(self._places)

    def _release(self, places: Sequence[Place]) -> None:
        try:
            for place in places:
                place.put(place.empty)
        finally:
            self.store.release(self.unit)
            self._turn.release()

    def retire(self) -> None:
        """Let weights be loaded into the layer: it has its own again."""
        for guard in self._guards:
            guard.remove()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StreamedError(
            "a model whose layers stream can be neither copied nor pickled; load it again"
        )


def refusing_loads(modules: Iterable[nn.Module]) -> list[RemovableHandle]:
    """Have `load_state_dict` of these refuse values of weights that stream, before it loads any."""
    return [module.register_load_state_dict_pre_hook(_refuse_loading) for module in modules]


def _refuse_loading(
    module: nn.Module, state_dict: Mapping[str, Tensor], prefix: str, *_: object
) -> None:
    """Raise StreamedError for values of what a module, or one in it, is without."""
    for path, part in module.named_modules(prefix=prefix.removesuffix("."), remove_duplicate=False):
        for own, x in tensors_of(part).items():
            name = f"{path}.{own}" if path else own
            value = state_dict.get(name)
            if x.is_meta and value is not None and not value.is_meta:
                raise StreamedError(f"{name} streams, {NOT_LOADED}")


def _refuse_gradients(tensors: Iterable[object]) -> None:
    """Raise StreamedError if any of these needs one: the weights are gone by the backward pass."""
    if any(isinstance(x, Tensor) and x.requires_grad for x in tensors):
        raise StreamedError(
            "a layer that streams has no backward pass; use torch.no_grad(), or train adapters by "
            "qoff.train.offload"
        )


def packed_places(
    model: PreTrainedModel, unit: int, streamed: Sequence[StoredWeight], file: WeightFile
) -> Iterator[_Place]:
    """Replace modules by packed ones without codes, and say where theirs come from."""
    names = local_names(unit, [stored.name for stored in streamed])
    experts: dict[str, list[StoredWeight]] = {}
    for stored in streamed:
        entry = file.weights[stored.name]
        assert isinstance(entry, QuantEntry)
        if stored.expert is not None:
            experts.setdefault(stored.targets[0], []).append(stored)
            continue
        for order, target in zip(stored.orders, stored.targets, strict=True):
            path = target.removesuffix(".weight")
            empty = _empty((len(order), entry.shape[1]), entry)
            install(model, path, empty)
            module = cast(CodesModule, model.get_submodule(path))
            yield _Place(module, _rows(names[stored.name], order, entry.shape[0]), empty)
    for target, found in experts.items():
        path, _, parameter = target.rpartition(".")
        entry = file.weights[found[0].name]
        assert isinstance(entry, QuantEntry)
        one = _empty(entry.shape, entry)
        codes, scale_min = (x.expand(len(found), *x.shape) for x in (one.codes, one.scale_min))
        none = QExperts(codes, scale_min, one.shape, one.bits, one.group_size, one.packing)
        experts_module(model, path).hold(parameter, none)
        module = cast(CodesModule, model.get_submodule(target))
        yield _Place(module, _all_of([names[stored.name] for stored in found]), none)


def _rows(name: str, order: Tensor, rows: int) -> _Find:
    """Rows `order` of a matrix of so many rows; in the same memory where they are neighbours."""
    start, stop = int(order[0]), int(order[-1]) + 1
    neighbours = torch.equal(order, torch.arange(start, stop))
    whole_blocks = start % ROW_BLOCK == 0 and (stop % ROW_BLOCK == 0 or stop == rows)

    def find(weights: Weights) -> QTensor:
        matrix = weights[name]
        assert isinstance(matrix, QTensor)
        if (start, stop) == (0, rows) and neighbours:
            return matrix
        if neighbours and whole_blocks:
            return matrix.rows(start, stop)
        return reordered(matrix, on_device(order, matrix.device))

    return find


def _all_of(names: Sequence[str]) -> _Find:
    """The matrices of all experts, in the same memory."""

    def find(weights: Weights) -> QExperts:
        matrices = [weights[name] for name in names]
        return QExperts.of([x for x in matrices if isinstance(x, QTensor)])

    return find


def _empty(shape: tuple[int, int], entry: QuantEntry) -> QTensor:
    codes, scale_min = packed_shapes(shape, entry.bits, entry.group_size, "split32")
    return QTensor(
        torch.empty(codes, dtype=torch.uint8, device="meta"),
        torch.empty(scale_min, dtype=entry.scale_min.dtype, device="meta"),
        shape,
        entry.bits,
        entry.group_size,
        "split32",
    )

"""A forward pass with gradients as a greenlet that stops before each of its layers."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from qoff.errors import UnsupportedModelError

from .generators import Generators

_HIDDEN = "hidden_states"  # what transformers' layers call their input
_FEW = 8  # tokens
_LEAVES = "leaves tensors for others in what it is given"


class Stop(NamedTuple):
    """A layer that a pass has come to, and what it is given beside hidden states."""

    layer: int
    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class TrainingPass(greenlet):
    """Computes a loss; `advance` goes on to the next layer, or to the loss.

    share: of its loss in that of the step. learns: whether there is a backward. hidden, loss: of
    `FusedHead`.
    """

    hidden: Tensor | None = None
    loss: Tensor | None = None

    def __init__(self, loss: Callable[[], Tensor], share: float, learns: bool = True) -> None:
        super().__init__(loss)
        self.share, self.learns = share, learns

    def advance(self, given: Any = None) -> Any:
        """Return the next `Stop`, or the loss. given: what the layer has returned."""
        self.parent = getcurrent()
        with torch.set_grad_enabled(self.learns):
            return self.switch() if given is None else self.switch(given)

    def end(self) -> None:
        """Give it up."""
        if not self.dead:
            self.throw(GreenletExit)


class StoppingLayer:
    """Takes the place of a layer's `forward`: within a pass, its driver computes the layer."""

    def __init__(self, layer: nn.Module, index: int, alone: Callable[..., Any]) -> None:
        """alone: computes the layer outside of a pass; it is given the index first."""
        self.own, self.module = layer.forward, layer
        self._index, self._alone = index, alone
        layer.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        here = getcurrent()
        if not isinstance(here, TrainingPass):
            return self._alone(self._index, *args, **kwargs)
        assert here.parent is not None
        return here.parent.switch(_stop(self._index, args, kwargs))

    def compute(self, hidden: Tensor, stop: Stop) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """The layer's hidden states, and what makes its whole result of others like them."""
        given = (stop.args, dict(stop.kwargs))
        before = [id(x) for x in _tensors(given)]
        with _for_itself(self.module):
            result = self.own(hidden, *stop.args, **stop.kwargs)
        if [id(x) for x in _tensors(given)] != before:
            _refuse(_LEAVES)  # without gradients
        if isinstance(result, Tensor):
            return result, lambda x: x
        if not isinstance(result, tuple | list) or not isinstance(result[0], Tensor):
            _refuse(f"returns a {type(result).__name__}, not hidden states")
        kind: Callable[[Iterable[Any]], Any] = list if isinstance(result, list) else tuple
        others = tree_map_only(Tensor, _unused, result[1:])
        return result[0], lambda x: kind((x, *others))


@contextmanager
def _for_itself(layer: nn.Module) -> Iterator[None]:
    """Without the keys and values that Gemma 4 leaves for an assistant model (transformers 5.24).

    `check_order` has refused models in which other layers use them.
    """
    leave: list[Any] = [x for x in layer.modules() if getattr(x, "store_full_length_kv", False)]
    for one in leave:
        one.store_full_length_kv = False
    try:
        yield
    finally:
        for one in leave:
            one.store_full_length_kv = True


class _Unused(Tensor):
    """What a layer returns beside hidden states, like attention weights, for nobody to use.

    It would need a gradient, which no layer is given for it. It has no memory.
    """

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        """Raise UnsupportedModelError, whatever is asked of it."""
        _refuse("returns more than hidden states, which the model uses")


def _unused(x: Tensor) -> Tensor:
    """In the place of what may learn; under `no_grad`, nothing says what does."""
    return x.new_empty(0).as_subclass(_Unused) if x.is_floating_point() else x


def stop_of(reached: Any, index: int) -> Stop:
    """What a pass has reached, if it is this layer. Raises UnsupportedModelError."""
    if isinstance(reached, Stop) and reached.layer == index:
        return reached
    where = f"layer {reached.layer}" if isinstance(reached, Stop) else "its loss"
    raise UnsupportedModelError(
        f"this model computes {where} where layer {index} was expected; only models that go "
        "through all layers in order can be trained by streaming"
    )


def next_stop(one: TrainingPass, given: Any, hidden: Tensor, index: int) -> Stop:
    """Have a pass go on with what a layer returned, hidden states in it, and come to this layer.

    Raises UnsupportedModelError where the model changes hidden states between them.
    """
    version = hidden._version
    stop = stop_of(one.advance(given), index)
    if not is_same(stop.hidden, hidden) or hidden._version != version:
        raise UnsupportedModelError(
            f"this model changes hidden states between layer {index - 1} and the next; "
            "it cannot be trained by streaming"
        )
    return stop


def check_order(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Raise UnsupportedModelError for a model that does not go through its layers in order.

    And for one whose layers use keys and values of others, as transformers' modules say of
    themselves. Two tokens go through it, with layers that return what they are given, so that
    neither these nor the head are computed. What else a model says to such layers is left to the
    first step.
    """
    if any(getattr(x, "is_kv_shared_layer", False) for one in layers for x in one.modules()):
        _refuse(_LEAVES)
    embedding: Any = getattr(model, "get_input_embeddings", nn.Module)() or nn.Module()
    tensors = chain(embedding.parameters(), embedding.buffers(), model.parameters())
    ids = torch.ones(1, 2, dtype=torch.int64, device=next(tensors).device)

    def loss() -> Tensor:
        found: Tensor = model(input_ids=ids, use_cache=False)
        return found

    def fault(whole: Callable[[Tensor], Any]) -> UnsupportedModelError | None:
        one = TrainingPass(loss, 1.0)
        try:
            stop = stop_of(one.advance(), 0)
            for i in range(1, len(layers)):
                hidden = stop.hidden.detach()
                stop = next_stop(one, whole(hidden), hidden, i)
        except UnsupportedModelError as error:
            return error
        except Exception:  # as in `reads_embeddings`
            return None
        finally:
            one.end()
        return None

    own = [layer.__dict__.get("forward") for layer in layers]
    try:
        for i, layer in enumerate(layers):
            StoppingLayer(layer, i, layer.forward)
        with Generators(ids.device).forked():
            error = fault(lambda x: x)
            if error is not None and fault(lambda x: (x,)) is not None:
                raise error
    finally:
        for layer, forward in zip(layers, own, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


def is_same(found: Tensor, given: Tensor) -> bool:
    """Whether these are the same elements in the same memory."""
    return (found.data_ptr(), found.shape, found.stride(), found.dtype) == (
        given.data_ptr(),
        given.shape,
        given.stride(),
        given.dtype,
    )


def share(stop: Stop, other: Stop, callers: Container[int] = ()) -> None:
    """Have what two passes are given beside hidden states (masks, rotary tables) once in memory.

    Where it is the same: their tensors stay two, with the memory of the second's. callers: storages
    of tensors that are not the model's, and stay as they are.
    """
    mine, theirs = (tree_leaves((x.args, dict(x.kwargs))) for x in (stop, other))
    for x, y in zip(mine, theirs, strict=False):
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            continue
        alike = (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        apart = x.data_ptr() != y.data_ptr() and storage_of(x) not in callers
        if alike and apart and torch.equal(x, y):
            x.data = y.data


def storage_of(x: Tensor) -> int:
    """Where the memory begins that a tensor lies in."""
    return x.untyped_storage().data_ptr()


def let_go(stop: Stop) -> None:
    """Free the memory of the hidden states of a stop, unless the layer is given it otherwise, too.

    The model's forward still has the tensor, and that keeps the one that it is a view of: see
    `reads_embeddings`.
    """
    x = stop.hidden
    others = [y for y in tree_leaves((stop.args, dict(stop.kwargs))) if isinstance(y, Tensor)]
    if all(storage_of(y) != storage_of(x) for y in others):
        for one in (x, x._base):
            if one is not None:
                one.data = one.new_full((), float("nan")).expand(one.shape)


def reads_embeddings(model: nn.Module, batch: Mapping[str, Tensor], layers: int) -> bool:
    """Whether a model computes with its embeddings outside of its layers, once these have begun.

    A few tokens go through it without gradients, with embeddings of NaN and layers that return 0.
    What cannot be found out counts as reading. Draws from torch's generators.
    """
    shape = batch["input_ids"].shape
    others: Mapping[str, Any] = {k: x for k, x in batch.items() if k != "labels"}
    alike = {k: x for k, x in others.items() if isinstance(x, Tensor) and x.shape == shape}
    few = {k: x[:1, :_FEW] for k, x in alike.items()}

    def logits() -> Tensor:
        found: Tensor = model(**few, use_cache=False, return_dict=True).logits
        return found

    def finite(whole: Callable[[Tensor], Any]) -> bool:
        one = TrainingPass(logits, 1.0, learns=False)
        try:
            stop = stop_of(one.advance(), 0)
            hidden = torch.zeros_like(stop.hidden)
            let_go(stop)
            for i in range(1, layers):
                if not is_same(stop_of(one.advance(whole(hidden)), i).hidden, hidden):
                    return False
            return bool(one.advance(whole(hidden)).isfinite().all())
        except Exception:  # whatever a model says to so strange a layer
            return False
        finally:
            one.end()

    with torch.no_grad():
        return not (finite(lambda x: x) or finite(lambda x: (x,)))


def _stop(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Stop:
    if args:
        hidden, args = args[0], args[1:]
    else:
        hidden = kwargs.pop(_HIDDEN, None)
    if not isinstance(hidden, Tensor):
        _refuse("is given no hidden states first")
    if any(x.requires_grad for x in _tensors((args, kwargs))):
        _refuse("is given more than hidden states that learns")
    return Stop(index, hidden, args, kwargs)


def _tensors(given: Any) -> Iterator[Tensor]:
    """The tensors in what a layer is given, those in mappings that pytree takes whole among them.

    transformers has a `UserDict` for keys and values of earlier layers.
    """
    for x in tree_leaves(given):
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, Mapping):
            yield from _tensors(list(x.values()))


def _refuse(why: str) -> NoReturn:
    raise UnsupportedModelError(f"a layer of this model {why}; it cannot be trained by streaming")

"""A forward pass with gradients as a greenlet that stops before each of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from qoff.errors import UnsupportedModelError

_HIDDEN = "hidden_states"  # what transformers' layers call their input


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
        before = [id(x) for x in tree_leaves(given) if isinstance(x, Tensor)]
        result = self.own(hidden, *stop.args, **stop.kwargs)
        if [id(x) for x in tree_leaves(given) if isinstance(x, Tensor)] != before:
            _refuse("leaves tensors for others in what it is given")  # without gradients
        if isinstance(result, Tensor):
            return result, lambda x: x
        if not isinstance(result, tuple) or not isinstance(result[0], Tensor):
            _refuse(f"returns a {type(result).__name__}, not hidden states")
        if any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(result[1:])):
            _refuse("returns more than hidden states that learns")
        return result[0], lambda x: (x, *result[1:])


def stop_of(reached: Any, index: int) -> Stop:
    """What a pass has reached, if it is this layer. Raises UnsupportedModelError."""
    if isinstance(reached, Stop) and reached.layer == index:
        return reached
    where = f"layer {reached.layer}" if isinstance(reached, Stop) else "its loss"
    raise UnsupportedModelError(
        f"this model computes {where} where layer {index} was expected; only models that go "
        "through all layers in order can be trained by streaming"
    )


def is_same(found: Tensor, given: Tensor) -> bool:
    """Whether these are the same elements in the same memory."""
    return (found.data_ptr(), found.shape, found.stride(), found.dtype) == (
        given.data_ptr(),
        given.shape,
        given.stride(),
        given.dtype,
    )


def _stop(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Stop:
    if args:
        hidden, args = args[0], args[1:]
    else:
        hidden = kwargs.pop(_HIDDEN, None)
    if not isinstance(hidden, Tensor):
        _refuse("is given no hidden states first")
    if any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves((args, kwargs))):
        _refuse("is given more than hidden states that learns")
    return Stop(index, hidden, args, kwargs)


def _refuse(why: str) -> NoReturn:
    raise UnsupportedModelError(f"a layer of this model {why}; it cannot be trained by streaming")

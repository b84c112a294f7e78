"""Texts that go through a model's own code, which stops before each layer for its weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn

from qoff.budgets import CPU
from qoff.kernels.ops import exact, ops_for
from qoff.memory import HEAD, Weights
from qoff.memory.plan import LM_HEAD, local_names
from qoff.models.modules.binding import WeightBinder, bind_embedding
from qoff.models.modules.configs import DTYPE, position_limit
from qoff.models.modules.current import current
from qoff.models.modules.decoder import wait_for_weights
from qoff.models.modules.linear import Bound, Head, Multiply
from qoff.models.modules.structure import Structure, buffers_from_config
from qoff.quant import QTensor

from .solving import Unsolved

_PACKING = "rows16"
Given = QTensor | Tensor | Unsolved
Seen = Callable[[object, Tensor, Tensor], None]  # a matrix, its input [M, K], its output [M, N]


class ModuleRun:
    """Batches of texts that go through each layer before the next one's weights come.

    structure: of the model without weights, which this replaces modules of. outer: what is outside
    of layers, embedding and head, by its names in the model. rows: of the embedding, and of those
    of layers where there are any, from ids. quantized: of each layer, the names of the matrices
    that may be. batches: int64 [texts, tokens] each, cut to the model's positions. seen: is told
    products with floats in `back`; without it nothing is kept for that. Memory holds what the
    tokens take in a layer; what goes into layers is in a file without a name where it is kept.
    """

    def __init__(
        self,
        structure: Structure,
        outer: Mapping[str, Tensor],
        rows: Sequence[Callable[[Tensor], Tensor]],
        quantized: list[set[str]],
        batches: Sequence[Tensor],
        seen: Seen | None = None,
    ) -> None:
        from qoff.models.modules.passes import ModulePass

        model, self._seen = structure.model, seen
        config = model.config.get_text_config(decoder=True)
        limit = position_limit(config)
        batches = [ids[:, :limit] for ids in batches]
        buffers_from_config(model)
        for place in structure.outer():
            place.put(outer[place.name])
        bind_embedding(model.get_input_embeddings(), rows[0])
        if structure.layer_table is not None:
            bind_embedding(cast(nn.Embedding, structure.layer_table.module), rows[1])
        ops = ops_for(CPU)
        multiply = _Multiply(ops, DTYPE, batches[0].shape, seen)
        self._layers = [
            _Layer(layer, WeightBinder(structure, i, quantized[i], multiply), seen is not None)
            for i, layer in enumerate(structure.layers)
        ]
        self._leaves = _stop_behind(structure.layers[-1], len(self._layers))
        model.set_output_embeddings(Head(structure.outputs, Multiply(exact(ops), DTYPE)))
        known = signature(model.forward).parameters.keys() & {"use_cache", "return_dict"}
        options = {name: name == "return_dict" for name in known}
        self._passes = [
            ModulePass(
                partial(model, input_ids=ids, **options), torch.ones_like(ids).nonzero().T
            ).steps()
            for ids in batches
        ]

    @torch.no_grad()
    def layer(self, index: int, given: Mapping[str, Given]) -> None:
        """Take all texts through a layer; given: its weights by their full names.

        What is unsolved of them is solved, for the first batch. Layers go in order.
        """
        weights = cast(Weights, _local(index, given))
        for one in self._passes:
            wanted = index if index else next(one)
            assert wanted == index
            wanted = one.send(weights)
            assert wanted == index + 1

    @torch.no_grad()
    def logits(self, batch: int, head: QTensor | Tensor, gradient: bool = False) -> Tensor:
        """Logits of all tokens of a batch, float32 [tokens, vocabulary], after the last layer.

        head: its matrix. gradient: they can be differentiated by `final`. Each batch has them once.
        """
        one = self._passes[batch]
        with torch.set_grad_enabled(gradient):
            wanted = one.send({})
            assert wanted == HEAD
            try:
                one.send(cast(Weights, {LM_HEAD: _multiplied(head)}))
            except StopIteration as done:
                logits: Tensor = done.value.logits[0]
                return logits.float()
        raise AssertionError("the model goes on behind its head")

    def final(self, batch: int) -> Tensor:
        """What the last layer returned for a batch, where it has its logits: a leaf of them."""
        return self._leaves[batch]

    def back(
        self, index: int, given: Mapping[str, Tensor], gradients: Sequence[Tensor]
    ) -> list[Tensor]:
        """Gradients by what went into a layer, of each batch, from those by what came out."""
        return self._layers[index].back(cast(Weights, _local(index, given)), gradients)

    def close(self) -> None:
        """Leave the model's code."""
        for one in self._passes:
            one.close()


def _local(index: int, given: Mapping[str, Given]) -> dict[str, Given]:
    local = local_names(index, list(given))
    return {local[name]: _multiplied(x) for name, x in given.items()}


def _multiplied(x: Given) -> Given:
    """A weight in the packing that the kernel multiplies by."""
    return x.to_packing(_PACKING) if isinstance(x, QTensor) else x


@dataclass(frozen=True)
class _Multiply(Multiply):
    """Solves the matrices that it multiplies by, and tells of those that are floats.

    texts: [texts, tokens], whose rows come in this order.
    """

    texts: torch.Size
    seen: Seen | None = None

    def __call__(self, x: Tensor, matrix: Bound | Unsolved, bias: Tensor | None) -> Tensor:
        if isinstance(matrix, Unsolved):
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            if matrix.twice and self._in_order(x):
                y = matrix.products(rows, len(rows) // 2)
                return (y if bias is None else y + bias).view(*x.shape[:-1], -1)
            matrix = matrix.solved(rows)
        if self.seen is None or not isinstance(matrix, Tensor) or not _differentiated(x):
            return super().__call__(x, matrix, bias)
        rows = x.reshape(-1, x.shape[-1])
        y = rows @ matrix.T
        self.seen(matrix, rows, y)
        y = y if bias is None else y + bias
        return y.view(*x.shape[:-1], -1)

    def _in_order(self, x: Tensor) -> bool:
        """Whether rows are those of the texts, one after another."""
        sizes, wanted = ([n for n in shape if n > 1] for shape in (x.shape[:-1], self.texts))
        return sizes in (wanted, [self.texts.numel()])


def _differentiated(x: Tensor) -> bool:
    """Whether x depends on what gradients are asked for, which positions do not."""
    return torch.is_grad_enabled() and x.requires_grad


class _Layer:
    """A layer's own code; kept: what it is called with, batch by batch, for the way back."""

    def __init__(self, module: Any, binder: WeightBinder, kept: bool) -> None:
        self._own, self._binder = module.forward, binder
        self._calls: list[tuple[Any, Any]] = []
        wait_for_weights(module, binder)
        if not kept:
            return
        waiting = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._calls.append(_with(args, kwargs, _on_disk))
            return waiting(*args, **kwargs)

        module.forward = forward

    def back(self, weights: Weights, gradients: Sequence[Tensor]) -> list[Tensor]:
        """See `ModuleRun.back`."""
        self._binder.bind(self._binder.values(weights))
        try:
            return [
                self._one(args, kwargs, g)
                for (args, kwargs), g in zip(self._calls, gradients, strict=True)
            ]
        finally:
            self._binder.unbind()

    def _one(self, args: Sequence[Any], kwargs: Mapping[str, Any], gradient: Tensor) -> Tensor:
        leaf = torch.empty(0)

        def taken(x: Tensor) -> Tensor:
            nonlocal leaf
            leaf = x.clone().requires_grad_()
            return leaf

        given, named = _with(args, kwargs, taken)
        with torch.enable_grad(), torch.autograd.graph.allow_mutation_on_saved_tensors():
            found = self._own(*given, **named)
            after = found if isinstance(found, Tensor) else found[0]
            (back,) = torch.autograd.grad(after, leaf, gradient)
        return back


def _with(
    args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[list[Any], dict[str, Any]]:
    """What a layer is called with, its hidden states changed: the first floats, or by name."""
    named, given = dict(kwargs), list(args)
    if "hidden_states" in named:
        named["hidden_states"] = change(named["hidden_states"])
    else:
        at = next(i for i, x in enumerate(args) if isinstance(x, Tensor) and x.is_floating_point())
        given[at] = change(given[at])
    return given, named


def _on_disk(x: Tensor) -> Tensor:
    """The same values, in a file without a name."""
    with tempfile.NamedTemporaryFile() as file:
        kept = torch.from_file(file.name, shared=True, size=x.numel(), dtype=x.dtype)
    return kept.view(x.shape).copy_(x)


def _stop_behind(layer: Any, unit: int) -> list[Tensor]:
    """Let the pass wait once more when a layer is done; returns where what it returned will be.

    As leaves, where gradients are enabled when the pass goes on.
    """
    own, leaves = layer.forward, list[Tensor]()

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        current().fetch(unit)
        if not torch.is_grad_enabled():
            return found
        after = found if isinstance(found, Tensor) else found[0]
        leaf = after.detach().requires_grad_()
        leaves.append(leaf)
        return leaf if isinstance(found, Tensor) else (leaf, *found[1:])

    layer.forward = forward
    return leaves

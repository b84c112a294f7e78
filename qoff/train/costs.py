"""What the layers of a model without memory save for their backward, of sequences of any length."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from qoff.hf.dispatch.units import units_of
from qoff.memory.arena import round_up
from qoff.models.modules.configs import layer_configs

from .activations import Activations, Cost
from .homes import Homes
from .mixtures import GroupedProducts
from .passes import StoppingLayer, TrainingPass, stop_of
from .swaps import Swaps

_WINDOWS = ("sliding_window", "attention_chunk_size")


def costs_of(model: Any, tokens: int) -> list[Cost]:
    """What each layer saves for its backward, counted as in a step; none where values decide.

    A pass takes time, and memory for masks, which are real. So the bytes of a long sequence follow
    from three shorter ones: beyond a window they are a polynomial of second degree in the tokens,
    but for padding, which is in proportion.
    """
    most = _counted(model.config)
    if tokens <= most:
        return _one_pass(model, tokens)
    lengths = [most * 5 // 8, most * 3 // 4, most]
    each = zip(*(_one_pass(model, length) for length in lengths), strict=True)
    return [
        Cost(
            _continued(lengths, [cost.nbytes for cost in layer], tokens),
            0.0,
            _continued(lengths, [cost.on_stage for cost in layer], tokens),
        )
        for layer in each
    ]


def _counted(config: Any) -> int:
    """Tokens of the longest sequence that goes through the layers, a multiple of 1024."""
    text = config.get_text_config(decoder=True)
    windows = (getattr(one, name, 0) or 0 for one in layer_configs(text) for name in _WINDOWS)
    return round_up(max(2048, 2 * max(windows)), 1024)


def _continued(at: Sequence[int], values: Sequence[int], to: int) -> int:
    """The value at `to` of the polynomial through these points."""
    parts = (
        value * math.prod(Fraction(to - other, one - other) for other in at if other != one)
        for one, value in zip(at, values, strict=True)
    )
    return round(sum(parts))


def _one_pass(model: Any, tokens: int) -> list[Cost]:
    """What each layer saves of a sequence that goes through the layers."""
    layers = [unit.module for unit in units_of(model, values=False)]
    homes = Homes(0, 0, 0, None)
    activations = Activations(1, lambda _: True, Swaps(homes, None))
    stopping = [StoppingLayer(layer, i, layer.forward) for i, layer in enumerate(layers)]
    ids = torch.ones(1, tokens, dtype=torch.int64)
    one = TrainingPass(lambda: model(input_ids=ids, labels=ids, use_cache=False).loss, 1.0)
    found = []
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.disabled = True
    try:
        with GroupedProducts():
            reached = one.advance()
            for i, layer in enumerate(stopping):
                stop = stop_of(reached, i)
                x = stop.hidden.detach().clone().requires_grad_()
                given = stop.args, stop.kwargs
                activations.plan(0, [(x.shape, x.dtype)], [given])
                with (
                    torch.enable_grad(),
                    activations.measuring((i, 0), x, layer.module, given, _nothing),
                ):
                    y, whole = layer.compute(x, stop)
                cost = activations.cost(i, 0)
                assert cost is not None
                found.append(Cost(cost.nbytes, 0.0, cost.on_stage))
                if i < len(stopping) - 1:
                    reached = one.advance(whole(y.detach()))
    except RuntimeError:  # of an operation that needs values
        return []
    finally:
        log.disabled = False
        one.end()
        homes.close()
        for layer in stopping:
            layer.module.forward = layer.own
    return found


def _nothing() -> Tensor:
    return _EMPTY


_EMPTY = torch.empty(0)

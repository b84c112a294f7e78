"""What a model needs of a training: its units, and the sizes that a placement is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qoff.budgets import CPU
from qoff.errors import ArgumentError, UnsupportedModelError
from qoff.hf.dispatch.units import others, units_of

from . import factored, stays
from .cuts import Tile, cut, whole_shapes
from .head import FusedHead
from .layout import FlatUnit, StateForm
from .loss_scale import uses_float16
from .optimizers import Optimizer
from .passes import StoppingLayer
from .sizes import Sizes
from .tiled import tileable

GRADIENTS = "auto", "float32", "bfloat16"  # auto: bfloat16 where layers' weights are


def needs_of(
    model: Any,
    optimizer: Optimizer,
    tokens: int,
    micro_batches: int,
    clips: bool,
    packed: bool | None = None,
    delayed: bool = False,
    most: int | None = None,
    part: str = "layers",
    device: torch.device = CPU,
    gradients: str = "auto",
    swaps: bool = False,
) -> tuple[list[nn.Module], FusedHead, Sizes]:
    """The layers of a model and its head, and the sizes of a training of it.

    packed: of a model of shapes alone, whether its frozen matrices are to be packed; None: it has
    values. delayed: weights change a step late. most: matrices of more bytes are cut into tiles, in
    this part, see `placement.PARTS`; None: none are. device: computes. gradients: what layers' are
    kept as, of GRADIENTS. swaps: activations may go to disk. Raises ArgumentError and
    UnsupportedModelError for a model that cannot be trained by streaming.
    """
    if packed is None:
        stays.check(model, device)
    layers, units, tiles = _units(model, packed is None, most, part)
    head = FusedHead(model)
    counts = list[int]()
    if optimizer.factored:
        for unit in (*units, *(tile.unit for tile in tiles)):
            unit.pieces = [(run.start, run.stop) for run in factored.runs(unit)]
        shapes = [[shape] for shape in whole_shapes(tiles).values()]
        counts = [factored.count(x) for x in (*(u.shapes.values() for u in units), *shapes)]
    forms = [StateForm.of(x, optimizer) for x in (*units, *(tile.unit for tile in tiles))]
    width = int(model.config.get_text_config(decoder=True).hidden_size)
    rows = {m: tile.count for tile in reversed(tiles) for m in tile.modules}
    sizes = Sizes(
        units,
        forms,
        micro_batches,
        4 * tokens * width,
        head.logits_bytes(tokens, packed, rows),
        clips or uses_float16(model),
        counts,
        delayed,
        tiles,
        0 if packed else stays.nbytes_of(model),
        kept_as(gradients, (*units[:-1], *(tile.unit for tile in tiles))),
        swaps,
    )
    return layers, head, sizes


def kept_as(name: str, units: Iterable[FlatUnit]) -> torch.dtype:
    """What gradients of layers are kept as. Raises ArgumentError for a name that is none."""
    if name not in GRADIENTS:
        raise ArgumentError(f"gradients are {name!r}; use {', '.join(GRADIENTS)}")
    if name == "auto":
        dtypes = {unit.dtype for unit in units if unit.count}
        return torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def _units(
    model: nn.Module, values: bool, most: int | None, part: str
) -> tuple[list[nn.Module], list[FlatUnit], list[Tile]]:
    """The layers of a model, what learns in each and outside of them, and what is cut."""
    if any(isinstance(m.__dict__.get("forward"), StoppingLayer) for m in model.modules()):
        raise ArgumentError(
            "this model is in training already: use what offload returned for it, or load it anew"
        )
    config = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False):
        raise UnsupportedModelError(
            "output_router_logits: the loss of routers is not there in training by streaming; "
            "set it to False in the config"
        )
    found = units_of(model, values=values)
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no layers that transformers names or lists"
        )
    names = {id(p): name for name, p in model.named_parameters()}
    units, tiles = [], list[Tile]()
    users = {} if most is None else tileable(model, (unit.module for unit in found))
    for i, unit in enumerate(found):
        learns = _learning(unit.tensors.values(), names)
        if most is not None and part != "outside":
            learns, more = cut(i, learns, users, most)
            tiles += more
        units.append(FlatUnit(unit.path, learns))
    learns = _learning([kind[name] for kind, name in others(model, found)], names)
    if most is not None and part != "layers":
        learns, more = cut(len(found), learns, users, most)
        tiles += more
    units.append(FlatUnit("outside of layers", learns))
    if not tiles and not any(unit.parameters for unit in units):
        raise ArgumentError(
            "no parameter of this model requires gradients; add an adapter, or call "
            "model.requires_grad_()"
        )
    return [unit.module for unit in found], units, tiles


def _learning(
    tensors: Iterable[Tensor | None], names: Mapping[int, str]
) -> dict[str, nn.Parameter]:
    """The parameters among them that learn, by name; shared ones once."""
    return {names[id(p)]: p for p in tensors if isinstance(p, nn.Parameter) and p.requires_grad}

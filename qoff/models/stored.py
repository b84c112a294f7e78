"""Whether a model's tensors are those that its config asks for, before either is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from qoff.checkpoint import Checkpoint, QuantEntry, WeightFile
from qoff.errors import FormatError

from .attention_weights import output_of
from .families.family import TensorNames
from .layer_weights import layer_weights, outer_weights
from .names import ROUTER, Weight, layer_prefix
from .spec import DecoderSpec

_DAMAGED = "they are not of one model, or one of them is damaged: get both again"


def check_counts(
    spec: DecoderSpec,
    names: TensorNames,
    shape_of: Callable[[str], tuple[int, ...] | None],
    where: Path,
) -> None:
    """Raise FormatError unless there is a last layer, and as many experts as the spec has.

    Before anything is made for each of them. shape_of: the shape of a tensor by its name in the
    source, None without one.
    """
    end = spec.num_layers - 1
    last = names.in_layer(end, output_of(spec, end), "weight")
    if shape_of(last) is None:
        raise FormatError(
            f"{where}: config.json has num_hidden_layers {spec.num_layers}, but there is no tensor "
            f"{last}; {_DAMAGED}"
        )
    layer = next((i for i in range(spec.num_layers) if spec.has_experts(i)), None)
    if spec.experts is None or layer is None:
        return
    router = names.in_layer(layer, ROUTER, "weight")
    shape = shape_of(router)
    if not shape or shape[0] != spec.experts.count:
        raise FormatError(
            f"{where}: config.json has {spec.experts.count} experts, but tensor {router} is "
            f"{'not there' if shape is None else list(shape)}; {_DAMAGED}"
        )


def check_checkpoint(spec: DecoderSpec, checkpoint: Checkpoint) -> None:
    """Raise FormatError, naming file and weight, where a checkpoint is not what a spec asks for."""
    config = checkpoint.path / "config.json"
    if spec.num_layers != len(checkpoint.layers):
        raise FormatError(
            f"{config}: has num_hidden_layers {spec.num_layers}, but there are files of "
            f"{len(checkpoint.layers)} layers; {_DAMAGED}"
        )
    for layer, file in enumerate(checkpoint.layers):
        prefix = layer_prefix(layer)
        if spec.experts is not None and spec.has_experts(layer):
            experts = spec.experts.count
            _check(file, config, prefix, Weight(ROUTER, (), spec.hidden_size), experts)
        for weight in layer_weights(spec, layer):
            _check(file, config, prefix, weight, weight.rows)
    for weight in outer_weights(spec):
        _check(checkpoint.outer, config, "", weight, weight.rows)


def _check(file: WeightFile, config: Path, prefix: str, weight: Weight, rows: int) -> None:
    """Compare a weight with the spec's: a packed matrix, or a vector in float32."""
    entry = file.weights.get(prefix + weight.name)
    wanted = (rows,) if weight.columns is None else (rows, weight.columns)
    kind = f"{'' if weight.columns is None else 'quantized '}{list(wanted)}"
    if entry is None:
        found = "is not there"
    elif entry.shape != wanted or isinstance(entry, QuantEntry) != (weight.columns is not None):
        found = f"is {'quantized ' * isinstance(entry, QuantEntry)}{list(entry.shape)}"
    elif not isinstance(entry, QuantEntry) and entry.dtype != torch.float32:
        found, kind = f"is {entry.dtype}", "torch.float32"
    else:
        return
    raise FormatError(
        f"{file.path}: weight {prefix}{weight.name} {found}, but {config} asks for {kind}; "
        f"{_DAMAGED}"
    )

"""The files of a checkpoint that is yet to be made: headers, and where each byte will lie."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qoff.checkpoint import QuantEntry, TensorEntry, WeightEntry, WeightFile, unwritten
from qoff.checkpoint.layout import layer_file
from qoff.errors import OpError, UnsupportedModelError
from qoff.kernels.layout.packing import packed_shapes
from qoff.quant import Format, QTensor, QuantConfig, comes_as_floats, stated


@dataclass(frozen=True)
class PlannedWeight:
    """A weight as it will be stored. form: of a quantized matrix [N, K]; None: as `dtype`."""

    name: str
    shape: tuple[int, ...]
    form: Format | None = None
    dtype: torch.dtype = torch.float32


def check_floats(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for weights whose codes are taken over."""
    stored = stated(config)
    if stored and not comes_as_floats(stored[1], f"config.json: {stored[0]}"):
        raise UnsupportedModelError(
            "config.json: the weights are quantized already, and only their files tell how "
            "many bytes they become; convert the model first (qoff convert), and plan that"
        )


def planned_layers(
    folder: Path, layers: Iterable[tuple[str, Sequence[PlannedWeight]]], quant: QuantConfig
) -> tuple[WeightFile, ...]:
    """The files of layers, each given as the prefix of its names and its weights in file order.

    Those that are alike are made once.
    """
    made = dict[Hashable, tuple[str, WeightFile]]()
    found = list[WeightFile]()
    for i, (prefix, weights) in enumerate(layers):
        forms = ((w.name.removeprefix(prefix), w.shape, w.form, w.dtype) for w in weights)
        like = len(prefix), *forms  # names are as long, so headers are, too
        if like not in made:
            made[like] = prefix, planned_file(folder / layer_file(i), weights, quant)
        found.append(_renamed(made[like][1], folder / layer_file(i), made[like][0], prefix))
    return tuple(found)


def planned_file(path: Path, weights: Iterable[PlannedWeight], quant: QuantConfig) -> WeightFile:
    """A file of weights as `convert` lays it out.

    Raises UnsupportedModelError for a matrix whose groups do not divide it.
    """
    built: dict[str, QTensor | Tensor] = {}
    for weight in weights:
        form, shape = weight.form, weight.shape
        if form is None:
            built[weight.name] = torch.empty(shape, dtype=weight.dtype, device="meta")
            continue
        rows, columns = shape
        try:
            codes, scales = packed_shapes(
                (rows, columns), form.bits, form.group_size, quant.packing
            )
        except OpError as error:
            raise UnsupportedModelError(f"{weight.name}: {error}") from error
        built[weight.name] = QTensor(
            torch.empty(codes, dtype=torch.uint8, device="meta"),
            torch.empty(scales, dtype=quant.scale_dtype, device="meta"),
            (rows, columns),
            form.bits,
            form.group_size,
            quant.packing,
        )
    return unwritten(path, built)


def _renamed(file: WeightFile, path: Path, old: str, new: str) -> WeightFile:
    """The file at another path, of weights whose names begin otherwise."""

    def tensor(t: TensorEntry) -> TensorEntry:
        return TensorEntry(new + t.name.removeprefix(old), t.dtype, t.shape, t.offset, t.nbytes)

    weights = dict[str, WeightEntry]()
    for entry in file.weights.values():
        found: WeightEntry
        if isinstance(entry, QuantEntry):
            codes, scales = tensor(entry.codes), tensor(entry.scale_min)
            found = replace(
                entry, name=new + entry.name.removeprefix(old), codes=codes, scale_min=scales
            )
        else:
            found = tensor(entry)
        weights[found.name] = found
    return replace(file, path=path, weights=weights)

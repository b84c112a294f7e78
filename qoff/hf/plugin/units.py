"""The weights of a qoff checkpoint, unit by unit, and the parameters of a model that they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from transformers import PreTrainedModel

from qoff.checkpoint import Checkpoint
from qoff.checkpoint.layout import QuantEntry, TensorEntry
from qoff.errors import FormatError
from qoff.models.modules.configs import LAYOUT
from qoff.models.spec import DecoderSpec

from .own_weights import OwnWeight, own_weights
from .stored import Stored, stored_weights

StoredWeight: TypeAlias = Stored | OwnWeight


def stored_units(checkpoint: Checkpoint, model: PreTrainedModel) -> list[Sequence[StoredWeight]]:
    """The weights of each layer, and at the end those outside.

    Raises UnsupportedModelError for a parameter that the model does not have, FormatError unless
    the checkpoint holds these weights, of their shapes, and no others.
    """
    units: list[Sequence[StoredWeight]]
    if checkpoint.config["quantization_config"].get("layout") == LAYOUT:
        units = [*own_weights(checkpoint, model)]
    else:
        units = [*stored_weights(DecoderSpec.from_config(checkpoint.config), model)]
    _check(checkpoint, units)
    return units


def _check(checkpoint: Checkpoint, units: Sequence[Sequence[StoredWeight]]) -> None:
    for file, unit in zip(checkpoint.files, units, strict=True):
        if {stored.name for stored in unit} != set(file.weights):
            name = min({stored.name for stored in unit} ^ set(file.weights))
            where = "is there, but not" if name in file.weights else "is not there, but"
            raise FormatError(
                f"{file.path}: {name!r} {where} asked for by config.json; convert the model again"
            )
        for stored in unit:
            entry = file.weights[stored.name]
            kind = QuantEntry if stored.packed else TensorEntry
            if not isinstance(entry, kind) or entry.shape != stored.shape:
                raise FormatError(
                    f"{file.path}: {stored.name!r} has shape {entry.shape}, but config.json wants "
                    f"{stored.shape}; convert the model again"
                )

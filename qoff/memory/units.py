"""Units: the steps of a forward pass as the weight store sees them, and the weights of each."""

from __future__ import annotations

from collections.abc import Mapping

from qoff.checkpoint import Checkpoint, WeightFile

Unit = int | str  # a decoder layer's number, or HEAD

HEAD = "head"  # the outer weights: final norm, and head or tied embedding
EMBEDDING = "model.embed_tokens"
LM_HEAD = "lm_head"


def unit_files(checkpoint: Checkpoint) -> dict[Unit, WeightFile]:
    """The units in their default order, 0 .. L-1 and HEAD, and the file of each."""
    files: dict[Unit, WeightFile] = dict(enumerate(checkpoint.layers))
    return {**files, HEAD: checkpoint.outer}


def unit_weights(checkpoint: Checkpoint, unit: Unit) -> tuple[str, ...]:
    """Names of the weights a unit computes with, in file order.

    An untied embedding belongs to no unit: its rows are gathered (`WeightStore.gather_rows`).
    """
    if unit != HEAD:
        return tuple(checkpoint.layers[int(unit)].weights)
    names = tuple(checkpoint.outer.weights)
    return tuple(n for n in names if n != EMBEDDING or not has_own_head(checkpoint))


def has_own_head(checkpoint: Checkpoint) -> bool:
    """Whether there is a head besides the embedding (not tied)."""
    return LM_HEAD in checkpoint.outer.weights


def local_names(unit: Unit, weights: Mapping[str, object]) -> dict[str, str]:
    """File names to the names a computation uses: those of a layer lose "model.layers.<i>."."""
    prefix = f"model.layers.{unit}."
    return {name: name.removeprefix(prefix) for name in weights}

"""The layer for multi-token prediction of a checkpoint, as a checkpoint of that layer."""

from __future__ import annotations

from dataclasses import replace

from qoff.checkpoint import Checkpoint

from .families.mtp import mtp_config
from .names import MTP_PREFIX, layer_prefix


def mtp_checkpoint(checkpoint: Checkpoint) -> Checkpoint | None:
    """The layer with the model's embedding and head; None where the checkpoint has no such layer.

    Its decoder wants `ForwardPass.previous` for each token; see `families.mtp`.
    """
    file = checkpoint.mtp
    if file is None:
        return None
    prefix = layer_prefix(0)
    weights = {prefix + name.removeprefix(MTP_PREFIX): w for name, w in file.weights.items()}
    layers = (replace(file, weights=weights),)
    return Checkpoint(checkpoint.path, mtp_config(checkpoint.config), layers, checkpoint.outer)

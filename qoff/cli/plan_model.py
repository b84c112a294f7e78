"""The model that `qoff plan` plans for: where it is, and the sizes of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qoff.errors import QoffError

from .options import QuantOptions

if TYPE_CHECKING:
    from qoff.checkpoint import Checkpoint
    from qoff.plan.sizes import Sizes
    from qoff.quant import Format


def sizes_of(
    model: str, weights: QuantOptions, on_gpu: bool, mixed: Mapping[str, Format] | None = None
) -> Sizes:
    """The sizes of a checkpoint, of a directory with config.json, or of a model on the hub.

    mixed: other formats of some matrices, by patterns. Raises QoffError for what has none.
    """
    from qoff.plan.model_sizes import known_sizes, planned_sizes
    from qoff.quant import QuantConfig
    from qoff.schema import read_object

    there = checkpoint_of(model)
    if there is not None:
        return known_sizes(there)
    config = config_of(model)
    packing = "split32" if on_gpu else "rows16"
    quant = QuantConfig(**vars(weights), packing=packing, weights=mixed or {})
    return planned_sizes(read_object(config), quant)


def folder_of(model: str) -> Path | None:
    """That of a qoff checkpoint, where the model is one or the config.json of one."""
    from qoff.hf.checkpoints import is_checkpoint
    from qoff.hf.hub import exists

    if not exists(model):
        return None
    path = Path(model)
    folder = path.parent if path.name == "config.json" else path
    return folder if is_checkpoint(folder) else None


def checkpoint_of(model: str) -> Checkpoint | None:
    """The qoff checkpoint that a model is. Raises QoffError for one that is damaged."""
    from qoff.checkpoint import Checkpoint

    folder = folder_of(model)
    return None if folder is None else Checkpoint.open(folder)


def config_of(model: str) -> Path:
    """The file of a model's config. Raises QoffError for what has none."""
    from qoff.hf.checkpoints import is_checkpoint
    from qoff.hf.hub import download_config, exists

    if not exists(model):
        config = download_config(model, None)
        if is_checkpoint(config.parent):
            raise QoffError(
                f"{model}: is a qoff checkpoint, and only its files tell how many bytes they "
                "have; download it (hf download), and plan its folder"
            )
        return config
    path = Path(model)
    config = path / "config.json" if path.is_dir() else path
    if config.suffix != ".json":
        raise QoffError(
            f"{model}: has no config.json; convert it first (qoff convert), and plan that"
        )
    return config

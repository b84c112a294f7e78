"""`save_pretrained` of a model with packed modules: a qoff checkpoint where the family has one."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from qoff.checkpoint import CheckpointWriter
from qoff.checkpoint.layout import CONFIG_FILE, INDEX_FILE, WEIGHT_FILE
from qoff.errors import UnsupportedModelError
from qoff.kernels.layout.qexperts import QExperts
from qoff.kernels.layout.qtensor import QTensor
from qoff.models.spec import DecoderSpec

from .config import LAYERS, STATE_DICT, QoffConfig
from .install import Packed, parameters_of
from .stored import Stored, stored_weights

_OTHER_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


def save_pretrained(
    self: PreTrainedModel,
    save_directory: str | os.PathLike[str],
    *,
    is_main_process: bool = True,
    **options: Any,
) -> None:
    """Save the model so that `from_pretrained` loads the same codes.

    Where qoff has a spec of the family and all of its matrices are packed, this writes a qoff
    checkpoint, which `qoff.load` reads, too, with codes in the packing of the CPU or of any device
    as the model has them. Otherwise, and with `state_dict` or `push_to_hub`, transformers saves
    codes and scales under the names of their modules, which only `from_pretrained` reads. With
    adapters loaded by transformers, only those are saved.
    """
    config: QoffConfig = self.config.quantization_config
    plain = not any(options.get(name) for name in ("state_dict", "push_to_hub"))
    adapters = getattr(self, "_hf_peft_config_loaded", False)
    units = _units(self) if plain and not adapters else None
    if units is None:
        if not adapters:
            config.layout = STATE_DICT
        type(self).save_pretrained(self, save_directory, is_main_process=is_main_process, **options)
    elif is_main_process:
        config.layout = LAYERS
        _write(self, units, Path(save_directory))


def _units(model: PreTrainedModel) -> list[list[Stored]] | None:
    """What a qoff checkpoint of the model consists of, None where it cannot be one."""
    try:
        units = stored_weights(DecoderSpec.from_config(_config(model)), model)
    except UnsupportedModelError:
        return None
    parameters = parameters_of(model)
    fits = all(_joinable(stored, parameters) for unit in units for stored in unit)
    return units if fits else None


def _joinable(stored: Stored, parameters: Mapping[str, Packed | Tensor]) -> bool:
    parts = [parameters[target] for target in stored.targets]
    if not stored.packed:
        return all(isinstance(part, Tensor) for part in parts)
    if stored.expert is not None:
        return isinstance(parts[0], QExperts)
    kinds = {(p.bits, p.group_size) if isinstance(p, QTensor) else None for p in parts}
    return None not in kinds and len(kinds) == 1


def _config(model: PreTrainedModel) -> dict[str, Any]:
    """The model's config.json, with its class and dtype, as transformers writes it."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = model.dtype
    config: dict[str, Any] = json.loads(model.config.to_json_string())
    return config


def _write(model: PreTrainedModel, units: list[list[Stored]], folder: Path) -> None:
    """Write beside the other files of a directory, config.json last."""
    parameters = parameters_of(model)
    packings = {p.packing for p in parameters.values() if not isinstance(p, Tensor)}
    packing = packings.pop() if len(packings) == 1 else "split32"
    config = _config(model)
    kept = ("bits", "group_size", "solver", "weights")
    had = config["quantization_config"]
    described = {key: had[key] for key in kept if key in had}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".qoff-") as place:
        made = Path(place, "checkpoint")
        with CheckpointWriter(made) as writer:
            for layer, unit in enumerate(units):
                joined = {stored.name: stored.join(parameters) for stored in unit}
                weights = {
                    name: x.to_packing(packing) if isinstance(x, QTensor) else x.detach()
                    for name, x in joined.items()
                }
                if layer < len(units) - 1:
                    writer.write_layer(layer, weights)
                else:
                    writer.write_outer(weights)
            writer.finish({**config, "quantization_config": {**described, "packing": packing}})
        for old in list(folder.iterdir()):
            if WEIGHT_FILE.fullmatch(old.name) or _OTHER_WEIGHTS.fullmatch(old.name):
                old.unlink()
        last = (INDEX_FILE, CONFIG_FILE)
        names = sorted(p.name for p in made.iterdir() if p.name not in last)
        for name in (*names, *last):
            (made / name).replace(folder / name)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)

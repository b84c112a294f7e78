"""A small checkpoint of random weights, and ways to damage its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qoff.checkpoint import CheckpointWriter
from qoff.checkpoint.layout import CONFIG_FILE, INDEX_FILE, layer_file
from qoff.quant import QTensor
from tests.kernels.operands import random_weight

Weights = Mapping[str, QTensor | Tensor]
LAYER = layer_file(1)
MATRIX = "model.layers.1.mlp.down_proj"
CONFIG = {"model_type": "llama", "quantization_config": {"bits": 4}}


def layer_weights(layer: int) -> dict[str, QTensor | Tensor]:
    prefix = f"model.layers.{layer}."
    return {
        prefix + "input_layernorm.weight": torch.randn(64),
        prefix + "mlp.down_proj": random_weight(48, 64, packing="split32"),
    }


def outer_weights() -> dict[str, QTensor | Tensor]:
    return {
        "model.embed_tokens": random_weight(20, 64, 8, 32),
        "model.norm.weight": torch.randn(64),
    }


def write(path: Path, layers: int = 3, *, overwrite: bool = False) -> Path:
    with CheckpointWriter(path, overwrite=overwrite) as writer:
        for layer in range(layers):
            writer.write_layer(layer, layer_weights(layer))
        writer.write_outer(outer_weights())
        writer.copy_file("tokenizer.json", b"{}")
        writer.finish({**CONFIG, "num_hidden_layers": layers})
    return path


def edit_json(path: Path, edit: Callable[[Any], None]) -> None:
    value = json.loads(path.read_bytes())
    edit(value)
    path.write_text(json.dumps(value))


def edit_index(folder: Path, edit: Callable[[Any], None]) -> None:
    edit_json(folder / INDEX_FILE, edit)


def edit_config(folder: Path, edit: Callable[[Any], None]) -> None:
    edit_json(folder / CONFIG_FILE, edit)


def set_bytes(folder: Path, name: str, data: bytes) -> None:
    """Replace a file, with the checksum of what it is now: only its content is wrong."""
    (folder / name).write_bytes(data)
    checksum = {"sha256": hashlib.sha256(data).hexdigest(), "nbytes": len(data)}
    edit_index(folder, lambda index: index["checksums"].update({name: checksum}))


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a file's bytes, and the data after it."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def with_header(text: bytes, data: bytes) -> bytes:
    """A file with the given header text, padded as the format wants."""
    length = -(-(8 + len(text)) // 4096) * 4096 - 8
    return length.to_bytes(8, "little") + text.ljust(length) + data


def edit_header(folder: Path, edit: Callable[[dict[str, Any]], None], name: str = LAYER) -> None:
    header, data = header_of((folder / name).read_bytes())
    edit(header)
    set_bytes(folder, name, with_header(json.dumps(header).encode(), data))


def edit_description(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change what the header of a layer's file says of its quantized weight."""

    def inner(header: dict[str, Any]) -> None:
        described = json.loads(header["__metadata__"]["qoff"])
        edit(described)
        header["__metadata__"]["qoff"] = json.dumps(described)

    edit_header(folder, inner)

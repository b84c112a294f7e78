"""Apertus in GGUF: what the activations have learned is metadata."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qoff.errors import FormatError
from qoff.schema import is_number, shown

from .gguf_dense import qwen
from .gguf_fields import Config
from .gguf_metadata import Metadata

MODULES = {"mlp.act_fn": "xielu"}
_SHAPES: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}


def apertus(metadata: Metadata, config: Config) -> Config:
    """Its RoPE is Llama 3's, whose divisors are a tensor."""
    return {**qwen(metadata, config), "hidden_act": "xielu"}


def numbers(metadata: Metadata) -> dict[str, Tensor]:
    """The numbers of xIELU as tensors: a key has one of each layer, or one for all.

    As in safetensors: the softplus of the alphas is taken later.
    """
    found, layers = dict[str, Tensor](), metadata.layers
    for name, shape in _SHAPES.items():
        key = f"xielu.{name}"
        value = metadata.values.get(key)
        each = value.tolist() if isinstance(value, np.ndarray) else [value] * layers
        if len(each) != layers or not all(map(is_number, each)):
            there = "missing" if value is None else shown(each)
            raise FormatError(
                f"{metadata.path}: {key} is {there}; expected a number for each of {layers} layers"
            )
        for layer, number in enumerate(each):
            found[f"blk.{layer}.xielu.{name}"] = torch.tensor(number).float().view(shape)
    return found

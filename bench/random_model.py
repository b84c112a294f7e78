"""Checkpoints of random 4-bit weights in the shape of a real model, written without quantizing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from qoff.checkpoint import CheckpointWriter, QuantEntry, WeightFile
from qoff.kernels.layout.packing import packed_shapes
from qoff.kernels.layout.qtensor import QTensor
from qoff.memory.plan import EMBEDDING
from qoff.models import names
from qoff.models.families.mtp import mtp_config
from qoff.models.layer_weights import layer_weights, outer_weights
from qoff.models.modules.configs import LAYOUT
from qoff.models.spec import DecoderSpec
from qoff.plan.module_sizes import ModuleSizes
from qoff.quant import QuantConfig
from qoff.quant.matrix import ROUTER_BITS

TINYLLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 22,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
SMALL = TINYLLAMA | {
    "hidden_size": 256,
    "num_hidden_layers": 16,
    "intermediate_size": 704,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
LLAMA_8B = TINYLLAMA | {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
GROUP = 64


class Twin(Protocol):
    """Another file that gets the same weights, as they are drawn."""

    packing: str  # of the matrices that it takes

    def write(self, weights: Sequence[names.Weight], drawn: Mapping[str, QTensor | Tensor]) -> None:
        """Write a layer, or the outer weights; drawn: by their names, may be changed."""


def random_matrix(
    shape: tuple[int, int], bits: int, generator: torch.Generator, packing: str = "rows16"
) -> QTensor:
    """A matrix of random codes, with elements of deviation about 1 / sqrt(K)."""
    codes_shape, scale_shape = packed_shapes(shape, bits, GROUP, packing)
    codes = torch.empty(codes_shape, dtype=torch.uint8)
    codes.view(-1).view(torch.int64).random_(-(2**63), None, generator=generator)
    deviation = (2**bits) / 12**0.5  # of uniform codes
    scale = (0.5 + torch.rand(scale_shape, generator=generator)) / (deviation * shape[1] ** 0.5)
    scale[:, :, 1] = scale[:, :, 0] * -(2**bits - 1) / 2
    return QTensor(codes, scale.half(), shape, bits, GROUP, packing)


def write_random_checkpoint(
    path: Path,
    config: Mapping[str, Any],
    seed: int = 0,
    packing: str = "rows16",
    threads: int = 1,
    embedding: float = 1.0,
    twin: Twin | None = None,
    mtp: bool = False,
) -> None:
    """Write a checkpoint of a Hugging Face config: 4-bit layers, heads by default.

    Each thread holds a layer in memory. embedding: how much larger its elements are; where they
    are as small as others, what attention adds is nearly the same for all tokens. twin: written
    beside it, layer by layer, by one thread. mtp: with a layer for multi-token prediction.
    """
    spec, head_bits = DecoderSpec.from_config(config), QuantConfig().head_bits

    def draw(
        weights: tuple[names.Weight, ...], layer: int, prefix: str | None = None
    ) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed + layer + 1)
        if prefix is None:
            prefix = "" if layer < 0 else names.layer_prefix(layer)
        drawn: dict[str, QTensor | Tensor] = {}
        for weight in weights:
            if weight.columns is None:
                drawn[prefix + weight.name] = torch.ones(weight.rows)
            else:
                shape, bits = (weight.rows, weight.columns), head_bits if weight.sensitive else 4
                bits = ROUTER_BITS if weight.exact else bits
                form = packing if twin is None else twin.packing
                drawn[prefix + weight.name] = random_matrix(shape, bits, generator, form)
                if weight.name == EMBEDDING:
                    drawn[weight.name].scale_min.mul_(embedding)  # type: ignore[union-attr]
        if twin is None:
            return drawn
        twin.write(weights, drawn)
        return {
            name: value.to_packing(packing) if isinstance(value, QTensor) else value
            for name, value in drawn.items()
        }

    with CheckpointWriter(path) as writer, ThreadPoolExecutor(threads) as pool:

        def write(layer: int) -> None:
            writer.write_layer(layer, draw(layer_weights(spec, layer), layer))

        for _ in pool.map(write, range(spec.num_layers)):
            pass
        writer.write_outer(draw(outer_weights(spec), -1))
        if mtp:
            ahead = DecoderSpec.from_config(mtp_config(config))
            layer = draw(layer_weights(ahead, 0), spec.num_layers, names.MTP_PREFIX)
            writer.write_mtp(layer)
        writer.finish(
            {
                **config,
                "quantization_config": {
                    "bits": 4,
                    "group_size": GROUP,
                    "solver": "rtn",  # readers know no other that is as plain
                    "packing": packing,
                },
            }
        )


def write_random_modules(path: Path, config: Mapping[str, Any], seed: int = 0) -> None:
    """Write a checkpoint for transformers' modules of a Hugging Face config, with 4-bit layers.

    What is not quantized is all ones, and numbers that are no floats are 0.
    """
    quant = QuantConfig(group_size=GROUP, packing="rows16", solver="rtn")
    sizes = ModuleSizes.of(config, quant)

    def draw(file: WeightFile, layer: int) -> dict[str, QTensor | Tensor]:
        generator = torch.Generator().manual_seed(seed + layer)
        return {
            name: random_matrix(entry.shape, entry.bits, generator)
            if isinstance(entry, QuantEntry)
            else torch.full(entry.shape, int(entry.dtype.is_floating_point), dtype=entry.dtype)
            for name, entry in file.weights.items()
        }

    with CheckpointWriter(path) as writer:
        for layer, file in enumerate(sizes.checkpoint.layers):
            writer.write_layer(layer, draw(file, layer))
        writer.write_outer(draw(sizes.checkpoint.outer, sizes.num_layers))
        how = {"bits": 4, "group_size": GROUP, "solver": "rtn", "packing": quant.packing}
        writer.finish({**config, "quantization_config": {"layout": LAYOUT, **how}})

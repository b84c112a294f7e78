"""Small checkpoints of random weights, and comparison of what a store serves with their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from qoff.checkpoint import Checkpoint, CheckpointWriter, read_weight
from qoff.kernels.layout.qtensor import QTensor
from qoff.memory import Tile, TiledMatrix, WeightStore
from qoff.memory.plan import (
    EMBEDDING,
    LM_HEAD,
    Image,
    Unit,
    local_names,
    unit_files,
    unit_weights,
)
from tests.kernels.operands import random_weight

HIDDEN, MLP, VOCAB = 64, 128, 100


def write_checkpoint(
    path: Path,
    layers: int = 4,
    packing: str = "rows16",
    tied: bool = True,
    scale: int = 1,
    alike: bool = False,
    vocab: int = VOCAB,
    odd: bool = False,
) -> Checkpoint:
    """A checkpoint shaped like a decoder; `scale` multiplies the rows of its matrices.

    With `alike`, all layers have the same weights, which is quicker. odd: codes that a GPU
    widens, of 6 bits in the embedding, of 3 and 5 in layers.
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "quantization_config": {
            "quant_method": "qoff",
            "version": 1,
            "bits": 4,
            "group_size": 64,
            "solver": "rtn",
            "packing": packing,
        },
    }
    with CheckpointWriter(path) as writer:
        layer: dict[str, QTensor | Tensor] = {}
        for i in range(layers):
            if not layer or not alike:
                layer = random_layer(packing, scale, (5, 3) if odd else (4, 4))
            writer.write_layer(i, {f"model.layers.{i}.{n}": w for n, w in layer.items()})
        outer: dict[str, QTensor | Tensor] = {
            "model.embed_tokens": random_weight(vocab, HIDDEN, 6 if odd else 8, packing=packing),
            "model.norm.weight": torch.randn(HIDDEN),
        }
        if not tied:
            outer["lm_head"] = random_weight(vocab, HIDDEN, 8, packing=packing)
        writer.write_outer(outer)
        writer.finish(config)
    return Checkpoint.open(path)


def random_layer(
    packing: str, scale: int, bits: tuple[int, int] = (4, 4)
) -> dict[str, QTensor | Tensor]:
    """bits: of the output and of the down projection; the others have 4."""
    out, down = bits
    return {
        "input_layernorm.weight": torch.randn(HIDDEN),
        "self_attn.qkv_proj": random_weight(90 * scale, HIDDEN, packing=packing),
        "self_attn.qkv_proj.bias": torch.randn(90 * scale),
        "self_attn.o_proj": random_weight(HIDDEN, HIDDEN, out, packing=packing),
        "post_attention_layernorm.weight": torch.randn(HIDDEN),
        "mlp.gate_up_proj": random_weight(256 * scale, HIDDEN, packing=packing),
        "mlp.down_proj": random_weight(HIDDEN * scale, MLP, down, packing=packing),
    }


def all_names(checkpoint: Checkpoint) -> list[str]:
    return [name for file in unit_files(checkpoint).values() for name in file.weights]


def same_bits(actual: object, expected: object) -> bool:
    """Whether two weights are the same, wherever they are."""
    if isinstance(actual, QTensor) and isinstance(expected, QTensor):
        return (
            (actual.shape, actual.bits, actual.packing)
            == (expected.shape, expected.bits, expected.packing)
            and same_bits(actual.codes, expected.codes)
            and same_bits(actual.scale_min, expected.scale_min)
        )
    assert isinstance(actual, Tensor)
    assert isinstance(expected, Tensor)
    parts = [x.cpu().contiguous().view(torch.uint8) for x in (actual, expected)]
    return actual.dtype == expected.dtype and torch.equal(*parts)


class Truth:
    """The weights of every unit, read plainly from the files."""

    def __init__(self, checkpoint: Checkpoint, packing: str) -> None:
        self.units: dict[Unit, dict[str, QTensor | Tensor]] = {}
        for unit, file in unit_files(checkpoint).items():
            local = local_names(unit, file.weights)
            weights: dict[str, QTensor | Tensor] = {}
            for name in unit_weights(unit, file):
                weight = read_weight(file, file.weights[name])
                if isinstance(weight, QTensor):
                    same = weight.packing == packing  # otherwise it is not for a GPU
                    weight = (weight.for_kernels if same else weight.to_packing)(packing)
                weights[local[name]] = weight
            self.units[unit] = weights
        table = read_weight(checkpoint.outer, checkpoint.outer.weights["model.embed_tokens"])
        assert isinstance(table, QTensor)
        self.embedding = table

    def wrong(self, unit: Unit, served: Mapping[str, object]) -> list[str]:
        """Names that are missing or differ in a bit from the files."""
        expected = self.units[unit]
        return [n for n in expected if n not in served or not same_bits(served[n], expected[n])]


def units_of(store: WeightStore) -> tuple[Unit, ...]:
    """All units in the order of a pass, tiled ones followed by their tiles."""
    units: list[Unit] = []
    for unit in unit_files(store.checkpoint):
        units += [unit, *(tile for tile in store.residency.tiles if tile.unit == unit)]
    return tuple(units)


def check_pass(store: WeightStore, truth: Truth) -> None:
    """One pass in the default order; every unit and every tile is what the files say."""
    units = iter(units_of(store))
    for unit in units:
        assert not isinstance(unit, Tile)
        with store.use(unit) as weights:
            for name, expected in truth.units[unit].items():
                if name == EMBEDDING:
                    name = LM_HEAD
                matrix = weights[name]
                if not isinstance(matrix, TiledMatrix):
                    assert same_bits(matrix, expected)
                    continue
                assert isinstance(expected, QTensor)
                assert matrix.shape == expected.shape
                row = 0
                for tile in matrix.tiles:
                    assert next(units) == tile
                    assert tile.first_row == row
                    with store.use(tile) as served:
                        assert set(served) == {name}
                        assert same_bits(served[name], expected.rows(row, tile.stop))
                    row = tile.stop
                assert row == expected.shape[0]


def file_bytes(image: Image) -> int:
    """Bytes that are read from the file."""
    return sum(r.nbytes for r in image.ranges)

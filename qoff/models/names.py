"""The weights of a layer file and of the outer file, and the Hugging Face tensors they come from.

    self_attn.qkv_proj   the rows of q_proj, k_proj and v_proj, one below the other
    mlp.gate_up_proj     the rows of gate_proj and up_proj, "interleaved16": blocks of 16 rows in
                         turn, gate 0..15, up 0..15, gate 16..31, up 16..31, ..., so that
                         silu(gate) * up of 16 outputs needs two neighbouring blocks of rows
    everything else      one tensor each, under its own name

Fused biases have the rows of their matrix in the same order. Matrices are called without the
".weight" of Hugging Face (as are `model.embed_tokens` and `lm_head`); vectors keep their names.
Inside a file every name has the prefix of its layer, "model.layers.0.".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qoff.errors import UnsupportedModelError

from .spec import DecoderSpec

ROW_BLOCK = 16
EMBEDDING, NORM, HEAD = "model.embed_tokens", "model.norm.weight", "lm_head"


@dataclass(frozen=True)
class Part:
    """A Hugging Face tensor and the number of its rows."""

    source: str  # name in the Hugging Face checkpoint, inside the layer for layer weights
    rows: int


@dataclass(frozen=True)
class Weight:
    """A weight as it is stored: a matrix [rows, columns], or a vector [rows] without columns."""

    name: str
    parts: tuple[Part, ...]
    columns: int | None = None
    interleaved: bool = False  # blocks of 16 rows of the parts in turn

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    def part_shape(self, part: int) -> tuple[int, ...]:
        """Shape that the Hugging Face tensor of a part has."""
        rows = self.parts[part].rows
        return (rows,) if self.columns is None else (rows, self.columns)

    def destination(self, part: int, start: int, stop: int) -> Tensor:
        """Return the stored rows, int64, in which rows start..stop-1 of a part lie."""
        rows = torch.arange(start, stop)
        if self.interleaved:
            block = rows // ROW_BLOCK * len(self.parts) + part
            return block * ROW_BLOCK + rows % ROW_BLOCK
        return rows + sum(part.rows for part in self.parts[:part])


def layer_prefix(layer: int) -> str:
    """Return what the names of a layer's weights start with."""
    return f"model.layers.{layer}."


def layer_weights(spec: DecoderSpec) -> tuple[Weight, ...]:
    """Return the weights of one layer, vectors first, in the order of its file.

    Raises UnsupportedModelError where a row block of 16 would hold rows of two parts.
    """
    for key, size in (("head_dim", spec.head_dim), ("intermediate_size", spec.intermediate_size)):
        if size % ROW_BLOCK:
            raise UnsupportedModelError(
                f"config.json: {key} is {size}; supported: multiples of {ROW_BLOCK}"
            )
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q, kv = spec.q_rows, spec.kv_rows
    vectors = [_vector("input_layernorm", hidden), _vector("post_attention_layernorm", hidden)]
    if spec.qk_norm:
        vectors += [_vector(f"self_attn.{x}_norm", spec.head_dim) for x in "qk"]
    matrices = [
        (
            _fused("self_attn", "qkv_proj", {"q_proj": q, "k_proj": kv, "v_proj": kv}, hidden),
            spec.qkv_bias,
        ),
        (_fused("self_attn", "o_proj", {"o_proj": hidden}, q), spec.o_bias),
        (
            _fused("mlp", "gate_up_proj", {"gate_proj": inner, "up_proj": inner}, hidden),
            spec.mlp_bias,
        ),
        (_fused("mlp", "down_proj", {"down_proj": hidden}, inner), spec.mlp_bias),
    ]
    vectors += [_bias(matrix) for matrix, has_bias in matrices if has_bias]
    return (*vectors, *(matrix for matrix, _ in matrices))


def outer_weights(spec: DecoderSpec) -> tuple[Weight, ...]:
    """Return the weights outside of the layers; `lm_head` only if it is not the embedding."""
    names = [EMBEDDING] if spec.tie_word_embeddings else [EMBEDDING, HEAD]
    matrices = [
        Weight(name, (Part(f"{name}.weight", spec.vocab_size),), spec.hidden_size) for name in names
    ]
    return (Weight(NORM, (Part(NORM, spec.hidden_size),)), *matrices)


def interleave16(gate: Tensor, up: Tensor) -> Tensor:
    """Join two tensors [rows, ...] in blocks of 16 rows in turn, as `mlp.gate_up_proj` is."""
    blocks = [torch.unflatten(x, 0, (-1, ROW_BLOCK)) for x in (gate, up)]
    return torch.stack(blocks, dim=1).flatten(0, 2)


def _vector(name: str, rows: int) -> Weight:
    return Weight(f"{name}.weight", (Part(f"{name}.weight", rows),))


def _fused(module: str, name: str, parts: dict[str, int], columns: int) -> Weight:
    return Weight(
        f"{module}.{name}",
        tuple(Part(f"{module}.{part}.weight", rows) for part, rows in parts.items()),
        columns,
        interleaved=name == "gate_up_proj",
    )


def _bias(matrix: Weight) -> Weight:
    parts = (Part(p.source.removesuffix("weight") + "bias", p.rows) for p in matrix.parts)
    return Weight(f"{matrix.name}.bias", tuple(parts), interleaved=matrix.interleaved)

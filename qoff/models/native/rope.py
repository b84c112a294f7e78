"""Cosines and sines of rotary position embeddings, equal to transformers' bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.budgets import CPU
from qoff.models.spec import DecoderSpec
from qoff.models.spec_parts import RopeSpec

_FIRST_ROWS = 256


def inverse_frequencies(spec: DecoderSpec, rope: RopeSpec) -> tuple[Tensor, float]:
    """Return the angle per position of each channel pair, float32 [rope.dim / 2], and a factor.

    rope: one of the spec's. Cosines and sines are multiplied by the factor. The formulas of scaled
    kinds are transformers' `ROPE_INIT_FUNCTIONS`; "dynamic" and "longrope" are taken as they are up
    to the spec's `position_limit`.
    """
    if rope.kind == "default":
        exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
        return 1.0 / (rope.theta**exponents), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    head_dim = rope.dim if rope.kind == "proportional" else spec.rope_head_dim
    config = LlamaConfig(
        hidden_size=spec.num_heads * head_dim,
        num_attention_heads=spec.num_heads,
        head_dim=head_dim,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters=rope.parameters(),
    )
    inv_freq, factor = ROPE_INIT_FUNCTIONS[rope.kind](config)
    return inv_freq.float(), float(factor)


def table_bytes(spec: DecoderSpec, positions: int) -> int:
    """The most bytes that the tables of a model take for so many positions, while they grow."""
    ropes = {rope for layer in range(spec.num_layers) if (rope := spec.rope_of(layer))}
    rows = max(2 * positions, _FIRST_ROWS)  # a table doubles, and is copied then
    return sum(4 * rope.dim * (rows + positions) for rope in ropes)


class RotaryTable:
    """Cosines and sines of the positions 0, 1, ..., as many as were asked for so far.

    Channel i of a head is paired with channel i + rope.dim / 2 and turned by column i. They are
    computed on the CPU, and lie on `device`.
    """

    def __init__(self, spec: DecoderSpec, rope: RopeSpec, device: torch.device = CPU) -> None:
        self._inv_freq, self._factor = inverse_frequencies(spec, rope)
        self._cos = self._sin = torch.empty(0, rope.dim // 2, device=device)

    @property
    def whole(self) -> tuple[Tensor, Tensor]:
        """All that was computed so far: what a recording reads, whatever positions come later."""
        return self._cos, self._sin

    def upto(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, float32 [positions, rope.dim / 2], views of the table.

        The table doubles when it is too short; views given out before stay valid.
        """
        have = len(self._cos)
        if positions > have:
            most = max(positions, 2 * have, _FIRST_ROWS)
            rows = torch.arange(have, most, dtype=torch.float32)
            angles = rows[:, None] * self._inv_freq
            cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
            self._cos = torch.cat((self._cos, cos.to(self._cos.device)))
            self._sin = torch.cat((self._sin, sin.to(self._sin.device)))
        return self._cos[:positions], self._sin[:positions]

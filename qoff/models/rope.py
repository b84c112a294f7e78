"""Cosines and sines of rotary position embeddings, equal to transformers' bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.errors import UnsupportedModelError

from .spec import DecoderSpec

CPU = torch.device("cpu")
_FIRST_ROWS = 256


def inverse_frequencies(spec: DecoderSpec) -> tuple[Tensor, float]:
    """Return the angle per position of each channel pair, float32 [head_dim / 2], and a factor.

    Cosines and sines are multiplied by the factor. The formulas of scaled kinds are transformers'
    `ROPE_INIT_FUNCTIONS`; "dynamic" is taken at its base, which holds up to
    `max_position_embeddings`.
    """
    if spec.rope.kind == "default":
        exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
        return 1.0 / (spec.rope.theta**exponents), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=spec.num_heads * spec.head_dim,
        num_attention_heads=spec.num_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters=spec.rope.parameters(),
    )
    inv_freq, factor = ROPE_INIT_FUNCTIONS[spec.rope.kind](config)
    return inv_freq.float(), float(factor)


class RotaryTable:
    """Cosines and sines of the positions 0, 1, ..., as many as were asked for so far.

    Channel i of a head is paired with channel i + head_dim / 2 and turned by column i. They are
    computed on the CPU, and lie on `device`.
    """

    def __init__(self, spec: DecoderSpec, device: torch.device = CPU) -> None:
        self._inv_freq, self._factor = inverse_frequencies(spec)
        self._limit = spec.max_position_embeddings if spec.rope.kind == "dynamic" else None
        self._cos = self._sin = torch.empty(0, spec.head_dim // 2, device=device)

    def upto(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, float32 [positions, head_dim / 2], views of the table.

        The table doubles when it is too short; views given out before stay valid. Raises
        UnsupportedModelError beyond `max_position_embeddings` for the kind "dynamic", whose
        frequencies would change there.
        """
        if positions > len(self._cos):
            self._grow(positions)
        return self._cos[:positions], self._sin[:positions]

    def _grow(self, positions: int) -> None:
        if self._limit is not None and positions > self._limit:
            raise UnsupportedModelError(
                f"rope_type 'dynamic' is supported up to max_position_embeddings={self._limit} "
                f"positions, not {positions}; use a shorter context"
            )
        have = len(self._cos)
        rows = torch.arange(have, max(positions, 2 * have, _FIRST_ROWS), dtype=torch.float32)
        angles = rows[:, None] * self._inv_freq
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        self._cos = torch.cat((self._cos, cos.to(self._cos.device)))
        self._sin = torch.cat((self._sin, sin.to(self._sin.device)))

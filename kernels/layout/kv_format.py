"""The packed form of the KV cache: 64 tokens of one sequence for one KV head are one record.

A record is bytes, in this order; D is head_dim, scales and minima are float16, and
value = code * scale + minimum:

    k_codes, k_scale, k_minimum, v_codes, v_scale, v_minimum

Codes of 4 bits are uint8 [64, D/2]: byte (t, c) holds channel c of token t in its low nibble and
channel c + D/2 in its high nibble, so that the two nibble planes are two matrices with the same
tokens, and neither has to be interleaved with the other. Codes of 8 bits are uint8 [64, D].

Codes of 2 bits are uint8 [32, D/2]: such bytes of token t, and two bits higher those of token
t + 32. Codes of 3 bits are their lower two bits in this form, and then uint8 [16, D/2] of their
upper bits: of tokens t, t + 16, t + 32 and t + 48 in the four bits of a nibble. So a shift and a
mask of whole rows make them codes of 4 bits, of which all that computes with them takes them for.

K has a scale and a minimum per channel over the 64 tokens, [D]; V per token and part, [parts, 64],
a part being D / parts neighbouring channels: see KIVI (arXiv 2402.02750).

A latent record is k_codes, k_scale and k_minimum alone: V are channels of K
(`heads.latent_values`), so its codes are read once for both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qoff.errors import OpError

BLOCK_TOKENS = 64
HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512)
LATENT_DIM = 640  # the most channels of a latent key
KV_BITS = (2, 3, 4, 8)
CLIPPED = {2: 1 / 8, 3: 1 / 16}  # of a group's range, left off at either end; powers of two
_HALF_BYTES = 2  # of a float16


@dataclass(frozen=True)
class KVFormat:
    """How the blocks of one layer are packed; latent: as `HeadShape` has it.

    Raises OpError for what no kernel supports.
    """

    head_dim: int
    k_bits: int = 4
    v_bits: int = 4
    latent: int = 0

    def __post_init__(self) -> None:
        if self.latent:
            self._check_latent()
        elif self.head_dim not in HEAD_DIMS:
            raise OpError(
                f"heads of {self.head_dim} channels (head_dim) have no packed KV cache; those of "
                f"{', '.join(map(str, HEAD_DIMS))} do. A cache that is not packed takes any"
            )
        if self.k_bits not in KV_BITS or self.v_bits not in KV_BITS:
            raise OpError(f"K and V have 2, 3, 4 or 8 bits, not {self.k_bits} and {self.v_bits}")

    def _check_latent(self) -> None:
        if self.latent % 32 or self.head_dim % 32 or not self.latent < self.head_dim <= LATENT_DIM:
            raise OpError(
                f"latent keys of {self.head_dim} channels, {self.latent} of them values, have no "
                f"packed KV cache; those of multiples of 32 up to {LATENT_DIM} do. A cache that is "
                "not packed takes any"
            )
        if self.k_bits != self.v_bits:
            raise OpError(
                f"values of this model are channels of its keys: give both the same bits, not "
                f"{self.k_bits} and {self.v_bits}"
            )

    @property
    def value_dim(self) -> int:
        """Channels of V."""
        return self.latent or self.head_dim

    @property
    def own_value_dim(self) -> int:
        """Channels of V that are not those of K."""
        return 0 if self.latent else self.head_dim

    @property
    def half(self) -> int:
        """Channels of one nibble plane."""
        return self.head_dim // 2

    @property
    def parts(self) -> int:
        """Groups of channels per token that have a scale and a minimum of their own."""
        return 1 if self.head_dim <= 64 else 2

    @property
    def v_params(self) -> int:
        """Scales of V in a block, and as many minima."""
        return 0 if self.latent else self.parts * BLOCK_TOKENS

    @property
    def k_scale(self) -> int:
        """Offset of K's scales in bytes; its codes are at 0, its minima follow the scales."""
        return BLOCK_TOKENS * self.head_dim * self.k_bits // 8

    @property
    def v_codes(self) -> int:
        """Offset of V's codes in bytes."""
        return self.k_scale + 2 * self.head_dim * _HALF_BYTES

    @property
    def v_scale(self) -> int:
        """Offset of V's scales in bytes; its minima follow the scales."""
        own = 0 if self.latent else BLOCK_TOKENS * self.head_dim * self.v_bits // 8
        return self.v_codes + own

    @property
    def bound_bytes(self) -> int:
        """Bytes of K's scales and minima, which bound the scores of a block."""
        return self.v_codes - self.k_scale

    @property
    def nbytes(self) -> int:
        """Bytes of a record, a multiple of 64."""
        return self.v_scale + 2 * self.v_params * _HALF_BYTES

    def key_views(self, records: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of records uint8 [..., nbytes], in the order they lie in.

        k_codes uint8 [..., 64, D] of 8 bits or [..., 16 * k_bits, D / 2] of fewer, k_scale and
        k_minimum float16 [..., D]. Raises OpError for records of another size.
        """
        if records.dtype != torch.uint8 or records.shape[-1] != self.nbytes:
            raise OpError(
                f"records of {self} are uint8 [..., {self.nbytes}], "
                f"not {records.dtype} {tuple(records.shape)}"
            )
        k_minimum = self.k_scale + self.head_dim * _HALF_BYTES
        return (
            records[..., : self.k_scale].unflatten(-1, (-1, self._width(self.k_bits))),
            records[..., self.k_scale : k_minimum].view(torch.float16),
            records[..., k_minimum : self.v_codes].view(torch.float16),
        )

    def value_views(self, records: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same of V, of a form that is not latent; its scales are [..., parts * 64]."""
        v_minimum = self.v_scale + self.v_params * _HALF_BYTES
        return (
            records[..., self.v_codes : self.v_scale].unflatten(-1, (-1, self._width(self.v_bits))),
            records[..., self.v_scale : v_minimum].view(torch.float16),
            records[..., v_minimum:].view(torch.float16),
        )

    def views(self, records: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Both."""
        return *self.key_views(records), *self.value_views(records)

    def _width(self, bits: int) -> int:
        """Bytes of a row of codes."""
        return self.head_dim if bits == 8 else self.half

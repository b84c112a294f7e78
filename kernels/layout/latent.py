"""Multi-head latent attention: what of a token is cached, and how its heads come of that.

A token's K and V are compressed to one vector, its latent. Each head has two matrices, that of its
keys [nope_dim, latent] and that of its values [value_dim, latent], one above the other in one
packed matrix, head after head. q . (W l) = (W^T q) . l, so a query is multiplied by its head's
matrix of keys and then attends to latents themselves; what it finds there, by the matrix of values.
Heads attend to one KV head, as `heads.HeadShape.latent` says: arXiv 2405.04434.
"""

from __future__ import annotations

from dataclasses import dataclass

from qoff.errors import OpError


@dataclass(frozen=True)
class LatentShape:
    """Sizes of one layer's latent attention. Raises OpError for what no kernel has."""

    heads: int
    latent: int  # channels of a token's latent
    nope_dim: int  # channels of a head's queries and keys that RoPE leaves alone
    rope_dim: int  # those that it rotates, of keys the same for all heads
    value_dim: int  # channels of a head's values

    def __post_init__(self) -> None:
        if self.latent % 32 or self.nope_dim % 16 or self.rope_dim % 16 or self.value_dim % 16:
            raise OpError(
                f"latents of {self.latent} channels, heads of {self.nope_dim} + {self.rope_dim} "
                f"and values of {self.value_dim}; latents are multiples of 32, the others of 16"
            )

    @property
    def query_dim(self) -> int:
        """Channels of a head's query: those without RoPE, then those with."""
        return self.nope_dim + self.rope_dim

    @property
    def head_dim(self) -> int:
        """Channels of the keys that are cached, and of the queries that attend to them."""
        return self.latent + self.rope_dim

    @property
    def rows(self) -> int:
        """Rows of the matrix of keys and values."""
        return self.heads * (self.nope_dim + self.value_dim)

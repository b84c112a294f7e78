"""Attention to the tokens that an index of keys chooses.

That is DeepSeek Sparse Attention (DSA: DeepSeek-V3.2, arXiv 2512.02556); the index is its lightning
indexer.

Beside what attention caches, a token has an index key, one for all heads of the index. A new token
has a query and a weight for each of these heads. The score of an older token, or of itself, is the
sum over heads of weight * relu(query . key), and attention is to the `top` tokens of largest
scores. Constant factors that DeepSeek has beside change no order and are left out. A token at a
position below `top` attends to all.

Keys of the index are cached as those of latent attention are (`heads.HeadShape.latent`): as a layer
of the cache of its own, with one KV head. Channels that RoPE does not turn take the place of the
latent.
"""

from __future__ import annotations

from dataclasses import dataclass

from qoff.errors import OpError

from .heads import HeadShape


@dataclass(frozen=True)
class IndexShape:
    """Sizes of an index. Raises OpError for what no kernel has."""

    heads: int
    dim: int  # channels of its queries and keys
    rope_dim: int  # those that RoPE turns
    top: int  # tokens that are attended to

    def __post_init__(self) -> None:
        if self.heads % 16 or self.dim % 32 or self.rope_dim % 32 or self.dim <= self.rope_dim:
            raise OpError(
                f"an index of {self.heads} heads of {self.dim} channels, {self.rope_dim} of which "
                "turn; heads are a multiple of 16, channels of 32, some of which do not turn"
            )
        if self.top < 1:
            raise OpError(f"an index that chooses {self.top} tokens; it is 1 or more")

    @property
    def keys(self) -> HeadShape:
        """How its keys are cached."""
        return HeadShape(
            self.heads, 1, self.dim, 1.0, latent=self.dim - self.rope_dim, indexes=True
        )

    @property
    def width(self) -> int:
        """Columns of its queries, and of the key."""
        return (self.heads + 1) * self.dim

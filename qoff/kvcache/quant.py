"""How a KV cache is packed."""

from __future__ import annotations

from dataclasses import dataclass

from qoff.errors import ArgumentError
from qoff.kernels.kv_format import KVFormat


@dataclass(frozen=True)
class KVQuant:
    """Bits of K (per channel over 64 tokens) and V (per token); how many tokens are never packed.

    Raises ArgumentError for other bits than 4 and 8 and for a negative window.
    """

    k_bits: int = 4
    v_bits: int = 4
    window: int = 64  # the newest tokens stay in float32

    def __post_init__(self) -> None:
        if self.k_bits not in (4, 8) or self.v_bits not in (4, 8):
            raise ArgumentError(f"a KV cache has 4 or 8 bits, not {self.k_bits} and {self.v_bits}")
        if self.window < 0:
            raise ArgumentError(f"a window of {self.window} tokens; use 0 or more")

    def form(self, head_dim: int) -> KVFormat:
        """The form of the blocks. Raises OpError for a head size that cannot be packed."""
        return KVFormat(head_dim, self.k_bits, self.v_bits)

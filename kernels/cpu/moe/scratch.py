"""What a mixture of experts on the CPU takes of a pool's workspace, in bytes."""

from __future__ import annotations

from typing import NamedTuple

from qoff.kernels.cpu.linear.scratch import TILE_BYTES, quantized_bytes

SORTED_BYTES = 16  # how many pairs and segments there are
SEGMENT_BYTES = 24  # of a segment: expert, first pair, pair after the last
_MOST = 64 << 20  # more tokens than this has room for go one part after the other


class ExpertSizes(NamedTuple):
    """An expert: inputs, inner values, outputs; groups of both matrices."""

    columns: int
    inner: int
    outputs: int
    groups: tuple[int, int]

    @property
    def first_bytes(self) -> int:
        """Of a pair of a token and an expert: inputs, and outputs where these were."""
        return max(quantized_bytes(self.columns, self.groups[0]), 4 * self.outputs)

    @property
    def second_bytes(self) -> int:
        """Of a pair: inputs of the second matrix."""
        return quantized_bytes(self.inner, self.groups[1])

    def together(self, top_k: int) -> int:
        """Tokens of `top_k` experts each that are computed together, at most."""
        pair = self.first_bytes + 4 * self.inner + self.second_bytes + 8
        return max(1, _MOST // pair // top_k)

    def arrays(self, threads: int, tokens: int, top_k: int, experts: int) -> dict[str, int]:
        """Bytes of each array of the jobs, one behind the other."""
        pairs = tokens * top_k
        return {
            "scratch": threads * TILE_BYTES,
            "sorted": SORTED_BYTES,
            "counts": 8 * experts,
            "segments": SEGMENT_BYTES * min(pairs, experts),
            "order": 8 * pairs,
            "inner": 4 * self.inner * pairs,
            "weighted": self.first_bytes * pairs,
            "quantized": self.second_bytes * pairs,
        }

    def nbytes(self, threads: int, tokens: int, top_k: int, experts: int) -> int:
        """`experts` of so many tokens, of `top_k` of so many experts each."""
        some = min(tokens, self.together(top_k))
        return sum(self.arrays(threads, some, top_k, experts).values())


def route_bytes(threads: int, experts: int, judged: bool) -> int:
    """`route`; judged: as `Routing.judged` says. Of each thread what scores of a token become."""
    return threads * 8 * experts * judged

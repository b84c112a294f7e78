"""Tokens chosen by an index, and attention to them, on the CPU against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.cpu.indexed import scratch
from qoff.kernels.cpu.jit.pool import Pool
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.index import IndexShape
from qoff.kernels.layout.latent import LatentShape
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.reference import ops as reference
from qoff.kvcache import KVQuant
from qoff.kvcache.host.mixed import host_cache
from tests.tolerances import RELATIVE_RMS, relative_rms

INDEX = IndexShape(heads=16, dim=64, rope_dim=32, top=40)
LATENTS = LatentShape(heads=6, latent=64, nope_dim=16, rope_dim=32, value_dim=16)
SHAPE = HeadShape(6, 1, LATENTS.head_dim, 0.2, latent=64)


def _rotary(tokens: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(tokens)[:, None] * torch.rand(16)
    return angles.cos(), angles.sin()


def random_rows(
    count: int, shape: HeadShape, index: IndexShape = INDEX
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of the index, its weights, and what is attended with."""
    return (
        torch.randn(count, index.width),
        torch.randn(count, index.heads),
        torch.randn(count, shape.qkv_width),
    )


@dataclass
class Sequences:
    """Passes of random tokens through two caches, of the CPU's ops and of the reference."""

    kv: KVQuant | None
    count: int
    index: IndexShape = INDEX
    shape: HeadShape = SHAPE
    pool: Pool | None = None
    lengths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        shapes = (self.index.keys, self.shape)
        self.caches = [host_cache(shapes, self.count, self.kv, 700) for _ in range(2)]
        self.rotary = _rotary(700)
        self.lengths = [0] * self.count

    def step(
        self, counts: list[int], given: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """New tokens of each sequence; what the CPU chose, and what it attended to.

        given: `random_rows` of all of them.
        """
        ragged = Ragged.of(counts, self.lengths)
        self.lengths = [n + count for n, count in zip(self.lengths, counts, strict=True)]
        inputs = given or random_rows(ragged.tokens, self.shape, self.index)
        found = []
        for ops, cache in zip((cpu, reference), self.caches, strict=True):
            given = {"pool": self.pool} if ops is cpu and self.pool is not None else {}
            qk, weights, qkv = (x.clone() for x in inputs)
            begun = cache.begin(ragged)
            chosen = ops.choose(
                qk, weights, self.index, begun.open(0), ragged, rotary=self.rotary, **given
            )
            begun.close(0)
            out = ops.attention(
                qkv, self.shape, begun.open(1), ragged, rotary=self.rotary, chosen=chosen, **given
            )
            begun.close(1)
            begun.end()
            found.append((chosen, out))
        (mine, out), (expected, wanted) = found
        late = ragged.positions >= self.index.top
        assert torch.equal(mine[late], expected[late])
        # Where tokens are packed, they are attended with rounded queries.
        bound = RELATIVE_RMS[torch.float32 if self.kv is None else torch.bfloat16]
        assert relative_rms(out, wanted) < bound
        return mine, out


@pytest.mark.parametrize("kv", [None, KVQuant(8, 8), KVQuant(4, 4, window=16), KVQuant(3, 3, 0)])
def test_equals_the_reference(kv: KVQuant | None) -> None:
    sequences = Sequences(kv, 3)
    sequences.step([100, 7, 300])  # one of them is not at `top` yet
    for _ in range(2):
        sequences.step([1, 1, 1])
    sequences.step([1, 60, 70])  # one comes there half-way
    sequences.step([1, 1, 1])


def test_codes_of_two_bits_and_sinks() -> None:
    sequences = Sequences(KVQuant(2, 2, window=0, sinks=16), 1)
    sequences.step([200])
    sequences.step([1])


def test_an_odd_number_of_tokens() -> None:
    sequences = Sequences(KVQuant(4, 4, window=0), 1, IndexShape(16, 64, 32, 133))
    sequences.step([200])
    sequences.step([1])


def test_sequences_shorter_than_top_attend_to_all() -> None:
    Sequences(None, 2).step([5, 40])
    Sequences(KVQuant(8, 8), 1, IndexShape(16, 64, 32, 2048)).step([600])


def test_the_sizes_of_deepseek() -> None:
    index = IndexShape(heads=64, dim=128, rope_dim=64, top=150)
    shape = HeadShape(128, 1, 576, 0.1, latent=512)
    sequences = Sequences(KVQuant(4, 4), 1, index, shape)
    sequences.rotary = tuple(torch.cat((x, x), 1) for x in _rotary(700))
    sequences.step([190])
    sequences.step([1])


def test_nothing_depends_on_threads_and_on_what_is_computed_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups of heads, parts of the scores, other sequences."""
    shape, found = HeadShape(80, 1, 96, 0.2, latent=64), []
    rows = {count: random_rows(count, shape) for count in (150, 90, 1)}
    for threads, scores, sequences in ((1, scratch._SCORES, 2), (5, 16 * 4 * 700, 2), (2, 1, 1)):
        monkeypatch.setattr(scratch, "_SCORES", scores)
        torch.manual_seed(0)
        pool = Pool(threads)
        both = Sequences(KVQuant(4, 4), sequences, shape=shape, pool=pool)
        steps = []
        for counts in ([150, 90][:sequences], [1, 1][:sequences]):
            given = [torch.cat(parts) for parts in zip(*map(rows.get, counts), strict=True)]
            chosen, out = both.step(counts, given)
            late = slice(INDEX.top, counts[0]) if counts[0] > 1 else slice(0, 1)
            steps += [chosen[late], out[: counts[0]]]
        found.append(steps)
        pool.close()
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


def test_refusals() -> None:
    for sizes in ((12, 64, 32, 8), (16, 64, 64, 8), (16, 48, 32, 8), (16, 64, 32, 0)):
        with pytest.raises(OpError, match="index"):
            IndexShape(*sizes)
    memory, one = host_cache((SHAPE,), 1, None, 64), Ragged.of([1], [0])
    cache = memory.begin(one).open(0)
    chosen = torch.zeros(1, 4, dtype=torch.int32)
    row = torch.randn(1, SHAPE.qkv_width)
    with pytest.raises(OpError, match="sinks"):
        cpu.attention(row, SHAPE, cache, one, sinks=torch.zeros(6), chosen=chosen)
    with pytest.raises(OpError, match="int32"):
        cpu.attention(row, SHAPE, cache, one, chosen=chosen.long())

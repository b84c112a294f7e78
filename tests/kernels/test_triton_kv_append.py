"""The Triton append against the reference: rings, records, and nothing else written."""

from dataclasses import dataclass, replace

import pytest
import torch

from qoff.kernels.layout.device_cache import DeviceLayerCache, PassTables
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.reference import kv_blocks as reference
from qoff.kernels.triton.attention.append import kv_append
from tests.tolerances import MOVED_CODES, assert_close


@dataclass
class Case:
    """Sequences of (start, new rows, tokens in blocks before, after) and the state they need."""

    sequences: list[tuple[int, int, int, int]]
    form: KVFormat
    kv_heads: int = 2
    window: int = 128
    dtype: torch.dtype = torch.float16

    def __post_init__(self):
        start, rows, before, after = (
            torch.tensor(x, dtype=torch.int32) for x in zip(*self.sequences, strict=True)
        )
        heads = self.kv_heads, self.form.head_dim
        qkv = torch.randn(int(rows.sum()), 3, *heads).to(self.dtype)
        self.k, self.v = qkv[:, 1] * torch.linspace(0.2, 5, heads[1]).to(self.dtype), qkv[:, 2]
        blocks = -(-int((start + rows).max()) // BLOCK_TOKENS)
        count = len(self.sequences) * blocks
        self.table = torch.randperm(count).int().view(len(self.sequences), blocks)
        step = PassTables(
            start=start,
            row_start=torch.cat((torch.zeros(1), rows.cumsum(0))).int(),
            length=start + rows,
            packed=before,
            after=after,
            table=self.table,
            positions=torch.zeros(len(self.k)).int(),
            max_rows=int(rows.max()),
            max_packed=int(before.max()),
            max_new_blocks=int((after - before).max()) // BLOCK_TOKENS,
        )
        ring = (len(self.sequences), self.window, *heads)
        recent_k, recent_v = (torch.randn(ring).to(self.dtype) for _ in range(2))
        shape = (count, self.kv_heads, self.form.nbytes)
        self.pool = torch.randint(0, 256, shape, dtype=torch.uint8)
        self.cache = DeviceLayerCache(self.form, self.pool, recent_k, recent_v, step)

    def run(self, function):
        """What `function` leaves in copies of ring and pool."""
        names = ("recent_k", "recent_v", "pool")
        state = [getattr(self.cache, name).clone() for name in names]
        cache = replace(self.cache, **dict(zip(names, state, strict=True)))
        function(self.k, self.v, cache)
        return state

    def packed(self):
        """Whether the physical blocks [blocks] are to be written."""
        written = torch.zeros(len(self.pool), dtype=torch.bool)
        for s, (_, _, before, after) in enumerate(self.sequences):
            blocks = self.table[s, before // BLOCK_TOKENS : after // BLOCK_TOKENS]
            written[blocks.long()] = True
        return written


def check(case):
    expected_k, expected_v, expected_pool = case.run(reference.append)
    recent_k, recent_v, pool = case.run(kv_append)
    assert torch.equal(recent_v, expected_v)
    assert torch.equal(recent_k, expected_k)
    written = case.packed()
    assert torch.equal(pool[~written], case.pool[~written])
    assert_same_records(pool[written], expected_pool[written], case.form)


def assert_same_records(actual, expected, form):
    """Equal scales and minima but for float16 rounding; few codes differ, and those by one."""
    parts = list(zip(form.views(actual), form.views(expected), strict=True))
    for index in (1, 2, 4, 5):
        assert_close(*parts[index])
    for (codes, wanted), bits in ((parts[0], form.k_bits), (parts[3], form.v_bits)):
        codes, wanted = (reference.unpack(x, bits) for x in (codes, wanted))
        apart = (codes.int() - wanted.int()).abs()
        assert bool((apart <= 1).all())
        assert int(apart.sum()) <= MOVED_CODES * apart.numel()


FORMS = [
    KVFormat(64),
    KVFormat(80),
    KVFormat(96, k_bits=8),
    KVFormat(128, v_bits=8),
    KVFormat(80, 8, 8),
    KVFormat(192),
    KVFormat(256),
    KVFormat(64, 3, 2),
    KVFormat(80, 2, 3),
]

RAGGED = [
    (70, 1, 64, 64),  # into the ring
    (127, 1, 64, 128),  # the last token of a block, the others in the ring
    (0, 150, 0, 128),  # a prompt of two blocks and a rest
    (40, 30, 0, 64),  # a block of ring and fresh tokens
    (128, 0, 64, 128),  # nothing new, a block from the ring
    (64, 0, 64, 64),  # nothing at all
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form(form):
    check(Case([(0, 65, 0, 64), (63, 1, 0, 64), (5, 1, 0, 0)], form, kv_heads=1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ragged_sequences(dtype):
    check(Case(RAGGED, KVFormat(64), kv_heads=3, dtype=dtype))


def test_blocks_are_read_before_the_ring_is_written():
    check(Case([(64, 1, 0, 64), (100, 28, 64, 128), (64, 64, 0, 64)], KVFormat(64), window=64))


def test_a_ring_that_is_no_multiple_of_a_block():
    check(Case([(130, 70, 64, 128), (199, 1, 128, 192)], KVFormat(64), kv_heads=1, window=72))


def test_one_long_sequence_beside_short_ones():
    check(Case([(0, 1, 0, 0), (10, 400, 0, 384), (0, 2, 0, 0)], KVFormat(64), kv_heads=1))


def test_heads_that_take_two_programs():
    check(Case(RAGGED[:2], KVFormat(256), kv_heads=5))


def test_decode_without_a_complete_block_is_one_launch(monkeypatch):
    monkeypatch.setattr(
        "qoff.kernels.triton.attention.append.pack_kernel", None
    )  # cannot be launched
    check(Case([(70, 1, 64, 64), (5, 1, 0, 0)], KVFormat(64)))


def test_equal_values_have_scale_zero():
    case = Case([(0, 64, 0, 64)], KVFormat(64), kv_heads=1)
    case.k, case.v = torch.full_like(case.k, 0.3), torch.full_like(case.v, -2.0)
    check(case)
    _, _, pool = case.run(kv_append)
    k, v = reference.dequantize_blocks(pool[case.packed()], case.form)
    assert bool((k == case.k[0, 0, 0].float()).all() and (v == -2).all())

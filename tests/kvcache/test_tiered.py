"""Blocks on three tiers against blocks in memory that grows: the same records and the same
attention for any passes and placements, nothing lost, nothing kept, nothing over capacity."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from qoff.errors import ArgumentError, BudgetError, DiskReadError, DiskWriteError
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.ragged import Ragged, Span
from qoff.kernels.reference.kv_blocks import dequantize_blocks, quantize_blocks
from qoff.kvcache import CachePass, KVCache, PackedCache
from qoff.kvcache.slots import SlotSubset
from qoff.kvcache.store.base import BlockStore
from qoff.kvcache.store.placement import DEVICE, DISK, HOST, TIERS, KVPlacement
from qoff.kvcache.store.sparse import BlockBounds
from qoff.kvcache.store.tiered import RING_SLOTS, BlockPlan, TieredBlocks
from qoff.memory.arena import PAGE, Arena
from qoff.memory.io.copies import Copies
from qoff.memory.io.disk import DiskReader
from qoff.memory.io.spill import Pwritev, SpillFile
from tests.instruments import POISON
from tests.tolerances import PACKED_ATTENTION, assert_close

PLAIN, WINDOWED = HeadShape(4, 2, 64, 0.125), HeadShape(4, 2, 64, 0.125, 150)
FORMS = (KVFormat(64), KVFormat(64, 3, 2), KVFormat(64, k_bits=8))
HEADS = (2, 2, 2)
LAYERS = range(len(FORMS))
MOST_TOKENS = 700
SEQUENCES = 3
WINDOW = 16
SAME = 1e-3  # the same arithmetic, summed in another order
PLACEMENTS = [
    KVPlacement(1, 0),
    KVPlacement(0, 1),
    KVPlacement(0, 0),
    KVPlacement(0.34, 0.33),
    KVPlacement(0.2, 0),
    KVPlacement(0, 0.5),
]
QUICK = settings(max_examples=20, phases=[Phase.explicit, Phase.reuse, Phase.generate])


def plan_of(
    placement: KVPlacement,
    attends_on_host: bool,
    sequences: int,
    tokens: int = MOST_TOKENS,
    sparse: bool = False,
) -> BlockPlan:
    """Room for so many sequences of so many tokens, as `Plan.block_plan` makes it."""
    one = placement.capacity(PackedCache.blocks_of(tokens, WINDOW, 0))
    far = one[DISK] if attends_on_host else one[DISK] + one[HOST]
    records = tuple(h * form.nbytes for h, form in zip(HEADS, FORMS, strict=True))
    blocks = {tier: n * sequences for tier, n in one.items()}
    bounds = tuple(BlockBounds.nbytes(form, h, 1) for h, form in zip(HEADS, FORMS, strict=True))
    ring = far * sequences
    return BlockPlan(records, blocks, sequences, ring, attends_on_host, bounds if sparse else ())


@contextmanager
def tiered(
    folder: Path,
    placement: KVPlacement,
    plan: BlockPlan,
    *,
    reader: DiskReader | None = None,
    pwritev: Pwritev | None = None,
) -> Iterator[TieredBlocks]:
    """A poisoned store with exactly the memory of its plan."""
    sizes = plan.tier_bytes()
    arenas = {tier: Arena(tier, sizes[tier]) for tier in (DEVICE, HOST)}
    with ExitStack() as stack:
        reader = stack.enter_context(closing(reader or DiskReader()))
        copies = stack.enter_context(closing(Copies()))
        spill = None
        if sizes[DISK]:
            options = {} if pwritev is None else {"pwritev": pwritev}
            spill = stack.enter_context(closing(SpillFile(folder, sizes[DISK], reader, **options)))
        yield TieredBlocks(
            FORMS,
            HEADS,
            plan,
            placement,
            arenas,
            copies,
            spill,
            instrumentation=POISON,
        )
        assert all(arena.capacity - arena.used < PAGE for arena in arenas.values())


def cache_on(
    store: BlockStore | None,
    sequences: int = SEQUENCES,
    shape: HeadShape = PLAIN,
    sinks: int = 0,
    tokens: int = MOST_TOKENS,
    top: float = 1.0,
) -> PackedCache:
    options: dict[str, Any] = {"window": WINDOW, "sinks": sinks, "attention_top": top}
    cache = PackedCache([shape] * len(FORMS), FORMS, sequences, store=store, **options)
    for slot in range(sequences):
        cache.reset(slot, tokens)
    return cache


def attend(step: CachePass, layer: int, qkv: Tensor, ragged: Ragged, shape: HeadShape) -> Tensor:
    found = cpu.attention(qkv.clone(), shape, step.open(layer), ragged)
    step.close(layer)
    return found


def forward(
    cache: KVCache | SlotSubset,
    ragged: Ragged,
    qkv: Sequence[Tensor],
    shape: HeadShape,
    ahead: bool,
) -> list[Tensor]:
    """One pass; `ahead` prefetches a layer before the one at hand is opened."""
    step = cache.begin(ragged)
    found = []
    for layer in LAYERS:
        for wanted in range(layer, min(layer + 1 + ahead, len(FORMS))):
            step.prefetch(wanted)
        found.append(attend(step, layer, qkv[layer], ragged, shape))
    step.end()
    return found


def assert_empty(store: TieredBlocks) -> None:
    """Nobody uses a block, and no slot of the ring is taken."""
    assert {tier: store.used(tier) for tier in TIERS} == dict.fromkeys(TIERS, 0)
    slots = RING_SLOTS if store.plan.slot_bytes else 0
    fetches = [store.ring.start(lambda memory: [], must=False) for _ in range(slots + 1)]
    assert [fetch is not None for fetch in fetches] == [True] * slots + [False]
    for fetch in fetches[:slots]:
        assert fetch is not None
        store.ring.drop(fetch)


def assert_same_records(found: PackedCache, expected: PackedCache) -> None:
    assert found.lengths == expected.lengths
    assert found.packed == expected.packed
    for mine, others in zip(found.blocks, expected.blocks, strict=True):
        for a, b in zip(mine, others, strict=True):
            for layer in LAYERS:
                assert torch.equal(found.store.read(layer, a), expected.store.read(layer, b))


class Twins:
    """The same moves on a cache whose blocks lie on tiers and on one whose blocks do not."""

    def __init__(self, store: TieredBlocks, shape: HeadShape, seed: int, top: float = 1.0) -> None:
        self.shape = shape
        self.caches = cache_on(store, shape=shape, top=top), cache_on(None, shape=shape, top=top)
        self.numbers = random.Random(seed)

    def move(self, kind: str, number: int) -> None:
        lengths, slots = self.caches[0].lengths, range(self.caches[0].sequences)
        room = [slot for slot in slots if lengths[slot] + number <= MOST_TOKENS]
        used = [slot for slot in slots if lengths[slot]]
        slot = self.numbers.choice(slots)
        if kind == "read" and room:
            self.read(self.numbers.sample(room, self.numbers.randint(1, len(room))), number)
        elif kind == "decode" and (ready := [s for s in room if s in used]):
            self.decode(self.numbers.sample(ready, self.numbers.randint(1, len(ready))))
        elif kind == "fork" and used and len(used) < len(slots):
            source, target = self.numbers.choice(used), next(s for s in slots if s not in used)
            for cache in self.caches:
                cache.fork(source, target)
        elif kind == "forget":
            for cache in self.caches:
                cache.forget(number)
        elif kind == "reset":
            for cache in self.caches:
                cache.reset(slot, MOST_TOKENS)
        elif kind == "select":
            chosen = self.numbers.choices(slots, k=SEQUENCES)
            for cache in self.caches:
                cache.select(chosen)
        assert_same_records(*self.caches)

    def read(self, slots: list[int], count: int) -> None:
        """A pass over a subset of the sequences."""
        pasts = [self.caches[0].lengths[slot] for slot in slots]
        ragged = Ragged.of([self.numbers.randint(1, count) for _ in slots], pasts)
        self._compare([cache.subset(slots) for cache in self.caches], ragged)

    def decode(self, slots: list[int]) -> None:
        """A pass of single tokens over the whole cache, in which some sequences sit out."""
        lengths = self.caches[0].lengths
        spans = (Span(slot, row, 1, lengths[slot]) for row, slot in enumerate(sorted(slots)))
        self._compare(self.caches, Ragged(tuple(spans)))

    def clear(self) -> None:
        for cache in self.caches:
            for slot in range(cache.sequences):
                cache.reset(slot)

    def _compare(self, caches: Sequence[KVCache], ragged: Ragged) -> None:
        qkv = [torch.randn(ragged.tokens, self.shape.qkv_width) for _ in LAYERS]
        ahead = self.numbers.random() < 0.5
        found, expected = (forward(cache, ragged, qkv, self.shape, ahead) for cache in caches)
        for mine, other in zip(found, expected, strict=True):
            assert_close(mine, other, tolerance=SAME)


@settings(QUICK, max_examples=10)
@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from(
                ["read", "read", "decode", "decode", "fork", "forget", "reset", "select"]
            ),
            st.integers(1, 300),
        ),
        min_size=4,
        max_size=14,
    ),
    placement=st.sampled_from(PLACEMENTS),
    attends_on_host=st.booleans(),
    shape=st.sampled_from([PLAIN, WINDOWED]),
    top=st.sampled_from([1.0, 0.3, 0.6]),
    seed=st.integers(0, 1000),
)
def test_any_moves_are_as_in_memory(
    moves: list[tuple[str, int]],
    placement: KVPlacement,
    attends_on_host: bool,
    shape: HeadShape,
    top: float,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    torch.manual_seed(seed)
    plan = plan_of(placement, attends_on_host, SEQUENCES, sparse=top < 1)
    with tiered(tmp_path_factory.getbasetemp(), placement, plan) as store:
        twins = Twins(store, shape, seed, top)
        twins.move("read", 300)
        for kind, number in moves:
            twins.move(kind, number)
        twins.clear()
        assert_empty(store)


@pytest.mark.parametrize(
    ("shape", "attends_on_host"), [(PLAIN, False), (WINDOWED, True)], ids=["full", "window"]
)
def test_a_sequence_over_all_tiers_grows_token_by_token(
    shape: HeadShape, attends_on_host: bool, tmp_path: Path
) -> None:
    placement = KVPlacement(0.34, 0.33)
    with tiered(tmp_path, placement, plan_of(placement, attends_on_host, SEQUENCES)) as store:
        twins = Twins(store, shape, 0)
        while min(twins.caches[0].lengths[:2]) < MOST_TOKENS - 260:
            twins.read([0, 1], 100)
        while max(twins.caches[0].lengths) < MOST_TOKENS:
            twins.decode([0, 1])
        assert all(store.used(tier) > 0 for tier in TIERS)
        assert_same_records(*twins.caches)
        twins.clear()
        assert_empty(store)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("attends_on_host", [True, False])
def test_batches_that_take_turns_in_each_layer(
    placement: KVPlacement, attends_on_host: bool, tmp_path: Path
) -> None:
    """As the block schedule has it: the next one's blocks come while one is attended to."""
    batches = 4
    with tiered(tmp_path, placement, plan_of(placement, attends_on_host, batches)) as store:
        caches = [cache_on(store, 1) for _ in range(batches)]
        others = [cache_on(None, 1) for _ in range(batches)]
        for count in (MOST_TOKENS - 100, 1, 63, 1):
            raggeds = [Ragged.of([count], cache.lengths) for cache in caches]
            qkv = [[torch.randn(count, PLAIN.qkv_width) for _ in LAYERS] for _ in caches]
            steps = [cache.begin(ragged) for cache, ragged in zip(caches, raggeds, strict=True)]
            steps[0].prefetch(0)
            found: list[list[Tensor]] = [[] for _ in caches]
            turns = [(layer, i) for layer in LAYERS for i in range(batches)]
            for (layer, i), following in zip(turns, [*turns[1:], None], strict=True):
                if following is not None:
                    steps[following[1]].prefetch(following[0])
                found[i].append(attend(steps[i], layer, qkv[i][layer], raggeds[i], PLAIN))
            for i in range(batches):
                steps[i].end()
                expected = forward(others[i], raggeds[i], qkv[i], PLAIN, False)
                for mine, other in zip(found[i], expected, strict=True):
                    assert_close(mine, other, tolerance=SAME)
                assert_same_records(caches[i], others[i])
        for cache in caches:
            cache.reset(0)
        assert_empty(store)


def exact(q: Tensor, k: Tensor, v: Tensor, past: int, shape: HeadShape) -> Tensor:
    """Attention in float64; k and v [tokens, kv_heads, D]."""
    k, v = (x.repeat_interleave(2, 1).double() for x in (k, v))
    scores = torch.einsum("thd,khd->htk", q.double(), k) * shape.scale
    places = past + torch.arange(len(q))[:, None]
    keys = torch.arange(len(k))
    hidden = keys > places
    if shape.window:
        hidden |= keys <= places - shape.window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("htk,khd->thd", weights, v).flatten(1).float()


def known(x: Tensor, y: Tensor, form: KVFormat, first: int, packed: int) -> tuple[Tensor, Tensor]:
    """K and V, `packed` tokens from `first` on as they come out of their blocks."""
    stop = first + packed
    if not packed:
        return x, y
    blocks = (z[first:stop].unflatten(0, (-1, 64)).transpose(1, 2) for z in (x, y))
    opening = (torch.arange(first, stop, 64) == 0)[:, None]
    old = dequantize_blocks(quantize_blocks(*blocks, form, opening), form)
    return tuple(  # type: ignore[return-value]
        torch.cat((z[:first], o.transpose(1, 2).flatten(0, 1), z[stop:]))
        for z, o in zip((x, y), old, strict=True)
    )


@pytest.mark.parametrize("on_tiers", [False, True])
@pytest.mark.parametrize("counts", [[5, 1, 1, 400, 1, 1, 70, 1], [15, 2, 1, 1, 590, *[1] * 12]])
@pytest.mark.parametrize(
    ("sinks", "shape"), [(0, PLAIN), (0, WINDOWED), (16, PLAIN), (64, PLAIN)], ids=str
)
def test_attention_is_exact_over_what_is_kept(
    sinks: int, shape: HeadShape, counts: list[int], on_tiers: bool, tmp_path: Path
) -> None:
    """Positions are those of the sequence, sinks or not, whatever tier the blocks are on."""
    with ExitStack() as stack:
        store = None
        if on_tiers:
            placement = KVPlacement(0.34, 0.33)
            plan = plan_of(placement, False, 1)
            store = stack.enter_context(tiered(tmp_path, placement, plan))
        cache = cache_on(store, 1, shape, sinks)
        tokens = [(torch.empty(0, 2, 64), torch.empty(0, 2, 64)) for _ in LAYERS]
        for count in counts:
            ragged = Ragged.of([count], cache.lengths)
            (past,), (packed,) = cache.lengths, cache.packed
            view = cache if count == 1 else cache.subset([0])
            step = view.begin(ragged)
            for layer in LAYERS:
                qkv = torch.randn(count, shape.qkv_width)
                q, k, v = qkv.view(count, -1, 64).split([4, 2, 2], dim=1)
                found = attend(step, layer, qkv, ragged, shape)
                k, v = (torch.cat(pair) for pair in zip(tokens[layer], (k, v), strict=True))
                tokens[layer] = k, v
                expected = exact(q, *known(k, v, FORMS[layer], sinks, packed), past, shape)
                assert_close(found, expected, tolerance=PACKED_ATTENTION)
            step.end()
        assert cache.packed == [64 * PackedCache.blocks_of(sum(counts), WINDOW, sinks)]
        assert cache.packed[0] > 0


def test_sinks_are_refused_with_a_sliding_window() -> None:
    with pytest.raises(ArgumentError, match="sliding window"):
        cache_on(None, shape=WINDOWED, sinks=16)
    with pytest.raises(ArgumentError, match="multiple of 16"):
        cache_on(None, sinks=8)


FRACTIONS = st.one_of(
    st.sampled_from([0.0, 0.1, 1 / 3, 0.5, 2 / 3, 0.9, 1.0]), st.floats(0, 1)
).map(float)


@settings(max_examples=200, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    device=FRACTIONS,
    host=FRACTIONS,
    most=st.integers(0, 40),
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4),
)
def test_capacity_suffices(
    device: float, host: float, most: int, lengths: list[tuple[int, int]]
) -> None:
    """For sequences of any expected number of blocks up to `most`, however few come about."""
    placement = KVPlacement(device, min(host, 1 - device))
    capacity = placement.capacity(most)
    for expected, there in lengths:
        expected = min(expected, most)
        tiers = [placement.tier(i, expected) for i in range(min(there, expected))]
        assert all(tiers.count(tier) <= capacity[tier] for tier in TIERS)
        assert tiers == sorted(tiers, key=TIERS.index)
        whole = [placement.tier(i, expected) for i in range(expected)]
        assert {tier: whole.count(tier) for tier in TIERS} == placement.split(expected)
        beyond = [*whole, *(placement.tier(expected + i, expected) for i in range(3))]
        assert beyond == sorted(beyond, key=TIERS.index)


@pytest.mark.parametrize("wrong", [(-0.1, 0), (0, -0.1), (0.7, 0.4), (float("nan"), 0)])
def test_fractions_out_of_range_are_refused(wrong: tuple[float, float]) -> None:
    with pytest.raises(ArgumentError, match="use fractions"):
        KVPlacement(*wrong)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_more_blocks_than_there_are_are_refused_without_a_leak(
    placement: KVPlacement, tmp_path: Path
) -> None:
    """The second sequence does not fit; the first goes on, and the second after it."""
    tokens = 400
    with tiered(tmp_path, placement, plan_of(placement, True, 1, tokens)) as store:
        cache = cache_on(store, 2, tokens=tokens)
        qkv = [torch.randn(tokens - 1, PLAIN.qkv_width) for _ in LAYERS]
        first = Ragged.of([tokens - 1], [0])
        forward(cache.subset([0]), first, qkv, PLAIN, True)
        used = {tier: store.used(tier) for tier in TIERS}
        for _ in range(3):
            with pytest.raises(BudgetError, match=r"all \d+ KV blocks of the \w+ are in use"):
                cache.subset([1]).begin(first)
            with pytest.raises(BudgetError, match="in use"):
                cache.begin(Ragged((Span(1, 0, tokens - 1, 0),)))
            assert {tier: store.used(tier) for tier in TIERS} == used
        one = [torch.randn(1, PLAIN.qkv_width) for _ in LAYERS]
        forward(cache, Ragged.of([1], [tokens - 1]), one, PLAIN, True)
        cache.reset(0)
        forward(cache.subset([1]), first, qkv, PLAIN, True)
        cache.reset(1)
        assert_empty(store)


def test_a_pass_that_failed_before_one_that_does_not_fit_is_given_back_once(
    tmp_path: Path,
) -> None:
    placement = KVPlacement(0, 0)
    plan = plan_of(placement, True, 1, 400)
    with tiered(tmp_path, placement, plan) as store:
        cache = cache_on(store, 2, tokens=400)
        small, large = Ragged.of([200], [0]), Ragged.of([399, 399], [0, 0])
        step = cache.begin(small)
        assert store.used(DISK) == 2
        with pytest.raises(BudgetError):
            cache.begin(large)
        assert store.used(DISK) == 0
        other = cache_on(store, 1, tokens=400)
        late = other.begin(Ragged.of([400], [0]))
        assert store.used(DISK) == plan.blocks[DISK]  # also those that were given back
        step.abandon()
        assert store.used(DISK) == plan.blocks[DISK]
        late.abandon()
        assert_empty(store)


def test_blocks_that_were_not_expected_stay_in_order(tmp_path: Path) -> None:
    placement = KVPlacement(0.34, 0.33)
    with tiered(tmp_path, placement, plan_of(placement, True, 2)) as store:
        caches = cache_on(store, 1, tokens=300), cache_on(None, 1)
        for count in (300, 200, 1, 130, 1):
            qkv = [torch.randn(count, PLAIN.qkv_width) for _ in LAYERS]
            ragged = Ragged.of([count], caches[0].lengths)
            found, expected = (forward(cache, ragged, qkv, PLAIN, True) for cache in caches)
            for mine, other in zip(found, expected, strict=True):
                assert_close(mine, other, tolerance=SAME)


def test_shared_blocks_are_free_when_nobody_uses_them(tmp_path: Path) -> None:
    placement = KVPlacement(0.34, 0.33)
    with tiered(tmp_path, placement, plan_of(placement, True, 1)) as store:
        cache = cache_on(store)
        qkv = [torch.randn(500, PLAIN.qkv_width) for _ in LAYERS]
        forward(cache.subset([0]), Ragged.of([500], [0]), qkv, PLAIN, False)
        used = {tier: store.used(tier) for tier in TIERS}
        assert sum(used.values()) == 7
        records = [store.read(0, block).clone() for block in cache.blocks[0]]
        cache.fork(0, 1)
        cache.fork(0, 2)
        for slot in (1, 0):
            cache.reset(slot)
            assert {tier: store.used(tier) for tier in TIERS} == used
        for block, record in zip(cache.blocks[2], records, strict=True):
            assert torch.equal(store.read(0, block), record)
        cache.reset(2)
        assert_empty(store)


def test_what_is_abandoned_half_way_gives_blocks_and_slots_back(tmp_path: Path) -> None:
    placement = KVPlacement(0, 0)
    with tiered(tmp_path, placement, plan_of(placement, False, 2)) as store:
        cache = cache_on(store, 2)
        qkv = [torch.randn(300, PLAIN.qkv_width) for _ in LAYERS]
        forward(cache.subset([0]), Ragged.of([300], [0]), qkv, PLAIN, True)
        used = store.used(DISK)
        for opened in (False, True):
            half = cache.subset([0]).begin(Ragged.of([200], [300]))
            half.prefetch(0)
            half.prefetch(1)
            if opened:
                half.open(0)
            half.abandon()
            half.abandon()
            assert store.used(DISK) == used
        cache.reset(0)
        assert_empty(store)


def test_a_block_that_is_written_again_is_what_was_written_last(tmp_path: Path) -> None:
    """Also when the first write is still on its way: two threads write."""
    gate, first = threading.Event(), threading.Event()

    def pwritev(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if not first.is_set():
            first.set()
            gate.wait(1)

        return os.pwritev(fd, views, offset)

    placement = KVPlacement(0, 0)
    plan = plan_of(placement, True, 1)
    with tiered(tmp_path, placement, plan, pwritev=pwritev) as store:
        for value in (1, 2):
            (block,) = store.allocate([0], 1, 0)
            store.write(0, [block], torch.full((1, 2, FORMS[0].nbytes), value, dtype=torch.uint8))
            if value == 1:
                assert first.wait(20)
                store.release([block])
        assert (store.read(0, block) == 2).all()
        gate.set()
        assert store.spill is not None
        deadline = time.monotonic() + 20
        while store.spill.written < 2 * plan.stride and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (store.read(0, block) == 2).all()


class Failing:
    """`os.pwritev` or `os.preadv` that fails while `broken`."""

    def __init__(self, call: Pwritev) -> None:
        self.broken = False
        self._call = call

    def __call__(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        if self.broken:
            raise OSError(errno.EIO, "Input/output error")
        return self._call(fd, views, offset)


def test_a_block_that_was_not_written_is_an_error_wherever_it_is_wanted(tmp_path: Path) -> None:

    pwritev = Failing(os.pwritev)
    placement = KVPlacement(0, 0)
    with tiered(tmp_path, placement, plan_of(placement, True, 2), pwritev=pwritev) as store:
        cache = cache_on(store, 1)
        qkv = [torch.randn(600, PLAIN.qkv_width) for _ in LAYERS]
        ragged = Ragged.of([600], [0])
        pwritev.broken = True
        forward(cache.subset([0]), ragged, qkv, PLAIN, True)
        for _ in range(2):
            with pytest.raises(DiskWriteError, match="Input/output error"):
                store.read(0, cache.blocks[0][0])
            step = cache.begin(Ragged.of([1], [600]))
            with pytest.raises(DiskWriteError, match="Input/output error"):
                step.prefetch(0)
            with pytest.raises(DiskWriteError, match="Input/output error"):
                step.open(0)
            step.abandon()
        cache.reset(0)
        assert_empty(store)
        pwritev.broken = False
        cache.reset(0, MOST_TOKENS)
        forward(cache.subset([0]), ragged, qkv, PLAIN, True)
        other = cache_on(None, 1)
        forward(other, ragged, qkv, PLAIN, False)
        assert_same_records(cache, other)


@pytest.mark.parametrize("placement", [KVPlacement(0, 0), KVPlacement(0, 0.5)])
def test_what_a_sequence_reads_stays_one_run_a_tier_for_thousands_of_sequences(
    placement: KVPlacement, tmp_path: Path
) -> None:
    """Of any lengths, admitted and ended in any order, block by block in turns."""
    random_ = random.Random(5)
    plan = plan_of(placement, False, 2 * SEQUENCES)
    with tiered(tmp_path, placement, plan) as store:
        first = [store.claim(SEQUENCES), store.claim(SEQUENCES)]
        assert first == [0, SEQUENCES]
        most = PackedCache.blocks_of(MOST_TOKENS, WINDOW, 0)
        rows: list[list[int]] = [[] for _ in range(2 * SEQUENCES)]
        expected = [0] * len(rows)
        for _ in range(4000):
            owner = random_.randrange(len(rows))
            if len(rows[owner]) == expected[owner]:
                store.release(rows[owner])
                rows[owner], expected[owner] = [], random_.randint(1, most)
            rows[owner] += store.allocate([len(rows[owner])], expected[owner], owner)
            for batch in first:
                blocks = sorted(b for row in rows[batch : batch + SEQUENCES] for b in row)
                found = store.copy_plan(blocks)
                assert len(found.from_disk) <= SEQUENCES
                assert len(found.from_host) <= SEQUENCES
        assert len(set().union(*rows)) == sum(map(len, rows))


def test_shared_blocks_take_no_place_from_others(tmp_path: Path) -> None:
    """Every block that the plan counts is handed out, whoever shares those of whom."""
    placement, most = KVPlacement(0, 0), PackedCache.blocks_of(MOST_TOKENS, WINDOW, 0)
    with tiered(tmp_path, placement, plan_of(placement, False, 2)) as store:
        shared = store.allocate(range(most // 2), most, 0)
        store.share(shared)
        store.release(shared)  # the first sequence has ended, the second goes on with its blocks
        second = shared + store.allocate(range(most // 2, most), most, 1)
        first = store.allocate(range(most), most, 0)
        assert sorted(first + second) == list(range(2 * most))
        with pytest.raises(BudgetError, match="all 20 KV blocks of the disk are in use"):
            store.allocate([0], most, 0)


def test_a_read_goes_through_a_few_blocks_of_others(tmp_path: Path) -> None:
    placement = KVPlacement(0, 0)
    with tiered(tmp_path, placement, plan_of(placement, True, 2)) as store:
        blocks = [*store.allocate([0, 1], 9, 0), *store.allocate([0], 9, 1)]
        each = store.plan.blocks[DISK] // 2
        assert blocks == [0, 1, each]
        whole = store.copy_plan(blocks, room=2 * each)
        assert (len(whole.from_disk), whole.places) == (1, (0, 1, each))
        assert whole.count == each + 1
        dense = store.copy_plan(blocks)
        assert (len(dense.from_disk), dense.places, dense.count) == (2, (0, 1, 2), 3)


def test_nothing_is_read_into_a_slot_that_a_failed_write_leaves_free(tmp_path: Path) -> None:
    plan, reads = plan_of(KVPlacement(0, 0), True, 1), []
    pwritev = Failing(os.pwritev)

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        reads.append(offset)
        return os.preadv(fd, views, offset)

    reader = DiskReader(preadv=preadv)
    with tiered(tmp_path, KVPlacement(0, 0), plan, reader=reader, pwritev=pwritev) as store:
        first, _, third = store.allocate([0, 1, 2], 3, 0)
        record = torch.ones(1, HEADS[0], FORMS[0].nbytes, dtype=torch.uint8)
        store.write(0, [first], record)
        store.read(0, first)
        reads.clear()
        pwritev.broken = True
        store.write(0, [third], record)
        copy_plan = store.copy_plan([first, third])
        assert len(copy_plan.from_disk) == 2
        with pytest.raises(DiskWriteError, match="Input/output error"):
            store.bring(0, copy_plan, torch.empty(2 * plan.stride, dtype=torch.uint8))
        assert not reads


def test_a_read_error_is_raised_where_the_layer_is_opened(tmp_path: Path) -> None:

    preadv = Failing(os.preadv)
    placement = KVPlacement(0, 0)
    plan = plan_of(placement, True, 2)
    with tiered(tmp_path, placement, plan, reader=DiskReader(preadv=preadv)) as store:
        cache = cache_on(store, 1)
        qkv = [torch.randn(600, PLAIN.qkv_width) for _ in LAYERS]
        forward(cache.subset([0]), Ragged.of([600], [0]), qkv, PLAIN, True)
        preadv.broken = True
        for ahead in (True, False):
            step = cache.begin(Ragged.of([1], [600]))
            if ahead:
                step.prefetch(0)
            with pytest.raises(DiskReadError, match="Input/output error"):
                step.open(0)
            step.abandon()
        preadv.broken = False
        one = [torch.randn(1, PLAIN.qkv_width) for _ in LAYERS]
        forward(cache, Ragged.of([1], [600]), one, PLAIN, True)
        cache.reset(0)
        assert_empty(store)

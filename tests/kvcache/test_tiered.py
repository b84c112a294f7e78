"""Blocks on three tiers against blocks in memory that grows: the same records and the same
attention for any passes and placements, nothing lost, nothing kept, nothing over capacity."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.ragged import Ragged, Span
from qoff.kernels.reference.kv_blocks import dequantize_blocks, quantize_blocks
from qoff.kvcache import CachePass, KVCache, PackedCache
from qoff.kvcache.groups import one_group
from qoff.kvcache.slots import SlotSubset
from qoff.kvcache.store.base import BlockStore
from qoff.kvcache.store.placement import DEVICE, DISK, HOST, TIERS, KVPlacement
from qoff.kvcache.store.plan import RING_SLOTS, BlockPlan
from qoff.kvcache.store.tiered import TieredBlocks
from qoff.memory.arena import PAGE, Arena
from qoff.memory.io.copies import Copies
from qoff.memory.io.disk import DiskReader
from qoff.memory.io.spill import Pwritev, SpillFile
from tests.instruments import POISON
from tests.tolerances import PACKED_ATTENTION, assert_close

PLAIN, WINDOWED = HeadShape(4, 2, 64, 0.125), HeadShape(4, 2, 64, 0.125, 150)
CHUNKED = HeadShape(4, 2, 64, 0.125, 250, chunked=True)
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
    bounds = tuple(h * form.bound_bytes for h, form in zip(HEADS, FORMS, strict=True))
    ring = far * sequences
    chosen = (sum(HEADS), bounds) if sparse else ()
    return BlockPlan(records, blocks, sequences, ring, attends_on_host, *chosen)


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
    shapes = [shape] * len(FORMS)
    stores = None if store is None else {one_group(shapes)[0]: store}
    cache = PackedCache(shapes, FORMS, sequences, stores=stores, **options)
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
    (group,) = expected.groups  # that may have freed the oldest
    for mine, others, gone in zip(found.blocks, expected.blocks, group.freed, strict=True):
        for a, b in zip(mine[gone:], others[gone:], strict=True):
            for layer in LAYERS:
                assert torch.equal(
                    found.stores[0].read(layer, a), expected.stores[0].read(layer, b)
                )


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
        elif kind == "forget" and self.caches[1].can_forget([number] * len(slots)):
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
    shape=st.sampled_from([PLAIN, WINDOWED, CHUNKED]),
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
    if shape.chunked and shape.window:
        hidden |= keys // shape.window < places // shape.window
    elif shape.window:
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
    ("sinks", "shape"),
    [(0, PLAIN), (0, WINDOWED), (0, CHUNKED), (16, PLAIN), (64, PLAIN)],
    ids=str,
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

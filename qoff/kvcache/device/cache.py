"""The packed KV cache in the memory of a GPU, for the Triton ops."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.kernels.layout.device_cache import DeviceLayerCache, LentTokens, PassTables
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.layer_cache import PackedTokens
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.reference.kv_blocks import dequantize_blocks
from qoff.kernels.upload import on_device
from qoff.kvcache.groups import GroupBlocks, LayerGroup, NewBlocks, by_layer, groups_of
from qoff.kvcache.slots import SlotCache, SlotPass
from qoff.kvcache.store.base import BlockView

from .blocks import DeviceBlocks
from .prefetch import PrefetchedBlocks
from .rings import Rings
from .tables import DeviceTables, offloaded_blocks, pass_tables
from .write_back import WriteBack


class DeviceCache(SlotCache):
    """Recent tokens in float16 or bfloat16 rings, older ones packed in blocks.

    shapes, forms: per layer. window: so many of the newest tokens are never packed; a ring has room
    for these and one block more. A block is packed when 64 tokens have left the window, in the pass
    in which they do, whose attention still sees them unpacked. Sequences that were one before
    (`select`) share their blocks. capacity: tokens of each sequence that there is room for at once.
    steady: what kernels are told at decode takes few values, so that it can be recorded and
    replayed. values_rotated, attention_top: see `DeviceLayerCache`; where that is below 1,
    single tokens go to offloaded blocks. lent: layers that are opened again when others have been.
    stores: blocks of each group of layers, shared with other caches; some of the first one's may be
    offloaded; rings are in one piece then. By default it has its own, which grow, of groups by the
    layers' windows, and `FORGETTABLE` tokens can be forgotten at any time; without `frees` all
    blocks are kept.
    """

    def __init__(
        self,
        shapes: Sequence[HeadShape],
        forms: Sequence[KVFormat],
        sequences: int,
        *,
        window: int = 64,
        capacity: int = 0,
        steady: bool = False,
        values_rotated: bool = False,
        attention_top: float = 1.0,
        device: torch.device,
        dtype: torch.dtype = torch.float16,
        frees: bool = True,
        lent: Collection[int] = (),
        stores: Mapping[LayerGroup, DeviceBlocks] | None = None,
    ) -> None:
        super().__init__(sequences, window, expected=self.blocks_of(capacity, window, 0))
        whole = stores is not None
        self.steady, self.values_rotated, self.lent = steady, values_rotated, frozenset(lent)
        self.attention_top = attention_top
        self.group = max(shape.heads // shape.kv_heads for shape in shapes)
        self.forms = tuple(forms)
        if stores is None:
            stores = {
                group: DeviceBlocks.growing(
                    [forms[layer] for layer in group.layers],
                    [shapes[layer].kv_heads for layer in group.layers],
                    self._most_each(group, capacity),
                    device,
                )
                for group in groups_of(shapes, frees)
            }
        self.stores = list(stores.values())
        self.groups = [GroupBlocks(group, found, sequences) for group, found in stores.items()]
        self.place = by_layer(self.groups)
        self.tables = [DeviceTables(sequences, device) for _ in self.groups]
        self.rings = Rings(shapes, forms, sequences, window, dtype, device, whole)
        # What kernels are told of every cache like this one.
        self.kind = repr(
            (self.rings.shapes, self.forms, [*stores], dtype, values_rotated, attention_top)
        )

    @property
    def store(self) -> DeviceBlocks:
        """Of the first group of layers."""
        return self.stores[0]

    def _most_each(self, group: LayerGroup, tokens: int) -> int:
        most = self.sequences * self.blocks_of(tokens, self.window, 0)
        if group.reach:
            most = min(most, self.sequences * group.blocks_at_once(tokens, self.window))
        return most

    @property
    def nbytes(self) -> int:
        return self._beside_blocks + sum(store.nbytes for store in self.stores)

    @property
    def _beside_blocks(self) -> int:
        away = 0 if self.store.write_back is None else self.store.write_back.nbytes
        return sum(tables.nbytes for tables in self.tables) + self.rings.nbytes + away

    def bytes_for(self, tokens: int) -> int:
        return self._beside_blocks + self.rings.copied_bytes + super().bytes_for(tokens)

    def start(self, ragged: Ragged, slots: Sequence[int] | None = None) -> DeviceCachePass:
        return DeviceCachePass(self, ragged, slots)

    def select(self, sequences: Sequence[int]) -> None:
        kept = list(sequences)
        if kept == list(range(self.sequences)):
            return
        super().select(kept)
        # Of as many sequences, what kernels read stays where it is: the next step may be recorded.
        for tables in self.tables:
            tables.select(kept)
        self.rings.select(kept)

    def fork(self, source: int, target: int) -> None:
        super().fork(source, target)
        self.tell_tables(target)

    def adopt(self, slot: int, blocks: Sequence[int]) -> None:
        super().adopt(slot, blocks)
        self.tell_tables(slot)

    def copy_recent(self, source: int, target: int) -> None:
        self.rings.copy(source, target)

    def unpack(self, slot: int, place: int, tokens: int) -> None:
        for layer, form in enumerate(self.forms):
            number, inner = self.place[layer]
            block = self.groups[number].blocks[slot][place]
            k, v = dequantize_blocks(self.stores[number].read(inner, block), form)
            self.rings.write(layer, slot, BLOCK_TOKENS * place, k[:, :tokens], v[:, :tokens])

    def tell_tables(self, slot: int) -> None:
        """Have the tables know a slot whose blocks are others than passes have made."""
        for tables, group in zip(self.tables, self.groups, strict=True):
            tables.write(slot, 0, group.blocks[slot])


class DeviceCachePass(SlotPass):
    """Its tables, the blocks that it completes, and what brings offloaded ones."""

    _cache: DeviceCache

    def __init__(self, cache: DeviceCache, ragged: Ragged, slots: Sequence[int] | None) -> None:
        if slots is not None:
            ragged = Ragged(tuple(replace(span, slot=slots[span.slot]) for span in ragged.spans))
        super().__init__(cache, ragged, None)
        self._steady = cache.steady and slots is None
        self._packed = cache.packed
        self._opened: dict[int, DeviceLayerCache] = {}
        self._lent: dict[int, LentTokens] = {}  # what layers append when the pass ends
        self._write_backs: dict[int, WriteBack] = {}
        self._spare: dict[int, int] = {}  # of groups of layers, for blocks that nobody reads
        # What brings the offloaded blocks, of the first group of layers: to where the CPU attends
        # to them, or to the device.
        self._view: BlockView | PrefetchedBlocks | None = None
        self._chooses = cache.attention_top < 1 and ragged.is_decode
        self._spans = spans = sorted(ragged.spans, key=lambda span: span.slot)
        for span in spans:
            if span.slot >= cache.sequences or span.past != cache.lengths[span.slot]:
                raise ArgumentError(
                    f"{span} does not continue a sequence of this cache, of lengths {cache.lengths}"
                )
        unpacked = [span.past + span.count - self._packed[span.slot] for span in spans]
        # With more, tokens of before the pass are written over.
        self._destroys = max(unpacked) > cache.rings.tokens
        try:
            for span, tokens in zip(spans, unpacked, strict=True):
                count = max(0, tokens - cache.window) // BLOCK_TOKENS
                if count:
                    self._make(span.slot, count, span.past + span.count)
            news = [{slot: made.numbers for slot, made in new.items()} for new in self._new]
            self._new_offloaded = [
                b for blocks in news[0].values() for b in offloaded_blocks(blocks)
            ]
            rows: list[list[int]] = [[] for _ in range(cache.sequences)]
            for span in spans if cache.store.offloaded is not None else ():
                rows[span.slot] = offloaded_blocks(cache.blocks[span.slot])
            self._view = cache.store.view(rows, spans, cache.group, sparse=self._chooses)
            elsewhere = not isinstance(self._view, PrefetchedBlocks)
            resident_from = [BLOCK_TOKENS * len(row) * elsewhere for row in rows]
            self._steps = list[PassTables]()
            for tables, new in zip(cache.tables, news, strict=True):
                first = not self._steps
                tables.write_new(new, self._packed)
                if slots is not None:  # may be under way together with another pass
                    tables = tables.copy()
                step = pass_tables(
                    tables,
                    spans,
                    ragged,
                    packed=self._packed,
                    new=new,
                    resident_from=resident_from if first else [0] * cache.sequences,
                    offloads=first and cache.store.offloaded is not None,
                    steady=self._steady,
                )
                self._steps.append(step)
            self._step = self._steps[0]
            self._prefetched_table = None
            if isinstance(self._view, PrefetchedBlocks):
                shape = self._step.table.shape
                self._prefetched_table = self._view.places(rows, shape, cache.store.device)
        except BaseException:
            self.abandon()
            raise

    @property
    def rows(self) -> int:
        """How many rows hidden states have: those of the new tokens, then others of no meaning."""
        return len(self._step.positions)

    @property
    def positions(self) -> Tensor:
        """Of each row, on the device; int32 or int64 [rows]."""
        if self._step.order is None:
            return self._step.positions
        return on_device(self.ragged.positions, self._cache.store.device)

    def replay_key(self) -> Hashable | None:
        """What kernels are told in this pass, beside the values in memory: addresses and sizes.

        None where the next pass's numbers will be in other memory, and where blocks move.
        """
        if not self._stays:
            return None
        cache, step = self._cache, self._step
        pools = [layer for store in cache.stores for layer in store.pool.layers]
        memory = [*pools, *cache.rings.all]
        sizes: list[int] = [self.rows]
        for one in self._steps:
            memory += [one.start, one.positions]
            sizes += [*one.table.shape, one.max_packed, one.max_new_blocks]
        return (cache.kind, step.slots is None, *sizes, *(part.data_ptr() for part in memory))

    @property
    def _stays(self) -> bool:
        """Whether it is a decode step, in which nothing moves."""
        decodes = self._steady and self._step.max_rows == 1 and self._step.order is None
        return decodes and self._view is None and not self._new_offloaded

    def steps_ahead(self, ragged: Ragged) -> int:
        if not ragged.goes_on(self.ragged, self._cache.lengths):
            return 0
        return min(self._cache.room(span.slot) for span in ragged.spans)

    def counters(self) -> list[Tensor]:
        return [step.counters for step in self._steps if step.counters is not None]

    def advance(self, steps: int) -> None:
        self._cache.lengthen(self.ragged, steps)
        for span in self.ragged.spans:
            self._cache.free(span.slot)

    def prefetch(self, layer: int) -> None:
        number, inner = self._cache.place[layer]
        if self._view is not None and number == 0:
            self._view.prefetch(inner)

    def open(self, layer: int) -> DeviceLayerCache:
        """What the attention of a layer reads and appends to; the same until `close`."""
        if layer not in self._opened:
            number, inner = self._cache.place[layer]
            step = self._steps[number]
            packed: tuple[PackedTokens, ...] = ()  # attended to elsewhere
            view = self._view if number == 0 else None
            if isinstance(view, PrefetchedBlocks):
                assert self._prefetched_table is not None
                numbers = self._prefetched_table + view.first(inner)
                table = torch.where(self._prefetched_table >= 0, numbers, step.table)
                step = replace(step, table=table)
            elif view is not None:
                packed = view.open(inner)
            lent = None
            if layer in self._cache.lent and step.max_rows > 1:
                lent = self._lent.setdefault(layer, LentTokens())
            self._opened[layer] = self._layer_cache(layer, step, packed, lent)
        return self._opened[layer]

    def _layer_cache(
        self,
        layer: int,
        step: PassTables,
        packed: tuple[PackedTokens, ...] = (),
        lent: LentTokens | None = None,
    ) -> DeviceLayerCache:
        """With room for new offloaded blocks, unless they are made later or were before."""
        cache, written = self._cache, None
        number, inner = cache.place[layer]
        store, form = cache.stores[number], cache.forms[layer]
        made = lent is not None or layer in self._write_backs
        if self._new_offloaded and number == 0 and not made:
            assert store.write_back is not None
            self._write_backs[layer] = store.write_back.take(inner, self._new_offloaded)
            written = self._write_backs[layer].records
        return DeviceLayerCache(
            form,
            store.pool.layers[inner],
            cache.rings.k[layer],
            cache.rings.v[layer],
            step,
            packed,
            written,
            cache.values_rotated and not form.latent,
            lent,
            cache.attention_top,
            None if store.bounds is None else store.bounds.layers[inner],
        )

    def close(self, layer: int) -> None:
        """Let go of the offloaded blocks; send the new ones to where they lie."""
        number, inner = self._cache.place[layer]
        if self._view is not None and number == 0:
            self._view.close(inner)
        if self._opened[layer].write_back is not None:
            self._send(layer)
        if layer in self._cache.lent:
            del self._opened[layer]

    def _send(self, layer: int) -> None:
        store, new = self._cache.store, self._write_backs[layer]
        assert store.write_back is not None
        if store.bounds is not None:
            store.bounds.keep_runs(new.layer, new.blocks, new.records)
        store.write_back.send(new)

    def _append_lent(self) -> None:
        """Append what layers have kept until no other attends to it any more."""
        for layer, lent in self._lent.items():
            number, _ = self._cache.place[layer]
            self._opened[layer] = cached = self._layer_cache(layer, self._steps[number])
            if lent.key is not None and lent.value is not None:
                from qoff.kernels.triton.attention.append import kv_append  # needs Triton

                with torch.cuda.device_of(lent.key):
                    kv_append(lent.key, lent.value, cached)
            if cached.write_back is not None:
                self._send(layer)
        self._lent = {}

    def end(self) -> None:
        self._append_lent()
        if self._cache.store.write_back is not None:
            self._cache.store.write_back.deliver(list(self._write_backs.values()))
        self._write_backs = {}
        self._release_spare()
        completed = list(self._new[0])
        super().end()
        if self._new_offloaded and self._cache.store.bounds is not None:
            for slot in completed:  # new blocks that were in the write-back buffer are not any more
                self._cache.tell_tables(slot)
        # What a step packs, the next one reads elsewhere.
        if self._stays and not any(step.max_new_blocks for step in self._steps):
            self._cache.ended = self

    @property
    def spoils(self) -> bool:
        return self._destroys and bool(self._opened)

    def abandon(self) -> None:
        if self._view is not None:
            self._view.abandon()
        if self._cache.store.write_back is not None:
            self._cache.store.write_back.drop(list(self._write_backs.values()))
        self._write_backs, self._lent = {}, {}
        self._release_spare()
        super().abandon()

    def _make(self, slot: int, count: int, length: int) -> None:
        """New blocks of a slot; offloaded ones only where none of its blocks is on the device.

        Kernels write them all. Those that nobody will read are one block, which they write over.
        """
        cache = self._cache
        for number, (group, store) in enumerate(zip(cache.groups, cache.stores, strict=True)):
            old, skipped = len(group.blocks[slot]), group.skipped(slot, count, length)
            if skipped and number not in self._spare:
                (self._spare[number],) = store.allocate([old], 0, 0, True)
            on_device = old > 0 and group.blocks[slot][-1] >= 0
            places, owner = range(old + skipped, old + count), group.first_owner + slot
            kept = store.allocate(places, cache.expected[slot], owner, on_device)
            numbers = [self._spare[number]] * skipped + kept if skipped else kept
            self._new[number][slot] = NewBlocks(old, numbers, skipped)

    def _release_spare(self) -> None:
        for number, block in self._spare.items():
            self._cache.stores[number].release([block])
        self._spare = {}

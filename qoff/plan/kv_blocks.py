"""Packed KV blocks of a sequence on average: how many, which are far, their bytes and attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kvcache import KVQuant, PackedCache
from qoff.kvcache.groups import LayerGroup, layer_groups
from qoff.kvcache.store.storage import READ_THROUGH
from qoff.memory.arena import PAGE, round_up

from .calls import call_s
from .mixture import Array
from .oldest import Oldest
from .processor import Processor
from .profile import MachineProfile
from .sizes import Sizes
from .workload import Workload


@dataclass(frozen=True)
class KVBlocks:
    """Those of a model whose cache is packed as `kv` says, for sequences as long as a workload's.

    frees: whether blocks behind the windows of their layers are free, see `Plan.frees`. on_gpu:
    whether a GPU computes, on which what such layers keep is.
    """

    sizes: Sizes
    kv: KVQuant
    workload: Workload
    frees: bool
    on_gpu: bool

    def bytes_of(self, blocks: int) -> int:
        """Bytes of the packed blocks of a sequence that has this many, where they may be anywhere.

        At its end, when it is as long as the workload has them.
        """
        found = 0
        for group in self.groups:
            most = blocks
            if self.stays(group):
                continue
            if group.reach and self.frees:
                at_once = group.blocks_at_once(self.workload.context, self.kv.window)
                most = min(blocks, at_once)
            found += most * sum(self.records[layer] for layer in group.layers)
        return found

    def each_bytes(self, seen: Sequence[Array], on_disk: bool = False, read: bool = False) -> Array:
        """Bytes of a block in all layers. seen: the part of the blocks of each group that count.

        on_disk: where those of each group begin at pages. read: by each layer that attends to them.
        """
        each = [[self.records[layer] for layer in group.layers] for group in self.groups]
        if on_disk and self.frees:
            each = [[round_up(max(records, default=0), PAGE)] * len(records) for records in each]
        elif on_disk:
            each = [
                [round_up(max(self.records, default=0), PAGE)] * len(records) for records in each
            ]
        if read:
            groups = zip(each, self.groups, strict=True)
            each = [
                [n * self.sizes.readers[i] for n, i in zip(r, group.layers, strict=True)]
                for r, group in groups
            ]
        found: Array = np.sum([sum(r) * part for r, part in zip(each, seen, strict=True)], axis=0)
        return found

    def stays(self, group: LayerGroup) -> bool:
        """Whether the blocks of a group are on the device, wherever others are."""
        all_of_them = len(self.groups) > 1 and not self.groups[0].reach
        return self.frees and self.on_gpu and group.reach != 0 and all_of_them

    def seen(self, tokens: Array) -> list[Array]:
        """The part of so many packed tokens that the layers of each group attend to."""
        found = list[Array]()
        recent = self.kv.window + BLOCK_TOKENS / 2
        for group in self.groups:
            reach = float(group.reach) if group.reach >= 0 else -group.reach / 2  # half a chunk
            packed = max(0.0, reach - recent) + BLOCK_TOKENS  # of whole blocks
            part = np.minimum(1.0, packed / np.maximum(1.0, tokens))
            found.append(part if group.reach else np.ones_like(part))
        return found

    def attention_s(
        self, processor: Processor, queries: Array, past: Array, far: bool = False
    ) -> Array:
        """Seconds to attend to a block of all layers; queries: of a KV head. past: tokens.

        far: of those layers whose blocks may be away from the device.
        """
        each = [np.zeros_like(past)]
        for group, part in zip(self.groups, self.seen(past), strict=True):
            if far and self.stays(group):
                continue
            heads = Counter[tuple[KVFormat, int]]()
            for layer in group.layers:
                indexing = self.sizes.shapes[layer]
                of_index = indexing.heads if indexing.indexes else 0
                heads[self.forms[layer], of_index] += self._read_heads(layer)
            for (form, of_index), count in heads.items():
                share, asking = part, queries
                if of_index:  # all tokens, by other heads
                    asking = queries * of_index / self._heads
                else:
                    share = part * self.chosen(past * part)
                tokens = np.maximum(BLOCK_TOKENS, past * share)
                each.append(share * count * processor.attention_s(form, asking, tokens))
        seconds: Array = np.sum(each, axis=0)
        return seconds

    def chosen(self, tokens: Array) -> Array:
        """The part of so many tokens that attention goes to where an index chooses, else 1."""
        top = self.sizes.index_top
        most = np.inf if top is None else top
        found: Array = np.minimum(1.0, most / np.maximum(1.0, tokens))
        return found

    def choosing_s(self, machine: MachineProfile, blocks: Array, passes: Array) -> Array:
        """Seconds in which a GPU chooses from so many blocks: bounds of K, and two calls a layer.

        blocks: of all layers, those that they see. A CPU does it within attention.
        """
        nbytes = np.zeros_like(blocks)
        seen = self.seen(np.asarray(self.mean * BLOCK_TOKENS))
        for group, part in zip(self.groups, seen, strict=True):
            for i in group.layers:
                nbytes = nbytes + part * blocks * self._read_heads(i) * self.forms[i].bound_bytes
        calls = 2 * sum(self.sizes.readers) * call_s(machine)
        found: Array = nbytes / machine.device.bytes_per_s + passes * calls
        return found

    @property
    def _heads(self) -> int:
        """Query heads of the layers that attend."""
        assert self.sizes.attention is not None
        return self.sizes.attention.heads

    def _read_heads(self, layer: int) -> int:
        """KV heads of a layer, times the layers that read them."""
        return self.sizes.readers[layer] * self.sizes.shapes[layer].kv_heads

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        return layer_groups(self.sizes.shapes, 0, self.workload.context)

    @cached_property
    def records(self) -> list[int]:
        shapes = self.sizes.shapes
        return [s.kv_heads * f.nbytes for s, f in zip(shapes, self.forms, strict=True)]

    @cached_property
    def forms(self) -> list[KVFormat]:
        return self.kv.packed_forms(self.sizes.shapes)

    @cached_property
    def mean(self) -> float:
        """Packed blocks of a sequence, halfway through its answer."""
        return self.count_of(self.workload.prompt.mean + self.workload.answer.mean / 2)

    def count_of(self, tokens: float) -> float:
        """Packed blocks of sequences of about so many tokens; half a block waits to be whole."""
        packed = tokens - self.kv.window - self.kv.sinks - BLOCK_TOKENS / 2
        return max(0.0, packed) / BLOCK_TOKENS

    @cached_property
    def oldest(self) -> Oldest:
        prompt, kv = self.workload.prompt.mean, self.kv
        tokens = prompt + self.workload.answer.mean
        most = PackedCache.blocks_of(int(tokens), kv.window, kv.sinks)
        return Oldest(self.count_of(prompt), self.count_of(tokens), most)

    @cached_property
    def unused(self) -> float | None:
        """Blocks that are read for nothing between two sequences' on disk, to save a request.

        None where each sequence is a request: they are too far from each other.
        """
        kv = self.kv
        most = PackedCache.blocks_of(self.workload.context, kv.window, kv.sinks)
        unused = max(0.0, most - self.mean)
        stride = round_up(max(self.records, default=1), PAGE)
        return unused if unused * stride <= READ_THROUGH else None

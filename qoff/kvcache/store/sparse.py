"""What sparse attention to far blocks needs near: bounds of their K, and which were chosen of late.

A record, a block of one KV head, is what is chosen and what moves. Records are read ahead by the
choices of the tokens before; what the real choice has beside these comes when it is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.layer_cache import ITEM_FIELDS, BlockTable, Bounds
from qoff.memory.arena import Arena
from qoff.memory.io.runs import Run

from .ring import BlockRing, LayerFetches, runs

WRONG_GUESSES = 0.01  # records that were read ahead in vain, of those that dense attention reads
_NEWEST = 128  # of eight choices in a byte

Numbers: TypeAlias = npt.NDArray[np.int64]
Records: TypeAlias = npt.NDArray[np.bool_]  # [blocks, kv_heads]
BringRecords: TypeAlias = Callable[[int, Numbers, Numbers, Records, Tensor], Sequence[Future[None]]]


class BlockBounds:
    """Bounds of the K of blocks 0 .. blocks - 1.

    layers: K's scales and minima, uint8 [blocks, kv_heads, form.bound_bytes] of each layer.
    virtual: blocks hold nothing, and neither do their bounds.
    """

    virtual = False

    def __init__(
        self, forms: Sequence[KVFormat], kv_heads: Sequence[int], blocks: int, arena: Arena
    ) -> None:
        self._forms = tuple(forms)
        self.layers: list[Tensor] = []
        for layer, (form, heads) in enumerate(zip(forms, kv_heads, strict=True)):
            nbytes = blocks * heads * form.bound_bytes
            memory = arena.alloc(nbytes, f"bounds of K of layer {layer}")
            self.layers.append(memory.view(blocks, heads, form.bound_bytes))

    def keep(self, layer: int, blocks: Sequence[int], records: Sequence[Tensor]) -> None:
        """Remember the bounds of new blocks; records: uint8 [kv_heads, form.nbytes] of each."""
        if self.virtual:
            return
        form = self._forms[layer]
        for block, record in zip(blocks, records, strict=True):
            self.layers[layer][block] = record[:, form.k_scale : form.v_codes]

    def keep_runs(self, layer: int, blocks: Sequence[int], records: Tensor) -> None:
        """As `keep`, of records that lie together, by one copy for blocks that do, too."""
        if self.virtual:
            return
        form = self._forms[layer]
        bounds = records[..., form.k_scale : form.v_codes]
        for run in runs(enumerate(blocks)):
            new = bounds[run.at : run.at + run.count]
            self.layers[layer][run.local : run.local + run.count] = new


class LateChoices:
    """Which tokens of late chose the records of blocks 0 .. blocks - 1.

    A byte of the arena for each record has its last eight choices, a bit each.
    """

    def __init__(self, kv_heads: Sequence[int], blocks: int, arena: Arena) -> None:
        memory = arena.alloc(blocks * sum(kv_heads), "what was chosen of KV blocks")
        parts = memory.split([blocks * heads for heads in kv_heads])
        self._choices: list[npt.NDArray[np.uint8]] = [
            part.view(blocks, heads).numpy() for heads, part in zip(kv_heads, parts, strict=True)
        ]
        self._credit = 0.0  # records that may yet be read in vain

    def forget(self, layer: int, blocks: Sequence[int]) -> None:
        """These are other blocks now."""
        self._choices[layer][list(blocks)] = 0

    def guess(self, layer: int, blocks: Numbers) -> Records:
        """Records of these blocks that the next token may choose: the last one's, the likeliest.

        So many that, even if all are wrong, no more are than `WRONG_GUESSES`.
        """
        choices = self._choices[layer][blocks]
        likely = choices >= _NEWEST
        most = int(self._credit)
        if np.count_nonzero(likely) > most:
            best = np.argsort(choices, axis=None, kind="stable")[choices.size - most :]
            kept = np.zeros_like(likely)
            kept.flat[best] = True
            likely &= kept
        self._credit -= np.count_nonzero(likely)
        return likely

    def note(self, layer: int, blocks: Numbers, chosen: Records, guessed: Records) -> None:
        """What a token chose of these blocks, and what of them had been guessed."""
        choices = self._choices[layer]
        choices[blocks] = choices[blocks] >> 1 | chosen * np.uint8(_NEWEST)
        earned = WRONG_GUESSES * chosen.size + np.count_nonzero(chosen & guessed)
        self._credit = min(self._credit + earned, chosen.size)


def record_runs(sources: Numbers, dests: Numbers, nbytes: int) -> list[Run]:
    """Records of so many bytes, sources ascending, as runs of those that follow each other."""
    if not len(sources):
        return []
    breaks = (np.diff(sources) != nbytes) | (np.diff(dests) != nbytes)
    starts = np.flatnonzero(np.concatenate(([True], breaks)))
    counts = np.diff(np.append(starts, len(sources)))
    return [
        Run(source, dest, count * nbytes)
        for source, dest, count in zip(
            sources[starts].tolist(), dests[starts].tolist(), counts.tolist(), strict=True
        )
    ]


class ChosenBlocks(LayerFetches):
    """The records that one pass of single tokens attends to, which come to a ring layer by layer.

    blocks: that the pass may bring, ascending, places: of each in a slot. table: of the rows'
    blocks, by number. bring: as `TieredBlocks.bring_records`. bounds: None where it is not the CPU
    that chooses.
    """

    def __init__(
        self,
        ring: BlockRing,
        bounds: BlockBounds | None,
        choices: LateChoices,
        bring: BringRecords,
        blocks: Sequence[int],
        places: Sequence[int],
        table: BlockTable,
    ) -> None:
        super().__init__(ring, self._read_ahead)
        self._bounds, self._choices = bounds, choices
        self._bring_records, self._table = bring, table
        self._blocks = np.array(blocks, dtype=np.int64)
        self._places = np.array(places, dtype=np.int64)
        self._index = np.searchsorted(self._blocks, table.blocks.numpy())  # in `blocks`
        self._slots = table.items[:, ITEM_FIELDS.index("slot")].numpy()  # of each row
        self._guessed: dict[int, Records] = {}

    def open(self, layer: int) -> Tensor:
        """The slot of a layer, where its records will be."""
        return self.take(layer).memory

    def of(self, layer: int) -> Bounds | None:
        """What attention on the CPU chooses the records of a layer by."""
        if self._bounds is None:
            return None
        return Bounds(self._bounds.layers[layer], self._table, self.bringing(layer))

    def bringing(self, layer: int) -> Callable[[Tensor, Tensor], None]:
        """Brings chosen records of a layer to the slot of `open`: see `Bounds.bring`."""
        return partial(self._bring_chosen, layer)

    def _read_ahead(self, layer: int, slot: Tensor) -> Sequence[Future[None]]:
        guessed = self._guessed[layer] = self._choices.guess(layer, self._blocks)
        return self._bring_records(layer, self._blocks, self._places, guessed, slot)

    def _bring_chosen(self, layer: int, blocks: Tensor, counts: Tensor) -> None:
        """Wait for those that are chosen: what is missing is read."""
        chosen = np.zeros_like(self._guessed[layer])
        lists, numbers = blocks.numpy(), counts.numpy()
        rows, heads, at = np.nonzero(np.arange(lists.shape[2]) < numbers[:, :, None])
        chosen[self._index[self._slots[rows], lists[rows, heads, at]], heads] = True
        guessed = self._guessed.pop(layer)
        self._choices.note(layer, self._blocks, chosen, guessed)
        missing = chosen & ~guessed
        self.add(
            layer,
            lambda slot: self._bring_records(layer, self._blocks, self._places, missing, slot),
        )

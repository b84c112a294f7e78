"""Packed blocks by the tokens they hold, so that prompts that begin alike share them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kvcache.device.blocks import DeviceBlocks
from qoff.kvcache.store.tiered import TieredBlocks

# The block before, or the adapter, below 0, and 64 tokens.
_Key = tuple[int, tuple[int, ...]]


class PrefixIndex:
    """Blocks of prompts that are still in use, found by the tokens from the first one on.

    A block is known by its tokens and by the block before it, the first one by the adapter that it
    was read with, and forgotten when it is free.
    """

    def __init__(self, store: TieredBlocks | DeviceBlocks) -> None:
        self._store = store
        self._blocks: dict[_Key, int] = {}
        self._keys: dict[int, _Key] = {}
        self.dropped = 0  # blocks so far: others with the same tokens may take their places

    def add(self, prompt: Sequence[int], blocks: Sequence[int], adapter: int = -1) -> None:
        """Remember the blocks that hold nothing but tokens of a prompt. adapter: -1 for none."""
        before = -2 - adapter
        for block, tokens in zip(blocks, _pieces(prompt), strict=False):
            key = (before, tokens)
            if block not in self._keys and key not in self._blocks:
                self._keys[block], self._blocks[key] = key, block
            before = block

    def find(self, prompt: Sequence[int], expected: int, adapter: int = -1) -> list[int]:
        """The longest chain of blocks that a prompt begins with, where they would lie, too.

        At least one token is left to be read. expected: blocks that the sequence will have.
        """
        found: list[int] = []
        before = -2 - adapter
        for index, tokens in enumerate(_pieces(prompt[:-1])):
            block = self._blocks.get((before, tokens))
            if block is None:
                break
            if self._store.tier(block) != self._store.placement.tier(index, expected):
                break
            found.append(block)
            before = block
        return found

    def drop(self, blocks: Iterable[int]) -> None:
        """Forget those of some blocks that nobody uses any more."""
        for block in blocks:
            if block in self._keys and not self._store.users(block):
                del self._blocks[self._keys.pop(block)]
                self.dropped += 1


def common_blocks(a: Sequence[int], b: Sequence[int]) -> int:
    """How many whole blocks of tokens two prompts begin with alike."""
    same = 0
    for x, y in zip(_pieces(a), _pieces(b), strict=False):
        if x != y:
            break
        same += 1
    return same


def _pieces(prompt: Sequence[int]) -> list[tuple[int, ...]]:
    """Whole blocks of tokens."""
    whole = len(prompt) // BLOCK_TOKENS
    return [tuple(prompt[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]) for i in range(whole)]

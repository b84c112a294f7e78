"""Packed blocks by the tokens they hold, so that prompts that begin alike share them."""

from __future__ import annotations

from collections.abc import Sequence

from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kvcache.device.blocks import DeviceBlocks
from qoff.kvcache.store.tiered import TieredBlocks

_Content = tuple[int, int]  # a block, and what `contents` says of it
# What comes before, or the adapter, below 0; and 64 tokens.
_Key = tuple[_Content | int, tuple[int, ...]]


class PrefixIndex:
    """Blocks with the tokens of sequences, found by these from the first one on.

    A block is known by its tokens and by what comes before it, the first one by the adapter that it
    was read with. It stays known when its sequences have ended, until other tokens come into it.
    queried, shared: tokens of prompts that were looked up, and those that were found.
    """

    def __init__(self, store: TieredBlocks | DeviceBlocks) -> None:
        self._store = store
        self.queried = self.shared = 0
        self._found: dict[_Key, _Content] = {}
        self._known: dict[int, tuple[int, _Key]] = {}  # of a block: contents, and its key

    def add(self, tokens: Sequence[int], blocks: Sequence[int], adapter: int = -1) -> None:
        """Remember the blocks of a sequence, full of these tokens. adapter: -1 for none.

        What others know of the same tokens stays.
        """
        before: _Content | int = -2 - adapter
        for i, block in enumerate(blocks[: len(tokens) // BLOCK_TOKENS]):
            own = block, self._store.contents(block)
            known = self._known.get(block)
            if known is None or known[0] != own[1]:
                key = before, tuple(tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS])
                other = self._there(key)
                if other is not None:
                    before = other
                    continue
                if known is not None:
                    self._found.pop(known[1], None)
                self._known[block], self._found[key] = (own[1], key), own
            before = own

    def find(self, prompt: Sequence[int], expected: int, adapter: int = -1) -> list[int]:
        """The longest chain of blocks that a prompt begins with, where they would lie, too.

        At least one token is left to be read. expected: blocks that the sequence will have.
        """
        chain: list[int] = []
        before: _Content | int = -2 - adapter
        for index, tokens in enumerate(_pieces(prompt[:-1])):
            found = self._there((before, tokens))
            if found is None:
                break
            if self._store.tier(found[0]) != self._store.placement.tier(index, expected):
                break
            chain.append(found[0])
            before = found
        return chain

    def clear(self) -> None:
        """Forget all blocks."""
        self._found.clear()
        self._known.clear()

    def _there(self, key: _Key) -> _Content | None:
        """The block of a key, if it still has these tokens."""
        found = self._found.get(key)
        if found is not None and self._store.contents(found[0]) != found[1]:
            del self._found[key], self._known[found[0]]
            return None
        return found


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

"""Numbers of blocks: which are free, and how many sequences share each of the others."""

from __future__ import annotations

from collections.abc import Iterable

from qoff.errors import ArgumentError


class BlockAllocator:
    """Hands out block numbers 0 .. capacity - 1; a block without users is free again."""

    def __init__(self, capacity: int) -> None:
        self._users = [0] * capacity
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def capacity(self) -> int:
        return len(self._users)

    @property
    def free(self) -> int:
        """Blocks nobody uses."""
        return len(self._free)

    def grow(self, capacity: int) -> None:
        """Add numbers up to `capacity` - 1."""
        self._free[:0] = range(capacity - 1, self.capacity - 1, -1)
        self._users += [0] * (capacity - self.capacity)

    def allocate(self) -> int:
        """Return a free block, now with one user. Raises ArgumentError when there is none."""
        if not self._free:
            raise ArgumentError(f"all {self.capacity} blocks of the KV cache are in use")
        block = self._free.pop()
        self._users[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Count one user more of each block."""
        for block in blocks:
            self._users[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Count one user less of each block."""
        for block in blocks:
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free.append(block)

    def users(self, block: int) -> int:
        """How many sequences use a block."""
        return self._users[block]

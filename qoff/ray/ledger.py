"""What the workers of a run have begun and not ended: so a request that ends processes is found.

Ray starts a worker that died again, and gives it the same block. Without a memory of what it was
doing it would die of the same request for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

Key = tuple[str, int]  # a task of Ray, which keeps its name when it is repeated, and a block of it
MOST = 4  # times that a request is begun: with its block, with a few others, and twice alone
_GROUPS = (1 << 30, 8, 1, 1)  # requests that are begun together, by how often they were before
_IDLE = 6  # deaths for each worker with nothing done in between: it is not the requests' fault


@dataclass
class Answers:
    """Lines of answers and of errors, and the numbers of the requests they are of."""

    numbers: list[int] = field(default_factory=list)
    output: list[bytes] = field(default_factory=list)
    errors: list[bytes] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0

    def add(self, other: Answers) -> None:
        self.numbers += other.numbers
        self.output += other.output
        self.errors += other.errors
        self.prompt_tokens += other.prompt_tokens
        self.tokens += other.tokens


@dataclass
class Block:
    """A block of requests. begun: how often each was, that was not ended; kept: what is done."""

    begun: Counter[int] = field(default_factory=Counter)
    kept: Answers = field(default_factory=Answers)


class Ledger:
    """The blocks that are at work. workers: how many there are."""

    def __init__(self, workers: int) -> None:
        self._blocks: dict[Key, Block] = {}
        self._most_deaths = _IDLE * workers
        self._deaths = 0  # in a row
        self._fault = "no machine could say why; see Ray's logs"

    def open(self, key: Key) -> Block:
        """What is known of a block: nothing of a new one."""
        known = self._blocks.get(key)
        if known is not None:
            self._deaths += 1
            if self._deaths > self._most_deaths:
                raise RuntimeError(f"{self._deaths} workers died one after another: {self._fault}")
            return known
        self._blocks[key] = found = Block()
        return found

    def begin(self, key: Key, numbers: Sequence[int]) -> None:
        """Requests of a block are begun."""
        self._blocks[key].begun.update(numbers)

    def keep(self, key: Key, answers: Answers) -> None:
        """Some requests of a block are done."""
        self._deaths = 0
        self._blocks[key].kept.add(answers)

    def close(self, key: Key) -> None:
        """All of a block is done."""
        self._deaths = 0
        self._blocks.pop(key, None)

    def fault(self, key: Key, numbers: Sequence[int], text: str) -> None:
        """A machine is at fault, not the requests that it was about to answer."""
        self._fault = text
        self._blocks[key].begun.subtract(numbers)


def new_ledger(workers: int) -> Any:
    """A ledger in a process of its own, on the machine of the caller."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "scheduling_strategy": here}
    return ray.remote(Ledger).options(**options).remote(workers)


def groups(numbers: Sequence[int], begun: Counter[int]) -> list[list[int]]:
    """The requests of a block as they are to be begun; those last that were begun most often."""
    found: list[list[int]] = []
    for times in sorted({begun[number] for number in numbers}):
        alike = [number for number in numbers if begun[number] == times]
        size = _GROUPS[min(times, MOST - 1)]
        found += [alike[at : at + size] for at in range(0, len(alike), size)]
    return found

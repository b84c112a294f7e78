"""Steps of decoding that follow a recorded one on a GPU: graph after graph, and nobody waits.

What `kernels.cpu.steps` is on a CPU. Between two steps a second recording chooses the tokens, puts
them where the next step finds them, and counts up positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from qoff.kernels.layout.distribution import Choice
from qoff.kernels.layout.ending import PLAIN, Ending
from qoff.kernels.reference.linear import ended
from qoff.kernels.sampling import likeliest_there
from qoff.kernels.upload import pinned

MOST = 64  # steps at once

Replay = Callable[[], object]


class StepsAhead(Protocol):
    """Does the steps that follow a recorded one, as long as that is not stale."""

    @property
    def overshoots(self) -> bool:
        """Whether steps may be computed after one that ends an answer."""

    @property
    def logits(self) -> Tensor:
        """What the head made of the rows of the last step, [R, V]."""

    def put(self, tokens: Tensor) -> None:
        """These are the next step's: int64 [R], in host memory."""

    def chooses(self, choice: Choice) -> bool:
        """Whether `tokens` can choose like this."""

    def step(self) -> bool:
        """Do the next one; False where it is stale."""

    def tokens(self, choice: Choice, most: int, noise: Tensor | None) -> list[list[int]]:
        """Do up to `most`: the tokens chosen after each; see `kernels.cpu.steps.Steps.tokens`."""


class GraphSteps:
    """Launches the steps that follow, and chooses the likeliest tokens.

    replay: of the pass, which reads `ids`, int64 [rows], and leaves `products` of the head, [rows,
    V]; rows behind those of the new tokens have no meaning. ending: what makes logits of these.
    counters: int32 [2, n] each, numbers and how much larger each is in a step that follows. found:
    int64 [MOST, rows], for tokens that are chosen; at: int64 [1], for where the next ones go.
    record: makes a replay of work, or None. All tensors stay where they are.
    """

    overshoots = True

    def __init__(
        self,
        replay: Replay,
        record: Callable[[Callable[[], None]], Replay | None],
        counters: Sequence[Tensor],
        ids: Tensor,
        products: Tensor,
        ending: Ending,
        found: Tensor,
        at: Tensor,
    ) -> None:
        self._replay, self._record = replay, record
        self._counters = [(numbers, by) for numbers, by in counters]
        self._ids, self._products, self._ending = ids, products, ending
        self._found, self._at = found, at
        self._rows = len(ids)
        self._warm = False  # whether `_pass_on` was done
        self._recorded: Replay | None = None

    @property
    def logits(self) -> Tensor:
        return self._products[: self._rows]

    def put(self, tokens: Tensor) -> None:
        self._rows = len(tokens)
        there = self._ids[: self._rows]
        there.copy_(pinned(tokens, there.device), non_blocking=True)

    def chooses(self, choice: Choice) -> bool:
        return choice.shapes is None

    def step(self) -> bool:
        self._count(1)
        self._replay()
        return True

    def tokens(self, choice: Choice, most: int, noise: Tensor | None = None) -> list[list[int]]:
        """As `StepsAhead.tokens`. The host waits once, when all are launched.

        Those launched after a token that ends an answer are of no consequence: they write behind
        what is remembered.
        """
        most = min(most, len(self._found))
        pass_on = self._passing_on()
        self._at.zero_()
        self._count(1)
        for _ in range(most):
            self._replay()
            pass_on()
        self._count(-1)
        found: list[list[int]] = self._found[:most, : self._rows].tolist()
        ends = {*choice.ends, -1}
        done = next((i for i, each in enumerate(found, 1) if not ends.isdisjoint(each)), most)
        if done < most:
            self._count(done - most)
        return found[:done]

    def _passing_on(self) -> Replay:
        """`_pass_on`: the first time as it is, which compiles what has to be, then recorded."""
        if self._warm and self._recorded is None:
            self._recorded = self._record(self._pass_on) or self._pass_on
        self._warm = True
        return self._recorded or self._pass_on

    def _pass_on(self) -> None:
        """Choose the likeliest tokens; the next step is of these."""
        logits = self._products
        if self._ending != PLAIN:
            logits = ended(logits.float(), self._ending)
        token = likeliest_there(logits)
        self._found.index_copy_(0, self._at, token[None])
        self._at.add_(1)
        self._ids.copy_(token.clamp_(min=0))
        self._count(1)

    def _count(self, steps: int) -> None:
        """Have positions be those of so many steps later."""
        for numbers, by in self._counters:
            numbers.add_(by, alpha=steps)

"""Plans that take the place of others while requests are answered, whatever rounds take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from qoff.engine.adapting import Adapter
from qoff.engine.opened import Opened, Source
from qoff.engine.passes import Round
from qoff.plan import Plan
from qoff.plan.reopen import Remaining


@contextmanager
def changing(
    *plans: Plan, after: int = 5, opening: Callable[[Plan], object] = lambda _: None
) -> Iterator[list[Plan]]:
    """Have each of these plans wanted so many rounds after the one before; those that were opened.

    opening: called before a plan is opened. Of an `LLM` that has an adapter.
    """
    left, rounds, opened = deque(plans), 0, list[Plan]()
    real = Source.open

    def observe(self: Adapter, done: Round, remaining: Callable[[], Remaining]) -> None:
        nonlocal rounds
        rounds += 1
        if left and self.wanted is None and rounds >= after:
            self.wanted, rounds = left.popleft(), 0

    def still(self: Adapter, remaining: Remaining) -> Plan | None:
        return self.wanted if remaining.there else None

    def open_(self: Source, plan: Plan) -> Opened:
        opening(plan)
        opened.append(plan)
        return real(self, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Adapter, "observe", observe)
        patch.setattr(Adapter, "still", still)
        patch.setattr(Source, "open", open_)
        yield opened

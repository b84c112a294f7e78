"""The pool's protocol, all of it: every order in which threads can take its steps.

`pool` keeps jobs apart by one word in memory, `_AT`. Here its functions are written as steps of one
access each, and all states that threads can come to are visited: in each, no thread writes what
another reads, and from each the end can be reached. At the end every item was done once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

Items = tuple[int, ...]  # of the phases of a job


class BrokenError(Exception):
    """What must not happen."""


class Launch(NamedTuple):
    """A list, how many times it is to run, and how many jobs have begun when one ends it.

    opened: its jobs are added one by one, and run once. abandoned: and the rest then given up.
    """

    jobs: tuple[Items, ...]
    times: int = 1
    ends: int = -1
    opened: bool = False
    abandoned: bool = False

    def is_done(self, finished: frozenset, first: int) -> bool:
        """Whether these are the items that may be done when the list is over."""
        count = len(self.jobs) if self.ends < 0 else self.ends
        counts = range(count + 1) if self.abandoned else [count]
        jobs = [self.jobs[i % len(self.jobs)] for i in range(count)]
        return any(finished == _items(jobs[:some], first) for some in counts)


class Pool(NamedTuple):
    """Memory that threads share. number, leaving, inside: the three parts of `_AT`."""

    launches: tuple[Launch, ...]
    number: int = 0
    leaving: bool = False
    inside: int = 0
    end: int = 0
    epoch: int = 0
    stop: bool = False
    steps: tuple[Items, ...] = ()
    first: int = 0
    ends: int = -1  # the job that ends the list, of those before its end
    taken: Items = (0, 0)
    done: Items = (0, 0)
    finished: frozenset = frozenset()  # job, phase and number of items done

    @property
    def at(self) -> tuple[int, bool, int]:
        return self.number, self.leaving, self.inside


class Thread(NamedTuple):
    """A thread: the step it is at, and its variables. launch: of the caller, which it is at."""

    step: str
    launch: int = -1
    seen: int = 0
    last: int = -1
    at: tuple[int, ...] = ()
    number: int = -1
    job: Items = ()
    phase: int = 0
    item: int = 0


LISTS = (Launch(((1, 1),)), Launch(((1,),), 2, 1))
ABANDONED = (Launch(((1,),), opened=True, abandoned=True), Launch(((1,),)))
OPEN_LISTS = (Launch(((1,), (1,)), opened=True, abandoned=True), Launch(((1,), (1,)), opened=True))


def step(pool: Pool, threads: tuple[Thread, ...], i: int) -> tuple[Pool, Thread] | None:
    """What thread i does next; None for one that has ended."""
    me = threads[i]
    return None if me.step == "ended" else STEPS[me.step](pool, me, threads)


_INSIDE = ("read", "take", "do", "end_list", "finish", "wait")


def _alone(threads: tuple[Thread, ...]) -> None:
    """That no thread is where it reads what is written now."""
    if any(thread.step in _INSIDE for thread in threads):
        raise BrokenError(f"written while it is read: {threads}")


def launch(pool, me, threads):
    if me.launch >= 0 and not pool.launches[me.launch].is_done(pool.finished, pool.first):
        raise BrokenError(f"returned before its end: {pool}")
    at = me.launch + 1
    if at == len(pool.launches):
        return pool._replace(stop=True), me._replace(step="publish", launch=at)
    _alone(threads)
    now = pool.launches[at]
    last = pool.number + now.ends - 1 if now.ends >= 0 else -1
    steps, none = () if now.opened else now.jobs, frozenset()
    pool = pool._replace(steps=steps, first=pool.number, ends=last, finished=none)
    return pool, me._replace(step="append" if now.opened else "lengthen", launch=at)


def append(pool, me, _):
    jobs = pool.launches[me.launch].jobs
    return pool._replace(steps=jobs[: pool.end - pool.first + 1]), me._replace(step="lengthen")


def lengthen(pool, me, _):
    now = pool.launches[me.launch]
    jobs = 1 if now.opened else len(now.jobs) * now.times
    return pool._replace(end=pool.end + jobs), me._replace(step="publish")


def abandon(pool, me, _):
    return pool._replace(end=0), me._replace(step="look")


def look(pool, me, _):
    free = not pool.leaving and pool.inside == 0
    return pool, me._replace(step="skip", at=pool.at) if free else me


def skip(pool, me, _):
    if pool.at != me.at:
        return pool, me._replace(step="look", at=())
    return pool._replace(number=pool.number + 1), me._replace(step="shut", at=())


def shut(pool, me, _):
    return pool._replace(end=pool.number), me._replace(step="launch")


def publish(pool, me, _):
    pool = pool._replace(epoch=pool.epoch + 1)
    if pool.stop:
        return pool, _go(me, "ended")
    now = pool.launches[me.launch]
    if len(pool.steps) < len(now.jobs):
        return pool, _go(me, "append")
    return pool, _go(me, "abandon" if now.abandoned else "enter")


def sleep(pool, me, _):
    return pool, me if pool.epoch == me.seen else me._replace(step="wake")


def wake(pool, me, _):
    return pool, me._replace(step="stopped", seen=pool.epoch)


def stopped(pool, me, _):
    return pool, _go(me, "ended" if pool.stop else "enter")


def enter(pool, me, _):
    return pool, me._replace(step="at_end", at=pool.at)


def at_end(pool, me, _):
    number, leaving, _ = me.at
    if number >= pool.end:
        return pool, _go(me, "sleep" if me.launch < 0 else "launch")
    if number == me.last or leaving:
        return pool, me._replace(step="enter", at=())
    return pool, me._replace(step="join")


def join(pool, me, _):
    if pool.at != me.at:
        return pool, me._replace(step="enter", at=())
    return pool._replace(inside=pool.inside + 1), _go(me, "read", number=me.at[0])


def read(pool, me, threads):
    if pool.stop:
        raise BrokenError(f"behind the last list: {pool}")
    place, now = me.number - pool.first, pool.launches[threads[0].launch]
    if place >= (now.ends if now.ends >= 0 else len(pool.steps)):
        raise BrokenError(f"behind the end of the list: {pool}")
    return pool, me._replace(step="take", job=pool.steps[place % len(pool.steps)])


def take(pool, me, _):
    item, items = pool.taken[me.phase], me.job[me.phase]
    pool = pool._replace(taken=_add(pool.taken, me.phase, items + 1))
    if item < items:
        return pool, me._replace(step="do", item=item)
    if me.phase + 1 < len(me.job):
        return pool, me._replace(step="wait")
    return pool, _go(me, "leave", number=me.number)


def do(pool, me, _):
    one = (me.number, me.phase, me.item)
    if one in pool.finished or me.number != pool.number:
        raise BrokenError(f"done twice, or not of the job at work: {one}")
    if _items((me.job[: me.phase],), me.number) - pool.finished:
        raise BrokenError(f"before the phase before it is done: {one}")
    following = "end_list" if me.number == pool.ends else "finish"
    return pool._replace(finished=pool.finished | {one}), me._replace(step=following, item=0)


def end_list(pool, me, _):
    return pool._replace(end=pool.number + 1), me._replace(step="finish")


def finish(pool, me, _):
    items = me.job[me.phase]
    return pool._replace(done=_add(pool.done, me.phase, items)), me._replace(step="take")


def wait(pool, me, _):
    there = pool.done[me.phase] == me.job[me.phase]
    return pool, me._replace(step="take", phase=me.phase + 1) if there else me


def leave(pool, me, _):
    return pool, me._replace(step="left" if pool.inside > 1 else "last", at=pool.at)


def left(pool, me, _):
    if pool.at != me.at:
        return pool, me._replace(step="leave", at=())
    return pool._replace(inside=pool.inside - 1), _go(me, "enter", last=me.number)


def last(pool, me, _):
    if pool.at != me.at:
        return pool, me._replace(step="leave", at=())
    return pool._replace(leaving=True), me._replace(step="reset", at=())


def reset(pool, me, threads):
    _alone(threads)
    return pool._replace(taken=(0, 0), done=(0, 0)), me._replace(step="open")


def open_(pool, me, _):
    following = pool._replace(number=me.number + 1, leaving=False, inside=0)
    return following, _go(me, "enter", last=me.number)


def _go(me: Thread, step: str, last: int = -1, number: int = -1) -> Thread:
    """A thread at a step, without variables that it no longer needs."""
    return Thread(step, me.launch, me.seen, last, number=number)


def _items(jobs: tuple[Items, ...], first: int) -> frozenset:
    """Job, phase and number of all items of a list."""
    return frozenset(
        (first + i, phase, item)
        for i, job in enumerate(jobs)
        for phase, items in enumerate(job)
        for item in range(items)
    )


def _add(counts: Items, i: int, most: int) -> Items:
    return (*counts[:i], min(counts[i] + 1, most), *counts[i + 1 :])


STEPS = {
    function.__name__.removesuffix("_"): function
    for function in (
        launch, append, lengthen, abandon, look, skip, shut, publish, sleep, wake, stopped, enter,
        at_end, join, read, take, do, end_list, finish, wait, leave, left, last, reset, open_,
    )
}  # fmt: skip


def states(workers: int, launches: tuple[Launch, ...]) -> dict:
    """All states that can be reached, and which follow each. Raises BrokenError."""
    begin = (Pool(launches), (Thread("launch"), *(Thread("sleep") for _ in range(workers))))
    found: dict = {}
    ahead = [begin]
    while ahead:
        state = ahead.pop()
        if state in found:
            continue
        pool, threads = state
        found[state] = []
        for i in range(len(threads)):
            if after := step(pool, threads, i):
                # Workers are alike: of states that differ in who is who, one is enough.
                caller, *others = (*threads[:i], after[1], *threads[i + 1 :])
                following = (after[0], (caller, *sorted(others)))
                found[state].append(following)
                ahead.append(following)
    return found


def check(workers: int, launches: tuple[Launch, ...]) -> int:
    """The number of states, if the end can be reached from each."""
    found = states(workers, launches)
    before: dict = {state: [] for state in found}
    for state, following in found.items():
        for one in following:
            before[one].append(state)
    reached = {s for s in found if all(thread.step == "ended" for thread in s[1])}
    ahead = [*reached]
    while ahead:
        for one in before[ahead.pop()]:
            if one not in reached:
                reached.add(one)
                ahead.append(one)
    if stuck := found.keys() - reached:
        raise BrokenError(f"never ends: {next(iter(stuck))}")
    return len(found)


@pytest.mark.parametrize(("workers", "launches"), [(2, LISTS), (2, ABANDONED), (1, OPEN_LISTS)])
def test_every_order_of_steps_ends_with_every_item_done_once(
    workers: int, launches: tuple[Launch, ...]
) -> None:
    assert check(workers, launches) > 10_000


def _joins_what_is_left(pool, me, _):
    """Into a job that is being left for good."""
    there = me.at[0] < pool.end and me.at[0] != me.last
    return (pool, me._replace(step="join")) if there else at_end(pool, me, _)


def _leaves_at_once(pool, me, threads):
    """Without saying that the job is being left for good."""
    pool, me = last(pool, me, threads)
    return pool._replace(leaving=False), me


def _waits_for_nothing(pool, me, _):
    return pool, me._replace(step="take", phase=me.phase + 1)


def _opens_none(pool, me, threads):
    pool, me = open_(pool, me, threads)
    return pool._replace(leaving=True), me


def _ends_too_early(pool, me, _):
    """Before the job at work."""
    return pool._replace(end=pool.number), me._replace(step="finish")


def _shuts_at_once(pool, me, _):
    """Without making sure that nobody joins."""
    return pool._replace(end=pool.number), me._replace(step="launch", at=())


def _looks_at_nothing(pool, me, _):
    """Whether anybody is in the job or not."""
    return pool, me._replace(step="skip", at=pool.at)


@pytest.mark.parametrize(
    ("name", "wrong", "launches"),
    [
        ("end_list", _ends_too_early, LISTS),
        ("at_end", _joins_what_is_left, LISTS),
        ("last", _leaves_at_once, LISTS),
        ("wait", _waits_for_nothing, LISTS),
        ("open", _opens_none, LISTS),
        ("skip", _shuts_at_once, OPEN_LISTS),
        ("look", _looks_at_nothing, OPEN_LISTS),
    ],
)
def test_a_protocol_without_one_of_its_rules_is_found(
    name: str, wrong: Callable, launches: tuple[Launch, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STEPS, name, wrong)
    with pytest.raises(BrokenError):
        check(1, launches)

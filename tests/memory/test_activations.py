"""Hidden states that wait elsewhere: what is loaded is what was stored, whatever the order of
batches, sizes and prefetches; failures are errors at `load`."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from qoff.errors import BudgetError, DiskReadError, DiskWriteError
from qoff.memory.activations import ActivationStore
from qoff.memory.arena import PAGE, Arena
from qoff.memory.io.copies import Copies
from qoff.memory.io.disk import DiskReader
from qoff.memory.io.spill import SpillFile
from tests.links import Link, behind

TOKENS, HIDDEN = 40, 24
TIERS = ["host", "disk"]


@contextmanager
def store_of(
    tier: str, batches: int, folder: Path, slow: bool = False, pwritev: object = None
) -> Iterator[ActivationStore]:
    """A store with exactly the memory that it says it takes."""
    sizes = ActivationStore.bytes_for(tier, [TOKENS] * batches, HIDDEN)
    arenas = {name: Arena(name, sizes[name]) for name in ("device", "host")}
    hooks = behind(host=Link(1e7) if slow else None)
    options = {} if pwritev is None else {"pwritev": pwritev}
    with (
        closing(DiskReader(threads=1)) as reader,
        closing(Copies(instrumentation=hooks)) as copies,
        closing(SpillFile(folder, PAGE + sizes["disk"], reader, **options)) as spill,  # type: ignore[arg-type]
    ):
        yield ActivationStore(
            tier,
            [TOKENS] * batches,
            HIDDEN,
            arenas,
            copies,
            spill if tier == "disk" else None,
            PAGE,
        )
        assert all(arena.used == arena.capacity for arena in arenas.values())


@settings(max_examples=25, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    tier=st.sampled_from(TIERS),
    counts=st.lists(st.integers(1, TOKENS), min_size=1, max_size=5),
    ahead=st.booleans(),
    rounds=st.integers(1, 2),
    slow=st.booleans(),
)
def test_what_is_loaded_was_stored(
    tier: str,
    counts: list[int],
    ahead: bool,
    rounds: int,
    slow: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Batches take turns as in a round, the next one on its way while one is computed on."""
    folder = tmp_path_factory.getbasetemp()
    with store_of(tier, len(counts), folder, slow) as store:
        for _ in range(rounds):
            truth = [torch.randn(count, HIDDEN) for count in counts]
            batches = [store.of_pass(i) for i in range(len(counts))]
            for batch, hidden in zip(batches, truth, strict=True):
                batch.store(hidden)
            if ahead:
                batches[0].prefetch()
            for layer in range(4):
                for i, batch in enumerate(batches):
                    if ahead:
                        batches[(i + 1) % len(batches)].prefetch()
                    hidden = batch.load()
                    assert torch.equal(hidden, truth[i])
                    if layer == 3:
                        continue
                    hidden += i + 1  # in place, as the decoder does
                    truth[i] = hidden.clone()
                    batch.store(hidden)


@pytest.mark.parametrize("tier", TIERS)
def test_an_abandoned_round_does_not_disturb_the_next(tier: str, tmp_path: Path) -> None:
    with store_of(tier, 3, tmp_path, slow=True) as store:
        for _ in range(5):
            left = [store.of_pass(i) for i in range(3)]
            for batch in left:
                batch.store(torch.full((TOKENS, HIDDEN), torch.nan))
            left[0].prefetch()
            left[1].prefetch()
            batch, hidden = store.of_pass(1), torch.randn(7, HIDDEN)
            batch.store(hidden)
            assert torch.equal(batch.load(), hidden)


def test_prefetching_twice_or_before_anything_is_stored(tmp_path: Path) -> None:
    with store_of("host", 1, tmp_path) as store:
        batch, hidden = store.of_pass(0), torch.randn(3, HIDDEN)
        batch.prefetch()
        batch.store(hidden)
        batch.prefetch()
        batch.prefetch()
        assert torch.equal(batch.load(), hidden)
        assert store.wait_s >= 0


def test_jobs_do_what_load_and_store_do(tmp_path: Path) -> None:
    with store_of("host", 2, tmp_path) as store:
        truth = [torch.randn(count, HIDDEN) for count in (5, 9)]
        batches = []
        for i, hidden in enumerate(truth):
            assert store.of_pass(i).by_jobs
            batches.append(store.of_pass(i).moved_by_jobs(len(hidden)))
            batches[i].store(hidden)
        for window in store.windows:
            window.fill_(0xFF)
        for _ in range(3):
            for i, batch in enumerate(batches):
                hidden = batch.load()
                assert torch.equal(hidden, truth[i])
                hidden += i + 1
                truth[i] = hidden.clone()
                batch.store(hidden)
                hidden.fill_(torch.nan)
        assert all(map(torch.equal, [batch.load() for batch in batches], truth))
    with store_of("disk", 1, tmp_path) as store:
        assert not store.of_pass(0).by_jobs


def test_too_small_an_arena_is_refused(tmp_path: Path) -> None:
    arenas = {name: Arena(name, PAGE) for name in ("device", "host")}
    with closing(Copies()) as copies, pytest.raises(BudgetError, match="hidden states at work"):
        ActivationStore("host", [TOKENS] * 2, HIDDEN, arenas, copies)


def broken(fd: int, views: Sequence[memoryview], offset: int) -> int:
    raise OSError(errno.EIO, "Input/output error")


def test_a_write_error_is_raised_by_load(tmp_path: Path) -> None:
    with store_of("disk", 2, tmp_path, pwritev=broken) as store:
        batch = store.of_pass(0)
        batch.store(torch.randn(5, HIDDEN))
        with pytest.raises(DiskWriteError, match="Input/output error"):
            batch.load()


@pytest.mark.parametrize("tier", TIERS)
def test_the_death_of_the_copying_thread_is_an_error(tier: str, tmp_path: Path) -> None:
    def die() -> None:
        raise SystemExit(1)

    with store_of(tier, 2, tmp_path) as store:
        batch = store.of_pass(0)
        batch.store(torch.randn(5, HIDDEN))
        store.copies.call(die, 0, "lane", "death")
        batch.prefetch()
        with pytest.raises(DiskReadError, match="died"):
            batch.load()
        with pytest.raises(DiskReadError, match="died"):
            store.of_pass(1).store(torch.randn(5, HIDDEN))


@pytest.mark.parametrize("tier", TIERS)
def test_each_pass_has_room_for_its_own_tokens(tier: str, tmp_path: Path) -> None:
    counts = (3, 500, 3, 500)
    sizes = ActivationStore.bytes_for(tier, counts, HIDDEN)
    arenas = {name: Arena(name, sizes[name]) for name in ("device", "host")}
    with (
        closing(DiskReader(threads=1)) as reader,
        closing(Copies()) as copies,
        closing(SpillFile(tmp_path, PAGE + sizes["disk"], reader)) as spill,
    ):
        store = ActivationStore(tier, counts, HIDDEN, arenas, copies, spill, PAGE)
        truth = [torch.randn(count, HIDDEN) for count in counts]
        passes = [store.of_pass(number) for number in range(len(counts))]
        for one, hidden in zip(passes, truth, strict=True):
            one.store(hidden)
        for one, hidden in zip(passes, truth, strict=True):
            assert torch.equal(one.load(), hidden)
    assert sizes[tier] == 2 * PAGE + 2 * 12 * PAGE

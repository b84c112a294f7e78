"""Jobs of a CPU are recorded while they run, with no torch between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils import _python_dispatch

from qoff.errors import OpError
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.cpu.jit import recorder as recorders
from qoff.kernels.cpu.jit.pool import default_pool
from qoff.kernels.cpu.jit.recorder import JobRecorder, deferring
from qoff.kernels.layout.qtensor import QTensor
from tests.kernels.operands import random_weight

X = torch.empty(2, 64)  # where the work finds its input


@pytest.fixture(scope="module")
def weight() -> QTensor:
    return random_weight(64, 64)


def test_a_replay_computes_on_what_is_in_memory_then(weight: QTensor) -> None:
    found: list[Tensor] = []

    def work() -> None:
        inner = torch.empty(2, 96)[:, :64]
        cpu.w4_linear(X, weight, out=inner)
        found.append(cpu.w4_linear(inner, weight).view(1, -1))

    X.normal_()
    work()  # takes as much scratch as it needs
    replay = JobRecorder()(work)
    assert replay is not None
    for _ in range(3):
        X.normal_()
        assert replay()
        twice = cpu.w4_linear(cpu.w4_linear(X, weight), weight)
        assert torch.equal(found[1], twice.view(1, -1))


@pytest.mark.parametrize(
    "compute",
    [lambda x: x + 1, lambda x: x.mul_(2), lambda x: x[0, 0].item(), lambda x: x.t().reshape(-1)],
    ids=["a new tensor", "in place", "a number", "a copy"],
)
def test_work_that_torch_has_a_part_in_is_done_and_not_recorded(
    compute: Callable[[Tensor], object], weight: QTensor
) -> None:
    found: list[Tensor] = []

    def work() -> None:
        y = cpu.w4_linear(X, weight)
        compute(y)
        found.append(cpu.w4_linear(y, weight))

    with torch.inference_mode():
        assert JobRecorder()(work) is None
    assert len(found) == 1


def test_recordings_share_memory_and_reuse_what_is_free(weight: QTensor) -> None:
    recorder, results = JobRecorder(), list[Tensor]()

    def work(x: Tensor) -> None:
        for _ in range(8):  # two are alive at a time
            x = cpu.w4_linear(x, weight)
        results.append(x)

    rows = [torch.randn(count, 64) for count in (2, 1, 3, 4)]
    for x in rows:
        work(x)
    replays = [recorder(partial(work, x)) for x in rows[:2]]
    assert recorder.nbytes == 2 * rows[0].nbytes  # though results of other recordings are kept
    assert all(replay and replay() for replay in replays)
    replays += [recorder(partial(work, x)) for x in rows[2:]]
    assert recorder.nbytes == 2 * rows[3].nbytes
    assert [replay and replay() for replay in replays] == [False, False, False, True]


def test_a_replay_whose_scratch_has_moved_says_so(weight: QTensor) -> None:
    replay = JobRecorder()(lambda: cpu.w4_linear(X, weight))
    assert replay is not None
    pool = default_pool()
    pool.workspace(2 * len(pool._workspace))
    assert replay() is False


def test_scratch_that_grows_while_it_is_recorded_is_not_the_recordings() -> None:
    """Else a later one would have its results where other jobs have their scratch."""
    pool, recorder = default_pool(), JobRecorder()

    def work() -> None:
        pool.workspace(2 * len(pool._workspace))

    replay = recorder(work)
    assert replay is not None
    assert replay.stale
    assert recorder.nbytes == 0


def test_deferred_work_is_done_before_torch_computes_and_at_the_end(weight: QTensor) -> None:
    """On memory that is nobody's any more by then, or has been given away again."""
    X.normal_()
    y = cpu.w4_linear(X, weight)
    wanted = [y + 1, cpu.w4_linear(cpu.w4_linear(cpu.w4_linear(y * 2, weight), weight), weight)]
    found = [torch.zeros(2, 64), torch.zeros(2, 64)]
    with torch.inference_mode(), deferring():
        between = cpu.w4_linear(X, weight)
        found[0].copy_(between + 1)
        x = between * 2
        for _ in range(2):
            x = cpu.w4_linear(x, weight)
        cpu.w4_linear(x, weight, out=found[1])
        del x
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize(
    "copied",
    [lambda x: x.to(torch.float64), lambda x: x.t().contiguous(), lambda x: x.t().reshape(-1)],
    ids=["to", "contiguous", "reshape"],
)
def test_copies_are_of_what_deferred_work_has_computed(
    copied: Callable[[Tensor], Tensor], inference: bool, weight: QTensor
) -> None:
    X.normal_()
    wanted = copied(cpu.w4_linear(X, weight))
    with torch.inference_mode(inference), deferring():
        y = cpu.w4_linear(X, weight)
        assert y.flatten().data_ptr() == y.contiguous().data_ptr()
        found = copied(y)
    assert torch.equal(found, wanted)


def test_what_deferred_work_is_told_may_change(weight: QTensor) -> None:
    """The scratch that later work has may lie elsewhere; and nothing waits that failed."""
    pool = default_pool()
    X.normal_()
    wanted = cpu.w4_linear(cpu.w4_linear(X, weight), weight)
    with deferring():
        inner = cpu.w4_linear(X, weight)
        pool.workspace(2 * len(pool._workspace))
        found = cpu.w4_linear(inner, weight)
    assert torch.equal(found, wanted)
    with pytest.raises(OpError), deferring():
        cpu.w4_linear(cpu.w4_linear(X, weight), weight, activation_bits=5)
    assert torch.equal(cpu.w4_linear(inner, weight), wanted)


def test_what_torch_made_is_kept_for_jobs_that_come_later(weight: QTensor) -> None:
    """Whatever else torch has computed in between; and not longer than it is used."""
    X.normal_()
    wanted = cpu.w4_linear(X + 1, weight)
    with torch.inference_mode(), deferring():
        x, unused = X + 1, X + 2
        memory = recorders._storage(x)
        del unused
        between = X * 2
        found = cpu.w4_linear(x, weight)
        mode = torch.utils._python_dispatch._get_current_dispatch_mode()
        assert isinstance(mode, recorders._Deferring)
        del x
        assert memory in mode._kept
        assert len(mode._kept) == 2
        between += 1  # which the job is done before
        assert mode._kept.keys() == {recorders._storage(between)}
    assert torch.equal(found, wanted)


def test_deferred_work_gives_back_what_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "_UNUSED_BYTES", 1 << 12)
    mode = recorders._Deferring(default_pool())
    with default_pool().deferring(), mode:
        for rows in range(1, 50):
            torch.empty(rows, 64)
    assert sum(memory.nbytes for memory, _ in mode._allocated) <= (1 << 12) + 2 * 50 * 64 * 4


def test_deferred_work_allocates_no_more_than_is_alive(weight: QTensor) -> None:
    places = set[int]()
    with deferring():
        x = X
        for _ in range(8):
            x = cpu.w4_linear(x, weight)
            places.add(x.data_ptr())
    assert len(places) == 2


@pytest.mark.parametrize("when", ["_push_mode", "_pop_mode"])
def test_an_interrupt_leaves_torch_as_it_was(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while torch begins, or ends, to ask who keeps the memory of deferred jobs."""
    real = getattr(_python_dispatch, when)

    def interrupted(mode: object) -> None:
        if when == "_push_mode":
            real(mode)
        raise KeyboardInterrupt

    monkeypatch.setattr(_python_dispatch, when, interrupted)
    with pytest.raises(KeyboardInterrupt), deferring():
        pass
    monkeypatch.undo()
    assert torch._C._len_torch_dispatch_stack() == 0
    with deferring():
        assert torch._C._len_torch_dispatch_stack() == 1

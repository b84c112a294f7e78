"""Races are found in whatever order the tasks are done, and what is ordered is none."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.late_gpu import DEVICE

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not os.environ.get("QOFF_LATE_GPU"), reason="needs the late GPU"),
]


@triton.jit
def doubled(source, target, count, stride, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(source + at * stride, mask=at < count)
    tl.store(target + at * stride, 2 * x, mask=at < count)


def kernel(source: Tensor, target: Tensor, count: int = 4, stride: int = 1) -> None:
    doubled[(1,)](source, target, count, stride, BLOCK=8)


def beside(here: Callable[[], object], there: Callable[[], object], ordered: bool) -> list[str]:
    """Races of two tasks, each in a stream of its own, both behind what was before."""
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    here()
    if ordered:
        other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        there()
    torch.cuda.synchronize()
    found, DEVICE.faults = DEVICE.faults, []
    return found


@pytest.fixture
def x() -> Tensor:
    return torch.ones(2, 8, device="cuda")


@pytest.fixture
def host() -> Tensor:
    return torch.ones(8, pin_memory=True)


@pytest.mark.parametrize(
    "pair",
    {
        "write and read": (lambda x, host: x.add_(1), lambda x, host: x.clone()),
        "read and write": (lambda x, host: x.clone(), lambda x, host: x[1].zero_()),
        "two writes": (lambda x, host: x[0].zero_(), lambda x, host: x.fill_(2)),
        "columns": (lambda x, host: x[:, ::2].zero_(), lambda x, host: x[:, 2].clone()),
        "copies": (
            lambda x, host: x[0].copy_(host, non_blocking=True),
            lambda x, host: host.copy_(x[1], non_blocking=True),
        ),
        "kernel's load": (lambda x, host: kernel(x[0], x[1]), lambda x, host: x[0, 3:].zero_()),
        "kernel's store": (lambda x, host: kernel(x[0], x[1]), lambda x, host: x[1, :1].clone()),
        "kernels": (lambda x, host: kernel(x[0], x[1]), lambda x, host: kernel(x[1], x[0])),
        "list": (
            lambda x, host: torch._foreach_add_([x[0], x[1]], 1),
            lambda x, host: x[1].clone(),
        ),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_what_nothing_orders_is_found(
    pair: tuple[str, tuple[Callable[..., object], ...]], x: Tensor, host: Tensor
) -> None:
    for one, two in (pair[1], pair[1][::-1]):
        assert beside(lambda: two(x, host), lambda: one(x, host), ordered=True) == []  # noqa: B023
        found = beside(lambda: one(x, host), lambda: two(x, host), ordered=False)  # noqa: B023
        assert found, pair[0]
        assert "test_races.py" in found[0]


def test_what_the_host_asks_for_is_read_in_its_stream(x: Tensor) -> None:
    assert beside(lambda: x.add_(1), x[0].nonzero, ordered=False)
    assert not beside(x[0].nonzero, lambda: x.add_(1), ordered=False)  # the host has waited


def test_reads_and_other_bytes_are_no_race(x: Tensor, host: Tensor) -> None:
    assert not beside(x.clone, lambda: x + 1, ordered=False)
    assert not beside(x[0].zero_, x[1].clone, ordered=False)
    assert not beside(x[:, ::2].zero_, x[:, 1::2].zero_, ordered=False)
    assert not beside(lambda: kernel(x[0], x[1]), x[1, 4:].zero_, ordered=False)  # 4 are stored
    assert not beside(lambda: kernel(x[0], x[1], 4, 2), x[1, 1::2].zero_, ordered=False)
    assert not beside(lambda: kernel(x[0], x[1]), x[0].clone, ordered=False)
    assert not beside(lambda: x[0, :4].copy_(host[:4], non_blocking=True), host[4:].cuda, False)


def test_an_order_by_others_holds(x: Tensor) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]

    def through_a_third() -> None:
        streams[0].wait_stream(torch.cuda.current_stream())
        streams[1].wait_stream(streams[0])
        with torch.cuda.stream(streams[1]):
            x.zero_()

    torch.cuda.synchronize()
    x.add_(1)
    through_a_third()
    torch.cuda.current_stream().wait_stream(streams[1])
    event = x.add_(1) is x and torch.cuda.current_stream().record_event()
    x.clone()  # behind the event
    event.synchronize()
    with torch.cuda.stream(streams[0]):
        x.clone()
    torch.cuda.synchronize()
    assert DEVICE.faults == []
    x.clone()
    event.synchronize()  # it knows nothing of that
    with torch.cuda.stream(streams[0]):
        x.zero_()
    torch.cuda.synchronize()
    assert len(DEVICE.faults) == 1
    DEVICE.faults.clear()


@pytest.mark.parametrize("joined", [True, False])
def test_branches_of_a_graph_and_what_is_beside_it(joined: bool, x: Tensor) -> None:
    side, stream, graph = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            x.add_(1)
        if joined:
            stream.wait_stream(side)
        y = x.clone()
        stream.wait_stream(side)
        graph.capture_end()
        graph.replay()
        graph.replay()
    torch.cuda.synchronize()
    assert len(DEVICE.faults) == (0 if joined else 2)  # one each replay
    DEVICE.faults.clear()
    assert bool(beside(graph.replay, y.clone, ordered=True)) is not joined
    found = beside(graph.replay, lambda: x[1].clone(), ordered=False)
    assert len(found) == (1 if joined else 2)

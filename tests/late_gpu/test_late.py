"""The late GPU itself: each mistake that it is for is an error, or a wrong number."""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor

from tests.late_gpu import DEVICE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not os.environ.get("QOFF_LATE_GPU"), reason="needs the late GPU"),
]


def ones(count: int = 4) -> Tensor:
    return torch.ones(count, device="cuda")


def test_host_memory_is_read_when_the_copy_is_made() -> None:
    pinned = torch.ones(3, pin_memory=True)
    there = pinned.to("cuda", non_blocking=True)
    pinned.fill_(7)
    assert there.tolist() == [7, 7, 7]
    pageable = torch.ones(3)  # which the driver has read when the call returns
    there = pageable.to("cuda", non_blocking=True)
    pageable.fill_(7)
    assert there.tolist() == [1, 1, 1]


def test_what_comes_to_the_host_is_there_behind_its_event() -> None:
    pinned = torch.zeros(4, pin_memory=True)
    pinned.copy_(ones(), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    assert pinned.tolist() == [0, 0, 0, 0]
    event.synchronize()
    assert pinned.tolist() == [1, 1, 1, 1]


def test_streams_know_of_each_other_what_they_wait_for() -> None:
    def doubled(wait: Callable[[torch.cuda.Stream], object]) -> list[float]:
        there, other = ones(), torch.cuda.Stream()
        torch.cuda.current_stream().synchronize()
        there.mul_(2)
        wait(other)
        with torch.cuda.stream(other):
            found = there.clone()
            return found.tolist()

    assert doubled(lambda _: None) == [1, 1, 1, 1]
    torch.cuda.synchronize()
    assert [fault[:5] for fault in DEVICE.faults] == ["race:"]
    DEVICE.faults.clear()
    assert doubled(lambda other: other.wait_stream(torch.cuda.current_stream())) == [2, 2, 2, 2]


def test_fresh_memory_holds_nothing() -> None:
    assert torch.empty(2, device="cuda").isnan().all()


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            work()
        finally:
            graph.capture_end()
    return graph


def test_a_graph_does_again_what_was_captured_and_nothing_before() -> None:
    there = ones()
    graph = captured(lambda: there.add_(1))
    assert there.tolist() == [1, 1, 1, 1]
    graph.replay()
    graph.replay()
    assert there.tolist() == [3, 3, 3, 3]


def test_the_host_reads_nothing_within_a_capture() -> None:
    there = ones()
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        captured(lambda: bool((there > 0).all()))


def test_a_graph_whose_memory_is_gone_is_not_replayed() -> None:
    found, others = ones(), [ones()]
    graph = captured(lambda: found.add_(others[0]))
    graph.replay()
    others.clear()
    with pytest.raises(RuntimeError, match="have been freed"):
        graph.replay()


def test_memory_that_another_stream_uses_is_not_freed_before() -> None:
    other = torch.cuda.Stream()

    def used(recorded: bool) -> None:
        there = ones()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            there.add_(1)
        if recorded:
            there.record_stream(other)

    used(recorded=True)
    assert not DEVICE.faults
    used(recorded=False)
    assert len(DEVICE.faults) == 1
    DEVICE.faults.clear()


def test_a_deep_copy_has_what_the_tensor_had() -> None:
    x = torch.zeros(3, device="cuda")
    copied = deepcopy({"x": x, "again": x})
    x.add_(1)
    assert copied["x"] is copied["again"]
    assert (copied["x"].tolist(), x.tolist()) == ([0, 0, 0], [1, 1, 1])

"""Steps of decoding that are recorded and replayed: the same results, whatever changes from step to
step, and nothing computed but by replays.

Where there is no GPU, `tests.tape` records instead of CUDA, and Triton interprets the kernels.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.ragged import Ragged, Span
from qoff.kernels.reference import ops as reference_ops
from qoff.kvcache import DeviceCache, KVQuant
from qoff.memory.io.copy_stream import CopyStream
from qoff.models.forward_pass import ForwardPass
from qoff.models.native import graphs
from qoff.models.native.graphs import CudaRecorder, Replays, can_draw_again
from tests.models.test_triton_decoder import KV8, checkpoint, interpreted
from tests.tiny_models import PlainRun
from tests.tolerances import assert_close
from tests.triton_module import triton_module

triton_ops = triton_module("ops")
tape = pytest.importorskip("tests.tape")

CPU = torch.device("cpu")
SLOTS = 4
PROMPTS = (78, 5, 79, 4)  # tokens; with a window of 16 a block is complete at 80
# Slots that decode; the last ones end and begin while the others go on.
STEPS = [(0, 1, 2, 3)] * 4 + [(0, 2, 3), (0, 2), (2,), (1, 3)]


def again(work: Callable[[], None]) -> Callable[[], None]:
    """A recording of work that changes its input: it is not run for it."""
    return work


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes long for each program: attention and cache are Triton's, no matmul."""

    def w4_linear(
        x: Tensor,
        weight: QTensor,
        *,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        **rest: Any,
    ) -> Tensor:
        y = reference_ops.w4_linear(x.float(), weight, **rest)
        y = (y if residual is None else y + residual).to(x.dtype)
        return y if out is None else out.copy_(y)

    monkeypatch.setattr("qoff.kvcache.device.tables._STEADY_BLOCKS", 4)
    monkeypatch.setattr(triton_ops, "w4_linear", w4_linear)


class Run:
    """A model with a cache, which is told the same tokens again and again."""

    def __init__(
        self,
        path: Path,
        replays: Replays | None = None,
        resident: bool = False,
        kv: KVQuant = KV8,
    ) -> None:
        self.run = PlainRun(path, triton_ops, dtype=torch.float16, replays=replays)
        self.run.decoder.resident = resident
        self.cache: Any = self.run.decoder.new_cache(SLOTS, kv=kv)

    def generate(self) -> list[Tensor]:
        """The logits of each step, behind prompts that all runs have the same K and V of."""
        random = torch.Generator().manual_seed(0)
        for slot, tokens in enumerate(PROMPTS):
            self.cache.reset(slot)
            self.cache.lengths[slot] = tokens
        for ring in self.cache.rings.all:
            ring.normal_(generator=random)
        found = [self.forward(slots, random) for slots in STEPS]
        assert self.cache.packed == [64, 0, 64, 0]
        return found

    def forward(self, slots: Sequence[int], random: torch.Generator) -> Tensor:
        spans = (Span(slot, row, 1, self.cache.lengths[slot]) for row, slot in enumerate(slots))
        ragged, tokens = Ragged(tuple(spans)), torch.randint(3, 32, (len(slots),), generator=random)
        return self.run.forward(ForwardPass(tokens, ragged, self.cache, ragged.last_rows))


@interpreted
@pytest.mark.parametrize(
    ("family", "resident", "top"),
    [("opt", True, 1.0), ("llama", False, 1.0), ("llama", True, 0.3)],
)
def test_every_step_is_replayed_and_computes_the_same(
    family: str, resident: bool, top: float, tmp_path: Path
) -> None:
    """Steps that pack blocks, with slots that are empty, of sequences that end and begin.

    Those that attend to a part of the blocks choose again in each step.
    """
    path, kv = checkpoint(tmp_path, family), replace(KV8, attention_top=top)
    replays = Replays(CPU, tape.record if resident else again)
    expected, replaying = Run(path, kv=kv).generate(), Run(path, replays, resident, kv)
    for replayed in (0, len(STEPS)):  # of one layer; all that kernels are told, they are told first
        before = replays.replayed
        for found, wanted in zip(replaying.generate(), expected, strict=True):
            assert_close(found, wanted, dtype=torch.float16)
        assert replays.replayed - before >= replayed
    assert 0 < replays.recorded < len(STEPS)
    assert not replays.failed


def test_a_key_is_of_one_cache_and_of_steps_that_kernels_are_told_the_same() -> None:
    from tests.kvcache.test_device import FORMS, SHAPE

    def key(cache: DeviceCache, *counts: int) -> object:
        step: Any = cache.begin(Ragged.of(list(counts), cache.lengths[: len(counts)]))
        found: object = step.replay_key()
        step.end()
        return found

    def cache(**options: Any) -> DeviceCache:
        return DeviceCache([SHAPE], FORMS[:1], 3, window=16, steady=True, device=CPU, **options)

    first, other = cache(), cache()
    assert key(first, 78, 3, 1) is None
    keys = [key(first, 1, 1, 1) for _ in range(4)]
    assert keys[2] == keys[3]
    assert len(set(keys)) == 3  # the second packs a block
    assert key(first, 1, 1) not in keys  # of two rows
    key(other, 1, 1, 1)
    assert key(other, 1, 1, 1) not in keys
    assert key(DeviceCache([SHAPE], FORMS[:1], 1, device=CPU), 1) is None


@interpreted
def test_tokens_that_there_are_not_are_refused(tmp_path: Path) -> None:
    run = Run(checkpoint(tmp_path, "opt"), Replays(CPU, tape.record), resident=True)
    ragged = Ragged.of([1] * SLOTS, [0] * SLOTS)
    tokens = torch.tensor([1, 2, 3, 32])
    with pytest.raises(OpError, match="tokens are 0 to 31"):
        run.run.forward(ForwardPass(tokens, ragged, run.cache, ragged.last_rows))


def test_only_so_many_recordings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qoff.models.native.graphs._MOST", 2)
    replays = Replays(CPU, again)

    def doubled(*keys: int) -> list[float]:
        return [float(replays.run(key, None, torch.tensor([key]), lambda x: 2 * x)) for key in keys]

    assert doubled(1, 2, 1, 2, 1, 2) == [2, 4] * 3
    assert (replays.recorded, replays.replayed) == (2, 4)
    assert doubled(3, 2, 1, 1) == [6, 4, 2, 2]  # the third takes the place of the first
    assert (replays.recorded, replays.replayed) == (3, 6)


def test_a_thread_records_only_what_it_has_computed() -> None:
    """What libraries have for each thread (handles of cuBLAS) cannot be made in a recording."""
    recording, handles, found = [False], threading.local(), list[float]()

    def record(work: Callable[[], None]) -> Callable[[], None]:
        recording[0] = True
        work()
        recording[0] = False
        return work

    def work(x: Tensor) -> Tensor:
        assert hasattr(handles, "mine") or not recording[0]
        handles.mine = True
        return 2 * x

    replays = Replays(CPU, record)

    def run() -> None:
        found.append(float(replays.run("key", None, torch.tensor([len(found)]), work)))

    run()
    with ThreadPoolExecutor(1) as other:
        for _ in range(3):
            other.submit(run).result()
    run()
    assert found == [0, 2, 4, 6, 8]
    assert (replays.recorded, replays.replayed, replays.failed) == (1, 3, 0)


def test_a_new_thread_is_not_taken_for_one_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have the other's number, and has no handles of its own."""
    threads = SimpleNamespace(get_ident=lambda: 7, current_thread=threading.current_thread)
    monkeypatch.setattr(graphs, "threading", threads)
    replays, recorded = Replays(CPU, again), list[int]()

    def step() -> None:
        replays.run("key", None, torch.ones(2), lambda x: 2 * x)
        recorded.append(replays.recorded)

    for _ in range(3):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    assert recorded == [0, 0, 0]
    step()
    step()
    assert recorded == [0, 0, 0, 0, 1]


def test_what_cannot_be_recorded_is_computed_and_said_once() -> None:
    def refuse(work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted\n  when stream is capturing")

    replays, x = Replays(CPU, refuse), torch.ones(3)

    def step(key: str) -> Tensor:
        return replays.run(key, None, x, lambda x: x.add_(1))

    assert step("a").tolist() == [2] * 3
    assert x.tolist() == [1] * 3
    with pytest.warns(RuntimeWarning, match=r"RuntimeError: operation not .* QOFF_CUDA_GRAPHS=0"):
        assert step("a").tolist() == [2] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for key in ("a", "b", "b"):
            step(key)
    assert x.tolist() == [4] * 3
    assert (replays.recorded, replays.replayed, replays.failed) == (0, 0, 1)


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_in_a_capture(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that nobody closed would wait for the GPU there."""
    found = list[bool]()

    def work() -> None:
        found.append(gc.isenabled())
        if fails:
            raise RuntimeError("no")

    monkeypatch.setattr(torch, "cuda", MagicMock())
    monkeypatch.setattr(CudaRecorder, "_abandon", lambda *_: None)
    assert gc.isenabled()
    if fails:
        with pytest.raises(RuntimeError, match="no"):
            CudaRecorder(CPU)(work)
    else:
        CudaRecorder(CPU)(work)
    assert (found, gc.isenabled()) == ([False], True)


def test_copies_of_other_threads_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has a few streams of each priority, which it gives out again and again."""
    cuda, pools = MagicMock(), dict[int, Iterator[Any]]()

    def stream(device: torch.device, priority: int = 0) -> Any:
        return next(pools.setdefault(priority, cycle([MagicMock(), MagicMock()])))

    cuda.Stream = stream
    monkeypatch.setattr(torch, "cuda", cuda)
    copies = [CopyStream(CPU) for _ in range(2)]
    CudaRecorder(CPU)(lambda: None)
    (recorded,) = cuda.stream.call_args.args
    assert not any(recorded is one._stream for one in copies)


def test_nobody_waits_for_the_whole_gpu_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model may be closed meanwhile, in another thread."""
    cuda, order = MagicMock(), list[str]()
    cuda.synchronize = lambda _: order.append("waited")
    cuda.CUDAGraph.return_value.capture_end = lambda: order.append("recorded")
    monkeypatch.setattr(torch, "cuda", cuda)
    closing = threading.Thread(target=CopyStream(CPU).close)

    def work() -> None:
        closing.start()
        closing.join(0.2)  # it does not end before this

    CudaRecorder(CPU)(work)
    closing.join()
    assert order == ["recorded", "waited"]


class Generator:
    """The default one of a GPU, of which a failed capture has or has not left the state marked."""

    def __init__(self, marked: bool, offset: int = 0) -> None:
        self.state = {"marked": marked, "offset": offset}

    def draw(self, *_: Any, **__: Any) -> None:
        if self.state["marked"]:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        self.state["offset"] += 4

    def get_offset(self) -> int:
        return self.state["offset"]

    def set_offset(self, offset: int) -> None:
        self.state["offset"] = offset

    def clone_state(self) -> Generator:
        return Generator(False, self.state["offset"])

    def graphsafe_set_state(self, other: Generator) -> None:
        self.state = other.state


@pytest.mark.parametrize("marked", [True, False])
def test_after_a_failed_capture_numbers_can_be_drawn(
    marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = Generator(marked, offset=8)
    before = generator.state
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch, "rand", generator.draw)
    can_draw_again(torch.device("cuda", 0))
    assert (generator.state is before) == (not marked)
    assert generator.state == {"marked": False, "offset": 8}


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_gpu_usable() -> None:
    device = torch.device("cuda")
    replays = Replays(device)

    def work(x: Tensor) -> Tensor:
        y = x + 1
        return y * float(y.sum())  # waits for the GPU, which a capture may not

    found = []
    with pytest.warns(RuntimeWarning, match="CUDA graph"):
        found += [replays.run("key", None, torch.ones(2), work).tolist() for _ in range(3)]
    assert found == [[8.0, 8.0]] * 3
    assert torch.randn(1 << 20, device=device).isfinite().all()  # random numbers, fresh memory
    others = Replays(device)
    found = [others.run("key", None, torch.ones(2), lambda x: 2 * x).tolist() for _ in range(3)]
    assert found == [[2.0, 2.0]] * 3
    assert (others.recorded, others.replayed) == (1, 2)

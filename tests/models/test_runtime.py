"""Where weights are and how they travel changes no bit of the logits."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError, BudgetError, ChecksumError, DiskReadError, OpError
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.reference import ops as reference_ops
from qoff.kvcache import PlainCache
from qoff.memory import DiskReader, Residency, ThreadTransfers, residency_of
from qoff.memory.instrumentation import Instrumentation
from qoff.memory.plan import EMBEDDING, unit_files
from qoff.models.forward_pass import ForwardPass
from qoff.models.native.decoder import Decoder
from qoff.models.native.linear import Steps
from qoff.models.runtime import Runtime
from tests.instruments import POISON, KeptPages
from tests.memory.kinds import racing_transfers
from tests.tiny_models import budgets, take_turns, tiny_checkpoint

FAMILIES = ["llama", "llama-gqa-tied", "qwen3-tied"]
PACKINGS = ["rows16", "split32"]
PROMPTS = [torch.arange(5, 22), torch.tensor([99]), torch.arange(60, 40, -3)]
DECODED = torch.tensor([[11, 12, 13], [90, 91, 92], [7, 7, 7]]).T  # [steps, sequences]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoints(family: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.getbasetemp()
    return {packing: tiny_checkpoint(base, family, packing) for packing in PACKINGS}


@pytest.fixture(scope="module")
def resident_logits(checkpoints: dict[str, Path]) -> Tensor:
    with Runtime(checkpoints["rows16"]) as runtime:
        return logits_of(runtime)


@pytest.fixture
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama")


def next_batch(tokens: Sequence[Tensor], cache: PlainCache) -> ForwardPass:
    ragged = Ragged.of([len(t) for t in tokens], cache.lengths)
    return ForwardPass(torch.cat(list(tokens)), ragged, cache, torch.arange(ragged.tokens))


def logits_of(runtime: Runtime) -> Tensor:
    """Logits of a ragged prefill and of decode steps, one below the other."""
    cache = runtime.new_cache(len(PROMPTS))
    found = [runtime.forward(next_batch(PROMPTS, cache))]
    found += [runtime.forward(next_batch(list(row[:, None]), cache)) for row in DECODED]
    return torch.cat(found)


@contextmanager
def racing_runtime(
    path: Path, residency: Residency | None = None, memory: int | None = None, slots: int = 2
) -> Iterator[Runtime]:
    """A runtime with racing reads and poisoned slots, by a residency or else by a budget."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qoff.models.runtime.ThreadTransfers", racing_transfers)
        if residency is not None:
            patch.setattr("qoff.models.runtime.plan_residency", lambda *_, **__: residency)
        with Runtime(path, device_memory=memory, slots=slots, instrumentation=POISON) as runtime:
            yield runtime


def names_of(path: Path) -> list[str]:
    files = unit_files(Checkpoint.open(path)).values()
    return [name for file in files for name in file.weights]


@settings(max_examples=12)
@given(data=st.data(), slots=st.sampled_from([2, 3]), packing=st.sampled_from(PACKINGS))
def test_every_residency_gives_the_same_bits(
    data: st.DataObject,
    slots: int,
    packing: str,
    checkpoints: dict[str, Path],
    resident_logits: Tensor,
) -> None:
    path = checkpoints[packing]
    every = names_of(path)
    resident = data.draw(st.sets(st.sampled_from(every)) | st.sampled_from([set(), set(every)]))
    plan = residency_of(Checkpoint.open(path), resident, slots)
    with racing_runtime(path, plan) as runtime:
        assert torch.equal(logits_of(runtime), resident_logits)
        stats = runtime.stats()
    assert stats.arena_peak <= stats.arena_capacity == plan.device_bytes
    assert stats.slot_bytes == plan.slots * plan.slot_bytes


def test_a_closed_runtime_gives_its_weights_back(llama: Path) -> None:
    pages = KeptPages()
    runtime = Runtime(llama, instrumentation=Instrumentation(pages=pages))
    logits_of(runtime)
    assert isinstance(runtime.decoder, Decoder)
    assert runtime.decoder.replays is not None
    assert runtime.decoder.replays.recorded
    assert pages.nbytes
    runtime.close()
    assert not pages.nbytes
    runtime.close()


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("slots", [2, 3])
def test_every_budget_gives_the_same_bits(
    slots: int, packing: str, checkpoints: dict[str, Path], resident_logits: Tensor
) -> None:
    path = checkpoints[packing]
    least, everything = budgets(path, slots)
    assert least < everything
    done = []
    for memory in torch.linspace(least, everything, 6, dtype=torch.int64).tolist():
        with racing_runtime(path, memory=memory, slots=slots) as runtime:
            assert torch.equal(logits_of(runtime), resident_logits)
            done.append(runtime.stats())
        assert done[-1].arena_peak <= done[-1].arena_capacity <= memory
    assert done[0].arena_capacity == least
    assert done[0].slot_bytes > 0
    assert done[0].disk_bytes > done[-1].disk_bytes
    assert done[-1].slot_bytes == 0


def test_a_byte_less_than_the_least_budget_is_refused(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["rows16"]
    least, everything = budgets(path, 2)
    with pytest.raises(BudgetError, match=rf"take {everything:,} .*is {least - 1:,};.*{least:,}"):
        Runtime(path, device_memory=least - 1)


def test_generators_that_take_turns_give_what_each_gives_alone(llama: Path) -> None:
    """One pass of the layers serves four batches, each with its own cache."""
    prompts = [torch.arange(3 + i, 40, 2 + i) for i in range(4)]
    with Runtime(llama) as runtime:
        alone = [runtime.forward(next_batch([p], runtime.new_cache(1))) for p in prompts]
    with racing_runtime(llama, memory=budgets(llama)[0]) as runtime:
        passes: list[Steps] = [
            runtime.decoder.steps(next_batch([p], runtime.new_cache(1))) for p in prompts
        ]
        finished = take_turns(passes, runtime.store)
    for found, wanted in zip(finished, alone, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("fails_at", [0, 3, 6])
def test_an_exception_in_a_step_leaves_the_runtime_usable(
    fails_at: int, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with racing_runtime(llama, memory=budgets(llama)[0]) as runtime:
        wanted = logits_of(runtime)
        linear, calls = cpu.w4_linear, 0

        def failing(x: Tensor, weight: QTensor, **options: object) -> Tensor:
            nonlocal calls
            calls += 1
            if calls > fails_at:
                raise RuntimeError("injected")
            return linear(x, weight, **options)

        cache = runtime.new_cache(len(PROMPTS))
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "w4_linear", failing)
            with pytest.raises(RuntimeError, match="injected"):
                runtime.forward(next_batch(PROMPTS, cache))
        assert cache.lengths == [0] * len(PROMPTS)  # the pass may be repeated on the same cache
        assert torch.equal(runtime.forward(next_batch(PROMPTS, cache)), wanted[: len(wanted) - 9])
        assert torch.equal(logits_of(runtime), wanted)


def test_after_a_read_error_the_runtime_recovers(llama: Path) -> None:
    fault: list[OSError] = []

    def faulty(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if fault:
            raise fault[0]
        return os.preadv(fd, views, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "qoff.models.runtime.ThreadTransfers",
            lambda: ThreadTransfers(DiskReader(preadv=faulty)),
        )
        with Runtime(llama, device_memory=budgets(llama)[0]) as runtime:
            wanted = logits_of(runtime)
            fault.append(OSError(5, "Input/output error"))
            with pytest.raises(DiskReadError, match="Input/output error"):
                logits_of(runtime)
            fault.clear()
            for _ in range(2):  # what was being read ahead in the two slots failed as well
                with contextlib.suppress(DiskReadError):
                    logits_of(runtime)
            assert torch.equal(logits_of(runtime), wanted)


def test_a_flipped_byte_is_found_before_any_logits(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(llama, path)
    file = path / "model-layer-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 4
    file.write_bytes(content)
    with pytest.raises(ChecksumError, match=file.name):
        Runtime(path)
    with (
        Runtime(path, device_memory=budgets(path)[0]) as runtime,
        pytest.raises(ChecksumError, match=file.name),
    ):
        logits_of(runtime)


@pytest.mark.parametrize("streaming", [False, True])
def test_threads_that_share_a_runtime_take_turns(llama: Path, streaming: bool) -> None:
    memory = budgets(llama)[0] if streaming else None
    with racing_runtime(llama, memory=memory) as runtime:
        wanted = logits_of(runtime)
        found: list[Tensor] = []

        def run() -> None:
            found.extend(logits_of(runtime) for _ in range(2))

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert len(found) == 8
    assert all(torch.equal(logits, wanted) for logits in found)


def test_ids_outside_of_the_vocabulary_are_refused(llama: Path) -> None:
    for memory in (None, budgets(llama)[0]):
        with Runtime(llama, device_memory=memory) as runtime:
            cache = runtime.new_cache(1)
            for bad in (-1, runtime.spec.vocab_size):
                with pytest.raises(OpError, match="tokens are 0 to 127"):
                    runtime.forward(next_batch([torch.tensor([5, bad])], cache))


@given(moves=st.lists(st.sampled_from(["append", "reserve", "forget", "select"]), max_size=8))
def test_a_cache_keeps_what_was_said_through_every_move(
    moves: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """After any moves, the next logits are those of a fresh run over what is remembered."""
    llama = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama")
    random_moves = random.Random(len(moves))
    with Runtime(llama) as runtime:
        said = [[3, 4, 5], [60, 61]]
        cache = runtime.new_cache(2)
        runtime.forward(next_batch([torch.tensor(s) for s in said], cache))
        for move in moves:
            if move == "append":
                new = [[random_moves.randrange(128)] * random_moves.randint(1, 9) for _ in said]
                runtime.forward(next_batch([torch.tensor(n) for n in new], cache))
                said = [s + n for s, n in zip(said, new, strict=True)]
            elif move == "reserve":
                cache.reserve(cache.capacity + 1)
            elif move == "forget":
                cache.forget(1)
                said = [s[:-1] for s in said]
            else:
                chosen = random_moves.choices(range(len(said)), k=random_moves.randint(1, 3))
                cache.select(chosen)
                said = [said[i] for i in chosen]
            assert cache.lengths == [len(s) for s in said]
        last = [torch.tensor([9])] * len(said)
        found = runtime.forward(next_batch(last, cache))
        fresh = [
            runtime.forward(next_batch([torch.tensor([*s, 9])], runtime.new_cache(1)))[-1]
            for s in said
        ]
    torch.testing.assert_close(found, torch.stack(fresh), rtol=0, atol=1e-3)


def test_an_untied_embedding_is_gathered_from_disk(llama: Path) -> None:
    with Runtime(llama, device_memory=budgets(llama)[0]) as runtime:
        assert EMBEDDING not in runtime.residency.resident
        logits_of(runtime)
        before = runtime.stats().disk_bytes
        runtime.decoder._embed(torch.tensor([3]))
        assert 0 < runtime.stats().disk_bytes - before < 64 * 1024


class CountingOps:
    """The reference ops, which note how many bits activations were to have."""

    ACTIVATION_BITS = (8, 16)

    def __init__(self) -> None:
        self.linear: list[int] = []
        self.mixtures: list[int] = []
        self.attended: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(reference_ops, name)

    def attention(self, *operands: Any, activation_bits: int = 16, **options: Any) -> Tensor:
        self.attended.append(activation_bits)
        return reference_ops.attention(*operands, **options)

    def w4_linear(self, *operands: Any, activation_bits: int = 16, **options: Any) -> Tensor:
        self.linear.append(activation_bits)
        return reference_ops.w4_linear(*operands, **options)

    def experts(self, *operands: Any, activation_bits: int = 16, **options: Any) -> Tensor:
        self.mixtures.append(activation_bits)
        return reference_ops.experts(*operands, **options)


def test_activations_are_rounded_except_where_scores_decide(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """In QKV, attention, output and experts of both layers and in the head; not in the routers."""
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "mixtral", "split32")
    ops: Any = CountingOps()
    with Runtime(path, activation_bits=8, instrumentation=Instrumentation(ops=ops)) as runtime:
        runtime.forward(next_batch(PROMPTS, runtime.new_cache(len(PROMPTS))))
    assert ops.linear == [8, 8, 16, 8, 8, 16, 8]
    assert ops.mixtures == ops.attended == [8, 8]


@pytest.mark.parametrize(
    ("ops", "bits", "message"),
    [(cpu, 4, "8 or 16, not 4"), (reference_ops, 8, "no 8-bit activations on this device")],
)
def test_activation_bits_that_ops_do_not_have_are_refused(
    ops: Any, bits: int, message: str, llama: Path
) -> None:
    with pytest.raises(ArgumentError, match=message):
        Runtime(llama, activation_bits=bits, instrumentation=Instrumentation(ops=ops))


def test_a_runtime_of_inference_mode_streams_outside_of_it_on_its_device(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[torch.device] = []

    @contextmanager
    def device_guard(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    steps = Decoder.steps

    def watched(decoder: Decoder, run: ForwardPass) -> Steps:
        assert current == [torch.device("cpu")]
        return steps(decoder, run)

    monkeypatch.setattr("qoff.models.runtime.device_guard", device_guard)
    monkeypatch.setattr(Decoder, "steps", watched)
    with torch.inference_mode():
        runtime = Runtime(llama, device_memory=min(budgets(llama)))
        before = logits_of(runtime)
    with runtime:
        assert torch.equal(logits_of(runtime), before)
        assert runtime.stats().disk_bytes > runtime.residency.resident_bytes
    assert current == []

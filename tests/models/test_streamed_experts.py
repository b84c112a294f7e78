"""Experts that come one by one change no bit, and only those come that a token chose."""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from qoff.errors import ChecksumError
from qoff.kernels.cpu.jit.read_queue import ReadQueue
from qoff.kernels.layout.ragged import Ragged
from qoff.memory.experts import ExpertCache
from qoff.memory.experts.moves import ExpertMoves, Slots
from qoff.memory.experts.policy import Lfu, Lru, Policy
from qoff.memory.experts.queued_moves import QueuedMoves
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.memory.io.thread_transfers import ThreadTransfers
from qoff.memory.io.transfers import UnitRead
from qoff.memory.load import check_file
from qoff.memory.plan import ChosenExperts, Expert
from qoff.models.adapters import Adapters
from qoff.models.convert.convert import convert
from qoff.models.forward_pass import ForwardPass
from qoff.models.native.decoder import Decoder
from qoff.models.runtime import Runtime
from tests.adapters import save_adapter
from tests.instruments import POISON
from tests.models.test_runtime import logits_of
from tests.models.test_triton_decoder import KV8, greedy, interpreted, triton_ops
from tests.tiny_families import EXPERTS, KINDS_OF_EXPERTS
from tests.tiny_models import QUANT, budgets, save_model, tiny_checkpoint


def resident_logits(path: Path) -> Tensor:
    """Those of a model whose weights are all there, computed op by op, as where experts come."""
    with Runtime(path) as runtime:
        assert isinstance(runtime.decoder, Decoder)
        runtime.decoder.replays = None
        return logits_of(runtime)


@pytest.mark.parametrize(
    ("family", "packing", "bits"),
    [(family, "rows16", 4) for family in EXPERTS]
    + [(family, "split32", 4) for family in KINDS_OF_EXPERTS]
    + [("mixtral", "rows16", 3), ("mixtral", "split32", 3)],
)
def test_the_logits_do_not_depend_on_the_budget(
    base: Path, family: str, packing: str, bits: int
) -> None:
    path = tiny_checkpoint(base, family, packing, bits)
    expected = resident_logits(path)
    least, everything = budgets(path)
    slots = set()
    for part in (0, 0.5, 0.99):
        budget = least + int(part * (everything - least))
        with Runtime(path, device_memory=budget, instrumentation=POISON) as runtime:
            assert runtime.residency.device_bytes <= budget
            assert torch.equal(logits_of(runtime), expected)
            slots.add(runtime.residency.expert_slots)
    assert min(slots) == 1
    # Pages are as large as several experts here; those of the smallest leave room for one.
    assert max(slots) > 2 or (family, packing) == ("qwen2-moe", "rows16")


@pytest.mark.parametrize("policy", [Lru, Lfu])
def test_the_logits_do_not_depend_on_the_policy(
    base: Path, policy: type[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint(base, "qwen3-moe")
    expected, (least, everything) = resident_logits(path), budgets(path)
    monkeypatch.setattr("qoff.memory.experts.cache.NextUse", policy)
    with Runtime(path, device_memory=(least + everything) // 2) as runtime:
        assert runtime.store.experts
        assert type(runtime.store.experts.policy) is policy
        assert torch.equal(logits_of(runtime), expected)


@pytest.mark.parametrize("family", ["qwen2-moe", "gpt-oss"])
def test_experts_in_host_memory_come_from_there(
    base: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A guess that was wrong is counted when it is asked for, and copied whenever there is time.
    monkeypatch.setattr(ExpertCache, "_guesses", lambda cache, _: cache.now.guesses[:0])
    path = tiny_checkpoint(base, family)
    least, everything = budgets(path)
    expected = resident_logits(path)
    with Runtime(path, device_memory=least, host_memory=2 * everything) as runtime:
        loaded = runtime.store.stats.bytes_read
        assert torch.equal(logits_of(runtime), expected)
        after = runtime.store.stats
        assert after.bytes_read - loaded < after.experts.bytes <= after.bytes_copied


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
@pytest.mark.parametrize("part", [0.15, 0.5])
def test_experts_that_leave_the_device_stay_in_host_memory(
    base: Path, family: str, part: float
) -> None:
    path = tiny_checkpoint(base, family)
    least, everything = budgets(path)
    expected = resident_logits(path)
    read = []
    for host in (0, int(part * everything)):
        with Runtime(
            path, device_memory=(least + everything) // 2, host_memory=host, instrumentation=POISON
        ) as runtime:
            assert runtime.residency.host_bytes <= host
            assert torch.equal(logits_of(runtime), expected)
            assert torch.equal(logits_of(runtime), expected)
            stats, slots = runtime.store.stats, runtime.residency.host_expert_slots
            assert (stats.experts.from_host > 0) == (stats.experts.saved > 0) == (slots > 0)
            read.append(stats.bytes_read)
    assert slots > 0
    assert read[1] < read[0]


def test_what_is_read_is_what_the_router_chose(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExpertCache, "_guesses", lambda cache, _: cache.now.guesses[:0])
    path = tiny_checkpoint(base, "mixtral")
    least, everything = budgets(path)
    with Runtime(path, device_memory=(least + 3 * everything) // 4) as runtime:
        cache, residency = runtime.store.experts, runtime.residency
        assert cache is not None
        cache.record = []
        logits_of(runtime)
        done, routes = cache.stats, cache.record
    chosen = sum(len(numbers) for _, numbers in routes)
    assert done.hits + done.misses == chosen
    assert done.guessed == done.wrong == 0
    assert done.bytes == done.misses * residency.expert_bytes
    assert len({(layer, n) for layer, numbers in routes for n in numbers}) <= done.misses < chosen


def test_guesses_save_reads_and_wrong_ones_are_counted(base: Path) -> None:
    path = tiny_checkpoint(base, "mixtral")
    least, everything = budgets(path)
    with Runtime(path, device_memory=(least + 2 * everything) // 3) as runtime:
        logits_of(runtime)
        done = runtime.store.stats.experts
    assert done.guessed > done.wrong
    assert done.bytes == (done.misses + done.guessed) * runtime.residency.expert_bytes


def test_steps_are_recorded_up_to_the_experts(base: Path) -> None:
    path = tiny_checkpoint(base, "qwen2-moe")
    with Runtime(path) as runtime:
        expected = greedy(runtime, 6)
    with Runtime(path, device_memory=sum(budgets(path)) // 2) as runtime:
        assert greedy(runtime, 6) == expected
        assert runtime.store.experts is not None
        assert isinstance(runtime.decoder, Decoder)
        assert runtime.decoder.replays is not None
        assert runtime.decoder.replays.replayed >= runtime.spec.num_layers


def test_adapters_of_a_shared_expert_add_to_every_step(base: Path, tmp_path: Path) -> None:
    path = tiny_checkpoint(base, "qwen2-moe")
    save_adapter(path, tmp_path, target_modules=r".*shared_expert\.\w+_proj")
    found = []
    for budget, adapted in ((None, True), (sum(budgets(path)) // 2, True), (None, False)):
        with Runtime(path, device_memory=budget) as runtime:
            adapters = Adapters({"a": tmp_path}, runtime.spec)
            adapters.load(frozenset(adapters.layers.places), torch.device("cpu"), False)
            cache, logits = runtime.new_cache(1), list[Tensor]()
            for token in range(5):
                ragged = Ragged.of([1], cache.lengths)
                run = ForwardPass(torch.tensor([token]), ragged, cache, ragged.last_rows)
                run.adapters = adapters.rows([adapters.number("a")]) if adapted else None
                logits.append(runtime.forward(run).clone())
            found.append(torch.cat(logits))
    assert torch.equal(found[0], found[1])
    assert (found[0] - found[2]).abs().amax(1).min() > 0


@pytest.mark.parametrize("notes", [PLAIN, POISON], ids=["plain", "poisoned"])
def test_what_the_queue_does_not_read_is_read_again(
    base: Path, notes: Instrumentation, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint(base, "mixtral")
    expected = resident_logits(path)
    asked = Mock(return_value=None)
    monkeypatch.setattr(ReadQueue, "ask", asked)
    with Runtime(path, device_memory=sum(budgets(path)) // 2, instrumentation=notes) as runtime:
        assert torch.equal(logits_of(runtime), expected)
        done = runtime.store.stats.experts
    assert asked.call_count
    assert done.bytes == (done.misses + done.guessed) * runtime.residency.expert_bytes


def test_wrong_guesses_that_wait_are_not_read(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_checkpoint(base, "mixtral")
    least, everything = budgets(path)
    with Runtime(path, device_memory=(least + 3 * everything) // 4) as runtime:
        cache = runtime.store.experts
        assert cache is not None
        monkeypatch.setattr(QueuedMoves, "waits", lambda _, slots: np.ones(len(slots), dtype=bool))
        for layer, guessed in ((0, (2, 3)), (1, (1,))):
            guesses = tuple(Expert(1 - layer, number) for number in guessed)
            cache.release(cache.acquire(ChosenExperts(layer, (0,), guesses)))
        done, there = cache.stats, np.flatnonzero(cache.now.slots >= 0).tolist()
        count = cache.counts[0]
    assert there == [0, 1, count]  # of the layer that was guessed last, and what was asked for
    assert (done.misses, done.guessed, done.wrong) == (2, 1, 0)
    assert done.bytes == 3 * runtime.residency.expert_bytes


def test_a_single_layer_of_experts_is_not_guessed(base: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "model", "mixtral", num_hidden_layers=1)
    path = convert(tmp_path / "model", tmp_path / "checkpoint", quant=QUANT, for_cpu=True)
    expected = resident_logits(path)
    with Runtime(path, device_memory=sum(budgets(path)) // 2) as runtime:
        assert torch.equal(logits_of(runtime), expected)
        done = runtime.store.stats.experts
    assert done.misses > 0 == done.guessed


@interpreted
def test_on_the_ops_of_a_gpu(tmp_path: Path) -> None:
    save_model(
        tmp_path / "model",
        "gpt-oss",
        head_dim=64,
        num_attention_heads=4,
        num_key_value_heads=1,
        num_hidden_layers=1,
        vocab_size=32,
        intermediate_size=32,
    )
    convert(tmp_path / "model", tmp_path / "checkpoint", quant=QUANT)
    path, hooks = tmp_path / "checkpoint", Instrumentation(poison=True, ops=triton_ops)
    with Runtime(path, kv=KV8, instrumentation=hooks) as runtime:
        expected = greedy(runtime, 2)
        everything = runtime.residency.device_bytes
    with Runtime(path, kv=KV8, device_memory=everything - 4096, instrumentation=hooks) as runtime:
        assert 0 < runtime.residency.expert_slots < 4
        assert greedy(runtime, 2) == expected


@pytest.mark.parametrize(
    ("moves", "owner", "call"),
    [
        (ExpertMoves, UnitRead, "settle"),
        (ExpertMoves, ThreadTransfers, "read_unit"),
        (QueuedMoves, ReadQueue, "ask"),
        (QueuedMoves, ReadQueue, "done"),
    ],
)
def test_a_request_that_ended_early_keeps_no_slot(
    base: Path, moves: type, owner: type, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint(base, "mixtral")
    least, everything = budgets(path)
    expected = resident_logits(path)
    watched = Instrumentation(expert_moves=moves)
    budget = least + (everything - least) // 2
    with Runtime(path, device_memory=budget, instrumentation=watched) as runtime:
        cache = runtime.store.experts
        assert cache is not None
        assert 1 < len(cache.now.free) <= 4
        for request in range(2 * len(cache.now.free)):
            chosen = ChosenExperts(request % len(cache.counts), (0, 1, 2, 3))
            with monkeypatch.context() as patch:
                patch.setattr(owner, call, Mock(side_effect=[KeyboardInterrupt]))
                with pytest.raises(KeyboardInterrupt):
                    cache.acquire(chosen)
        assert torch.equal(logits_of(runtime), expected)


class WaitedFor(ExpertMoves):
    """Experts that have come when somebody has waited for them, and no sooner."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.coming, self.given_up, self.reused = set[int](), list[int](), set[int]()

    def start(self, slots: Slots, keys: Slots, hosts: Slots, urgent: int) -> None:
        self.coming |= set(slots.tolist())
        super().start(slots, keys, hosts, urgent)

    def done(self, slots: Slots) -> NDArray[np.bool_]:
        return ~np.isin(slots, list(self.coming))

    def settle(self, slots: Slots) -> None:
        super().settle(slots)
        self.coming -= set(slots.tolist())

    def finish(self, slots: Slots) -> None:
        super().finish(slots)
        self.coming -= set(slots.tolist())

    def abandon(self, slot: int) -> None:
        self.given_up.append(slot)
        super().abandon(slot)

    def recycle(self, slots: Slots) -> None:
        self.reused |= self.coming & set(slots.tolist())
        super().recycle(slots)


def test_a_slot_whose_read_is_given_up_is_free_when_the_read_has_ended(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint(base, "mixtral")
    watched = Instrumentation(expert_moves=WaitedFor)
    with Runtime(path, device_memory=sum(budgets(path)) // 2, instrumentation=watched) as runtime:
        cache = runtime.store.experts
        assert cache is not None
        moves, every = cache.moves, (0, 1, 2, 3)
        assert isinstance(moves, WaitedFor)
        assert len(cache.now.free) <= len(every)
        with monkeypatch.context() as patch:
            patch.setattr(WaitedFor, "settle", Mock(side_effect=[KeyboardInterrupt]))
            with pytest.raises(KeyboardInterrupt):
                cache.acquire(ChosenExperts(0, every))
        wave = cache.acquire(ChosenExperts(1, every))  # all slots are read into, for nobody
        assert wave.numbers
        assert moves.given_up
        assert not moves.reused


def test_saves_and_copies_that_ended_early_leave_no_stale_expert(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint(base, "mixtral")
    least, everything = budgets(path)
    expected = resident_logits(path)
    device = (least + everything) // 2
    save, numbers, kept, ended = ExpertMoves.save, count(), dict[int, int](), 0
    copy, copies, random = ThreadTransfers.copy_unit, count(), Random(0)
    wait, waits = UnitRead.wait, count(1)
    with Runtime(path, device_memory=device, host_memory=everything // 4) as runtime:
        cache = runtime.store.experts
        assert cache is not None

        def interrupted(moves: ExpertMoves, slot: int, host: int) -> None:
            if next(numbers) % 2:
                raise KeyboardInterrupt
            save(moves, slot, host)
            kept[host] = int(cache.now.keys[slot])

        def copied(*args: Any) -> UnitRead:
            if next(copies) % 2 == 0:
                raise KeyboardInterrupt
            return copy(*args)

        def waited(read: UnitRead) -> None:
            if next(waits) % 3 == 1:
                raise KeyboardInterrupt
            wait(read)

        monkeypatch.setattr(ExpertMoves, "save", interrupted)
        monkeypatch.setattr(UnitRead, "wait", waited)
        monkeypatch.setattr(ThreadTransfers, "copy_unit", copied)
        for request in range(48):
            two = tuple(sorted(random.sample(range(4), 2)))
            chosen = ChosenExperts(request % len(cache.counts), two)
            try:
                cache.release(cache.acquire(chosen))
            except KeyboardInterrupt:
                ended += 1
            keys = cache._host._keys
            there = np.flatnonzero(keys >= 0)
            assert {int(host): int(keys[host]) for host in there}.items() <= kept.items()
            moving = int((cache.now.hosts >= 0).sum())
            total = len(there) + moving + len(cache._host._free)
            assert total == runtime.residency.host_expert_slots
        assert ended
        assert next(copies) > 2 < next(waits)
        monkeypatch.setattr(ExpertMoves, "save", save)
        monkeypatch.setattr(UnitRead, "wait", wait)
        monkeypatch.setattr(ThreadTransfers, "copy_unit", copy)
        assert torch.equal(logits_of(runtime), expected)


def test_files_of_experts_are_compared_once_and_again_when_they_change(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(tiny_checkpoint(base, "mixtral"), path)
    check = Mock(side_effect=check_file)
    monkeypatch.setattr("qoff.memory.load.check_file", check)
    with Runtime(path, device_memory=budgets(path)[0]) as runtime:
        expected = logits_of(runtime)
        file = runtime.checkpoint.layers[1]
        entry: Any = file.weights["model.layers.1.mlp.experts.2.down_proj"]
    compared = check.call_count
    assert compared >= len(runtime.checkpoint.layers)
    with Runtime(path, device_memory=budgets(path)[0]) as runtime:  # as another process would
        assert torch.equal(logits_of(runtime), expected)
    assert check.call_count == compared
    damaged = bytearray(file.path.read_bytes())
    damaged[entry.codes.offset] ^= 1
    file.path.write_bytes(damaged)
    with (
        Runtime(path, device_memory=budgets(path)[0]) as runtime,
        pytest.raises(ChecksumError, match="layer"),
    ):
        logits_of(runtime)

"""Passes whose experts come by jobs: they compute and count what passes do that Python leads."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from qoff.errors import ChecksumError, DiskReadError
from qoff.kernels.layout.ragged import Ragged
from qoff.memory.experts import ExpertCache, ExpertStats
from qoff.memory.experts.jobs import ExpertJobs
from qoff.memory.experts.queued_moves import QueuedMoves
from qoff.memory.experts.trial import GuessTrial
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.models.convert.convert import convert
from qoff.models.forward_pass import ForwardPass
from qoff.models.native.decoder import Decoder
from qoff.models.runtime import Runtime
from tests.instruments import POISON
from tests.tiny_models import QUANT, budgets, save_model

TOKENS = 12
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 256, "num_local_experts": 8},
    "gpt-oss": {"intermediate_size": 512},  # biases of experts
    "qwen2-moe": {"moe_intermediate_size": 256},  # a shared one, and a layer without any
    "step-3.5": {"moe_intermediate_size": 512},  # limits of gate and up by layer
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Mixtures whose experts are whole blocks of their files, by family."""
    found = {}
    for family, changes in FAMILIES.items():
        folder = tmp_path_factory.mktemp(family)
        save_model(folder / "model", family, hidden_size=128, **changes)
        convert(folder / "model", folder / "checkpoint", quant=QUANT, for_cpu=True)
        found[family] = folder / "checkpoint"
    return found


@pytest.fixture(scope="module")
def expected(paths: dict[str, Path]) -> dict[str, list[int]]:
    """The tokens when all weights are there."""
    found = {}
    for family, path in paths.items():
        with Runtime(path) as runtime:
            found[family] = tokens(runtime)
    return found


def tokens(runtime: Runtime, sequences: int = 1) -> list[int]:
    """Those of greedy steps behind a prompt, of all sequences."""
    cache, found = runtime.new_cache(sequences), list[int]()
    fresh = torch.arange(3, 3 + 9 * sequences)
    for _ in range(TOKENS):
        ragged = Ragged.of([len(fresh) // sequences] * sequences, cache.lengths)
        logits = runtime.forward(ForwardPass(fresh, ragged, cache, ragged.last_rows))
        fresh = logits.argmax(-1)
        found += fresh.tolist()
    return found


def opened(path: Path, part: float, hooks: Instrumentation = PLAIN) -> Runtime:
    """A model with the least memory and a part of what would take all of it."""
    least, everything = budgets(path)
    budget = least + int(part * (everything - least))
    return Runtime(path, device_memory=budget, instrumentation=hooks)


def replayed(runtime: Runtime) -> int:
    """How many passes, or else layers, were recordings that had been made before."""
    assert isinstance(runtime.decoder, Decoder)
    assert runtime.decoder.replays is not None
    assert runtime.decoder.replays.recorded <= 2  # else of layers
    return runtime.decoder.replays.replayed


@pytest.mark.parametrize("hooks", [PLAIN, POISON], ids=["plain", "poisoned"])
@pytest.mark.parametrize(
    ("family", "part"),
    [("mixtral", 0.2), ("mixtral", 0.6), ("gpt-oss", 0.6), ("qwen2-moe", 0.6), ("step-3.5", 0.6)],
)
def test_a_pass_is_one_recording_with_the_same_tokens(
    paths: dict[str, Path],
    expected: dict[str, list[int]],
    family: str,
    part: float,
    hooks: Instrumentation,
) -> None:
    with opened(paths[family], part, hooks) as runtime:
        assert tokens(runtime) == expected[family]
        assert replayed(runtime) >= TOKENS - 3
        assert tokens(runtime) == expected[family]
        assert runtime.store.stats.experts.misses


def test_several_sequences_are_recorded_while_their_experts_are_few(paths: dict[str, Path]) -> None:
    path = paths["mixtral"]
    with Runtime(path) as runtime:
        both, many = tokens(runtime, 2), tokens(runtime, 9)
    with opened(path, 0.6) as runtime:
        assert tokens(runtime, 2) == both
        assert replayed(runtime)
        assert tokens(runtime, 9) == many


def test_jobs_count_and_evict_as_the_cache_does(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def followed() -> tuple[ExpertStats, list[Any], list[int], float]:
        with opened(paths["mixtral"], 0.6) as runtime:
            cache = runtime.store.experts
            assert cache is not None
            cache.now.accuracy = -1e3  # what is read ahead depends on how fast the disk is
            cache.record = []
            tokens(runtime)
            there = np.flatnonzero(cache.now.slots >= 0).tolist()
            return cache.stats, cache.record, there, cache.now.accuracy

    by_jobs = followed()
    monkeypatch.setattr(ExpertJobs, "can_serve", lambda *_: False)
    assert followed() == by_jobs
    assert by_jobs[0].misses > 0 < by_jobs[0].guesses


def test_guesses_are_read_ahead(paths: dict[str, Path], expected: dict[str, list[int]]) -> None:
    with opened(paths["mixtral"], 0.6) as runtime:
        tokens(runtime)
        before = runtime.store.stats.experts
        assert tokens(runtime) == expected["mixtral"]
        after, size = runtime.store.stats.experts, runtime.residency.expert_bytes
    assert after.guessed > before.guessed
    assert after.bytes == (after.misses + after.guessed) * size


def test_the_cache_reads_what_jobs_cannot(
    paths: dict[str, Path], expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = QueuedMoves.arrays
    monkeypatch.setattr(
        QueuedMoves, "arrays", lambda moves: arrays(moves) | {"files": np.full(2, -1)}
    )
    asked = Mock(side_effect=ExpertJobs._ask_cache, autospec=True)
    monkeypatch.setattr(ExpertJobs, "_ask_cache", lambda *args: asked(*args))
    with opened(paths["mixtral"], 0.6) as runtime:
        assert tokens(runtime) == expected["mixtral"]
    assert asked.call_count


def test_the_cache_is_told_of_each_pass_once(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven sequences want nearly all experts of the last layer, which jobs leave to the cache."""
    asked, begun = Mock(), Mock()
    ask, begin = ExpertJobs._ask_cache, GuessTrial.begin
    monkeypatch.setattr(ExpertJobs, "_ask_cache", lambda *args: (asked(), ask(*args))[1])
    monkeypatch.setattr(GuessTrial, "begin", lambda *args: (begun(), begin(*args))[1])
    with opened(paths["mixtral"], 0.95) as runtime:
        cache, fresh = runtime.new_cache(7), torch.arange(3, 10)
        for passes in range(1, 6):
            ragged = Ragged.of([1] * 7, cache.lengths)
            fresh = runtime.forward(ForwardPass(fresh, ragged, cache, ragged.last_rows)).argmax(-1)
            assert begun.call_count == passes
    assert asked.call_count


def test_where_the_cache_fails_it_knows_of_every_slot(
    paths: dict[str, Path], expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(moves: QueuedMoves) -> bool:
        moves._counts[:] = -1
        return True

    with opened(paths["mixtral"], 0.6) as runtime:
        cache = runtime.store.experts
        assert cache is not None
        monkeypatch.setattr(cache.trial, "_note", Mock())  # guesses are always read
        tokens(runtime)
        with monkeypatch.context() as patch:
            patch.setattr(QueuedMoves, "all_queued", unknown)
            patch.setattr(ExpertJobs, "_ask_cache", failing(patch))
            with pytest.raises(DiskReadError, match="gone"):
                tokens(runtime)
        assert sorted(cache.now.free) == np.flatnonzero(cache.now.keys < 0).tolist()
        fixed = set(np.flatnonzero(cache.now.fixed).tolist())
        assert fixed
        assert fixed <= set(cache.now.reading.tolist())
        assert tokens(runtime) == expected["mixtral"]


def failing(patch: pytest.MonkeyPatch) -> Any:
    """Have the cache fail behind the start of its reads, when jobs ask it."""
    ask = ExpertJobs._ask_cache

    def asked(jobs: ExpertJobs, request: Any) -> None:
        jobs._bring_back()
        jobs._moves.settle(jobs._cache.now.reading)
        jobs._cache._unfix()  # else what is read now may be listed as read before
        jobs._bring()
        patch.setattr(ExpertCache, "_arrived", Mock(side_effect=DiskReadError("gone")))
        ask(jobs, request)

    return asked


def test_a_pass_that_ended_early_holds_nothing(
    paths: dict[str, Path], expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(paths["mixtral"], 0.6) as runtime:
        tokens(runtime)
        cache = runtime.store.experts
        assert cache is not None
        assert isinstance(runtime.decoder, Decoder)
        assert runtime.decoder.replays is not None
        for call in range(8):
            runtime.decoder.replays._entries.clear()  # Python is between the jobs that are recorded
            with monkeypatch.context() as patch:
                patch.setattr(ExpertJobs, "ended", interrupted_after(call))
                with pytest.raises(KeyboardInterrupt):
                    tokens(runtime)
            still = np.flatnonzero(cache.now.fixed).tolist()
            assert set(still) <= set(cache.now.reading.tolist())
        assert tokens(runtime) == expected["mixtral"]


def interrupted_after(calls: int) -> Any:
    """What ends jobs, the first so many times."""
    ended, numbers = ExpertJobs.ended, count()

    def ended_or_interrupted(jobs: ExpertJobs) -> int | None:
        if next(numbers) == calls:
            raise KeyboardInterrupt
        return ended(jobs)

    return ended_or_interrupted


def test_a_file_that_changes_ends_the_pass(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "mixtral", hidden_size=128, **FAMILIES["mixtral"])
    path = convert(tmp_path / "model", tmp_path / "checkpoint", quant=QUANT, for_cpu=True)
    with opened(path, 0.2) as runtime:
        tokens(runtime)
        assert replayed(runtime)
        file = runtime.checkpoint.layers[1]
        entry: Any = file.weights["model.layers.1.mlp.experts.2.down_proj"]
        with file.path.open("r+b") as damaged:
            damaged.seek(entry.codes.offset)
            byte = damaged.read(1)
            damaged.seek(entry.codes.offset)
            damaged.write(bytes([byte[0] ^ 1]))
        with pytest.raises(ChecksumError, match="layer"):
            tokens(runtime)

"""Steps of decoding on a CPU that are recorded and replayed give the same bits as steps that are
not, whatever changes from step to step.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.cpu.jit.recorder import JobRecorder
from qoff.kernels.layout.ragged import Ragged, Span
from qoff.kvcache import KVCache, KVQuant
from qoff.models.forward_pass import ForwardPass
from qoff.models.native.graphs import Replays
from tests.tiny_families import FAMILIES
from tests.tiny_models import PlainRun, tiny_checkpoint

CPU = torch.device("cpu")
SLOTS, WINDOW = 3, 16
PROMPTS = (70, 5, 76)  # a block is complete at 80
STEPS = [(0, 1, 2)] * 12 + [(0, 2), (2,), (1, 2), (0, 1, 2), (0, 1, 2)]
CACHES: dict[str, Callable[[PlainRun], KVCache]] = {
    "float": lambda run: run.decoder.new_cache(SLOTS),
    "packed": lambda run: run.decoder.new_cache(SLOTS, kv=KVQuant(4, 4, window=WINDOW)),
    "both": lambda run: run.decoder.new_cache(
        SLOTS, kv=KVQuant(4, 4, window=WINDOW, layers={0: (16, 16)})
    ),
    "sparse": lambda run: run.decoder.new_cache(
        SLOTS, kv=KVQuant(4, 4, window=WINDOW, attention_top=0.5)
    ),
}


class Run:
    """A model and its cache, which are told the same tokens in every run."""

    def __init__(
        self,
        path: Path,
        cache: str,
        replays: Replays | None,
        resident: bool,
        prompts: Sequence[int] = PROMPTS,
    ) -> None:
        self.run = PlainRun(path, cpu, replays=replays)
        self.run.decoder.resident = resident
        self.cache: Any = CACHES[cache](self.run)
        self.random = torch.Generator().manual_seed(0)
        self.pass_over(range(SLOTS), prompts)

    def next_pass(self, slots: Sequence[int], counts: Sequence[int]) -> ForwardPass:
        spans, row = [], 0
        for slot, count in zip(slots, counts, strict=True):
            spans.append(Span(slot, row, count, self.cache.lengths[slot]))
            row += count
        ragged = Ragged(tuple(spans))
        tokens = torch.randint(3, 96, (row,), generator=self.random)
        return ForwardPass(tokens, ragged, self.cache, ragged.last_rows)

    def pass_over(self, slots: Sequence[int], counts: Sequence[int]) -> Tensor:
        return self.run.forward(self.next_pass(slots, counts))

    def steps(self) -> list[Tensor]:
        return [self.pass_over(slots, [1] * len(slots)) for slots in STEPS]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("resident", [True, False], ids=["whole", "by layer"])
def test_replayed_steps_give_the_same_bits(cache: str, resident: bool, checkpoint: Path) -> None:
    """Steps of fewer sequences, that pack blocks, behind a prompt, of a cache that has grown."""
    replays = Replays(CPU, while_done=JobRecorder())
    expected, found = (Run(checkpoint, cache, replays, resident) for replays in (None, replays))
    for _ in range(2):
        for wanted, logits in zip(expected.steps(), found.steps(), strict=True):
            assert torch.equal(logits, wanted)
        prompts = [run.pass_over((1,), (90,)) for run in (expected, found)]
        assert torch.equal(*prompts)
    assert replays.replayed >= len(STEPS)


@pytest.mark.parametrize("cache", ["float", "packed"])
def test_a_prompt_is_few_lists_of_jobs(
    cache: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch computes once in the first layer, and takes the rows whose logits are wanted."""
    run = Run(checkpoint, cache, Replays(CPU, while_done=JobRecorder()), True)
    pool, lists = cpu.default_pool(), list[int]()  # jobs of each, when it is waited for
    wait = pool.catch_up

    def catch_up() -> None:
        lists.extend([len(pool._ahead)] if pool._ahead else [])
        wait()

    monkeypatch.setattr(pool, "catch_up", catch_up)
    for _ in range(2):  # the second time there are tokens that are not packed
        lists.clear()
        run.pass_over((1,), (90,))
        assert len(lists) <= 4 < 5 * run.run.decoder.spec.num_layers <= sum(lists)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_replayed(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """So torch computes nothing between the embedding and the logits."""
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), family, "split32")
    replays = Replays(CPU, while_done=JobRecorder())
    runs = [Run(path, "float", one, True, (7, 5, 9)) for one in (None, replays)]
    for slots in [(0, 1, 2)] * 3:
        assert torch.equal(*(run.pass_over(slots, [1] * len(slots)) for run in runs))
    assert (replays.recorded, replays.replayed) == (1, 2)


@pytest.mark.parametrize("cache", CACHES)
def test_steps_that_follow_give_the_same_bits(cache: str, checkpoint: Path) -> None:
    """Past blocks that are completed, and a table of rotations that grows."""
    expected, found = (
        Run(checkpoint, cache, Replays(CPU, while_done=JobRecorder()), True) for _ in range(2)
    )
    followed = 0
    for _ in range(200):
        wanted = expected.pass_over((0, 1, 2), (1, 1, 1))
        step = found.next_pass((0, 1, 2), (1, 1, 1))
        logits = found.run.decoder.follow(step)
        followed += logits is not None
        assert torch.equal(found.run.forward(step) if logits is None else logits, wanted)
        assert found.cache.lengths == expected.cache.lengths
    assert followed > 150


CHANGES: dict[str, Callable[[Run], object]] = {
    "another pass": lambda run: run.pass_over((0, 1), (1, 1)),
    "some chosen": lambda run: run.cache.select([1, 0, 2]),
    "room is made": lambda run: run.cache.reserve(4096),
    "some forgotten": lambda run: run.cache.forget(1),
    "one begins anew": lambda run: run.cache.reset(1),
    "one is forked": lambda run: (run.cache.reset(1), run.cache.fork(0, 1)),
    "fewer go on": lambda run: run.pass_over((0, 2), (1, 1)),
    "a piece of a prompt": lambda run: run.run.forward(
        replace(run.next_pass((0,), (9,)), cache=run.cache.subset([1]))
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("cache", ["float", "packed"])
def test_no_step_follows_where_something_else_happened(
    cache: str, change: str, checkpoint: Path
) -> None:
    run = Run(checkpoint, cache, Replays(CPU, while_done=JobRecorder()), True)
    if not hasattr(run.cache, "reset") and change in tuple(CHANGES)[4:]:
        pytest.skip("sequences of this cache have no slots")
    run.pass_over((0, 1, 2), (1, 1, 1))
    assert run.run.decoder.follow(run.next_pass((0, 1, 2), (1, 1, 1))) is not None
    CHANGES[change](run)
    lengths = list(run.cache.lengths)
    assert run.run.decoder.follow(run.next_pass((0, 1, 2), (1, 1, 1))) is None
    assert run.cache.lengths == lengths


@pytest.mark.parametrize("cache", CACHES)
def test_a_copied_cache_has_no_part_of_the_recording(cache: str, checkpoint: Path) -> None:
    run = Run(checkpoint, cache, Replays(CPU, while_done=JobRecorder()), True)
    for _ in range(2):
        run.pass_over((0, 1, 2), (1, 1, 1))
    copies = copy.deepcopy(run.cache), pickle.loads(pickle.dumps(run.cache))
    step = run.next_pass((0, 1, 2), (1, 1, 1))
    assert run.run.decoder.follow(replace(step, cache=copies[0])) is None
    wanted = run.run.forward(step).clone()
    for one in copies:
        assert torch.equal(run.run.forward(replace(step, cache=one)), wanted)


def test_tokens_there_are_not_are_refused_before_a_replay(checkpoint: Path) -> None:
    run = Run(checkpoint, "packed", Replays(CPU, while_done=JobRecorder()), True)
    run.pass_over((0, 1, 2), (1, 1, 1))
    vocab = run.run.decoder.spec.vocab_size
    step = run.next_pass((0, 1, 2), (1, 1, 1))
    step.tokens[2] = vocab
    with pytest.raises(OpError, match=f"tokens are 0 to {vocab - 1}, not .* to {vocab}"):
        run.run.decoder.follow(step)
    step.tokens[2] = 0
    assert run.run.decoder.follow(step) is not None


def test_passes_of_batches_that_take_turns_layer_by_layer(checkpoint: Path) -> None:
    """Each has a cache of its own; recordings of one may not see the other's positions."""
    found = []
    for replays in (None, Replays(CPU, while_done=JobRecorder())):
        runs = [Run(checkpoint, "packed", replays, resident=False) for _ in range(2)]
        runs[1].run = runs[0].run
        runs[1].pass_over((0, 1, 2), (3, 40, 9))
        logits = []
        for _ in range(6):
            passes = [run.next_pass((0, 1, 2), (1, 1, 1)) for run in runs]
            decoder, units = runs[0].run.decoder, runs[0].run._units
            steps = [decoder.steps(one) for one in passes]
            unit = max(next(one) for one in steps)
            done: list[Tensor] = []
            while len(done) < len(steps):
                for one in steps:
                    try:
                        following = one.send(units[unit])
                    except StopIteration as finished:
                        done.append(finished.value)
                unit = following
            logits += done
        found.append(torch.cat(logits))
        if replays is not None:
            assert replays.replayed
    assert torch.equal(*found)


def test_batches_that_grow_leave_no_memory_behind(checkpoint: Path) -> None:
    """Logits of more sequences take the place of those of fewer, whose recordings are dropped."""
    recorder = JobRecorder()
    replays = Replays(CPU, while_done=recorder)
    run = Run(checkpoint, "float", replays, resident=True)
    for slots in [(0,), (0, 1), (0, 1, 2)] * 2:
        run.pass_over(slots, [1] * len(slots))
    logits = 4 * SLOTS * run.run.decoder.spec.vocab_size
    assert replays.recorded > 3  # those of one and two sequences were dropped, and made again
    assert recorder.nbytes < 2 * logits
    alive = sum(entry.result.untyped_storage().nbytes() for entry in replays._entries.values())
    assert alive <= len(replays._entries) * logits

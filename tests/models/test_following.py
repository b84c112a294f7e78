"""Several steps together give the tokens that one after another does."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from qoff.errors import ArgumentError, OpError
from qoff.kernels.cpu.jit.recorder import JobRecorder
from qoff.kernels.layout.distribution import Choice, Shape
from qoff.kernels.sampling import likeliest, multinomial
from qoff.models.native import following
from qoff.models.native.graphs import Replays
from tests.models.test_recorded_steps import CACHES, CPU, SLOTS, Run
from tests.tiny_models import tiny_checkpoint

STEPS = 100  # past blocks that are completed
HOT = Shape(temperature=2.0, top_k=40, top_p=0.95, min_p=0.01)


def opened(checkpoint: Path, cache: str = "packed") -> Run:
    return Run(checkpoint, cache, Replays(CPU, while_done=JobRecorder()), True)


def one_by_one(run: Run, shape: Shape | None, count: int) -> list[list[int]]:
    tokens, found = torch.tensor([1, 2, 3]), []
    for _ in range(count):
        step = run.next_pass(range(SLOTS), [1] * SLOTS)
        step.tokens = tokens
        logits = run.run.forward(step)
        found.append(likeliest(logits) if shape is None else multinomial(logits.unbind(), shape))
        tokens = torch.tensor(found[-1])
    return found


def together(run: Run, choice: Choice, count: int, most: int) -> tuple[list[list[int]], list[int]]:
    """The tokens, and how many came at once; by logits where steps cannot be done together."""
    tokens, found, at_once = torch.tensor([1, 2, 3]), list[list[int]](), []
    while len(found) < count:
        step = run.next_pass(range(SLOTS), [1] * SLOTS)
        step.tokens = tokens
        more = run.run.decoder.follow_with_tokens(step, choice, min(most, count - len(found)))
        at_once.append(len(more))
        if not more:
            logits, shapes = run.run.forward(step), choice.shapes
            one = likeliest(logits) if not shapes else multinomial(logits.unbind(), shapes[0])
            more = [one]
        found += more
        tokens = torch.tensor(found[-1])
        assert run.cache.lengths[1] == 5 + len(found)
    return found, at_once


@pytest.mark.parametrize("shape", [None, HOT], ids=["likeliest", "drawn"])
@pytest.mark.parametrize("cache", CACHES)
def test_tokens_do_not_depend_on_how_many_steps_are_done_at_once(
    cache: str, shape: Shape | None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "HEARD_S", 1e9)
    choice = Choice(None if shape is None else [shape] * SLOTS)
    torch.manual_seed(0)
    wanted = one_by_one(opened(checkpoint, cache), shape, STEPS)
    state = torch.get_rng_state()
    for most in (1, 3, 8):
        torch.manual_seed(0)
        found, at_once = together(opened(checkpoint, cache), choice, STEPS, most)
        assert found == wanted
        assert max(at_once) == most
        assert torch.equal(torch.get_rng_state(), state)


def test_steps_end_with_a_token_that_ends_an_answer(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "HEARD_S", 1e9)
    wanted = one_by_one(opened(checkpoint), None, 30)
    end = wanted[9][1]
    found, at_once = together(opened(checkpoint), Choice(ends=(96, end)), 30, 8)
    assert found == wanted
    ends = {i for i, tokens in enumerate(wanted) if end in tokens}
    begins = [0, *torch.tensor([max(1, n) for n in at_once]).cumsum(0).tolist()]
    assert {i + 1 for i in ends} <= set(begins)


def test_steps_end_where_logits_are_not_finite(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "HEARD_S", 1e9)
    run = opened(checkpoint)
    together(run, Choice(), 20, 3)
    run.cache.recent.values[0][1] = torch.nan
    step = run.next_pass(range(SLOTS), [1] * SLOTS)
    found = run.run.decoder.follow_with_tokens(step, Choice(), 3)
    assert len(found) == 1
    assert [token < 0 for token in found[0]] == [False, True, False]


def test_steps_take_no_longer_than_they_may(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "HEARD_S", 0.0)
    _, at_once = together(opened(checkpoint), Choice(), 20, 8)
    assert set(at_once) == {0, 1}


def test_steps_that_are_interrupted_were_not_done(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal is heard when they are computed, before they are counted."""
    monkeypatch.setattr(following, "HEARD_S", 1e9)
    run, other = opened(checkpoint), opened(checkpoint)
    for one in (run, other):
        together(one, Choice(), 20, 2)
    before, passes = list(run.cache.lengths), run.cache.ended

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(passes, "advance", interrupt)
        step = run.next_pass(range(SLOTS), [1] * SLOTS)
        with pytest.raises(KeyboardInterrupt):
            run.run.decoder.follow_with_tokens(step, Choice(), 4)
    assert (run.cache.lengths, run.cache.ended) == (before, None)
    assert one_by_one(run, None, 4) == one_by_one(other, None, 4)


def test_states_of_steps_that_are_interrupted_are_not_gone_on_from(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "HEARD_S", 1e9)
    run = opened(tiny_checkpoint(tmp_path_factory.getbasetemp(), "qwen3-next-head64"))
    together(run, Choice(), 20, 2)

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run.cache.ended, "advance", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.run.decoder.follow_with_tokens(
                run.next_pass(range(SLOTS), [1] * SLOTS), Choice(), 4
            )
    with pytest.raises(ArgumentError, match="half-way"):
        run.pass_over(range(SLOTS), [1] * SLOTS)
    run.cache.forget(1000)
    assert run.pass_over(range(SLOTS), [3] * SLOTS).isfinite().all()


@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_is_gone_when_nobody_holds_it(cache: str, checkpoint: Path) -> None:
    """Its memory is not kept by the pass that it may go on with, until garbage is collected."""
    run = opened(checkpoint, cache)
    together(run, Choice(), 20, 3)
    assert run.cache.ended is not None
    gone = weakref.ref(run.cache)
    gc.disable()
    try:
        del run.cache
        assert gone() is None
    finally:
        gc.enable()


def test_tokens_there_are_not_are_refused(checkpoint: Path) -> None:
    run = opened(checkpoint)
    together(run, Choice(), 20, 1)
    step = run.next_pass(range(SLOTS), [1] * SLOTS)
    step.tokens[0] = -1
    with pytest.raises(OpError, match="tokens are 0 to"):
        run.run.decoder.follow_with_tokens(step, Choice(), 2)

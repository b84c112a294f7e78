"""Activations that are kept: within a bound, as planned, and without a change of any bit."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qoff import train
from qoff.errors import DiskWriteError
from qoff.memory.arena import HUGE_PAGE, map_pages
from qoff.train.activations import Cost, chosen, shared_out
from qoff.train.swaps import Stage
from tests.train.test_training import LAYERS, LR, PLACES, batch, model_of, offloaded


@pytest.mark.parametrize("place", PLACES)
def test_what_is_kept_changes_no_bit_and_is_as_large_as_planned(place: str, tmp_path: Path) -> None:
    found = []
    for bound in (0, 60_000, "1GiB"):
        model = model_of("llama", attention_dropout=0.2)
        optimizer = train.AdamW(lr=LR)
        training = offloaded(model, place, tmp_path, optimizer=optimizer, activation_memory=bound)
        torch.manual_seed(3)
        losses = [training.step([batch(step), batch(step + 9)]) for step in range(3)]
        stats = training.stats
        assert stats.activations_peak == stats.activations_planned  # what is counted, all of it
        found.append((losses, training.state_dict(), stats))
    none, some, all_of_them = (stats for *_, stats in found)
    assert none.activations_peak == 0
    assert 0 < some.activations_peak <= 60_000
    assert all_of_them.activations_peak > 2 * some.activations_peak
    if place != PLACES[0]:  # what is kept need not be computed again, so its input is not written
        written = [stats.moved["inputs of units written"] for stats in (none, some, all_of_them)]
        assert written[0] >= written[1] > written[2] == written[0] // 3  # of the first step
    for losses, weights, _ in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(x, found[0][1][name]) for name, x in weights.items())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_is_swapped_changes_no_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qoff.train.swaps.Swaps._measured", lambda _: 1e12)  # a fast disk
    found, bound = [], 1 << 30
    for disk in (0, 1 << 20):
        model, optimizer = model_of(name, attention_dropout=0.2), train.AdamW(lr=LR)
        options = {"activation_memory": bound, "activation_disk": disk}
        training = offloaded(model, PLACES[2], tmp_path, optimizer=optimizer, **options)
        torch.manual_seed(3)
        losses = [training.step([batch(step), batch(step + 9)]) for step in range(3)]
        found.append((losses, training.state_dict()))
        stats = training.stats
        assert stats.activations_peak == stats.activations_planned <= bound
        bound = stats.activations_planned // (2 * LAYERS) * 3 + 2 * 4096  # one, and two stages
    assert stats.moved["activations written"] == stats.moved["activations read"]
    steps, places = 2, 2 * LAYERS - 1  # the first step keeps nothing
    assert stats.moved["activations written"] >= steps * places * (stats.activations_planned // 4)
    assert found[0][0] == found[1][0]
    assert all(torch.equal(x, found[0][1][key]) for key, x in found[1][1].items())


def test_a_disk_that_is_full_in_the_forward_pass_changes_no_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qoff.train.swaps.Swaps._measured", lambda _: 1e12)
    bounds: dict[str, Any] = {"activation_memory": 110_000, "activation_disk": 1 << 20}
    model = model_of("llama", num_hidden_layers=LAYERS + 2)
    training = train.offload(model, tokens=12, disk=tmp_path, **bounds)
    training.step([batch(0)])
    before, failed = training.state_dict(), Future[None]()
    failed.set_exception(DiskWriteError("full"))

    def full_at_first(*_: object) -> Future[None]:
        patch.undo()
        return failed

    with monkeypatch.context() as patch:
        patch.setattr(training._homes._spill, "write", full_at_first)
        with pytest.raises(DiskWriteError):
            training.step([batch(1)])
    assert all(torch.equal(x, before[name]) for name, x in training.state_dict().items())
    training.step([batch(1)])
    assert training.stats.moved["activations read"] > 0


def test_what_is_swapped_saves_time() -> None:
    costs = {(i, 0): Cost(5000, 1.0, 5120) for i in range(8)}
    bound, disk = 2 * 8192 + 10_000, 6 * 8192  # two stages and two places
    kept, swapped = shared_out(costs, bound, disk, 1e6)
    assert (len(kept), len(swapped)) == (2, 6)
    assert len(shared_out(costs, bound, disk - 1, 1e6)[1]) == 5
    for memory, rate in ((bound, 5000.0), (2 * 8192 - 1, 1e6), (40_000, 1e6)):
        assert shared_out(costs, memory, disk, rate) == (chosen(costs, memory), set())


def test_kept_bytes_are_those_of_the_layers_activations() -> None:
    training = train.offload(model_of("llama"), tokens=12, activation_memory="1GiB")
    training.step([batch(0)])
    engine = training._engine
    own, seen = engine.parts.activations.keep, []

    def keep(place: tuple[int, int], *rest: object) -> object:
        found = own(place, *rest)  # type: ignore[arg-type]
        seen.append(engine.parts.activations._kept[place].nbytes)
        return found

    engine.parts.activations.keep = keep  # type: ignore[method-assign, assignment]
    training.step([batch(0)])
    tokens = 12
    config = training.model.config
    width, wide = config.hidden_size, config.intermediate_size
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    head = width // heads
    # Inputs of two norms, of three products, q, k, v, and the output of attention, at the least;
    # twice as much at the most.
    least = 4 * tokens * (5 * width + 3 * wide + (heads + 2 * kv) * head)
    assert len(seen) == LAYERS
    assert all(least <= nbytes <= 2.5 * least for nbytes in seen)


WINDOW: dict[str, Any] = {
    "model_type": "qwen2",
    "use_sliding_window": True,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", *(LAYERS - 1) * ["full_attention"]],
}


def padded(seed: int, padding: int) -> dict[str, Tensor]:
    """A batch of one length, with so many tokens of padding."""
    found = batch(seed)
    mask = torch.ones_like(found["input_ids"])
    mask[0, mask.shape[1] - padding :] = 0
    return {**found, "attention_mask": mask, "labels": found["labels"].masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("case", ["mask", "window", "small stages"])
def test_layers_that_are_given_a_mask_save_more(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is none without padding, but in layers with a window, here the first."""
    monkeypatch.setattr("qoff.train.swaps.Swaps._measured", lambda _: 1e12)  # a fast disk
    if case == "small stages":  # as where more experts are chosen than when they were measured
        half = property(lambda tally: tally.nbytes // 2)
        monkeypatch.setattr("qoff.train.activations._Tally.on_stage", half)
    found, bound = [], 160_000
    for kept in (0, bound):
        model = model_of("llama", num_key_value_heads=2, **(WINDOW if case == "window" else {}))
        options = {"activation_memory": kept, "activation_disk": kept and 1 << 20}
        training = offloaded(model, PLACES[2], tmp_path, optimizer=train.AdamW(lr=LR), **options)
        losses, written = [], []
        for step, padding in enumerate((0, 0, 2, 2, 0)):
            losses.append(training.step([padded(step, padding), padded(step + 9, padding)]))
            written.append(training.stats.moved.get("activations written", 0))
            assert training.stats.activations_peak <= kept
        found.append((losses, training.state_dict()))
    assert 0 == written[0] < written[1] <= written[2] < written[3]
    assert (written[2] == written[1]) == (case != "window")
    assert found[0][0] == found[1][0]
    assert all(torch.equal(x, found[0][1][name]) for name, x in found[1][1].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16])
def test_stages_of_huge_pages_give_back_what_they_took(dtype: torch.dtype) -> None:
    """Their memory begins anywhere in its storage; part of a storage is taken with all of it."""
    stage = Stage(map_pages(HUGE_PAGE + 4096)[4096:])
    stage.clear(HUGE_PAGE)
    wanted = [torch.randn(5, 3).gt(0).to(dtype), torch.arange(24).view(4, 6).to(dtype)[1:, ::2]]
    taken = [stage.take(x) for x in wanted]
    for x, place in zip(wanted, taken, strict=True):
        assert place is not None
        assert torch.equal(stage.at(*place), x)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 50)), min_size=1, max_size=9),
    st.integers(1, 100),
)
def test_the_plan_is_the_best_there_is(items: list[tuple[int, int]], bound: int) -> None:
    costs = {(i, 0): Cost(nbytes, float(seconds)) for i, (nbytes, seconds) in enumerate(items)}
    found = chosen(costs, bound)
    assert sum(costs[place].nbytes for place in found) <= bound
    best = 0.0
    for mask in range(1 << len(items)):
        taken = [items[i] for i in range(len(items)) if mask >> i & 1]
        if sum(nbytes for nbytes, _ in taken) <= bound:
            best = max(best, sum(seconds for _, seconds in taken))
    assert sum(costs[place].seconds for place in found) == best

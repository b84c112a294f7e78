"""Training with units that stream is training in memory: the same losses and weights."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from qoff import train
from qoff.errors import ArgumentError, BudgetError, TrainingError, UnsupportedModelError
from qoff.train.heap import GAPS
from tests.instruments import allocated
from tests.tiny_families import TINY

LAYERS, TOKENS = 3, 12
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "tied": {"model_type": "llama", "tie_word_embeddings": True},
    "gemma2": {"model_type": "gemma2", "tie_word_embeddings": True, "head_dim": 16},
    "gpt2": {"model_type": "gpt2", "n_layer": LAYERS, "tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    # Their layers return attention weights, too, one in a list.
    "gptj": {"model_type": "gptj", "n_layer": LAYERS, "rotary_dim": 4},
    "openai-gpt": {"model_type": "openai-gpt", "n_layer": LAYERS, "tie_word_embeddings": True},
}
LR, EPS = 1e-3, 1e-6
# After 50 steps in float32. Adam divides by the root of squares, so that rounding of gradients near
# zero moves weights by a part of the rate.
LOSSES, WEIGHTS = 1e-4, 1e-4
PLACES = ["memory", "states on disk", "weights and states on disk"]


def model_of(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = {**TINY, "num_hidden_layers": LAYERS, **CONFIGS[name], **changes}
    made: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    return made.train()


def batch(seed: int, rows: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 128, (rows, TOKENS // rows), generator=generator)
    labels = ids.clone()
    labels[0, : seed % 3 + 1] = -100  # other numbers of labels in each
    return {"input_ids": ids, "labels": labels}


def offloaded(model: Any, place: str, folder: Path, **options: Any) -> train.Training:
    given = {"tokens": TOKENS, "micro_batches": 3, **options}
    if place != "memory":
        layers = sum(p.nbytes for p in model.model.layers.parameters()) if place == PLACES[1] else 0
        given["host_memory"], given["disk"] = layers + LAYERS * 4096 * 4 if layers else 0, folder
    return train.offload(model, **given)


def torch_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batches: list[dict[str, Tensor]],
    norm: float | None,
) -> float:
    """A step of torch on all micro-batches; returns the mean loss of their tokens."""
    counts = [int((b["labels"][:, 1:] != -100).sum()) for b in batches]
    total = 0.0
    for b, n in zip(batches, counts, strict=True):
        loss = model(**b, use_cache=False).loss * (n / sum(counts))
        loss.backward()
        total += float(loss.detach())
    if norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
    optimizer.step()
    optimizer.zero_grad()
    return total


def assert_same_weights(found: dict[str, Tensor], model: Any, tolerance: float = WEIGHTS) -> None:
    wanted = dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    for name, p in wanted.items():
        assert (found[name] - p).abs().max() < tolerance, name


def batches_of(step: int) -> list[dict[str, Tensor]]:
    return [batch(2 * step + i) for i in range(2)]


@cache
def after_50_steps(name: str) -> tuple[list[float], Any]:
    """Losses of torch's training in memory, and the model."""
    reference = model_of(name)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=LR, eps=EPS)
    return [torch_step(reference, optimizer, batches_of(i), None) for i in range(50)], reference


# Places change no bit of llama's steps, and tied embeddings in all places but this are clipped as
# torch clips: tests below.
@pytest.mark.parametrize(
    ("name", "place"), [("llama", PLACES[0]), ("llama", PLACES[2]), ("tied", PLACES[1])]
)
def test_50_steps_are_those_of_torch(name: str, place: str, tmp_path: Path) -> None:
    wanted, reference = after_50_steps(name)
    training = offloaded(model_of(name), place, tmp_path, optimizer=train.AdamW(lr=LR, eps=EPS))
    where = training.placement
    assert (len(where.weights), len(where.states) < LAYERS) == {
        "memory": (LAYERS, False),
        "states on disk": (LAYERS, True),
        "weights and states on disk": (0, True),
    }[place]
    losses = [training.step(batches_of(i)) for i in range(50)]
    assert losses == pytest.approx(wanted, abs=LOSSES)
    assert_same_weights(training.state_dict(), reference)


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "mixtral", "gptj", "openai-gpt"])
def test_other_families(name: str, tmp_path: Path) -> None:
    model, reference = model_of(name), model_of(name)
    if "gpt" in name:  # their dropout is on: without, as masks of another order are others
        model.eval(), reference.eval()
    options = {"tokens": TOKENS, "micro_batches": 3, "host_memory": 0, "disk": tmp_path}
    training = train.offload(model, train.SGD(lr=LR, momentum=0.9), **options)
    model.train("gpt" not in name)
    theirs = torch.optim.SGD(reference.parameters(), lr=LR, momentum=0.9)
    for step in range(3):
        batches = batches_of(step)
        wanted = torch_step(reference, theirs, batches, None)
        assert training.step(batches) == pytest.approx(wanted, abs=1e-5)
    assert_same_weights(training.state_dict(), reference, 2e-6)


@pytest.mark.parametrize("place", [PLACES[0], PLACES[2]])
def test_clipping_is_by_the_norm_of_all_gradients(place: str, tmp_path: Path) -> None:
    model, reference = model_of("tied"), model_of("tied")
    training = offloaded(
        model, place, tmp_path, optimizer=train.SGD(lr=LR, momentum=0.9), max_norm=0.1
    )
    theirs = torch.optim.SGD(reference.parameters(), lr=LR, momentum=0.9)
    for step in range(4):
        batches = [batch(step), batch(step + 50)]
        wanted = torch_step(reference, theirs, batches, 0.1)
        assert training.step(batches) == pytest.approx(wanted, abs=1e-5)
        assert training.grad_norm is not None
        assert training.grad_norm > 0.1
    assert_same_weights(training.state_dict(), reference, 1e-6)


OPTIMIZERS: dict[str, Callable[[], train.Optimizer]] = {
    "adamw": lambda: train.AdamW(lr=1e-3),
    "adamw, 8 bits": lambda: train.AdamW(lr=1e-3, bits=8),
    "lion": lambda: train.Lion(lr=1e-3),
    "adafactor": lambda: train.Adafactor(lr=1e-2),
    "sgd, scheduled": lambda: train.SGD(momentum=0.9, lr=lambda step: LR / (step + 1)),
}


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_adafactor_is_that_of_torch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qoff.train.factored.PIECE", 500)  # matrices go in parts
    model, reference = model_of(name), model_of(name)
    training = offloaded(model, PLACES[2], tmp_path, optimizer=train.Adafactor(weight_decay=0.1))
    theirs = torch.optim.Adafactor(reference.parameters(), weight_decay=0.1)
    for step in range(10):
        wanted = torch_step(reference, theirs, batches_of(step), None)
        assert training.step(batches_of(step)) == pytest.approx(wanted, abs=LOSSES)
    assert_same_weights(training.state_dict(), reference, 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_where_it_lies_changes_no_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    found = []
    for place in PLACES:
        training = offloaded(
            model_of("llama", dtype), place, tmp_path, optimizer=OPTIMIZERS[name]()
        )
        losses = [training.step([batch(step), batch(step + 9)]) for step in range(3)]
        found.append((losses, training.state_dict()))
    for losses, weights in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(x, found[0][1][key]) for key, x in weights.items())
    assert found[0][0][-1] < found[0][0][0]


def test_bfloat16_weights_have_a_float32_master(tmp_path: Path) -> None:
    model, reference = model_of("llama", torch.bfloat16), model_of("llama", torch.bfloat16)
    training = offloaded(model, PLACES[2], tmp_path, optimizer=train.AdamW(lr=1e-3))
    masters = [p.detach().float().requires_grad_() for p in reference.parameters()]
    theirs = torch.optim.AdamW(masters, lr=1e-3)
    for step in range(5):
        loss = reference(**batch(step), use_cache=False).loss
        loss.backward()
        for master, p in zip(masters, reference.parameters(), strict=True):
            master.grad = p.grad.float()
            p.grad = None
        theirs.step()
        for master, p in zip(masters, reference.parameters(), strict=True):
            p.data.copy_(master)
        assert training.step([batch(step)]) == pytest.approx(float(loss.detach()), rel=1e-2)
    ours = training.state_dict()
    same = [(ours[n] == p).float().mean() for n, p in reference.named_parameters()]
    assert torch.stack(same).mean() > 0.9


@pytest.mark.parametrize("count", [1, 3])
def test_units_are_read_twice_a_step_whatever_the_micro_batches(count: int, tmp_path: Path) -> None:
    model = model_of("llama")
    training = offloaded(model, PLACES[2], tmp_path, optimizer=train.AdamW(lr=LR))
    training.step([batch(i) for i in range(count)])
    moved = training.stats.moved
    unit = training.placement.disk["weights"] // LAYERS
    # The last layer's backward follows its forward: it is read once.
    assert moved["weights read"] == (2 * LAYERS - 1) * unit
    assert moved["weights written"] == LAYERS * unit
    assert moved["states read"] == moved["states written"] == training.placement.disk["states"]
    assert moved["inputs of units read"] == moved["inputs of units written"]
    assert moved["inputs of units read"] == count * LAYERS * 4096


def test_arenas_are_what_the_placement_counts(tmp_path: Path) -> None:
    for place in PLACES:
        training = offloaded(model_of("llama"), place, tmp_path, optimizer=train.AdamW(lr=LR))
        training.step([batch(0)])
        device, host, _ = training.placement.totals
        assert (training.stats.device_peak, training.stats.host_peak) == (device, host)


def test_memory_between_steps_is_not_kept_where_it_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("qoff.train.training.reused", lambda x: asked.append(x) or nullcontext())
    for place in PLACES:
        offloaded(model_of("llama"), place, tmp_path).step([batch(0)])
    assert asked == [None, GAPS, GAPS]


@pytest.mark.parametrize("tiles", [False, True])
def test_weights_are_looked_through_without_a_copy(tiles: bool, tmp_path: Path) -> None:
    model = model_of("tied", vocab_size=1 << 16)
    embedding = model.get_input_embeddings().weight
    whole, memory = embedding.nbytes, "24MiB" if tiles else None
    for wrong in (False, True):
        training = offloaded(model, PLACES[2], tmp_path, device_memory=memory)
        assert bool(training._engine.parts.steps.tiles.tiles) == tiles
        found = list[bool]()
        assert allocated(lambda f=found, t=training: f.append(t.is_finite())) < whole / 2
        assert found == [not wrong]
        model = model_of("tied", vocab_size=1 << 16)
        model.get_input_embeddings().weight.data[-1, -1] = torch.inf


def test_memory_is_free_when_nobody_has_the_training(tmp_path: Path) -> None:
    training = offloaded(model_of("llama"), PLACES[0], tmp_path, max_norm=1.0)
    training.step(batches_of(0))
    homes = weakref.ref(training._homes)
    memory = weakref.ref(training._engine.parts.held.weights.places[0].memory)
    del training
    gc.collect()
    assert homes() is None
    assert memory() is None


def test_dropout_is_the_same_in_backward(tmp_path: Path) -> None:
    model = model_of("llama", attention_dropout=0.3)
    reference = model_of("llama", attention_dropout=0.3)
    training = offloaded(model, PLACES[0], tmp_path, optimizer=train.SGD(lr=LR))
    theirs = torch.optim.SGD(reference.parameters(), lr=LR)
    for step in range(3):
        torch.manual_seed(step)
        wanted = torch_step(reference, theirs, [batch(step)], None)
        torch.manual_seed(step)
        assert training.step([batch(step)]) == pytest.approx(wanted, abs=1e-5)


def test_a_loss_of_nan_changes_nothing(tmp_path: Path) -> None:
    training = offloaded(model_of("llama"), PLACES[2], tmp_path, optimizer=train.AdamW(lr=LR))
    before = training.state_dict()
    head = training.model.lm_head.weight
    kept = head.data[5, 0].item()
    head.data[5, 0] = float("nan")
    with pytest.raises(TrainingError, match="step 1: the loss is nan; weights are as before"):
        training.step([batch(0)])
    head.data[5, 0] = kept
    assert all(torch.equal(x, before[n]) for n, x in training.state_dict().items())
    training.step([batch(0)])
    assert training.steps == 1


def test_the_model_computes_between_steps(tmp_path: Path) -> None:
    model, reference = model_of("llama"), model_of("llama")
    training = offloaded(model, PLACES[2], tmp_path, optimizer=train.AdamW(lr=LR))
    ids = batch(0)["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference(ids).logits)
    training.step([batch(0)])
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, reference(ids).logits)


def test_a_model_in_training_is_not_copied() -> None:
    training = offloaded(model_of("tied"), PLACES[0], Path())
    for how in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ArgumentError, match="neither copied nor pickled; use its training"):
            how(training.model)
    assert copy.deepcopy(training.state_dict())


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    options = {"tokens": TOKENS}
    with pytest.raises(BudgetError, match=r"1,000 bytes are too few by [\d,]+: weights outside"):
        train.offload(model_of("llama"), device_memory=1000, **options)
    with pytest.raises(
        ArgumentError, match=r"states \([\d,]+\) go to disk, .* give a folder for the disk"
    ):
        train.offload(model_of("llama"), host_memory=0, **options)
    mixed = model_of("llama")
    mixed.model.layers[0].mlp.to(torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match=r"are bfloat16, float32; .* all of a layer"):
        train.offload(mixed, **options)
    with pytest.raises(ArgumentError, match="no parameter of this model requires gradients"):
        train.offload(model_of("llama").requires_grad_(False), **options)
    with pytest.raises(ArgumentError, match="tokens is 0"):
        train.offload(model_of("llama"), tokens=0)
    training = train.offload(model_of("llama"), **options)
    with pytest.raises(ArgumentError, match="24 tokens"):
        training.step([{"input_ids": torch.ones(2, 12, dtype=torch.int64)}])
    with pytest.raises(ArgumentError, match="2 micro-batches"):
        training.step([batch(0), batch(1)])
    ids = torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="0 of them with labels"):
        training.step([{"input_ids": ids, "labels": torch.full_like(ids, -100)}])

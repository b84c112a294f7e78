"""Hidden states of many micro-batches: where they are at work, and what else of a pass stays."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from qoff import train
from qoff.train.finetune import Lora, adapted
from qoff.train.passes import TrainingPass, let_go, reads_embeddings, share, stop_of, storage_of
from qoff.train.step import Engine
from qoff.train.walk import Walk
from tests.tiny_models import tiny_checkpoint

from .test_training import LAYERS, LR, TOKENS, batch, model_of

COUNT = 8  # micro-batches
REGION = 4096


def trained(folder: Path, device: int | None, **options: Any) -> tuple[Any, train.Training]:
    """Losses of three steps and an evaluation, weights; and the training."""
    given = {"host_memory": 0, "disk": folder, **options}
    training = train.offload(
        model_of("llama"),
        train.AdamW(lr=LR),
        tokens=TOKENS,
        micro_batches=COUNT,
        device_memory=device,
        **given,
    )
    losses = [training.step([batch(i + step) for i in range(COUNT)]) for step in range(3)]
    losses.append(training.evaluate([batch(i) for i in range(COUNT + 1)]))
    return (losses, training.state_dict()), training


@pytest.mark.parametrize(
    "options",
    [{}, {"host_memory": None}, {"host_memory": 1 << 19}, {"activation_memory": 40_000}],
    ids=["disk", "host", "some on disk", "some kept"],
)
def test_hidden_states_at_work_need_no_memory_for_each_micro_batch(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """They are where units' inputs are, and nothing of the result changes."""
    (losses, weights), training = trained(tmp_path, None, **options)
    device = training.placement.totals[0]
    assert training.placement.device["hidden states"] == COUNT * REGION
    (found, theirs), tight = trained(tmp_path, device - 1, **options)
    assert tight.placement.device["hidden states"] == 0
    assert tight.placement.totals[0] < device
    assert found == losses
    assert all(torch.equal(x, weights[name]) for name, x in theirs.items())
    moved, forward = tight.stats.moved, COUNT * REGION
    if not options:  # an input is read forward and back; gradients go there and back
        steps, evaluated = 3, (COUNT + 1) * LAYERS * REGION
        each = (2 * LAYERS + LAYERS + 1) * forward
        assert moved["inputs of units read"] == steps * each + evaluated
        assert moved["inputs of units written"] == steps * (2 * LAYERS + 1) * forward + evaluated


def test_a_checkpoint_goes_on_with_hidden_states_elsewhere(tmp_path: Path) -> None:
    _, first = trained(tmp_path, None)
    first.save(tmp_path / "run")
    _, second = trained(tmp_path, first.placement.totals[0] - 1)
    second.resume(tmp_path / "run")
    batches = [batch(i) for i in range(COUNT)]
    assert second.step(batches) == first.step(batches)


class _AddsEmbeddings(nn.Module):
    """A final norm that adds what the model began with."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm = model.model.norm
        self.begun: Tensor | None = None
        model.model.embed_tokens.register_forward_hook(self._begin)

    def _begin(self, module: Any, given: Any, found: Tensor) -> None:
        self.begun = found

    def forward(self, x: Tensor) -> Tensor:
        assert self.begun is not None
        found: Tensor = self.norm(x + self.begun)
        return found


def test_embeddings_that_a_model_computes_with_later_stay() -> None:
    model = model_of("llama")
    model.requires_grad_(False)
    model.model.layers.requires_grad_(True)
    model.model.norm = _AddsEmbeddings(model)
    training = train.offload(model, train.SGD(lr=0.0), tokens=TOKENS)
    wanted = float(model(**batch(0), use_cache=False).loss)
    assert training.step([batch(0)]) == pytest.approx(wanted, rel=1e-5)
    assert training._engine._walk._reads_embeddings is True


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mixtral"])
def test_embeddings_are_let_go(name: str) -> None:
    training = train.offload(model_of(name), train.SGD(lr=0.0), tokens=TOKENS)
    training.step([batch(0)])
    assert training._engine._walk._reads_embeddings is False


@pytest.mark.parametrize("packed", [False, True], ids=["learns", "packed"])
def test_passes_keep_no_hidden_states(
    packed: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Those that wait at the first layer, and those that are over, before the layers' backward."""
    model = model_of("llama")
    if packed:  # whose embeddings are a view of what was looked up
        path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama")
        model = adapted(AutoModelForCausalLM.from_pretrained(path, device_map="disk"), Lora(4, 8))
    options: dict[str, Any] = {"host_memory": 0, "disk": tmp_path} if packed else {}
    training = train.offload(model, train.AdamW(), tokens=TOKENS, micro_batches=COUNT, **options)
    nbytes, found = 4 * TOKENS * model.config.hidden_size, list[int]()

    def count() -> None:
        tensors = [x for x in gc.get_objects() if isinstance(x, Tensor) and not x.is_meta]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        found.append([*storages.values()].count(nbytes))

    start, backward = Walk.start, Engine._backward
    monkeypatch.setattr(Walk, "start", lambda *given: (start(*given), count()))
    monkeypatch.setattr(Engine, "_backward", lambda *given: (count(), backward(*given)))
    training.step([batch(i) for i in range(COUNT)])
    assert len(found) == 2
    assert max(found) < COUNT


def test_what_passes_are_given_alike_is_once_in_memory() -> None:
    model = model_of("llama")
    train.offload(model, tokens=TOKENS)
    ids = torch.arange(TOKENS)[None] + 5
    positions = [{}, {}, {"position_ids": torch.arange(TOKENS)[None] + 3}]
    stops = []
    for given in positions:
        one = TrainingPass(partial(model, ids, use_cache=False, **given), 1.0)
        stops.append((one, stop_of(one.advance(), 0)))
    tables = [stop.kwargs["position_embeddings"][0] for _, stop in stops]
    assert tables[0].data_ptr() != tables[1].data_ptr()
    share(stops[1][1], stops[0][1], {storage_of(x) for x in tables})
    assert tables[0].data_ptr() != tables[1].data_ptr()
    for _, stop in stops[1:]:
        share(stop, stops[0][1])
    assert tables[0].data_ptr() == tables[1].data_ptr()
    assert not torch.equal(tables[0], tables[2])
    hidden = stops[0][1].hidden
    let_go(stops[0][1])
    assert hidden.untyped_storage().nbytes() == hidden.itemsize
    assert not reads_embeddings(model, {"input_ids": ids}, LAYERS)
    for one, _ in stops:
        one.end()

"""What a step does not expect: it is computed rightly, or refused, and nothing hangs."""

from __future__ import annotations

import errno
import os
import time
from collections import UserDict
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from qoff import train
from qoff.errors import (
    ArgumentError,
    BudgetError,
    DiskReadError,
    DiskWriteError,
    QoffError,
    UnsupportedModelError,
)
from qoff.train.boundaries import STAGES, Boundaries
from qoff.train.homes import Homes
from qoff.train.passes import Stop, StoppingLayer
from qoff.train.schedules import Schedule

from .test_training import LR, PLACES, batch, model_of, offloaded


@pytest.mark.parametrize("kind", [dict, UserDict])  # transformers' is of the second
def test_layers_that_leave_each_other_keys_are_refused(kind: type) -> None:
    given = {"shared": kind(), "mask": None}
    layer = nn.Module()

    def forward(x: torch.Tensor, shared: dict[str, Any], mask: None) -> torch.Tensor:
        shared["keys"] = x, x
        return x

    layer.forward = forward
    stopping = StoppingLayer(layer, 0, forward)
    x = torch.ones(2)
    with pytest.raises(UnsupportedModelError, match="leaves tensors for others"):
        stopping.compute(x, Stop(0, x, (), given))


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("bert", {"is_decoder": True}, "a layer of this model is given no hidden states first"),
        ("xlm", {}, "computes layer 3 where layer 1 was expected"),
        (
            "gemma3n_text",
            {"intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.0] * 4},
            "is given more than hidden states that learns",
        ),
        ("gemma4_text", {"global_head_dim": 16}, "is given more than hidden states that learns"),
        ("gemma4_text", {"num_kv_shared_layers": 2}, "leaves tensors for others in what it is"),
    ],
)
def test_models_that_do_not_go_through_their_layers_in_order_are_refused_at_once(
    kind: str, changes: dict[str, Any], said: str
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 2, "vocab_size": 64}
    if kind == "xlm":
        sizes = {"emb_dim": 32, "n_layers": 3, "n_heads": 2, "vocab_size": 64}
    if kind.startswith("gemma"):
        sizes |= {"num_key_value_heads": 1, "head_dim": 16, "num_kv_shared_layers": 0}
        sizes |= {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
        sizes |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **changes}))
    with pytest.raises(UnsupportedModelError, match=said):
        train.offload(model, tokens=12)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("behind", [0, 2])  # at the next layer, and after the last
def test_what_layers_return_beside_hidden_states_may_not_be_used(behind: int) -> None:
    model = model_of("llama")
    training = train.offload(model, tokens=12)
    own = [layer.forward for layer in model.model.layers]

    def forward(i: int, x: torch.Tensor, **options: Any) -> torch.Tensor:
        y, weights = own[i](x, **options)
        return y + weights.mean() if i == behind else y

    for i, layer in enumerate(training._engine.layers):
        computed = layer.own
        layer.own = lambda *args, _own=computed, **options: (y := _own(*args, **options), 2 * y)
        layer.module.forward = partial(forward, i)
    with pytest.raises(UnsupportedModelError, match="which the model uses"):
        training.step([batch(0)])


@pytest.mark.timeout(60, method="thread")
def test_layers_in_which_nothing_learns(tmp_path: Path) -> None:
    model = model_of("llama")
    model.model.layers.requires_grad_(False)
    training = offloaded(model, PLACES[2], tmp_path, optimizer=train.Lion(lr=LR))
    losses = [training.step([batch(0), batch(1)]) for _ in range(2)]
    assert losses[1] < losses[0]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_changes_hidden_states_between_layers_is_refused(in_place: bool) -> None:
    model = model_of("llama")
    training = train.offload(model, tokens=12)
    layer = model.model.layers[1]
    own = layer.forward
    layer.forward = lambda x, **options: own(x.mul_(0.5) if in_place else x * 0.5, **options)
    with pytest.raises(UnsupportedModelError, match="between layer 0 and the next"):
        training.step([batch(0)])


@pytest.mark.parametrize("in_memory", [False, True])
def test_inputs_of_units_keep_their_dtypes(in_memory: bool, tmp_path: Path) -> None:
    homes = Homes((1 + STAGES) * 4096, 2 * 4096, 2 * 4096, tmp_path)
    column, *stages = [homes.device.alloc(4096, "hidden states") for _ in range(1 + STAGES)]
    inputs = [[homes.home("inputs of units", 4096, in_memory)] for _ in range(2)]
    boundaries = Boundaries(homes, [column], inputs, stages)
    given = [torch.randn(2, 3).to(dtype) for dtype in (torch.bfloat16, torch.float32)]
    for i, x in enumerate(given):
        boundaries.put(i, 0, x)
        boundaries.save(i, 0)
    for i in (1, 0):
        found, _ = boundaries.back(i, 0, [])
        assert found is not None
        assert found.dtype == given[i].dtype
        assert torch.equal(found, given[i])
    boundaries.stop()
    homes.close()


def test_a_disk_without_room_is_called_as_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(BudgetError, match=r"bytes free .*; name another folder for the disk$"):
        offloaded(model_of("llama"), PLACES[2], tmp_path)


def test_a_write_is_done_after_what_follows_it(tmp_path: Path) -> None:
    homes = Homes(4096, 0, 4096, tmp_path)
    home, source = homes.home("weights", 4096, False), homes.device.alloc(4096, "weights")
    called = []

    def then() -> None:
        time.sleep(0.05)
        called.append(True)

    homes.write(home, source, then).result()
    assert called == [True]
    homes.close()


def test_half_a_step_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    training = train.offload(model_of("llama"), tokens=12)
    updater = training._engine.parts.updater
    own = updater._step

    def step(i: int, *rest: Any) -> None:
        if i == 1:
            raise DiskWriteError("full")
        own(i, *rest)

    monkeypatch.setattr(updater, "_step", step)
    with pytest.raises(DiskWriteError):
        training.step([batch(0)])
    for use in (training.state_dict, lambda: training.step([batch(0)])):
        with pytest.raises(ArgumentError, match="half-way"):
            use()


def test_a_schedule_is_asked_once_a_step() -> None:
    asked = []

    def rate(step: int) -> float:
        asked.append(step)
        return 1e-3 if step < 1 else float("nan")

    training = train.offload(model_of("llama"), train.AdamW(lr=rate), tokens=12, max_norm=1.0)
    training.step([batch(0)])
    assert asked == [0]
    with pytest.raises(ArgumentError, match="lr of step 1 is nan"):
        training.step([batch(0)])


@pytest.mark.parametrize("wrong", [{"momentum": 1.0}, {"momentum": -0.1}, {"nesterov": True}])
def test_what_torch_refuses_of_sgd_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="momentum"):
        train.SGD(**wrong)


def test_micro_batches_that_do_not_fit_the_model_are_refused() -> None:
    training = train.offload(model_of("llama"), tokens=12)
    one = batch(0)
    ids, labels = one["input_ids"], one["labels"]
    for changes, said in (
        ({"labels": labels[:, :-1]}, r"labels \[2, 5\] of a micro-batch of \[2, 6\]"),
        ({"labels": labels.tolist()}, "labels of a micro-batch must be a tensor, not list"),
        ({"attention_mask": [[1] * 6] * 2}, "attention_mask of a micro-batch must be a tensor"),
        ({"labels": labels + 500}, "labels of a micro-batch have 6"),
        ({"labels": torch.full_like(labels, -1)}, "have -1; this model's vocabulary is 0 to"),
        ({"input_ids": ids + 500}, "input_ids of a micro-batch have"),
        ({"input_ids": ids.float()}, "input_ids of a micro-batch are whole numbers"),
    ):
        for use in (lambda x: training.step([x]), lambda x: training.evaluate([x])):
            with pytest.raises(ArgumentError, match=said):
                use({**one, **changes})
    unlabelled: Any = {"input_ids": ids, "labels": None, "attention_mask": None}
    assert training.evaluate([unlabelled]) == training.evaluate([{**unlabelled, "labels": ids}])


@pytest.mark.parametrize("changes", [{}, {"model_type": "gptj", "rotary_dim": 4}])
def test_sequences_end_where_tables_of_positions_do(changes: dict[str, Any]) -> None:
    model = model_of("gpt2", max_position_embeddings=4, **changes)
    training = train.offload(model, tokens=12)
    with pytest.raises(ArgumentError, match="has 6 tokens, and this model has positions for 4"):
        training.step([batch(0)])


def test_texts_in_one_sequence_have_positions_of_their_own() -> None:
    training = train.offload(model_of("gpt2", max_position_embeddings=4), tokens=12)
    apart = torch.arange(6).remainder(4)[None].expand(2, -1)  # as of two texts in one sequence
    training.step([{**batch(0), "position_ids": apart}])


@pytest.mark.parametrize(
    "wrong", [{"lr": "x"}, {"lr": None}, {"warmup": 0.5}, {"kind": "linear", "steps": "9"}]
)
def test_numbers_of_schedules_are_numbers(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"{[*wrong][-1]} is .*; use a (whole )?number"):
        Schedule(**{"lr": 1e-4, **wrong})


@pytest.mark.parametrize("norm", ["1", 0, -1.0, float("nan")])
def test_a_norm_is_a_number_above_zero(norm: Any) -> None:
    with pytest.raises(ArgumentError, match=r"max_norm is .*; use a number above 0, or None"):
        train.offload(model_of("llama"), tokens=12, max_norm=norm)


@pytest.mark.parametrize("other", [torch.optim.AdamW, "adamw"])
def test_optimizers_of_others_are_refused(other: Any) -> None:
    with pytest.raises(ArgumentError, match=r"use one of qoff\.train"):
        train.offload(model_of("llama"), other, tokens=12)


@pytest.mark.parametrize(
    "wrong", [{"lr": "1e-4"}, {"lr": float("inf")}, {"weight_decay": None}, {"eps": -1.0}]
)
def test_numbers_of_optimizers_are_from_zero(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"{next(iter(wrong))} is .*; use a number from 0"):
        train.AdamW(**wrong)


def test_a_path_that_is_none_is_said_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(QoffError, match="no such file or directory"):
        train.offload(tmp_path / "none", tokens=12)


def test_losses_of_routers_are_refused() -> None:
    model = model_of("mixtral")
    model.config.output_router_logits = True
    with pytest.raises(UnsupportedModelError, match="output_router_logits"):
        train.offload(model, tokens=12)


def test_what_a_machine_or_its_limit_never_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a cgroup's limit the system would end the process in the middle of it."""
    monkeypatch.setattr("qoff.system_memory.machine_memory", lambda: 100_000)
    with pytest.raises(BudgetError, match=r"^host memory: weights, states .* has 100,000; use sma"):
        train.offload(model_of("llama"), tokens=8)


def test_a_model_is_offloaded_once() -> None:
    model = model_of("llama")
    training = train.offload(model, tokens=12)
    with pytest.raises(ArgumentError, match="is in training already"):
        train.offload(model, tokens=12)
    training.step([batch(0)])


def test_a_read_that_fails_between_steps_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = offloaded(model_of("llama"), PLACES[2], tmp_path, optimizer=train.Lion(lr=LR))
    ids = batch(0)["input_ids"]
    with torch.no_grad():
        wanted = training.model(ids).logits
        spill = training._homes._spill

        def failing(*_: object) -> Future[None]:
            failed: Future[None] = Future()
            failed.set_exception(DiskReadError("broken"))
            return failed

        with monkeypatch.context() as patch:
            patch.setattr(spill, "read", failing)
            with pytest.raises(DiskReadError):
                training.model(ids)
        assert torch.equal(training.model(ids).logits, wanted)
    training.step([batch(0)])


def test_evaluation_is_the_models_loss_and_learns_nothing(tmp_path: Path) -> None:
    training = offloaded(
        model_of("llama", attention_dropout=0.3), PLACES[2], tmp_path, optimizer=train.Lion(lr=LR)
    )
    reference = model_of("llama").eval()
    given = [batch(0), batch(1)]
    with torch.no_grad():
        losses = [float(reference(**b).loss) for b in given]
    counts = [int((b["labels"][:, 1:] != -100).sum()) for b in given]
    mean = sum(x * n for x, n in zip(losses, counts, strict=True)) / sum(counts)
    assert training.evaluate(given) == pytest.approx(mean, abs=1e-6)
    read = training.stats.moved["weights read"]
    training.evaluate(given[:1])
    assert training.stats.moved["weights read"] == 2 * read  # as much for one as for two
    assert training.evaluate([*given, *given]) == pytest.approx(mean, abs=1e-6)  # 3 and 1
    assert training.stats.moved["weights read"] == 4 * read
    assert training.model.training
    with pytest.raises(ArgumentError, match="no labels"):
        training.evaluate([])


def test_weights_are_saved_layer_by_layer_in_place_of_older_ones(tmp_path: Path) -> None:
    model = model_of("mixtral", tie_word_embeddings=True)
    training = offloaded(model, PLACES[2], tmp_path, optimizer=train.Lion(lr=LR))
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"an older one")
    training.step([batch(0)])
    training.save_model(out)
    assert len(list(out.glob("*.safetensors"))) == 4
    assert not list(out.glob(".qoff-*"))
    loaded = AutoModelForCausalLM.from_pretrained(out)
    for name, x in training.state_dict().items():
        assert torch.equal(loaded.get_parameter(name), x), name

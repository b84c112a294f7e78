"""A Trainer that streams trains as it does in memory, and goes on from its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from qoff import train
from qoff.errors import ArgumentError

from .test_training import LOSSES, assert_same_weights, batch, model_of

ROWS = [{"input_ids": b["input_ids"][0], "labels": b["labels"][0]} for b in map(batch, range(14))]


def trainer_of(model: Any, folder: Path, kind: type[Trainer] = Trainer, **changes: Any) -> Trainer:
    options: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,  # of 7 micro-batches: the last step has one
        "learning_rate": 1e-3,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_steps": 4,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "gradient_checkpointing": True,
        **changes,
    }
    return kind(model, TrainingArguments(str(folder), **options), train_dataset=ROWS)


def attached(model: Any, folder: Path, **changes: Any) -> tuple[Trainer, train.Training]:
    trainer = trainer_of(model, folder, **changes)
    return trainer, train.attach(trainer, tokens=12, host_memory=0, disk=folder)


def losses(trainer: Trainer) -> list[float]:
    return [one["loss"] for one in trainer.state.log_history if "loss" in one]


def test_it_trains_as_in_memory_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    reference = model_of("llama")
    theirs = trainer_of(reference, tmp_path / "theirs", save_strategy="no")
    theirs.train()
    ours, training = attached(model_of("llama"), tmp_path / "ours")
    ours.train()
    assert losses(ours) == pytest.approx(losses(theirs), abs=LOSSES)
    assert training.steps == len(losses(ours)) == 8
    assert_same_weights(training.state_dict(), reference)
    rates = [
        [x["learning_rate"] for x in t.state.log_history if "loss" in x] for t in (ours, theirs)
    ]
    assert rates[0] == rates[1]

    again, second = attached(model_of("llama"), tmp_path / "ours")
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-4"))
    wanted = training.state_dict()
    assert all(torch.equal(x, wanted[name]) for name, x in second.state_dict().items())
    saved = type(reference).from_pretrained(tmp_path / "ours" / "checkpoint-8")
    assert_same_weights(dict(saved.named_parameters()), reference)


def test_adapters_are_saved_as_pefts(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    model = get_peft_model(model_of("llama"), LoraConfig(r=2, target_modules="all-linear"))
    trainer, training = attached(model, tmp_path, num_train_epochs=1)
    trainer.train()
    loaded = PeftModel.from_pretrained(model_of("llama"), tmp_path / "checkpoint-4")
    theirs = dict(loaded.named_parameters())
    for name, x in training.state_dict().items():
        assert torch.equal(theirs[name], x)


def test_a_tokenizer_that_is_cut_off_takes_no_place(tmp_path: Path) -> None:
    class Cut:
        def save_pretrained(self, folder: str | Path) -> None:
            (Path(folder) / "tokenizer.json").write_text("{")
            raise KeyboardInterrupt

    trainer, _ = attached(model_of("llama"), tmp_path / "disk")
    trainer.processing_class = Cut()  # type: ignore[assignment]
    out = tmp_path / "out"
    out.mkdir()
    (out / "tokenizer.json").write_text("{}")
    with pytest.raises(KeyboardInterrupt):
        trainer.save_model(str(out))
    assert (out / "tokenizer.json").read_text() == "{}"
    assert not [*out.glob(".*")]


def test_it_trains_in_the_mode_of_training_after_an_evaluation(tmp_path: Path) -> None:
    model = model_of("llama")
    trainer, training = attached(model, tmp_path, max_steps=3)
    modes, step = [], training.step

    def noted(batches: Any) -> float:
        modes.append(model.training)
        trainer.evaluate(trainer.train_dataset)
        return step(batches)

    training.step = noted  # type: ignore[method-assign]
    trainer.train()
    assert modes == [True] * 3


def test_a_training_that_was_interrupted_leaves_no_micro_batch(tmp_path: Path) -> None:
    trainer, training = attached(model_of("llama"), tmp_path, max_steps=1)
    prepare, left = trainer._prepare_inputs, iter([False, True])

    def interrupted(inputs: Any) -> Any:
        if next(left, False):
            raise KeyboardInterrupt
        return prepare(inputs)

    trainer._prepare_inputs = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert training.steps == 1


def test_a_checkpoint_without_states_is_refused(tmp_path: Path) -> None:
    trainer_of(model_of("llama"), tmp_path, num_train_epochs=1).train()
    trainer, _ = attached(model_of("llama"), tmp_path, num_train_epochs=1)
    with pytest.raises(ArgumentError, match="checkpoint-4 has no folder 'qoff'"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


class OwnLoss(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class WithRouters(Trainer):
    """As TRL's of a mixture."""

    aux_loss_enabled = True


@pytest.mark.parametrize(
    ("kind", "changes", "match"),
    [
        (OwnLoss, {}, "loss of its own"),
        (WithRouters, {}, "loss of routers"),
        (Trainer, {"weight_decay": 0.1}, "leaves biases and norms out"),
        (Trainer, {"optim": "adafactor"}, "not known here"),
        (Trainer, {"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
        (Trainer, {"optim": "sgd", "optim_args": "momentum=0.9"}, "optim_args='momentum=0.9'"),
        (Trainer, {"torch_compile": True}, "torch_compile=True"),
    ],
)
def test_what_would_not_be_trained_as_the_trainer_does_is_refused(
    kind: type[Trainer], changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    trainer = trainer_of(model_of("llama"), tmp_path, kind, **changes)
    with pytest.raises(ArgumentError, match=match):
        train.attach(trainer, tokens=12)

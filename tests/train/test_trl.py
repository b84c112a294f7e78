"""TRL's SFTTrainer on a model that streams: the losses of the same trainer in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from qoff import train
from qoff.hf.tokenizer import load_tokenizer
from tests.tiny_models import tiny_model

pytest.importorskip("trl")
SAME = 1e-5
TEXTS = [{"text": f"the number {i} is followed by {i + 1}"} for i in range(6)]
CHATS = [
    {"prompt": [{"role": "user", "content": f"{i}?"}],
     "completion": [{"role": "assistant", "content": f"{i + 1}"}]}
    for i in range(6)
]  # fmt: skip


def losses(path: Path, folder: Path, rows: list[Any], streams: bool, **changes: Any) -> Any:
    """What is logged of training and evaluation, and the training, if the model streams."""
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    adapters = changes.pop("adapters", False)
    options: dict[str, Any] = {
        "max_length": 48,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        **changes,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        model,
        SFTConfig(str(folder), **options),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:2]),
        processing_class=load_tokenizer(path),
        peft_config=lora if adapters else None,
    )
    training = train.attach(trainer, tokens=96, host_memory=0, disk=folder) if streams else None
    trainer.train()
    kinds = ("loss", "eval_loss")
    found = {kind: [x[kind] for x in trainer.state.log_history if kind in x] for kind in kinds}
    return found, training


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        (TEXTS, {}),
        (CHATS, {}),
        (TEXTS, {"packing": True, "padding_free": False}),
        (TEXTS, {"adapters": True}),
    ],
    ids=["texts", "conversations", "packed", "adapters"],
)
def test_it_trains_and_evaluates_as_in_memory(
    rows: list[Any],
    changes: dict[str, Any],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tiny_model(tmp_path_factory.getbasetemp(), "llama")
    wanted, _ = losses(path, tmp_path / "theirs", rows, False, **changes)
    found, training = losses(path, tmp_path / "ours", rows, True, **changes)
    assert training.steps == len(found["loss"]) == 4
    assert training.stats.moved["states written"] > 0
    for kind, each in wanted.items():
        assert each
        assert found[kind] == pytest.approx(each, rel=SAME)

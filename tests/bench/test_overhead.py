"""The bench of what a token costs beside the pass: every door goes through the stubbed pass."""

from __future__ import annotations

from pathlib import Path

import pytest

import qoff
from bench import overhead
from qoff.engine import LLM
from qoff.plan import Plan
from tests.tiny_models import tiny_checkpoint

NEW = 4


@pytest.mark.parametrize("batch", [1, 2])
def test_each_door_makes_a_pass_for_each_token(
    batch: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkpoint: Path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")
    model, tokenizer = qoff.load(checkpoint, device="cpu")
    plan = Plan(batch_size=batch, batches=1, context=overhead._PROMPT + NEW)
    with model, LLM(checkpoint, plan, device="cpu") as llm:
        for stub, doors in (
            (
                overhead.StubbedPass(model.runtime),
                overhead.doors_of_model(model, tokenizer, batch, NEW),
            ),
            (overhead.StubbedPass(llm.runtime), overhead.doors_of_llm(llm, batch, NEW)),
        ):
            for door in doors.values():
                assert stub.microseconds(door) > 0
                assert len(stub.gaps) == NEW

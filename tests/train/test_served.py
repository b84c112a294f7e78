"""What `qoff finetune --lora` has trained says in `qoff.LLM` what it says in PEFT's model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from qoff.cli.main import app
from qoff.engine import LLM, SamplingParams
from qoff.kvcache import KVQuant
from qoff.plan import Plan
from tests.tiny_families import VOCAB
from tests.tiny_models import reference_model, tiny_checkpoint
from tests.tolerances import DECODER_LOGITS, assert_close, relative_rms

peft = pytest.importorskip("peft")
IDS = [5, 6, 7, 8, 9, 10, 11, 12, 20, 21]
PLAN = Plan(batch_size=1, context=160, kv=KVQuant(window=128))


def said_by(llm: LLM, adapter: str | None) -> Tensor:
    """Log-probabilities of all tokens, behind each token of the prompt but the last."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=VOCAB)
    steps = llm.generate([IDS], params, adapter=adapter)[0].prompt_logprobs
    assert steps is not None
    rows = [[step[i].logprob for i in range(VOCAB)] for step in steps if step is not None]
    return torch.tensor(rows)


def test_an_adapter_of_finetune_is_served_as_in_peft(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    texts = [f"the number {i} is followed by {i + 1}" for i in range(6)]
    data.write_text("".join(json.dumps({"text": x}) + "\n" for x in texts))
    options = ["--lora", "r=4,alpha=8", "--sequence", 48, "--micro-batches", 2, "--steps", 3]
    given = ["finetune", path, data, "-o", out, *options, "--lr", 1e-2]
    result = CliRunner().invoke(app, [str(x) for x in given])
    assert result.exit_code == 0, result.output

    with LLM(path, PLAN, device="cpu", adapters={"tuned": out}) as llm:
        tuned, plain = said_by(llm, "tuned"), said_by(llm, None)
    reference = peft.PeftModel.from_pretrained(reference_model(path), out).eval()
    with torch.no_grad():
        wanted = reference(torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
    assert_close(tuned, wanted, tolerance=DECODER_LOGITS)
    assert relative_rms(plain, wanted) > 20 * DECODER_LOGITS  # it has learned

"""`--trust-remote-code`: code of a model and of its tokenizer runs only where that is said."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.commands import run
from tests.module_models import changed, save_model_with_code
from tests.tiny_models import save_model, save_tokenizer

TRUST = "--trust-remote-code"
CONVERT = ["--solver", "rtn", "--group-size", "32", "--for", "cpu"]
GENERATE = ["--max-new-tokens", "4", "--json"]
TOKENIZER = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast

class HalTokenizer(PreTrainedTokenizerFast):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        Path({ran!r}).touch()
"""


@pytest.fixture(autouse=True)
def modules_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies code to a folder of its own and imports it from there."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setenv("QOFF_CACHE", str(tmp_path / "cache"))


def refusal(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    return line


def test_code_of_a_model(tmp_path: Path) -> None:
    source, out = save_model_with_code(tmp_path / "model"), tmp_path / "out"
    assert TRUST in refusal("convert", source, out, *CONVERT)
    assert not out.exists()
    assert TRUST in refusal("generate", source, "Hello", *GENERATE)
    assert run("convert", source, out, *CONVERT, TRUST).exit_code == 0
    assert TRUST in refusal("generate", out, "Hello", *GENERATE)
    answers = []
    for checkpoint in (out, plain_checkpoint(source, tmp_path)):
        result = run("generate", checkpoint, "Hello", *GENERATE, TRUST)
        assert result.exit_code == 0, result.output
        answers.append(json.loads(result.stdout)["text"])
    assert answers[0] == answers[1]


def plain_checkpoint(source: Path, tmp_path: Path) -> Path:
    """That of the same model under the name that transformers knows."""
    changed(source, model_type="stablelm", auto_map={})
    assert run("convert", source, tmp_path / "known", *CONVERT).exit_code == 0
    return tmp_path / "known"


def test_code_of_a_tokenizer(tmp_path: Path) -> None:
    source, ran = tmp_path / "model", tmp_path / "ran"
    save_model(source, "llama-head64")
    save_tokenizer(source)
    (source / "hal.py").write_text(TOKENIZER.format(ran=str(ran)))
    file = source / "tokenizer_config.json"
    config = json.loads(file.read_text())
    names = {"AutoTokenizer": [None, "hal.HalTokenizer"]}
    file.write_text(json.dumps({**config, "tokenizer_class": "HalTokenizer", "auto_map": names}))
    (tmp_path / "prompts.txt").write_text("Hello\n")
    batch = ["batch", tmp_path / "prompts.txt", "--context", "64", "--max-tokens", "4"]
    for trust in ([], [TRUST]):
        out = tmp_path / f"out{len(trust)}"
        assert run("convert", source, out, *CONVERT, *trust).exit_code == 0
        assert (out / "hal.py").exists() == bool(trust)
        for command in (["generate", out, "Hello", *GENERATE], [batch[0], out, *batch[1:]]):
            if not trust:
                assert TRUST in refusal(*command)
            else:
                result = run(*command, TRUST)
                assert result.exit_code == 0, result.output
            assert ran.exists() == bool(trust)
            ran.unlink(missing_ok=True)


def test_batch_passes_it_on(tmp_path: Path) -> None:
    source = save_model_with_code(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("Hello\n")
    assert TRUST in refusal("batch", source, tmp_path / "prompts.txt")
    result = run("batch", source, tmp_path / "prompts.txt", TRUST, "--max-tokens", 2)
    assert json.loads(result.stdout)["finish_reason"] == "length"

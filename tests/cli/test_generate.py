"""`qoff generate`: what it prints, the same from memory and from disk."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer
from typer.testing import CliRunner

from qoff.cli.generate import encode
from qoff.cli.main import app
from qoff.errors import ArgumentError
from tests.cli.commands import fail, run, succeed
from tests.tiny_families import EOS
from tests.tiny_models import QUANT, load_budgets, tiny_checkpoint, tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.getbasetemp(), "llama")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama")


def test_generate_gives_the_same_answer_from_memory_and_from_disk(checkpoint: Path) -> None:
    options = ["Hello", "--raw", "--max-new-tokens", 6, "--json"]
    least, _ = load_budgets(checkpoint, context=5 + 6)
    resident = json.loads(succeed("generate", checkpoint, *options))
    streamed = json.loads(succeed("generate", checkpoint, *options, "--device-memory", least))
    assert streamed["text"] == resident["text"]
    assert 0 < streamed["new_tokens"] <= 6
    assert streamed["prompt_tokens"] == resident["prompt_tokens"] > 0
    assert streamed["arena_peak_bytes"] <= streamed["arena_capacity_bytes"] <= least
    assert resident["disk_bytes"] == 0 < streamed["disk_bytes"]
    assert streamed["peak_rss_bytes"] > 0 < streamed["kv_cache_bytes"]


def test_generate_prints_the_text_and_a_table(checkpoint: Path) -> None:
    options = ["Hello", "--max-new-tokens", 4, "--raw"]
    printed = succeed("generate", checkpoint, *options)
    answer = json.loads(succeed("generate", checkpoint, *options, "--json"))
    assert answer["prompt_tokens"] == len("Hello")  # no chat template
    text, table = printed.split("\n", 1)
    assert text == answer["text"]
    for label in ("prefill", "time to first token", "decode", "read from disk", "peak RSS"):
        assert label in table


def test_the_cache_is_packed_as_asked(tmp_path_factory: pytest.TempPathFactory) -> None:
    checkpoint = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")
    options = ["a" * 200, "--max-new-tokens", 2, "--raw", "--json", "--kv"]
    sizes = [
        json.loads(succeed("generate", checkpoint, *options, bits))["kv_cache_bytes"]
        for bits in ("4", "8,4", "8,4/1:8")
    ]
    assert sizes == sorted(set(sizes))
    assert "KV bits are written like" in fail("generate", checkpoint, *options, "4;8")
    assert "the model's 2 layers" in fail("generate", checkpoint, *options, "4/2:8")


def test_a_prompt_can_be_standard_input(checkpoint: Path) -> None:
    def asked(prompt: str, stdin: bytes) -> Result:
        options = ["--raw", "--max-new-tokens", "2", "--json"]
        return CliRunner().invoke(app, ["generate", str(checkpoint), prompt, *options], input=stdin)

    piped = asked("-", b"Hello\n")
    assert json.loads(piped.stdout)["prompt_tokens"] == len("Hello")
    assert "the prompt is not UTF-8" in asked("-", b"a\xff").stderr
    assert "the prompt has no tokens" in asked("-", b"\n").stderr


def test_an_empty_prompt_is_what_the_tokenizer_begins_with(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert encode(tokenizer, "", raw=True) == [1]
    with pytest.raises(ArgumentError, match="the prompt is empty"):
        encode(tokenizer, "", raw=False)  # a template would ask nothing
    tokenizer.chat_template = None
    assert encode(tokenizer, "", raw=False) == [1]


def test_generate_loads_the_tokenizer_once(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, load = [], AutoTokenizer.from_pretrained

    def counted(path: Path, **options: Any) -> Any:
        loaded.append(path)
        return load(path, **options)

    monkeypatch.setattr("qoff.hf.tokenizer.AutoTokenizer.from_pretrained", counted)
    succeed("generate", checkpoint, "Hello", "--max-new-tokens", 1)
    assert loaded == [checkpoint]


def test_generate_ends_where_the_models_positions_do(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "opt")
    options = ("--max-new-tokens", 300, "--json")
    found = json.loads(succeed("generate", path, "a", "--raw", *options))
    assert found["prompt_tokens"] + found["new_tokens"] == 256
    assert "is run up to 256 tokens" in fail("generate", path, "a" * 256, "--raw", *options)


def test_a_character_that_the_output_has_not_ends_no_command(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "字").symlink_to(checkpoint)
    printed = BytesIO()
    monkeypatch.setattr("sys.stdout", TextIOWrapper(printed, "latin-1"))
    app(["verify", str(tmp_path / "字")], standalone_mode=False)
    sys.stdout.flush()
    assert b"/?: " in printed.getvalue()


def test_generate_says_what_each_token_waited_for(checkpoint: Path, tmp_path: Path) -> None:
    least, _ = load_budgets(checkpoint, context=5 + 3)
    trace = tmp_path / "trace.json"
    result = run(
        "generate", checkpoint, "Hello", "--raw", "--max-new-tokens", 3, "--device-memory", least,
        "--stats", "--json", "--trace", trace,
    )  # fmt: skip
    answer = json.loads(result.stdout)
    assert len(answer["rounds"]) == answer["new_tokens"]
    assert all(0 <= wait <= seconds for seconds, wait in answer["rounds"])
    assert "waited for the disk" in result.stderr
    names = {e["args"].get("name") for e in json.loads(trace.read_text())["traceEvents"]}
    assert {"compute", "disk to device"} <= names


def test_sampling_follows_the_seed(checkpoint: Path) -> None:
    def text(seed: int) -> str:
        options = ["--temperature", 1.5, "--top-k", 50, "--top-p", 0.95, "--seed", seed, "--json"]
        return json.loads(succeed("generate", checkpoint, "Hi", *options))["text"]

    assert text(1) == text(1) != text(2)


def test_generate_converts_on_the_way(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QOFF_CACHE", str(tmp_path))
    monkeypatch.setattr("qoff.hf.checkpoints.QuantConfig", lambda: QUANT)
    found = json.loads(succeed("generate", source, "Hi", "--max-new-tokens", 2, "--json"))
    assert found["new_tokens"] > 0
    (made,) = tmp_path.iterdir()
    assert json.loads(succeed("verify", made, "--json"))["ok"]


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_an_answer_may_end_at_once(checkpoint: Path, tmp_path: Path) -> None:
    """One token, and it is the end: no rate to divide by, an empty text."""
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    answer = json.loads(succeed("generate", copy, "Hello", "--max-new-tokens", 1, "--json"))
    assert answer["new_tokens"] == 1
    assert "not timed (1 token)" in succeed("generate", copy, "Hello", "--max-new-tokens", 1)
    every = list(range(128))
    edit_json(copy / "generation_config.json", lambda c: c.update(eos_token_id=[EOS, *every]))
    answer = json.loads(succeed("generate", copy, "Hello", "--max-new-tokens", 9, "--json"))
    assert answer["new_tokens"] == 1
    assert answer["decode_tokens_per_s"] == 0

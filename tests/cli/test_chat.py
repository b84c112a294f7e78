"""`qoff chat`: turns, commands, and what Ctrl-C does."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qoff.api.thinking import style_of
from qoff.checkpoint import Checkpoint
from qoff.cli.chat import Conversation, talk
from qoff.cli.main import app
from qoff.engine.request import SamplingParams
from qoff.errors import QoffError
from qoff.hf.chat import ChatRenderer
from qoff.hf.load import open_runtime
from qoff.hf.tokenizer import load_tokenizer
from qoff.models.spec import DecoderSpec
from tests.tiny_models import tiny_checkpoint

PARAMS = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture
def chat(checkpoint: Path) -> Iterator[Conversation]:
    opened = open_runtime(checkpoint, context=200)
    with closing(opened.runtime), ChatRenderer() as renderer:
        yield Conversation(opened, load_tokenizer(checkpoint), PARAMS, 200, renderer)


def answered(chat: Conversation, text: str) -> str:
    return "".join(said for _, said in chat.say(text))


def said(chat: Conversation, *lines: str) -> str:
    """What the program writes for some lines."""
    left, found = list(lines), list[str]()

    def read() -> str:
        if not left:
            raise EOFError
        return left.pop(0)

    talk(chat, read, found.append)
    return "".join(found)


def test_a_later_turn_reads_only_what_is_new_and_answers_the_same(
    chat: Conversation, checkpoint: Path
) -> None:
    first = answered(chat, "Hi")
    known = chat._cache.length if chat._cache is not None else 0
    second = answered(chat, "and now")
    assert f"{known} of them known" in chat.stats["prompt"]
    assert [one["role"] for one in chat.messages] == ["user", "assistant"] * 2
    before = chat.messages[:2]
    chat._cache, chat._read = None, []  # so that all is read again
    chat.reset(before)
    assert answered(chat, "and now") == second
    assert before[1]["content"] == first


@pytest.mark.parametrize(
    ("template", "pieces"),
    [
        ("<|START_RESPONSE|>", ["<|START_THINKING|>Hm<|END_", "THINKING|><|START_RESPONSE|>4"]),
        ("</think>", ["<thi", "nk>\nHm\n</", "think>\n", "\n4"]),
    ],
)
def test_thinking_is_dim_and_told_back_apart(
    chat: Conversation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, template: str,
    pieces: list[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(chat, "_style", style_of(template))
    monkeypatch.setattr(chat, "_answer", lambda ids, most: iter(pieces))
    written, lines = list[str](), iter(["2 + 2?", f"/save {tmp_path}/a", f"/load {tmp_path}/a"])

    def read() -> str:
        if line := next(lines, ""):
            return line
        raise EOFError

    talk(chat, read, written.append, dims=True)
    assert "".join(written).startswith("\x1b[2mHm\x1b[22m\n\n4\n")
    said = {"role": "assistant", "content": "4", "reasoning_content": "Hm"}
    assert chat.messages[-1] == said
    assert "\x1b" not in "".join(map("".join, chat.say("2 + 2?")))


def test_commands(chat: Conversation, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    found = said(
        chat, "/system Be brief", "Hi", "/stats", f"/save {file}", "/reset", "/help", "",
        "/nothing", "/load", f"/load {tmp_path}", "/exit", "never read",
    )  # fmt: skip
    assert "tok/s" in found
    assert "Ctrl-C stops an answer" in found
    assert "qoff: there is no command '/nothing'" in found
    assert "qoff: /load needs a file" in found
    assert f"qoff: {tmp_path}: Is a directory; name a file" in found
    assert chat.messages == [{"role": "system", "content": "Be brief"}]
    messages = json.loads(file.read_text())["messages"]
    assert [one["role"] for one in messages] == ["system", "user", "assistant"]
    said(chat, f"/load {file}", "/system")
    assert chat.messages == messages[1:]
    file.write_text("[]")
    assert "is no conversation" in said(chat, f"/load {file}")
    found = said(chat, f"/save {file}/a", f"/save {tmp_path}", "/save ~nobody-here/a", "/save a\0b")
    assert f"qoff: {file}/a: Not a directory; choose another place" in found
    assert found.count("qoff: ") == 4
    assert "Errno" not in found


def test_what_cannot_be_saved_leaves_the_file_as_it_is(chat: Conversation, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    said(chat, "/system Sag ja \N{LATIN SMALL LETTER SHARP S}", f"/save {file}")
    before = file.read_bytes()
    assert "\N{LATIN SMALL LETTER SHARP S}".encode() in before  # UTF-8, whatever the locale
    assert "cannot be written" in said(chat, "/system \udcff", f"/save {file}")
    assert file.read_bytes() == before


@pytest.mark.parametrize("pieces", [0, 2])
def test_a_message_whose_answer_fails_is_forgotten(
    chat: Conversation, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    assert "qoff:" not in said(chat, "Hi")
    before = list(chat.messages)

    def fails(*_: object) -> Iterator[int]:
        yield from [70] * pieces
        raise QoffError("a broken layer")

    with monkeypatch.context() as patched:
        patched.setattr("qoff.cli.chat.tokens_of", fails)
        assert "qoff: a broken layer" in said(chat, "and now")
    assert chat.messages == before
    assert "qoff:" not in said(chat, "again")
    assert [one["content"] for one in chat.messages[::2]] == ["Hi", "again"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Triton Error [CUDA]: out of memory", "qoff: device memory: the system refused memory"),
        ("Triton Error [CUDA]: an illegal memory access", ""),
    ],
)
def test_what_fails_on_a_gpu_does_not_end_the_program(
    chat: Conversation, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    def fails(*_: object) -> Iterator[int]:
        raise RuntimeError(text)

    with monkeypatch.context() as patched:
        patched.setattr("qoff.cli.chat.tokens_of", fails)
        assert expected in said(chat, "Hi", "/stats")
    assert chat.messages == []
    assert "qoff:" not in said(chat, "again")


def test_ctrl_c_stops_an_answer_and_not_the_program(chat: Conversation) -> None:
    pieces: list[str] = []

    def write(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    lines = iter(["Hi", "again", KeyboardInterrupt, "/stats"])

    def read() -> str:
        line = next(lines, EOFError)
        if isinstance(line, str):
            return line
        raise line

    before = signal.getsignal(signal.SIGINT)
    talk(chat, read, write)
    text = "".join(pieces)
    assert text.count("(stopped)") == 1
    assert "Ctrl-D ends the program" in text
    assert text.endswith("\n")
    assert [one["role"] for one in chat.messages] == ["user", "assistant"] * 2
    assert chat.messages[1]["content"] == "".join(pieces[:3])
    assert signal.getsignal(signal.SIGINT) is before


def test_a_conversation_longer_than_the_context_is_refused(chat: Conversation) -> None:
    with pytest.raises(QoffError, match="use /reset"):
        list(chat.say("x" * 300))
    assert chat.messages == []
    found = said(chat, "x" * 300, "Hi")
    assert "qoff: the conversation has" in found
    assert "the context 200; use /reset, or a larger --context" in found
    assert len(chat.messages) == 2


def test_a_model_whose_positions_end_is_asked_for_no_more(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "opt")
    limit = DecoderSpec.from_config(Checkpoint.open(path).config).position_limit
    assert limit is not None
    opened, params = open_runtime(path), replace(PARAMS, max_tokens=2 * limit)
    with closing(opened.runtime), ChatRenderer() as renderer:
        chat = Conversation(opened, load_tokenizer(path), params, 2 * limit, renderer)
        assert "qoff:" not in said(chat, "Hi")
        assert chat.stats["context"].endswith(f"of {limit} tokens")
        assert "all that the model takes" in said(chat, "x" * limit)


def test_the_command_reads_standard_input(checkpoint: Path) -> None:
    found = CliRunner().invoke(
        app,
        ["chat", str(checkpoint), "--max-new-tokens", "4", "--system", "Be"],
        input="Hi\n/stats\n",
    )
    assert found.exit_code == 0, found.output
    assert "4 tokens" in found.stdout


def test_a_line_that_is_not_utf8_is_left_out(checkpoint: Path) -> None:
    given = b"\xff\nHi\n/stats\n"
    found = CliRunner().invoke(app, ["chat", str(checkpoint), "--max-new-tokens", "4"], input=given)
    assert found.exit_code == 0, found.output
    assert "qoff: a message (user) is not UTF-8" in found.stdout
    assert "4 tokens" in found.stdout

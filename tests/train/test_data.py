"""Examples of fine-tuning: what is learned of a line, and how lines lie in sequences."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from qoff.errors import FormatError
from qoff.hf.chat import ChatRenderer
from qoff.hf.tokenizer import load_tokenizer
from qoff.train.data import IGNORED, Encoder, Example, Sequences, examples, packed
from tests.tiny_models import save_tokenizer

ASKED = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "yes"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def encoder(tokenizer: PreTrainedTokenizerBase) -> Iterator[Encoder]:
    with ChatRenderer() as renderer:
        yield Encoder(tokenizer, renderer)


@pytest.mark.parametrize(
    ("line", "text", "learned"),
    [
        ({"text": "abc"}, "abc</s>", "abc</s>"),
        ({"prompt": "ab", "completion": " c"}, "ab c</s>", " c</s>"),
        (
            {"messages": [ASKED, SAID, ASKED, SAID]},
            "<s>user: hi</s><s>assistant: yes</s><s>user: hi</s><s>assistant: yes</s>",
            "yes</s>yes</s>",
        ),
        (
            {"prompt": [ASKED, SAID, ASKED], "completion": [SAID]},
            "<s>user: hi</s><s>assistant: yes</s><s>user: hi</s><s>assistant: yes</s>",
            "yes</s>",
        ),
        (
            {"messages": [SAID, ASKED, SAID]},
            "<s>assistant: yes</s><s>user: hi</s><s>assistant: yes</s>",
            "yes</s>yes</s>",
        ),
    ],
)
def test_what_is_learned(
    line: dict[str, Any], text: str, learned: str, encoder: Encoder, tokenizer: Any
) -> None:
    one = encoder.encode(line)
    assert tokenizer.decode(one.ids) == text
    kept = [label for label in one.labels if label != IGNORED]
    assert tokenizer.decode(kept) == learned
    assert all(label in (IGNORED, token) for token, label in zip(*vars(one).values(), strict=True))


def test_a_template_that_rewrites_the_past(tokenizer: Any) -> None:
    """The last answer is learned where only that is written as when it was asked for."""
    tokenizer = load_tokenizer(Path(tokenizer.name_or_path))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}:"
        "{{ m['content'] if loop.last or m['role'] == 'user' else '-' }}</s>{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    with ChatRenderer() as renderer:
        one = Encoder(tokenizer, renderer).encode({"messages": [ASKED, SAID, ASKED, SAID]})
    assert tokenizer.decode([x for x in one.labels if x != IGNORED]) == "yes</s>"


@pytest.mark.parametrize(
    ("messages", "text"),
    [([SAID], "be kind</s>yes</s>"), ([ASKED, SAID, ASKED], "be kind</s>hi</s>yes</s>")],
)
def test_only_the_answer_is_learned_where_its_beginning_is_not_recognized(
    messages: list[dict[str, str]], text: str, tokenizer: Any
) -> None:
    """The template adds a system prompt, and asks for an answer as it never writes one."""
    tokenizer = load_tokenizer(Path(tokenizer.name_or_path))
    tokenizer.chat_template = (
        "be kind</s>{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}think:{% endif %}"
    )
    with ChatRenderer() as renderer:
        one = Encoder(tokenizer, renderer).encode({"messages": messages})
    assert tokenizer.decode(one.ids) == text
    assert tokenizer.decode([x for x in one.labels if x != IGNORED]) == "yes</s>"


def test_a_prompt_that_the_template_rewrites_is_not_learned(tokenizer: Any) -> None:
    tokenizer = load_tokenizer(Path(tokenizer.name_or_path))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}think:{% endif %}"
    )
    with ChatRenderer() as renderer:
        encoder = Encoder(tokenizer, renderer)
        with pytest.raises(FormatError, match="writes the prompt in another way"):
            encoder.encode({"prompt": [ASKED], "completion": [SAID]})
        with pytest.raises(FormatError, match="no message of the assistant"):
            encoder.encode({"prompt": [ASKED, SAID], "completion": [ASKED]})


def test_tools_are_given_to_the_template(tokenizer: Any) -> None:
    tokenizer = load_tokenizer(Path(tokenizer.name_or_path))
    tokenizer.chat_template = (
        "{% for t in tools or () %}[{{ t['name'] }}]{% endfor %}"
        "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    with ChatRenderer() as renderer:
        encoder = Encoder(tokenizer, renderer)
        one = encoder.encode({"messages": [ASKED, SAID], "tools": [{"name": "add"}]})
        with pytest.raises(FormatError, match="tools must be a list of objects"):
            encoder.encode({"messages": [ASKED, SAID], "tools": "add"})
    assert tokenizer.decode(one.ids) == "[add]u:hi</s>a:yes</s>"
    assert tokenizer.decode([x for x in one.labels if x != IGNORED]) == "yes</s>"


def test_broken_lines_are_told(tmp_path: Path, encoder: Encoder) -> None:
    lines: list[Any] = [
        {"text": "a"},
        "{",
        {"prompt": "a"},
        {"messages": [ASKED]},
        {"messages": "a"},
        [],
        {"text": 3},
        {"prompt": [ASKED], "completion": "a"},
        {"text": "\ud800"},
        {"messages": [ASKED, {**SAID, "content": "\ud800"}]},
        {"messages": [{**ASKED, "content": "\ud800"}, SAID]},
        "",
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    told: dict[int, str] = {}
    found = list(examples(path, encoder, told.__setitem__))
    assert [len(one.ids) for one in found] == [2]
    assert list(told) == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert "no message of the assistant" in told[4]
    assert "a line is {" in told[3]
    half = r"text has '\ud800', half of a character (a surrogate)"
    assert [told[number] for number in (9, 10, 11)] == [half] * 3


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "assistant"}, "message 1, of the assistant, has no content"),
        ({"role": "assistant", "content": 5}, "content of message 1, of the assistant, must be"),
        ({"role": "user", "content": [{"type": "image"}]}, "of the user, must be text, or parts"),
        ({"role": "system", "content": ["a"]}, "of the system, must be text, or parts of text"),
    ],
)
def test_messages_that_are_no_text_are_refused(
    message: dict[str, Any], said: str, encoder: Encoder
) -> None:
    with pytest.raises(FormatError, match=said):
        encoder.encode({"messages": [message, SAID]})


def test_messages_of_parts_calls_and_tools_are_examples(encoder: Encoder) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}], "content": None}
    result = {"role": "tool", "content": {"sum": 3}}
    found = encoder.encode({"messages": [parts, call, result, SAID]})
    assert any(label != IGNORED for label in found.labels)


def test_the_place_of_a_fault_is_in_its_line(tmp_path: Path, encoder: Encoder) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n{"text": "a"\n')
    told: dict[int, str] = {}
    assert len(list(examples(path, encoder, told.__setitem__))) == 1
    assert told == {2: "is not a JSON object (not JSON: Expecting ',' delimiter at column 13)"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "a"}\n'.encode("utf-16"), "is UTF-16; save it as UTF-8"),
        (gzip.compress(b'{"text": "a"}\n'), "is compressed by gzip; unpack it"),
        (b"PAR1\x15\x04\n", "is a Parquet file; write its rows as lines"),
        (b'[\n{"text": "a"}\n]\n', "begins with a JSON array; write each example as a line"),
    ],
)
def test_a_file_of_another_format_is_refused_at_once(
    content: bytes, said: str, tmp_path: Path, encoder: Encoder
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    told: dict[int, str] = {}
    with pytest.raises(FormatError, match=f"{path}: {said}"):
        list(examples(path, encoder, told.__setitem__))
    assert told == {}


def test_the_mark_of_an_encoding_is_no_fault(tmp_path: Path, encoder: Encoder) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"text": "a"}) + "\n", encoding="utf-8-sig")
    told: dict[int, str] = {}
    assert len(list(examples(path, encoder, told.__setitem__))) == 1
    assert told == {}


def test_empty_text_is_refused(encoder: Encoder) -> None:
    with pytest.raises(FormatError, match="text must be text that is not empty"):
        encoder.encode({"text": ""})


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(2, 12))
def test_packing_loses_no_token(sizes: list[int], length: int) -> None:
    made = [[100 * n + i for i in range(size)] for n, size in enumerate(sizes)]
    rows = packed((Example(ids, ids) for ids in made), length).rows
    assert all(row.shape[1] <= length for row in rows)
    found = [(int(a), int(b)) for row in rows for a, b in row.T]
    tokens = [token for token, _ in found]
    # What is left out has nothing to learn: sequences of one token, or of examples of one.
    missing = {x for ids in made for x in ids} - set(tokens)
    assert len(tokens) == len(set(tokens))
    assert all(len(missing & set(ids)) <= 1 for ids in made)
    for token, label in found:
        starts = token % 100 % length == 0
        assert label == (IGNORED if starts else token)


def test_epochs_go_through_all_sequences() -> None:
    data = Sequences([torch.full((2, 3), i) for i in range(5)])
    order = [
        int(batch["input_ids"][0, 0])
        for step in range(5)
        for batch in data.of_step(step, 2, seed=3, most=10)
    ]
    assert sorted(order[:5]) == sorted(order[5:]) == list(range(5))
    assert order[:5] != order[5:]
    assert len(data.of_step(2, 2, seed=3, most=5)) == 1

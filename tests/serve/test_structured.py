"""Answers that must match something."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from qoff.engine import LLM, SamplingParams, StructuredOutputs
from qoff.engine.grammar import Grammars
from qoff.errors import ArgumentError
from qoff.plan import Plan

from .conftest import MODEL, Running

CHAT: Any = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture
def llm(served: Running) -> LLM:
    assert served.engine.llm is not None
    return served.engine.llm


@pytest.mark.parametrize("temperature", [0, 1])
def test_answers_match_what_they_must(client: OpenAI, temperature: float) -> None:
    options: Any = {"model": MODEL, "messages": CHAT, "temperature": temperature, "seed": 3, "n": 2}
    form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    found = client.chat.completions.create(response_format=form, max_tokens=60, **options)
    for choice in found.choices:
        said = json.loads(choice.message.content or "")
        assert set(said) == {"a", "b"}
        assert choice.finish_reason == "stop"
    for wanted, pattern in (
        ({"regex": r"[ab]{3}-\d{2}"}, r"[ab]{3}-\d{2}"),
        ({"choice": ["yes", 'no "no"']}, r'yes|no "no"'),
        ({"grammar": 'start: "k" /[xyz]{2}/'}, r"k[xyz]{2}"),
    ):
        more = {"structured_outputs": wanted}
        for choice in client.chat.completions.create(extra_body=more, **options).choices:
            assert re.fullmatch(pattern, choice.message.content or "")


def test_any_json_object_is_one_as_far_as_it_goes(client: OpenAI) -> None:
    found = client.chat.completions.create(
        model=MODEL, messages=CHAT, response_format={"type": "json_object"}, max_tokens=20, seed=1
    )
    assert (found.choices[0].message.content or "").lstrip().startswith("{")


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "(a"},
        {"regex": "((a{1000}){1000}){1000}"},
        {"json": {"type": "nothing"}},
        {"json": {"$ref": "http://localhost:1/x"}},
        {"json": "{"},
        {"grammar": "start: other"},
        {"choice": []},
        {"regex": "a", "choice": ["b"]},
    ],
)
def test_what_cannot_be_matched_is_refused(served: Running, wanted: Any) -> None:
    status, found, _ = served.ask("/v1/completions", {"prompt": "a", "structured_outputs": wanted})
    assert status == 400, found
    assert "structured output" in found["error"]["message"]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"regex": "a" * 17_000}, "17000 characters, and may have 16384"),
        ({"regex": "a?" * 2001}, "2001 signs, and may have 2000"),
        ({"grammar": 'start: "a"' + ' "b"' * 1000}, "2003 signs"),
        ({"json": {"enum": ["a" * 132_000]}}, "132014 characters, and may have 131072"),
        ({"json": {"anyOf": [{"$ref": "#/$defs/a"}] * 501}}, "501 references, and may have 500"),
        ({"json": {"allOf": [{"pattern": "a?" * 2001}]}}, "2001 signs in patterns"),
        ({"json": {"patternProperties": {"a" * 17_000: {}}}}, "17000 characters in patterns"),
        ({"choice": ["a" * 9000, "b" * 9000]}, "18000 characters"),
        ({"choice": ["a"] * 2001}, "2001 choices, and may have 2000"),
    ],
)
def test_what_would_take_long_to_read_is_refused_unread(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, wanted: Any, found: str
) -> None:
    monkeypatch.setattr("qoff.engine.grammar._grammar", lambda _: pytest.fail("it is read"))
    params = SamplingParams(structured_outputs=StructuredOutputs(**wanted))
    (answer,) = llm.generate([[5]], params)
    assert found in answer.error


def test_a_schema_may_have_many_properties(llm: LLM) -> None:
    """Which take no longer than a pattern of few signs."""
    said = {"type": "string", "description": "as it is in the file (or 'none')."}
    schema = {"type": "object", "properties": {f"field_{i}": said for i in range(200)}}
    params = SamplingParams(structured_outputs=StructuredOutputs(json=schema), max_tokens=1)
    assert not llm.generate([[5]], params)[0].error


def test_prompts_share_a_grammar(llm: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="x{4}y"), max_tokens=8)
    found, grammars = [llm.generate([5], params)[0].text], llm._admission._grammars
    read = grammars._last
    found += [one.text for one in llm.generate([[5], [6, 7], [8]], params)]
    assert found == ["xxxxy"] * 4
    assert grammars._last is read is not None


@pytest.mark.parametrize("asked", [True, False])
def test_what_grammars_take_is_there_before_a_limit_is_measured(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    done, known = list[str](), Grammars._known

    def within(plan: Plan, *_: object) -> Plan:
        done.append("measured")
        return plan

    def reading(grammars: Grammars) -> Any:
        done.append("read")
        return known(grammars)

    monkeypatch.setattr("qoff.engine.llm.left_by_limits", lambda: 1 << 40)
    monkeypatch.setattr("qoff.engine.llm.plan_within_limit", within)
    monkeypatch.setattr(Grammars, "_known", reading)
    with LLM(checkpoint, Plan(batch_size=1, context=64), device="cpu", _grammars=asked):
        assert done == (["read", "measured"] if asked else ["measured"])


def test_what_goes_against_it_is_refused(served: Running) -> None:
    for more in (
        {"ignore_eos": True},
        {"min_tokens": 2},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "xml"}},
    ):
        body = {"prompt": "a", "structured_outputs": {"regex": "a"}, **more}
        assert served.ask("/v1/completions", body)[0] == 400, more
    with pytest.raises(ArgumentError, match="give one of json, regex"):
        StructuredOutputs()


@pytest.mark.parametrize(
    "wanted", [{"choice": "yes"}, {"choice": [1]}, {"choice": []}, {"json": 3}, {"regex": ["a"]}]
)
def test_other_types_are_refused(wanted: Any) -> None:
    with pytest.raises(ArgumentError, match=f"^{next(iter(wanted))} of structured outputs is"):
        StructuredOutputs(**wanted)


def test_an_empty_schema_is_one(llm: LLM) -> None:
    """It allows any JSON."""
    params = SamplingParams(structured_outputs=StructuredOutputs(json={}), max_tokens=1)
    assert not llm.generate([[5]], params)[0].error
    with pytest.raises(ArgumentError, match="have json, regex; give one"):
        StructuredOutputs(json={}, regex="a")


def test_the_engine_matches_beside_others(llm: LLM) -> None:
    """Rows with a grammar, with penalties and without anything, in one round."""
    plain = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    params = [
        plain,
        SamplingParams(temperature=0, structured_outputs=StructuredOutputs(regex="x{4}y")),
        SamplingParams(temperature=1, seed=1, top_k=3, presence_penalty=1,
                       structured_outputs=StructuredOutputs(choice=["one", "two"])),
    ]  # fmt: skip
    found = llm.generate(["abc"] * 3, params)
    (alone,) = llm.generate(["abc"], plain)
    assert found[0].text == alone.text
    assert found[1].text == "xxxxy"
    assert found[2].text in ("one", "two")
    assert [one.finish_reason for one in found] == ["length", "stop", "stop"]


# After c only the first byte of a character may come, whose second byte no token has.
DEAD_END: Any = {"prompt": "abc", "structured_outputs": {"regex": "ab|c\u00e9"}, "temperature": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_end_is_the_error_of_its_answer_alone(served: Running, stream: bool) -> None:
    body = DEAD_END | {"n": 4, "seed": 0, "stream": stream, "logprobs": 0}
    status, found, _ = served.ask("/v1/completions", body)
    assert status == 200
    texts, ends = dict[int, str](), dict[int, Any]()
    for document in _events(found) if stream else [found]:
        for choice in document["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + choice["text"]
            if choice["finish_reason"]:
                ends[index] = choice
    assert {texts[i] for i, end in ends.items() if end["finish_reason"] == "stop"} == {"ab"}
    dead = [i for i, end in ends.items() if end["finish_reason"] == "error"]
    assert 0 < len(dead) < 4 == len(ends)
    for i in dead:
        assert texts[i].startswith("c")
        assert ends[i]["error"]["type"] == "invalid_request_error"
        assert "structured output" in ends[i]["error"]["message"]
    assert all("error" not in end for i, end in ends.items() if i not in dead)


def test_openais_client_reads_the_error_of_an_answer(client: OpenAI) -> None:
    wanted = {"structured_outputs": DEAD_END["structured_outputs"]}
    found = client.chat.completions.create(
        model=MODEL, messages=CHAT, n=4, seed=0, temperature=1, extra_body=wanted
    )
    ends = Counter(str(choice.finish_reason) for choice in found.choices)
    assert ends["stop"] + ends["error"] == 4 > ends["error"] > 0
    for choice in found.choices:
        assert ((choice.model_extra or {}).get("error") is None) == (choice.finish_reason == "stop")


def test_where_all_answers_are_dead_ends_there_is_none(served: Running) -> None:
    body = DEAD_END | {"structured_outputs": {"regex": "c\u00e9"}}
    for n in (1, 2):
        status, found, _ = served.ask("/v1/completions", body | {"n": n})
        assert (status, "structured output" in found["error"]["message"]) == (400, True)
    events = _events(served.ask("/v1/completions", body | {"stream": True})[1])
    assert "structured output" in events[-1]["error"]["message"]


def _events(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


class _Characters:
    """A tokenizer with a token for each character."""

    def __init__(self, _: object) -> None: ...

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(map(chr, tokens))

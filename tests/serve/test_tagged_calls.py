"""Calls of functions in tags, Qwen3-Coder's and GLM 4.5's forms; and Cohere's actions."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from qoff.api.tools import Calls, split, written

from .test_calls import characters

TYPES: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "exact": {"type": "boolean"},
    "where": {"type": "array"},
    "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "zip": {"type": ["string", "null"]},
}
CALLS = Calls({"look": {"properties": TYPES}, "now": {}}, must=False, named=False, one_only=False)


def qwen(name: str, **values: str) -> str:
    """As Qwen3-Coder's chat template writes a call."""
    said = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{said}</function>\n</tool_call>"


def glm(name: str, **values: str) -> str:
    """As GLM 4.5's chat template writes a call."""
    said = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items()
    )
    return f"<tool_call>{name}\n{said}</tool_call>"


def found(text: str) -> tuple[str, list[tuple[str, Any]]]:
    """What is beside the calls, and their names and arguments."""
    said, calls = split(CALLS, text)
    functions = [one["function"] for one in calls]
    return said, [(one["name"], json.loads(one["arguments"])) for one in functions]


@pytest.mark.parametrize("form", [qwen, glm])
def test_values_have_the_types_of_the_schema(form: Any) -> None:
    text = form("look", city="12", days="3", exact="True", where='["a", {"b": 1}]', unit="null")
    expected = {"city": "12", "days": 3, "exact": True, "where": ["a", {"b": 1}], "unit": None}
    assert found(f"I look. {text}\n") == ("I look. ", [("look", expected)])
    text = form("look", days="three", unit="12", zip="None", city="Köln\n  <b>", where="")
    expected = {"days": "three", "unit": "12", "zip": None, "city": "Köln\n  <b>", "where": ""}
    assert found(text) == ("", [("look", expected)])


def test_values_without_a_type() -> None:
    """As in vLLM: Qwen's are texts, GLM's JSON."""
    assert found(qwen("now", zone="1")) == ("", [("now", {"zone": "1"})])
    assert found(glm("now", zone="1")) == ("", [("now", {"zone": 1})])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (qwen("now"), [("now", {})]),
        (glm("now"), [("now", {})]),
        ("<tool_call>now</tool_call>", [("now", {})]),
        ("<tool_call><function=now></function></tool_call>", [("now", {})]),
        (qwen("now").removesuffix("\n</tool_call>"), [("now", {})]),
        (qwen("look", city="a") + "\n" + qwen("now"), [("look", {"city": "a"}), ("now", {})]),
        (glm("look", city="a") + glm("now"), [("look", {"city": "a"}), ("now", {})]),
        ("<tool_call>look<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
         [("look", {"days": 2})]),
        (qwen("look", city=qwen("now").replace("\n", "")),
         [("look", {"city": "<tool_call><function=now></function></tool_call>"})]),
        (glm("look", city="<tool_call>now</tool_call>"),
         [("look", {"city": "<tool_call>now</tool_call>"})]),
    ],
)  # fmt: skip
def test_calls_are_found(text: str, calls: list[tuple[str, Any]]) -> None:
    assert found(text) == ("", calls)


@pytest.mark.parametrize(
    "text",
    [
        qwen("other", city="a"),
        glm("other", city="a"),
        "<tool_call>now",
        "<tool_call>now then</tool_call>",
        "<tool_call>\n<function=look>\n<parameter=city>\nKö",
        "<tool_call>\n<function=look>\n<parameter=city>\nKöln\n</parameter>\n",
        "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Köln",
        qwen("look", days="NaN"),
        "<tool_call><function=look>" + " " * 100_000,
        "<tool_call><function=look><parameter=city>" + "</parameter>" * 10_000,
        "<tool_call>look" + " " * 100_000,
        "<tool_call><function=look><parameter=city>" * 2_000,
    ],
)
@pytest.mark.timeout(20)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert found(text) == (text, [])


PLAIN = {"city": "Köln ]``` <|END_ACTION|>", "days": [1, 2.5]}
LOOK = ("look", PLAIN)


def r7b(*calls: tuple[str, Any], hidden: bool = False) -> str:
    """As the template of Command R7B writes calls. hidden: without special tokens."""
    said = [
        f'    {{"tool_call_id": "{number}", "tool_name": "{name}", '
        f'"parameters": {json.dumps(arguments, ensure_ascii=False)}}}'
        for number, (name, arguments) in enumerate(calls)
    ]
    text = "[\n" + ",\n".join(said) + "\n]"
    return text if hidden else f"<|START_ACTION|>{text}<|END_ACTION|>"


def command_r(*calls: tuple[str, Any]) -> str:
    """As Command R writes calls."""
    said = [{"tool_name": name, "parameters": arguments} for name, arguments in calls]
    return f"Action: ```json\n{json.dumps(said, indent=4, ensure_ascii=False)}\n```"


def actions(form: str, one_only: bool = False) -> Calls:
    template = {
        "cohere": "{{ tools }}<|START_ACTION|>[",
        "command-r": '{{ tools }}"tool_name": title of the tool in the specification,',
    }
    plain = Calls(CALLS.tools, must=False, named=False, one_only=one_only)
    calls = written(plain, template[form])
    assert calls.marked == form
    return calls


def read(form: str, text: str, with_marks: str | None = None) -> tuple[str, list[tuple[str, Any]]]:
    marks = None if with_marks is None else (lambda: with_marks)
    said, calls = split(actions(form), text, marks)
    functions = [one["function"] for one in calls]
    return said, [(one["name"], json.loads(one["arguments"])) for one in functions]


@pytest.mark.parametrize("calls", [[LOOK], [("now", {})], [LOOK, ("now", {}), LOOK]])
@pytest.mark.parametrize("after", ["", "\n"])
def test_actions_are_found(calls: list[tuple[str, Any]], after: str) -> None:
    assert read("cohere", f"I look.{r7b(*calls)}{after}") == ("I look.", calls)
    assert read("command-r", f"Plan: look\n{command_r(*calls)}{after}") == ("Plan: look\n", calls)
    said = f"Action:```json\n{json.dumps([{'tool_name': n, 'parameters': a} for n, a in calls])}```"
    assert read("command-r", f"{said}\nRelevant Documents: None") == (
        "Relevant Documents: None", calls
    )  # fmt: skip


@pytest.mark.parametrize("calls", [[LOOK], [LOOK, ("now", {})]])
def test_actions_whose_marks_a_text_leaves_out(calls: list[tuple[str, Any]]) -> None:
    text = f"I look.{r7b(*calls)}<|END_OF_TURN_TOKEN|>"
    assert read("cohere", f"I look.{r7b(*calls, hidden=True)}", text) == ("I look.", calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("cohere", "I look." + r7b(LOOK)),
        ("cohere", "I look." + r7b(LOOK, hidden=True)),
        ("command-r", "Action\n" + command_r(LOOK)),
    ],
)
def test_streams_show_no_action(form: str, text: str) -> None:
    stream = characters((), actions(form).begins)
    shown = "".join(stream.add([ord(one)])[1] for one in text)
    assert shown == text[: text.index("Action:" if form == "command-r" else text[7])]


def test_identifiers_are_the_models_where_it_writes_them() -> None:
    """As vLLM's cohere_command3 does."""
    text = r7b(LOOK, LOOK)
    assert [one["id"] for one in split(actions("cohere"), text)[1]] == ["0", "1"]
    found = split(actions("command-r"), command_r(LOOK, LOOK))[1]
    assert len({one["id"] for one in found}) == 2
    assert len(split(actions("cohere", one_only=True), text)[1]) == 1


@pytest.mark.parametrize(
    "text",
    [
        '<|START_ACTION|>{"tool_name":"look","parameters":{"city":"a"}}<|END_ACTION|>',
        '<|START_ACTION|>\n[{"tool_name":"look","parameters":{"city":"a"}}]',
        '<|START_ACTION|>[{"parameters":{"city":"a"},"tool_call_id":7,"tool_name":"look"}]',
    ],
)
def test_other_ways_to_write_actions(text: str) -> None:
    assert read("cohere", text) == ("", [("look", {"city": "a"})])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("cohere", r7b(("other", {}))),
        ("cohere", r7b(("now", {}), ("other", {}))),
        ("cohere", r7b(("now", "text"))),
        ("cohere", "<|START_ACTION|>[]<|END_ACTION|>"),
        ("cohere", r7b(LOOK)[:-30]),
        ("cohere", '<|START_ACTION|>[{"tool_name":"now","parameters":{}}<|END_ACTION|>'),
        ("cohere", '<|START_ACTION|>[{"tool_name":["now"],"parameters":{}}]<|END_ACTION|>'),
        ("cohere", r7b(("now", {"a": math.nan}))),
        ("cohere", "<|START_ACTION|>" + " " * 100_000),
        ("cohere", "<|START_ACTION|>" * 10_000),
        ("cohere", '<|START_ACTION|>[{"a":' + "[" * 100_000),
        ("cohere", '<|START_ACTION|>["' + '\\"' * 100_000),
        ("command-r", command_r(("directly_answer", {}))),
        ("command-r", "No. " + command_r(LOOK)),
        ("command-r", "Action:" + " " * 100_000),
        ("command-r", "Action: ```json\n" * 10_000),
    ],
)
@pytest.mark.timeout(20)
def test_what_is_no_action_stays_text(form: str, text: str) -> None:
    assert read(form, text) == (text, [])


@pytest.mark.parametrize(("broken", "numbers"), [("1", [1, 2]), ("[1 2]", [2])])
def test_what_an_action_quotes_is_none(broken: str, numbers: list[int]) -> None:
    quoted = json.dumps(r7b(("now", {})))
    text = "".join(
        f'<|START_ACTION|>[{{"tool_name":"now","parameters":{{"q":{q},"t":{t}}}}}]<|END_ACTION|>'
        for q, t in ((broken, quoted), ("2", '""'))
    )
    assert [arguments["q"] for _, arguments in read("cohere", text)[1]] == numbers

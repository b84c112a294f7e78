"""Calls of functions in tags: Qwen3-Coder's and GLM 4.5's forms."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qoff.api.tools import Calls, split

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

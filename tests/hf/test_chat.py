"""Chat templates: transformers' text, and one line for whatever a template does wrong."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qoff.errors import ArgumentError
from qoff.hf import chat, chat_worker
from qoff.hf.chat import ChatRenderer
from qoff.hf.tokenizer import load_tokenizer
from tests.tiny_models import save_tokenizer

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " 1 < 2 é\n", "name": None},
    {"role": "assistant", "content": "Yes", "reasoning": "They differ."},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TEMPLATES = {
    "plain": "{% for m in messages %}\n  {{ m['role'] }}: {{ m.content | trim }}\n{% endfor %}\n",
    "names": "{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}{{ extra | default(7) }}",
    "tools": "{{ tools | tojson }}{{ tools is none }}{{ documents }}",
    "json": "{{ messages | tojson(indent=2) }}",
    "missing": "{% for m in messages %}{{ 'name' in m }}{{ m.reasoning_content }}{% endfor %}",
    "loops": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}x{% endfor %}",
    "namespace": "{% set n = namespace(a=0) %}{% for m in messages %}{% set n.a = n.a + 1 %}"
    "{% endfor %}{{ n.a }}{{ dict(a=1) }}{{ dict.fromkeys('ab') }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "macros": "{% macro f(x) -%} [{{ x }}] {%- endmacro %}{{ f(messages[0].role) }}",
}
WRONG = {
    "a loop": "{% for i in range(10**9) %}{% endfor %}",
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "a long text": "{{ 'a' * 10**10 }}",
    "a wide text": "{{ 'a'.center(10**10) }}",
    "doubling": "{% set n = namespace(a='aa') %}{% for i in range(99) %}{% set n.a = n.a ~ n.a %}"
    "{% endfor %}",
    "much output": "{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}",
    "a large number": "{{ 10 ** (10 ** 10) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "syntax": "{% for %}\n{% endfor %}",
    "nesting": "{{ " + "(" * 99999 + ")" * 99999 + " }}",
    "division": "{{ 1 / 0 }}",
    "nothing there": "{{ x.y.z }}",
    "the sandbox": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a refusal": "{{ raise_exception('no\nno') }}",
    "a file": "{% include 'x' %}",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def renderer() -> Iterator[ChatRenderer]:
    with ChatRenderer() as renderer:
        yield renderer


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "options", [{}, {"tools": [TOOL], "extra": 5}, {"add_generation_prompt": False}]
)
def test_the_text_is_that_of_transformers(
    tokenizer: Any, renderer: ChatRenderer, name: str, options: dict[str, Any]
) -> None:
    template = TEMPLATES[name]
    given = {"add_generation_prompt": True, **options}
    wanted = tokenizer.apply_chat_template(CHAT, chat_template=template, tokenize=False, **given)
    assert renderer.render(tokenizer, CHAT, chat_template=template, **options) == wanted


def test_a_message_is_continued(tokenizer: Any, renderer: ChatRenderer) -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    wanted = tokenizer.apply_chat_template(CHAT, tokenize=False, **options)
    assert renderer.render(tokenizer, CHAT, continue_final_message=True) == wanted
    assert wanted.endswith("Yes")


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m['role'] }}:{% for part in m['content'] %}"
        "{% if part['type'] == 'text' %} {{ part['text'] }}{% endif %}{% endfor %};{% endfor %}",
        "{% for m in messages %}{{ m.role }}:{% for part in m.content"
        " | selectattr('type', 'equalto', 'text') %} {{ part['text'] }}{% endfor %};{% endfor %}",
        "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
        "{{ m.content[0].text }}, of type {{ m.content[0].type }}{% endif %};{% endfor %}",
    ],
)
def test_text_is_a_part_where_a_template_reads_only_these(
    tokenizer: Any, renderer: ChatRenderer, template: str
) -> None:
    """As in LLaVA, SmolVLM and Pixtral: text alone would be left out, or fail."""
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    assert renderer.render(tokenizer, said, chat_template=template) == "user: Hi;assistant: Yes;"
    continued = renderer.render(
        tokenizer, said, chat_template=template, continue_final_message=True
    )
    assert continued == "user: Hi;assistant: Yes"


BY_PARTS = (
    "{% set n = namespace(a=1) %}{% for m in messages %}{{ m.role }}:{% if m.role == 'user' %}"
    "{% for part in m.content %}{% if part.type == 'text' %} {{ part.text }}{% endif %}{% endfor %}"
    "{% else %} {{ m.content | trim }}{% endif %};{% endfor %}"
)


def test_each_role_is_read_as_the_template_reads_it(tokenizer: Any, renderer: ChatRenderer) -> None:
    said = [{"role": r, "content": x} for r, x in (("user", "Hi"), ("assistant", " Yes "))]
    found = renderer.render(tokenizer, said, chat_template=BY_PARTS)
    assert found == "user: Hi;assistant: Yes;"


def test_a_request_that_fails_changes_nothing_for_the_next(tokenizer: Any) -> None:
    said = [{"role": "user", "content": "Hi"}]
    with ChatRenderer() as fresh:
        with pytest.raises(ArgumentError):
            fresh.render(tokenizer, said, chat_template=BY_PARTS, namespace=0)
        assert fresh.render(tokenizer, said, chat_template=BY_PARTS) == "user: Hi;"


def test_what_templates_read_is_remembered_of_so_many(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "_TEMPLATES", 2)
    said = [{"role": "user", "content": "Hi"}]
    with ChatRenderer() as fresh:
        for end in "abca":
            found = fresh.render(tokenizer, said, chat_template=BY_PARTS + end)
            assert found == f"user: Hi;{end}"
            assert len(fresh._by_parts) <= 2


@pytest.mark.parametrize("name", WRONG)
def test_what_goes_wrong_is_one_line(tokenizer: Any, renderer: ChatRenderer, name: str) -> None:
    start = time.perf_counter()
    with pytest.raises(ArgumentError, match="the chat template does not take this: ") as refusal:
        renderer.render(tokenizer, CHAT, chat_template=WRONG[name])
    assert "\n" not in str(refusal.value)
    assert time.perf_counter() - start < 20  # a second of CPU time on a machine that is busy
    assert renderer.render(tokenizer, CHAT, chat_template="on") == "on"


def test_the_process_ends_with_its_renderer(tokenizer: Any) -> None:
    renderer = ChatRenderer()
    renderer.render(tokenizer, CHAT)
    worker = renderer._worker
    assert worker is not None
    pid = worker._process.pid
    renderer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert renderer.render(tokenizer, CHAT)
    renderer.close()


def test_a_process_that_was_killed_is_replaced(tokenizer: Any, renderer: ChatRenderer) -> None:
    renderer.render(tokenizer, CHAT)
    assert renderer._worker is not None
    renderer._worker._process.kill()
    renderer._worker._process.wait()
    assert renderer.render(tokenizer, CHAT)


def test_a_lower_limit_of_address_space_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may not raise its own."""
    asked = dict[int, tuple[int, int]]()
    monkeypatch.setattr("resource.getrlimit", lambda _: (700 << 20, 800 << 20))
    monkeypatch.setattr("resource.setrlimit", asked.__setitem__)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(chat_worker, "read", lambda _: b"")
    chat_worker.main()
    assert asked[resource.RLIMIT_AS] == (800 << 20, 800 << 20)


def test_an_interrupted_request_leaves_no_answer_to_the_next(
    tokenizer: Any, renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("qoff.hf.chat.read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            renderer.render(tokenizer, CHAT, chat_template="one")
    assert renderer.render(tokenizer, CHAT, chat_template="two") == "two"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sanitize_control_tokens", True),
        ("truncation", True),
        ("max_length", 5),
        ("padding", True),
        ("continue_final_message", "content"),
    ],
)
def test_options_that_would_change_nothing_are_refused(
    tokenizer: Any, renderer: ChatRenderer, name: str, value: Any
) -> None:
    """Those of transformers that no template is told of."""
    options: dict[str, Any] = {name: value}
    with pytest.raises(ArgumentError, match=name) as refusal:
        renderer.render(tokenizer, CHAT, **options)
    assert "\n" not in str(refusal.value)

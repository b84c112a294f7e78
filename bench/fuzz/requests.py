"""Inputs that come from a program: prompts, conversations, chat templates, sampling parameters."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from qoff.engine.admission import Admission
from qoff.engine.grammar import Grammars
from qoff.engine.prompts import Chat, PromptReader, conversations, prompt_list
from qoff.engine.request import SamplingParams, Sequence
from qoff.engine.sampling import LogitsRow, Sampler
from qoff.hf.tokenizer import load_tokenizer
from qoff.models.spec import DecoderSpec
from qoff.plan import Plan

from . import corpus
from .edits import anything, edit_text
from .targets import Target

_PIECES = tuple(
    r"""
{{ messages }}
{{ x }}
{% for m in messages %}
{% endfor %}
{% if x %}
{% endif %}
{{ m.a.b.c }}
{{ messages[9].role }}
{% set x = 'a' %}
{% set x = x ~ x %}
{{ 1 / 0 }}
{{ 'a'.__class__.__mro__ }}
{{ raise_exception('no') }}
{{ raise_exception(messages) }}
{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}
{% include 'x' %}
{% extends messages %}
{{ messages | tojson | length }}
{{ strftime_now('%Y') }}
{{ strftime_now(1) }}
{% generation %}
{% endgeneration %}
{{ namespace(a=1).a }}
{{ dict(a=1) }}
{{ ''.join(1) }}
{% break %}
{{ '%d' % 'a' }}
{{ '%*d' % (9, 1) }}
{{ messages | sort }}
{#
}}
{{
""".splitlines()
)
_RUNAWAY = (
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{% set x = namespace(a='a') %}{% for i in range(99) %}{% set x.a = x.a ~ x.a %}{% endfor %}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ 'a'.center(10**10) }}",
    "{{ range(99999) | list | string * 9999 }}",
)
_FIELDS = (*SamplingParams.__dataclass_fields__, "other")


def targets(folder: Path) -> dict[str, Target]:
    """Targets beside a model's files; folder: with a tokenizer."""
    reader = PromptReader(load_tokenizer(folder))
    spec = DecoderSpec.from_config(corpus.CONFIG)
    eos = frozenset({258})
    grammars = Grammars(reader, eos)
    admission = Admission(Plan(batch_size=4, context=96), spec, reader, grammars, eos)

    def chat_template(template: str) -> None:
        reader.read(Chat([{"role": "user", "content": "Hi"}], {"chat_template": template}))

    def request(value: list[Any]) -> None:
        prompts, params, continuations = value
        for _ in admission.requests(prompt_list(prompts), params, continuations):
            pass

    def sampled(fields: dict[str, Any]) -> None:
        params = SamplingParams(**fields)
        sequence = Sequence(0, 0, None, (1, 2, 3), params, 9, frozenset({7, 300}))
        sampler = Sampler(50, 1, 6, torch.device("cpu"))
        sampler.begin(0, sequence)
        for _ in range(3):
            sampler.draw([LogitsRow(0, sequence, torch.randn(50) * 10)])
            if not 0 <= sequence.answer[-1] < 50:
                raise AssertionError(f"token {sequence.answer[-1]} of 50")

    return {
        "chat-template": Target(lambda _: corpus.TEMPLATE, _edit_template, chat_template),
        "conversation": Target(
            lambda _: [{"role": "user", "content": "Hi"}], _edit_value, _conversation(reader)
        ),
        "prompts": Target(
            lambda _: [
                ["a", [1, 2], {"prompt": "a"}, {"prompt_token_ids": [1, 2]}],
                SamplingParams(),
                None,
            ],
            _edit_request,
            request,
            8,
        ),
        "sampling": Target(lambda _: {}, _edit_fields, sampled, 8),
    }


def _conversation(reader: PromptReader) -> Any:
    def run(messages: Any) -> None:
        for chat in conversations(messages, {}):
            reader.read(chat)

    return run


def _edit_request(value: list[Any], random: Random) -> list[Any]:
    at = random.choice((0, 0, 0, 0, 1, 2))
    return [*value[:at], _edit_value(value[at], random), *value[at + 1 :]]


def _edit_template(template: str, random: Random) -> str:
    if random.random() < 0.0005:  # a second for each
        return template + random.choice(_RUNAWAY)
    return edit_text(template, random, _PIECES)


def _edit_value(value: Any, random: Random) -> Any:
    """A value of Python with one part replaced."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        return {**value, key: _edit_value(value[key], random)}
    if isinstance(value, list) and value and random.random() < 0.9:
        at = random.randrange(len(value))
        return [*value[:at], _edit_value(value[at], random), *value[at + 1 :]]
    return _strange(random)


def _edit_fields(fields: dict[str, Any], random: Random) -> dict[str, Any]:
    name = random.choice(_FIELDS[:-1])
    choices = (0, 1, 2, 0.5, 1.0, -1, 0.01, 1e-9, 1.9, 4, None, True, "a", ["a"], [5])
    value = random.choice(choices) if random.random() < 0.7 else _strange(random)
    return {**fields, name: value}


def _strange(random: Random) -> Any:
    """A value that JSON has, or one that it has not."""
    others: tuple[Any, ...] = (
        b"bytes", (1, 2), {1, 2}, range(3), torch.tensor([1, 2]), torch.tensor(1.5), np.arange(3),
        np.float32(0.5), np.int64(3), np.bool_(True), object(), SamplingParams, 1 + 2j, [1, 2.5],
        [1, True], {"prompt_token_ids": [1.0]}, {"prompt": 5}, {"prompt": None}, {5: 6},
        ["a", None], lambda: 1,
    )  # fmt: skip
    return random.choice(others) if random.random() < 0.5 else anything(random)

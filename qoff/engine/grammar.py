"""Answers that must match a JSON schema, a regular expression, one of some texts, or a grammar."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from qoff.errors import ArgumentError, QoffError, raised_as
from qoff.schema import shown
from qoff.system_memory import return_freed

from .prompts import PromptReader

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Where JSON may have any number of blanks and lines, models write them without end.
_JSON: Any = {"whitespace_pattern": r"[ \n]?"}
_WRONG = "the structured output cannot be had"
# What llguidance does with a schema takes about 1 us a character, but with expressions and grammars
# up to the square of their length, and of their signs. The worst text of so many takes about 0.1 s.
_SCHEMA, _CHARACTERS, _SIGNS = 128 << 10, 16 << 10, 2000
_REFERENCES = 500  # of a schema: it follows them by recursion, and 1800 exceed a thread's stack
_SIGN = re.compile(r"[^\w\s]")


@dataclass(frozen=True)
class StructuredOutputs:
    """What an answer must match, with vLLM's names; exactly one of them.

    json: a JSON schema, as text or parsed; json_object: any JSON object; choice: one of the texts;
    grammar: in llguidance's Lark dialect. Needs the package llguidance. Raises ArgumentError for
    none or several, and for other types.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        given = [one.name for one in fields(self) if getattr(self, one.name) not in (None, False)]
        if len(given) != 1:
            raise ArgumentError(
                f"structured outputs have {', '.join(given) or 'nothing'}; give one of "
                + ", ".join(one.name for one in fields(self))
            )
        for name, good, wanted in (
            ("json", isinstance(self.json, str | Mapping | None), "a JSON schema, text or parsed"),
            ("regex", isinstance(self.regex, str | None), "text"),
            ("choice", self.choice is None or _texts(self.choice), "a list of texts, not empty"),
            ("grammar", isinstance(self.grammar, str | None), "text"),
            ("json_object", isinstance(self.json_object, bool), "True or False"),
        ):
            if not good:
                raise ArgumentError(
                    f"{name} of structured outputs is {shown(getattr(self, name))}; use {wanted}"
                )


def _texts(choice: object) -> bool:
    """Whether it is a list of texts; a text is a sequence of its characters, which nobody means."""
    if not isinstance(choice, list | tuple) or not choice:
        return False
    return all(isinstance(one, str) for one in choice)


class Matcher:
    """Where an answer stands in what it must match."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self, vocab_size: int) -> Tensor:
        """Whether each token may come next, bool [vocab_size]; none that the tokenizer has not."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        known = torch.from_numpy(np.unpackbits(bits, bitorder="little")[:vocab_size])
        found = torch.zeros(vocab_size, dtype=torch.bool)
        found[: len(known)] = known > 0
        return found

    def take(self, token: int) -> str:
        """Go on by a token; why it cannot be gone on with then, or nothing."""
        self._matcher.consume_token(token)
        return f"{_WRONG}: {_line(self._matcher.get_error())}" if self._matcher.is_error() else ""

    def copy(self) -> Matcher:
        """The same for another answer."""
        return Matcher(self._matcher.deep_copy())

    def reset(self) -> None:
        """Begin again."""
        self._matcher.reset()


class Grammars:
    """Compiles what answers must match. eos: tokens that end an answer. Threads may share it."""

    def __init__(self, reader: PromptReader, eos: frozenset[int]) -> None:
        self._reader, self._eos = reader, eos
        self._lock = threading.Lock()
        self._tokens: LLTokenizer | None = None
        self._last: tuple[str, Matcher] | None = None  # a grammar, and what came of it

    def warm(self) -> None:
        """Have what grammars need take its memory now, where it can be had."""
        with suppress(QoffError):  # whoever asks for one hears of it
            self.matcher(StructuredOutputs(json_object=True))
        return_freed()  # reading the tokenizer takes three times as much

    def matcher(self, wanted: StructuredOutputs) -> Matcher:
        """Raises ArgumentError for what is none, or too complex; QoffError without llguidance."""
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ModuleNotFoundError as error:
            raise QoffError(
                "structured output needs llguidance, which is not installed; "
                "pip install 'qoff[serve]'"
            ) from error
        # All of it together takes about a tenth of a second at most, a step some milliseconds.
        limits = LLParserLimits(
            max_items_in_row=1000,
            initial_lexer_fuel=100_000,
            step_lexer_fuel=50_000,
            step_max_items=20_000,
            max_lexer_states=50_000,
            max_grammar_size=100_000,
            verbose_errors=False,
        )
        with raised_as(ArgumentError, _WRONG):
            _check_size(wanted)
            grammar = _grammar(wanted)
            if (last := self._last) is not None and last[0] == grammar:  # of another prompt
                return last[1].copy()
            found = LLMatcher(self._known(), grammar, log_level=0, limits=limits)
            if not found.is_error():
                found.compute_bitmask()  # the first takes longest: not in a round
            if found.is_error():
                raise ArgumentError(f"{_WRONG}: {_line(found.get_error())}")
        matcher = Matcher(found)
        self._last = grammar, matcher.copy()
        return matcher

    def _known(self) -> LLTokenizer:
        """The tokenizer as llguidance has it; made once, in about a second."""
        tokenizer: Any = self._reader.tokenizer
        if not self._eos:
            raise ArgumentError(f"{_WRONG}: the model has no token that ends an answer")
        with self._lock:
            if self._tokens is None:
                from llguidance.hf import from_tokenizer

                self._tokens = from_tokenizer(
                    tokenizer,
                    n_vocab=1 + max(max(self._eos), max(tokenizer.get_vocab().values())),
                    eos_token=sorted(self._eos),
                )
            return self._tokens


def _check_size(wanted: StructuredOutputs) -> None:
    """Raise ArgumentError for what would hold up others while it is read. A choice is a sign."""
    schema = _schema(wanted)
    if schema is not None:
        _check_most(len(schema), _SCHEMA, "characters")
        objects = list(_objects(json.loads(schema)))
        _check_most(sum("$ref" in one for one in objects), _REFERENCES, "references")
        text = " ".join(pattern for one in objects for pattern in _patterns(one))
        _check_most(len(text), _CHARACTERS, "characters in patterns")
        _check_most(sum(1 for _ in _SIGN.finditer(text)), _SIGNS, "signs in patterns")
    elif wanted.choice is not None:
        _check_most(sum(map(len, wanted.choice)), _CHARACTERS, "characters")
        _check_most(len(wanted.choice), _SIGNS, "choices")
    else:
        text = wanted.regex or wanted.grammar or ""
        _check_most(len(text), _CHARACTERS, "characters")
        _check_most(sum(1 for _ in _SIGN.finditer(text)), _SIGNS, "signs")


def _check_most(found: int, most: int, what: str) -> None:
    if found > most:
        raise ArgumentError(f"{_WRONG}: it has {found} {what}, and may have {most}")


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """All objects in a schema."""
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            yield one
            left += one.values()
        elif isinstance(one, list):
            left += one


def _patterns(schema: dict[str, Any]) -> Iterator[str]:
    """The regular expressions of an object of a schema itself."""
    if isinstance(schema.get("pattern"), str):
        yield schema["pattern"]
    if isinstance(schema.get("patternProperties"), dict):
        yield from schema["patternProperties"]


def _schema(wanted: StructuredOutputs) -> str | None:
    """The schema as text, where there is one."""
    given = wanted.json
    return given if given is None or isinstance(given, str) else json.dumps(given)


def _grammar(wanted: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    if wanted.json_object:
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_JSON)
    if (schema := _schema(wanted)) is not None:
        return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON)
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, wanted.choice)))
    return LLMatcher.grammar_from_lark(wanted.grammar or "")


def _line(text: str) -> str:
    return " ".join(text.split())[:300]

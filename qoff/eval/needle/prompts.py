"""Prompts of a needle test: a long text with a number in it, and the question for the number."""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice

from transformers import PreTrainedTokenizerBase

from qoff.errors import ArgumentError
from qoff.eval.texts import read_text
from qoff.hf.chat import ChatRenderer

INTRODUCTION = (
    "The following text states a pass key somewhere. Read it carefully and keep the pass key in "
    "mind: at the end you will be asked for it."
)
NEEDLE = "The pass key is {key}. Remember it."
QUESTION = "What is the pass key?"
OPENING = "The pass key is"  # of the answer; the key follows
_DIGITS = 5  # of a key
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class NeedleSettings:
    """What a needle test asks. Raises ArgumentError for values out of range.

    lengths: tokens of prompt and answer together, at most. depths: where the needle lies, from 0,
    before all other text, to 1, after it. Both are sorted, each value once. repetitions: prompts
    for each of both, with other keys and other text; they depend on `seed`, length and repetition
    alone, so that prompts of other depths differ in the needle's place only. filler: text to hide
    it in; empty: the one that comes with qoff. answer_tokens: of an answer, at most.
    """

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    repetitions: int = 3
    seed: int = 0
    filler: str = ""
    answer_tokens: int = 12

    def __post_init__(self) -> None:
        depths = self.depths and all(0 <= depth <= 1 for depth in self.depths)
        for name, good, wanted in (
            ("lengths", self.lengths and min(self.lengths) > 0, "one token or more"),
            ("depths", depths, "one or more, from 0 to 1"),
            ("repetitions", self.repetitions >= 1, "at least 1"),
            ("answer_tokens", self.answer_tokens >= 1, "at least 1"),
            ("filler", not self.filler or self.filler.strip(), "some text, or none"),
        ):
            if not good:
                raise ArgumentError(f"{name} is {getattr(self, name)!r}; use {wanted}")
        for name in ("lengths", "depths"):
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))


@dataclass(frozen=True)
class NeedlePrompt:
    """Token ids of a prompt, and of the key that should follow."""

    length: int
    depth: float
    repetition: int
    key: str
    tokens: list[int]
    key_tokens: list[int]


Frame = Callable[[str], str]  # from what is asked to the text up to where the key has to follow


def prompts(tokenizer: PreTrainedTokenizerBase, settings: NeedleSettings) -> Iterator[NeedlePrompt]:
    """All prompts of a test, shortest lengths first, by the chat template if there is one.

    Each is as long as whole sentences of filler allow. Raises ArgumentError for a length without
    room for needle and question, and for keys of more tokens than an answer has.
    """
    text = settings.filler or read_text()
    sentences = [s for s in _SENTENCE_END.split(" ".join(text.split())) if s]
    with ChatRenderer() as renderer:
        yield from _prompts(tokenizer, partial(_frame, tokenizer, renderer), sentences, settings)


def _prompts(
    tokenizer: PreTrainedTokenizerBase,
    frame: Frame,
    sentences: Sequence[str],
    settings: NeedleSettings,
) -> Iterator[NeedlePrompt]:
    for length in settings.lengths:
        room = length - settings.answer_tokens
        for repetition in range(settings.repetitions):
            rng = random.Random(f"{settings.seed} {length} {repetition}")
            key = str(rng.randrange(10 ** (_DIGITS - 1), 10**_DIGITS))
            filler = _enough(tokenizer, endless(sentences, rng), room)
            key_tokens = _key_tokens(tokenizer, frame, key)
            if len(key_tokens) > settings.answer_tokens:
                raise ArgumentError(
                    f"a key of {_DIGITS} digits has {len(key_tokens)} tokens, an answer "
                    f"{settings.answer_tokens}; use more answer_tokens"
                )
            for depth in settings.depths:
                tokens = _longest(tokenizer, frame, filler, key, depth, room)
                yield NeedlePrompt(length, depth, repetition, key, tokens, key_tokens)


def endless(sentences: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Sentences over and over, beginning at one of them that is drawn."""
    return islice(cycle(sentences), rng.randrange(len(sentences)), None)


def _enough(tokenizer: PreTrainedTokenizerBase, sentences: Iterator[str], room: int) -> list[str]:
    """The first sentences, a little more than fit in `room` tokens."""
    found: list[str] = []
    tokens = 0
    while tokens <= room + room // 8:  # what is joined may have a few tokens less
        found.append(next(sentences))
        tokens += len(tokenizer.encode(found[-1], add_special_tokens=False))
    return found


def _longest(
    tokenizer: PreTrainedTokenizerBase,
    frame: Frame,
    filler: Sequence[str],
    key: str,
    depth: float,
    room: int,
) -> list[int]:
    """The prompt with most of the filler's first sentences that has `room` tokens at most."""

    def tokens(sentences: int) -> list[int]:
        return _encoded(tokenizer, _text(frame, filler[:sentences], key, depth))

    if (least := len(tokens(0))) > room:
        raise ArgumentError(
            f"needle and question alone are {least} tokens, and there is room for {room}; "
            "use longer lengths"
        )
    counts = range(1, len(filler) + 1)
    return tokens(bisect_right(counts, room, key=lambda count: len(tokens(count))))


def _text(frame: Frame, filler: Sequence[str], key: str, depth: float) -> str:
    """The whole prompt, up to where the key has to follow."""
    at = round(depth * len(filler))
    body = " ".join([*filler[:at], NEEDLE.format(key=key), *filler[at:]])
    return frame(f"{INTRODUCTION}\n\n{body}\n\n{QUESTION}")


def _frame(tokenizer: PreTrainedTokenizerBase, renderer: ChatRenderer, content: str) -> str:
    if not tokenizer.chat_template:
        return f"{content} {OPENING}"
    return renderer.render(tokenizer, [{"role": "user", "content": content}]) + OPENING


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    special = not tokenizer.chat_template  # which has them already
    return list(tokenizer.encode(text, add_special_tokens=special, verbose=False))


def _key_tokens(tokenizer: PreTrainedTokenizerBase, frame: Frame, key: str) -> list[int]:
    """What follows a prompt's tokens when the key follows its text."""
    text = _text(frame, [], key, 0)
    before, whole = _encoded(tokenizer, text), _encoded(tokenizer, f"{text} {key}")
    if whole[: len(before)] == before:
        return whole[len(before) :]
    return list(tokenizer.encode(f" {key}", add_special_tokens=False))

"""What prompts may be, and their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral, Number
from typing import Any, TypeAlias

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qoff.errors import ArgumentError, ContextLengthError, QoffError, raised_as
from qoff.hf.chat import ChatRenderer
from qoff.schema import shown

_WARM = 512  # times four words, which are read before memory is measured
_CHARACTERS = 16  # of a text for each token that may be wanted, read at first
_DOUBT = 1024  # tokens that the first part of a text may have more of than in the whole
_FORMS = "text, token ids, {'prompt': text} or {'prompt_token_ids': ids}"


@dataclass(frozen=True)
class Chat:
    """A conversation, to be continued. options: of `ChatRenderer.render`."""

    messages: list[Mapping[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)


Prompt: TypeAlias = str | list[int] | tuple[int, ...] | Mapping[str, Any] | Chat


def prompt_list(prompts: Prompt | Iterable[Prompt]) -> list[Any]:
    """Prompts one by one; a text is one, and a flat list of numbers, right or wrong, is one.

    So is a tensor of one dimension.
    """
    if isinstance(prompts, Tensor) and prompts.dim() == 1:
        prompts = prompts.tolist()
    if isinstance(prompts, str | bytes | Mapping | Chat):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ArgumentError(f"prompts are of type {type(prompts).__name__}; give a list of prompts")
    with raised_as(ArgumentError, f"prompts are of type {type(prompts).__name__}"):
        each = iter(prompts)
    found = list(each)  # what a generator raises is its caller's
    return [found] if found and all(isinstance(one, Number) for one in found) else found


def conversations(messages: Any, options: Mapping[str, Any]) -> list[Chat]:
    """One conversation, a list of messages, or a list of such lists."""
    found = list(messages) if isinstance(messages, list | tuple) else [messages]
    if found and all(isinstance(message, Mapping) for message in found):
        found = [found]
    for one in found:
        if not isinstance(one, list | tuple) or not all(isinstance(m, Mapping) for m in one):
            raise ArgumentError(
                "messages are a list like [{'role': 'user', 'content': text}], or a list of such "
                f"lists, not {type(one).__name__}"
            )
    return [Chat(list(one), options) for one in found]


class PromptReader:
    """The tokens of prompts. tokenizer: None where a checkpoint has none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._renderer = ChatRenderer()

    def warm(self) -> None:
        """Have what reads prompts take its memory now: a process for templates, threads."""
        if self._tokenizer is None:
            return
        with suppress(QoffError):  # whoever asks with it hears of it
            self._encoded("a b c d " * _WARM, verbose=False)  # longer than some models' context
        if getattr(self._tokenizer, "chat_template", None):
            with suppress(QoffError):
                self._renderer.render(self._tokenizer, [{"role": "user", "content": "a"}])

    def close(self) -> None:
        """End the process that renders chat templates, if there is one."""
        self._renderer.close()

    def read(self, prompt: object, most: int | None = None) -> tuple[str | None, tuple[int, ...]]:
        """The text of a prompt, where it is known, and its token ids.

        most: tokens; a text that is much longer is refused, without reading all of it. Raises
        ContextLengthError for that, ArgumentError for what is no prompt, and for text without a
        tokenizer.
        """
        if isinstance(prompt, Mapping):
            if not prompt or not all(key in ("prompt", "prompt_token_ids") for key in prompt):
                keys = ", ".join(map(shown, prompt))
                raise ArgumentError(f"a prompt is {_FORMS}, not a dict with the keys {keys or '-'}")
            text, tokens = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if text is not None and not isinstance(text, str):
                raise ArgumentError(f"a prompt is text, not {type(text).__name__}")
            if tokens is not None:
                return text, token_ids(tokens)
            prompt = text
        if isinstance(prompt, str):
            return prompt, self._encoded(prompt, most)
        if isinstance(prompt, Chat):
            return self._chat(prompt, most)
        return None, token_ids(prompt)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Raises ArgumentError where there is none."""
        if self._tokenizer is None:
            raise ArgumentError("the checkpoint has no tokenizer; give prompts as token ids")
        return self._tokenizer

    def check_chat(self, template: str | None) -> None:
        """Raise ArgumentError where no template can be applied to conversations."""
        if template is None and not self.tokenizer.chat_template:
            raise ArgumentError("the tokenizer has no chat template; give chat_template")

    def _chat(self, chat: Chat, most: int | None) -> tuple[str, tuple[int, ...]]:
        text = self._renderer.render(self.tokenizer, chat.messages, **chat.options)
        # A template has the special tokens itself.
        return text, self._encoded(text, most, add_special_tokens=False)

    def _encoded(self, text: str, most: int | None = None, **options: Any) -> tuple[int, ...]:
        part = len(text) if most is None else _CHARACTERS * (most + _DOUBT)
        with raised_as(ArgumentError, "the tokenizer does not take this text"):
            while most is not None and part < len(text):
                if len(self.tokenizer(text[:part], **options)["input_ids"]) > most + _DOUBT:
                    raise ContextLengthError(
                        f"a prompt of {len(text)} characters has more than {most} tokens, the most "
                        "that this takes"
                    )
                part *= 4
            return tuple(self.tokenizer(text, **options)["input_ids"])


def _is_token(one: object) -> bool:
    return isinstance(one, Integral) and not isinstance(one, bool)


def token_ids(prompt: object) -> tuple[int, ...]:
    """The token ids of a list. Raises ArgumentError for another type, and for other numbers."""
    if not isinstance(prompt, list | tuple):
        raise ArgumentError(f"a prompt is {_FORMS}, not {type(prompt).__name__}")
    for one in prompt:
        if not _is_token(one):
            raise ArgumentError(f"a prompt's token ids are whole numbers, not {type(one).__name__}")
    return tuple(map(int, prompt))

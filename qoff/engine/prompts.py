"""What prompts may be, and their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from qoff.errors import ArgumentError

_FORMS = "text, token ids, {'prompt': text} or {'prompt_token_ids': ids}"


@dataclass(frozen=True)
class Chat:
    """A conversation, to be continued. options: of the tokenizer's `apply_chat_template`."""

    messages: list[Mapping[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)


Prompt: TypeAlias = str | list[int] | tuple[int, ...] | Mapping[str, Any] | Chat


def prompt_list(prompts: Prompt | Iterable[Prompt]) -> list[Any]:
    """Prompts one by one; a text and a flat list of token ids are one prompt."""
    if isinstance(prompts, str | bytes | Mapping | Chat):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ArgumentError(f"prompts are of type {type(prompts).__name__}; give a list of prompts")
    found = list(prompts)
    return [found] if found and all(map(_is_token, found)) else found


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

    def read(self, prompt: object) -> tuple[str | None, tuple[int, ...]]:
        """The text of a prompt, where it is known, and its token ids.

        Raises ArgumentError for what is no prompt, and for text without a tokenizer.
        """
        if isinstance(prompt, Mapping):
            unknown = prompt.keys() - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                keys = ", ".join(map(repr, prompt))
                raise ArgumentError(f"a prompt is {_FORMS}, not a dict with the keys {keys or '-'}")
            text, tokens = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if tokens is not None:
                return text, _tokens(tokens)
            prompt = text
        if isinstance(prompt, str):
            return prompt, self._encoded(prompt)
        if isinstance(prompt, Chat):
            return self._chat(prompt)
        return None, _tokens(prompt)

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

    def _chat(self, chat: Chat) -> tuple[str, tuple[int, ...]]:
        options: dict[str, Any] = {"add_generation_prompt": True, **chat.options}
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in chat.messages], tokenize=False, **options
            )
        except Exception as error:  # a template is code of the model's
            raise ArgumentError(f"the chat template does not take this: {error}") from error
        # A template has the special tokens itself.
        return str(text), self._encoded(text, add_special_tokens=False)

    def _encoded(self, text: Any, **options: Any) -> tuple[int, ...]:
        try:
            return tuple(self.tokenizer(text, **options)["input_ids"])
        except (TypeError, UnicodeError) as error:  # half of a surrogate pair, for example
            raise ArgumentError(f"the tokenizer does not take this text: {error}") from error


def _is_token(one: object) -> bool:
    return isinstance(one, Integral) and not isinstance(one, bool)


def _tokens(prompt: object) -> tuple[int, ...]:
    if not isinstance(prompt, list | tuple):
        raise ArgumentError(f"a prompt is {_FORMS}, not {type(prompt).__name__}")
    wrong = next((one for one in prompt if not _is_token(one)), None)
    if wrong is not None:
        raise ArgumentError(f"a prompt's token ids are whole numbers, not {type(wrong).__name__}")
    return tuple(map(int, prompt))

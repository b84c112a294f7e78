"""Examples of fine-tuning: lines of JSON, as tokens with labels, packed into sequences."""

from __future__ import annotations

import hashlib
import os
import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qoff.errors import ArgumentError, DiskReadError, FormatError, QoffError
from qoff.hf.chat import ChatRenderer
from qoff.schema import load_object

from .batches import IGNORED

_FORMS = '{"messages": [...]}, {"prompt": ..., "completion": ...} or {"text": ...}'
_HALF = re.compile("[\ud800-\udfff]")
_PLACE = re.compile(r": line 1 (column \d+) \(char \d+\)$")  # of a fault in a line of a file
_ROLES = ("system", "developer", "user", "assistant")  # whose messages are text
_OTHERS = {  # what files begin with that are no lines of JSON, and what to do
    BOM_UTF16_LE: "is UTF-16; save it as UTF-8",
    BOM_UTF16_BE: "is UTF-16; save it as UTF-8",
    b"\x1f\x8b": "is compressed by gzip; unpack it with gunzip",
    b"PAR1": "is a Parquet file; write its rows as lines of JSON",
}


@dataclass(frozen=True)
class Example:
    """Tokens, and for each of them itself as a label or `IGNORED`."""

    ids: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Sequences:
    """Packed examples: rows of int64 [2, up to T], ids and labels."""

    rows: list[Tensor]

    @property
    def digest(self) -> str:
        """Of all tokens and labels."""
        found = hashlib.sha256()
        for row in self.rows:
            found.update(row.numpy().tobytes())
        return found.hexdigest()

    def split(self, share: float) -> tuple[Sequences, Sequences]:
        """Without the last ones of so large a share, at least one, and those.

        Raises ArgumentError where none would be left.
        """
        count = max(1, round(share * len(self.rows)))
        if count >= len(self.rows):
            raise ArgumentError(
                f"{len(self.rows)} sequences are too few to hold some out; give more data, or a "
                "smaller --sequence"
            )
        return Sequences(self.rows[:-count]), Sequences(self.rows[-count:])

    def each(self) -> Iterator[dict[str, Tensor]]:
        """All sequences once, in their order."""
        for ids, labels in self.rows:
            yield {"input_ids": ids[None], "labels": labels[None]}

    def of_step(self, step: int, count: int, seed: int, most: int) -> list[dict[str, Tensor]]:
        """The micro-batches of a step: `count` sequences, up to number `most` of the run.

        Every epoch goes through all sequences in an order of its own.
        """
        return [self._batch(i, seed) for i in range(step * count, min(most, (step + 1) * count))]

    def _batch(self, at: int, seed: int) -> dict[str, Tensor]:
        epoch, place = divmod(at, len(self.rows))
        generator = torch.Generator().manual_seed((seed << 20) + epoch)
        order = torch.randperm(len(self.rows), generator=generator)
        ids, labels = self.rows[int(order[place])]
        return {"input_ids": ids[None], "labels": labels[None]}


class Encoder:
    """Turns a line into tokens. What is learned:

    - `text`: everything;
    - `prompt` and `completion`: the completion, or of messages the assistant's in it;
    - `messages`: what the assistant says, with the template's end of it. Where the template writes
      a conversation otherwise than its beginning, the last answer.

    Text ends with the tokenizer's end token, which is learned. `tools` beside messages are given
    to the template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, renderer: ChatRenderer) -> None:
        """Raises ArgumentError for a tokenizer that does not know where its tokens begin."""
        if not tokenizer.is_fast:
            raise ArgumentError("this tokenizer cannot say where tokens begin in a text")
        self._tokenizer, self._renderer = tokenizer, renderer

    def encode(self, line: Mapping[str, Any]) -> Example:
        """Raises FormatError, and ArgumentError for what the chat template refuses."""
        keys = line.keys() & {"messages", "prompt", "completion", "text"}
        if keys == {"messages"}:
            text, learned = self._conversation(line["messages"], line.get("tools"))
            return self._tokens(text, learned, whole=False)
        if keys not in ({"text"}, {"prompt", "completion"}):
            raise FormatError(f"a line is {_FORMS}")
        parts = [line.get("prompt", ""), line.get("completion", line.get("text"))]
        if all(isinstance(part, list) for part in parts):
            said = self._conversation(parts[0] + parts[1], line.get("tools"), len(parts[0]))
            return self._tokens(*said, whole=False)
        if not all(isinstance(part, str) for part in parts) or not parts[1]:
            raise FormatError(f"{' and '.join(sorted(keys))} must be text that is not empty")
        return self._tokens("".join(parts), [(len(parts[0]), len("".join(parts)))], whole=True)

    def _conversation(
        self, messages: Any, tools: Any, prompt: int = 0
    ) -> tuple[str, list[tuple[int, int]]]:
        """Its text and the parts to learn, which are not in the first `prompt` messages."""
        if not isinstance(messages, list) or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
        ):
            raise FormatError("messages must be a list of objects with a role")
        _check_content(messages)
        if not isinstance(tools, list | None) or not all(isinstance(x, dict) for x in tools or ()):
            raise FormatError("tools must be a list of objects")
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= prompt]
        if not answers:
            raise FormatError("there is no message of the assistant to learn")
        text = self._text(messages, tools, False)
        learned: list[tuple[int, int] | None] = []
        for i in answers:
            before = (
                self._text(messages[:i], tools, True)
                if i
                else self._before(text, messages, 0, tools)
            )
            end = text if i == len(messages) - 1 else self._text(messages[: i + 1], tools, False)
            same = text.startswith(before) and text.startswith(end)
            learned.append((len(before), len(end)) if same else None)
        found = [place for place in learned if place is not None]
        if len(found) < len(learned):
            found = [place for place in learned[-1:] if place is not None]
        if prompt and not found:
            raise FormatError(
                "the chat template writes the prompt in another way with an answer behind it, so "
                'it cannot be told from that; use {"messages": [...]}'
            )
        if not found:
            last = answers[-1]
            messages = messages[: last + 1]
            text = self._text(messages, tools, False)
            found = [(len(self._before(text, messages, last, tools)), len(text))]
        return text, found

    def _before(self, text: str, messages: list[dict[str, Any]], i: int, tools: Any) -> str:
        """What of a conversation's text is the same, whatever message i says."""
        others = (
            [*messages[:i], {**messages[i], "content": content}, *messages[i + 1 :]]
            for content in ("a", "b")
        )
        texts = [text, *(self._text(x, tools, False) for x in others)]
        return os.path.commonprefix(texts)  # noqa: RUF071  # of characters

    def _text(self, messages: list[dict[str, Any]], tools: Any, prompt: bool) -> str:
        return self._renderer.render(
            self._tokenizer, messages, tools=tools, add_generation_prompt=prompt
        )

    def _tokens(self, text: str, learned: list[tuple[int, int]], whole: bool) -> Example:
        half = _HALF.search(text)
        if half:
            raise FormatError(f"text has {half[0]!a}, half of a character (a surrogate)")
        found = self._tokenizer(
            text, add_special_tokens=whole, return_offsets_mapping=True, verbose=False
        )
        ids, offsets = found["input_ids"], found["offset_mapping"]
        labels = [
            token if any(a <= start < b for a, b in learned) else IGNORED
            for token, (start, _) in zip(ids, offsets, strict=True)
        ]
        end = self._tokenizer.eos_token_id
        if whole and end is not None:
            if ids and ids[-1] == end:
                ids, labels = ids[:-1], labels[:-1]
            ids, labels = [*ids, end], [*labels, end]
        return Example(ids, labels)


def examples(path: Path, encoder: Encoder, broken: Callable[[int, str], None]) -> Iterator[Example]:
    """The examples of a file; `broken` is told the number and the fault of lines that are none.

    Raises DiskReadError, FormatError for a file of another format.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    line = line.removeprefix(BOM_UTF8)  # which editors of Windows write
                    _check_format(path, line)
                if not line.strip():
                    continue
                try:
                    yield encoder.encode(load_object(line.strip()))
                except (FormatError, ArgumentError) as error:
                    broken(number, str(error))
                except QoffError:
                    raise
                except ValueError as error:
                    reason = _PLACE.sub(r" at \1", str(error))
                    broken(number, f"is not a JSON object ({reason})")
    except OSError as error:
        raise DiskReadError(f"{path}: {error.strerror or error}") from error


def _check_format(path: Path, first: bytes) -> None:
    """Raise FormatError for a file that has no lines of JSON, of which this is the first."""
    for start, what in _OTHERS.items():
        if first.startswith(start):
            raise FormatError(f"{path}: {what}")
    if first.lstrip().startswith(b"["):
        raise FormatError(
            f"{path}: begins with a JSON array; write each example as a line of its own, as "
            "jq -c '.[]' does"
        )


def _check_content(messages: list[dict[str, Any]]) -> None:
    """Raise FormatError for messages that a chat template would write as something else."""
    for number, message in enumerate(messages, 1):
        role, content = message["role"], message.get("content")
        if role not in _ROLES or isinstance(content, str):
            continue
        if content is None:
            if not any(x for key, x in message.items() if key != "role"):  # like calls of tools
                raise FormatError(f"message {number}, of the {role}, has no content")
        elif not isinstance(content, list) or not all(map(_is_text, content)):
            raise FormatError(
                f"the content of message {number}, of the {role}, must be text, or parts of text "
                'like {"type": "text", "text": ...}'
            )


def _is_text(part: Any) -> bool:
    """Whether a part of a message's content is text."""
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def packed(found: Iterable[Example], length: int) -> Sequences:
    """Examples one behind the other in sequences of up to `length` tokens.

    One that does not fit into the rest of a sequence begins another; only longer ones are cut. The
    first token of each is not learned, as it would be from the example before. Sequences of which
    nothing is learned are left out.
    """
    rows: list[Tensor] = []
    ids: list[int] = []
    labels: list[int] = []

    def end() -> None:
        if any(label != IGNORED for label in labels[1:]):
            rows.append(torch.tensor([ids, labels]))
        ids.clear()
        labels.clear()

    for one in found:
        for at in range(0, len(one.ids), length):
            piece = one.ids[at : at + length]
            if len(ids) + len(piece) > length:
                end()
            ids += piece
            labels += [IGNORED, *one.labels[at + 1 : at + length]]
    end()
    return Sequences(rows)

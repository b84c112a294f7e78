"""`qoff chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from qoff.api.thinking import Thinking, style_of
from qoff.api.token_bytes import TokenBytes
from qoff.engine.answers import default_params, end_tokens
from qoff.engine.request import SamplingParams, Sequence
from qoff.errors import QoffError, io_errors, raised_as
from qoff.hf.chat import ChatRenderer
from qoff.hf.load import Opened
from qoff.kernels.torch_threads import one_torch_thread
from qoff.measure.model_rates import Sequences
from qoff.schema import shown
from qoff.serve.text import TextStream
from qoff.system_memory import refusals
from qoff.units import format_size

from .generate import check_text, limits_of, tokens_of

logger = logging.getLogger(__name__)
HELP = """\
/help         this
/reset        forget the conversation
/system TEXT  what the model is told first; without TEXT: nothing
/save FILE    write the conversation as JSON
/load FILE    go on with one
/stats        tokens, rates, memory
/exit         or Ctrl-D
Ctrl-C stops an answer."""
_DIM, _NOT_DIM = "\x1b[2m", "\x1b[22m"  # of a terminal (ECMA-48)


class Conversation:
    """Messages, and the KV cache of what was read of them.

    A turn reads only what is new, as long as the chat template adds to the end of the text.
    """

    def __init__(
        self,
        opened: Opened,
        tokenizer: PreTrainedTokenizerBase,
        params: SamplingParams,
        context: int,
        renderer: ChatRenderer,
    ) -> None:
        if not tokenizer.chat_template:
            raise QoffError("the model has no chat template; use qoff generate --raw")
        self._opened, self._tokenizer, self._renderer = opened, tokenizer, renderer
        limit = limits_of(opened.runtime).position_limit
        self._params, self._context = params, min(context, limit or context)
        self._style, self._bytes = style_of(tokenizer.chat_template), TokenBytes(tokenizer)
        self._longest = limit is not None and limit <= context
        self.messages: list[dict[str, str]] = []
        self._cache: Sequences | None = None
        self._read: list[int] = []  # tokens in the cache
        self.stats: dict[str, str] = {}

    def say(self, text: str) -> Iterator[tuple[str, str]]:
        """The answer to a message, in pieces: what it thinks, and what it says.

        What was given out of it becomes a message, too. Raises QoffError for a conversation that is
        longer than the context, ArgumentError for one that is not UTF-8. After these and other
        errors it is as it was.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        for one in messages:
            check_text(one["content"], f"a message ({one['role']})")
        prompt = self._renderer.render(self._tokenizer, messages)
        ids = list(self._tokenizer(prompt, add_special_tokens=False)["input_ids"])
        most = min(self._params.max_tokens or self._context, self._context - len(ids))
        if most < 1:
            larger = ", which is all that the model takes" if self._longest else ""
            raise QoffError(
                f"the conversation has {len(ids)} tokens, and the context {self._context}{larger}; "
                f"use /reset{'' if larger else ', or a larger --context'}"
            )
        begun = self._style is not None and self._style.begun(prompt)
        thought, said, failed = "", "", False
        try:
            for new in self._parted(self._answer(ids, most), begun):
                thought, said = thought + new[0], said + new[1]
                yield new
        except Exception:
            failed = True
            raise
        finally:
            if not failed:
                told = {"role": "assistant", "content": said}
                if thought:  # the template sees to it, or leaves it out
                    told["reasoning_content"] = thought
                self.messages = [*messages, told]

    def _parted(self, pieces: Iterator[str], begun: bool) -> Iterator[tuple[str, str]]:
        """What pieces of an answer think and say. begun: it begins with thinking."""
        thinking = Thinking(self._style, begun, keeps=True)
        for piece in pieces:
            yield thinking.add(piece)
        yield thinking.add("", last=True)

    def reset(self, messages: list[dict[str, str]]) -> None:
        """Go on from other messages."""
        self.messages = messages

    def _answer(self, ids: list[int], most: int) -> Iterator[str]:
        runtime, budget = self._opened.runtime, self._opened.budget
        if self._cache is None or ids[: len(self._read)] != self._read or ids == self._read:
            self._cache, self._read = None, []  # before there is another one
            room = len(ids) + (0 if budget is None else most)
            self._cache = Sequences(runtime, 1, room, budget)
        cache, known = self._cache, len(self._read)
        path, ends = runtime.checkpoint.path, end_tokens(runtime.checkpoint)
        sequence = Sequence(0, 0, None, tuple(ids), self._params, most, ends)
        marks = () if self._style is None else self._style.marks
        decode = partial(self._bytes.with_marks, marks=marks)
        text, start, first = TextStream(self._tokenizer, (), decode), time.perf_counter(), 0.0
        try:
            with torch.inference_mode(), one_torch_thread():
                for token in tokens_of(sequence, cache, path):
                    first = first or time.perf_counter() - start
                    if token not in ends:
                        yield text.add([token])
        except Exception:
            self._cache = None  # a pass may have ended in the middle
            raise
        finally:
            self._read = [*ids, *sequence.answer][: cache.length]
            self._note(sequence, known, first, time.perf_counter() - start, cache)
        kept = [token for token in sequence.answer if token not in ends]
        yield text.finish(decode(kept))

    def _note(
        self, sequence: Sequence, known: int, first: float, seconds: float, cache: Sequences
    ) -> None:
        new = len(sequence.answer)
        rate = (new - 1) / (seconds - first) if new > 1 and seconds > first else 0.0
        self.stats = {
            "context": f"{cache.length} of {self._context} tokens",
            "prompt": f"{len(sequence.prompt)} tokens, {known} of them known",
            "time to first token": f"{first * 1e3:.0f} ms",
            "answer": f"{new} tokens, {rate:.1f} tok/s",
            "KV cache": format_size(cache.nbytes),
        }


class Interrupts:
    """Ctrl-C: raises KeyboardInterrupt while a line is read; stops an answer otherwise."""

    def __init__(self) -> None:
        self.asked = self.answering = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if not self.answering:
            raise KeyboardInterrupt

    @contextmanager
    def handled(self) -> Iterator[None]:
        """From here to the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def talk(
    chat: Conversation, read: Callable[[], str], write: Callable[[str], None], dims: bool = False
) -> None:
    """Answer lines until there are no more. write: text as it comes, with its line ends.

    dims: whether a terminal shows that, and thinking is to be dim.
    """
    interrupts = Interrupts()
    with interrupts.handled():
        while True:
            try:
                line = read().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                write("\n(/exit or Ctrl-D ends the program)\n")
                continue
            if line in ("/exit", "/quit"):
                return
            try:
                if line.startswith("/"):
                    write(_command(chat, line) + "\n")
                elif line:
                    with refusals():
                        _answer(chat, line, interrupts, write, dims)
            except (QoffError, OSError) as error:
                write(f"qoff: {error}\n")
            except Exception:  # a GPU's, say: /save still keeps the conversation
                logger.exception("qoff: this failed; the conversation is as it was")


def _answer(
    chat: Conversation,
    line: str,
    interrupts: Interrupts,
    write: Callable[[str], None],
    dims: bool,
) -> None:
    pieces, begun, between = chat.say(line), False, ""
    interrupts.asked, interrupts.answering = False, True
    try:
        for thought, said in pieces:
            begun = True
            text = f"{_DIM}{thought}{_NOT_DIM}" if thought and dims else thought
            between = "\n\n" if thought else between
            if said:
                text, between = text + between + said, ""
            write(text)
            if interrupts.asked:
                write(" (stopped)")
                break
    finally:
        pieces.close()  # type: ignore[attr-defined]
        interrupts.answering = False
        if begun:  # what comes next, an error too, has a line of its own
            write("\n")


def _command(chat: Conversation, line: str) -> str:
    """What a command answers. Raises QoffError for one that cannot be done."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name == "/help":
        return HELP
    if name == "/reset":
        chat.reset([one for one in chat.messages[:1] if one["role"] == "system"])
        return "(forgotten)"
    if name == "/system":
        others = [one for one in chat.messages if one["role"] != "system"]
        chat.reset([{"role": "system", "content": rest}, *others] if rest else others)
        return "(set)" if rest else "(removed)"
    if name == "/stats":
        return "\n".join(f"{label}: {value}" for label, value in chat.stats.items()) or "(none yet)"
    if name in ("/save", "/load") and not rest:
        raise QoffError(f"{name} needs a file")
    if name == "/save":
        _save(chat.messages, _path(rest))
        return f"({len(chat.messages)} messages)"
    if name == "/load":
        chat.reset(_messages(_path(rest)))
        return f"({len(chat.messages)} messages)"
    raise QoffError(f"there is no command {shown(name)}; see /help")


def _path(name: str) -> Path:
    """A file. Raises QoffError where its name begins with a user that is not known."""
    with raised_as(QoffError, name):
        return Path(name).expanduser()


def _save(messages: list[dict[str, str]], path: Path) -> None:
    text = json.dumps({"messages": messages}, indent=2, ensure_ascii=False)
    with (
        raised_as(QoffError, f"{shown(str(path))} cannot be written"),  # what is not UTF-8
        io_errors(path, QoffError, "choose another place"),
    ):
        data = f"{text}\n".encode()  # before a file that is there is emptied
        path.write_bytes(data)


def _messages(path: Path) -> list[dict[str, str]]:
    try:
        with io_errors(path, QoffError, "name a file that /save has written"):
            text = path.read_text(encoding="utf-8")
        found: Any = json.loads(text)["messages"]
        return [_message(one) for one in found]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise QoffError(f"{path}: is no conversation that /save has written") from error


def _message(said: Any) -> dict[str, str]:
    """What a file has of a message."""
    found = {"role": str(said["role"]), "content": str(said["content"])}
    if "reasoning_content" in said:
        found["reasoning_content"] = str(said["reasoning_content"])
    return found


def terminal() -> tuple[Callable[[], str], Callable[[str], None], bool]:
    """How a line is read and text written here, and whether text may be dim.

    With a history of lines, if it is a terminal.
    """
    prompt = ""
    if isinstance(sys.stdin, TextIOWrapper):  # a line that is not UTF-8 does not end the program
        sys.stdin.reconfigure(errors="surrogateescape")
    if sys.stdin.isatty():
        prompt = "> "
        with suppress(ImportError):
            import readline  # noqa: F401 - `input` uses it from now on

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    return lambda: input(prompt), write, sys.stdout.isatty()


def params_of(opened: Opened, draw: dict[str, Any], most: int) -> SamplingParams:
    """How answers are drawn; the penalty is that of the model's generation_config.json."""
    penalty = default_params(opened.runtime.checkpoint).repetition_penalty
    return SamplingParams(**draw, max_tokens=most, repetition_penalty=penalty)

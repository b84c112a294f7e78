"""Chat templates: code that comes with a model, rendered within bounds of time and memory."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from qoff.errors import ArgumentError, QoffError, raised_as
from qoff.schema import shown

from .chat_worker import encoded, read, write

_SECONDS = 1.0  # of CPU time for a conversation; the largest take some hundredths
_WAIT = 30.0  # seconds that an answer may take on a machine that is busy with other things
_TEMPLATES = 64  # at most, of which `ChatRenderer` remembers what they read
_CHARACTERS = 1 << 24  # of a conversation, beside those of its messages
# What transformers makes of messages and options before it applies a template, as JSON.
_VARIABLES = (
    "{{ dict(more, messages=messages, tools=tools, documents=documents, "
    "add_generation_prompt=add_generation_prompt) | tojson }}"
)
_END = "\ue000qoff-end-of-message\ue000"  # where a message that is continued stops
_PROBE = "\ue000qoff-content\ue000"  # what a message says that shows what a template reads
_ROLES = ("user", "assistant", "system")
_LIMITS = [_SECONDS, _CHARACTERS]
_WRONG = "the chat template does not take this"
# Names that transformers does not pass on to templates.
_OPTIONS = frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"kwargs"}


class ChatRenderer:
    """Applies chat templates in a process of its own, started when it is first needed.

    Threads may share it. Close it, or use it as a context manager.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._by_parts: dict[str, frozenset[str]] = {}  # by template: see `_parts_of`

    def render(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        tools: Any = None,
        documents: Any = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: Any,
    ) -> str:
        """The text of a conversation, as the tokenizer's `apply_chat_template` makes it.

        Where a template reads a message only as a list of parts, as those of models that see may,
        text is given as one part. options: further names for the template. Raises ArgumentError, in
        one line, for other options of `apply_chat_template`, what the template refuses, a template
        that is none, and one that takes too much time or memory.
        """
        if wrong := sorted(_OPTIONS & options.keys()):
            raise ArgumentError(f"chats are not rendered with {', '.join(wrong)}; leave that out")
        if not isinstance(continue_final_message, bool):
            raise ArgumentError(
                f"continue_final_message is {shown(continue_final_message)}; use True or False"
            )
        sent = [dict(message) for message in messages]
        if continue_final_message:
            sent = _marked(sent)
        with raised_as(ArgumentError, _WRONG):
            template = tokenizer.get_chat_template(chat_template, tools)
            if not isinstance(template, str):
                raise ArgumentError(f"a chat template is text, not {type(template).__name__}")
            variables = tokenizer.apply_chat_template(
                sent,
                chat_template=_VARIABLES,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                more={**tokenizer.special_tokens_map, **options},
                tokenize=False,
            )
            assert isinstance(variables, str)
            request = {
                "template": template,
                "variables": json.loads(variables),
                "limits": [_SECONDS, _CHARACTERS + 4 * len(variables)],
            }
        by_parts = self._parts_of(template, tokenizer.special_tokens_map)
        variables = request["variables"]
        variables["messages"] = [
            _as_part(m) if isinstance(m, dict) and str(m.get("role")) in by_parts else m
            for m in variables["messages"]
        ]
        text = self._text(request)
        if continue_final_message:
            text, found, _ = text.rpartition(_END)
            if not found:
                raise ArgumentError(f"{_WRONG}: it has no place where the last message ends")
        return text

    def close(self) -> None:
        """End the process; another one is started when it is needed again."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _parts_of(self, template: str, tokens: Mapping[str, Any]) -> frozenset[str]:
        """The roles whose messages a template leaves out as text, but not as a part.

        Found out with messages of its own, and remembered if the template took one of a user.
        """
        if "text" not in template or "type" not in template:
            return frozenset()
        known = self._by_parts.get(template)
        if known is not None:
            return known
        found, user = set[str](), {"role": "user", "content": "a"}
        works = False
        for role in _ROLES:
            said = {"role": role, "content": _PROBE}
            shown_as = []
            for message in (said, _as_part(said)):
                other = _as_part(user) if "user" in found else user
                around = {"user": [message], "assistant": [other, message]}
                messages = around.get(role, [message, other])
                variables = {**tokens, "messages": messages, "add_generation_prompt": False}
                answer = self._ask(
                    {"template": template, "variables": variables, "limits": _LIMITS}
                )
                shown_as.append(_PROBE in answer.get("text", ""))
                works |= role == "user" and "text" in answer
            if shown_as == [False, True]:
                found.add(role)
        if works:
            if len(self._by_parts) >= _TEMPLATES:
                self._by_parts.clear()
            self._by_parts[template] = frozenset(found)
        return frozenset(found)

    def _text(self, request: dict[str, Any]) -> str:
        found = self._ask(request)
        if "error" in found:
            raise ArgumentError(f"{_WRONG}: {found['error']}")
        return found["text"]

    def _ask(self, request: dict[str, Any]) -> dict[str, str]:
        with self._lock:
            if self._worker is None or not self._worker.usable:
                self._worker = _Worker()
            return self._worker.ask(encoded(request))


class _Worker:
    """The process of `chat_worker`."""

    def __init__(self) -> None:
        import jinja2
        import markupsafe

        folders = {str(Path(str(module.__file__)).parents[1]) for module in (jinja2, markupsafe)}
        script = str(Path(__file__).with_name("chat_worker.py"))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", script, *sorted(folders)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise QoffError(
                f"Python cannot be started for a chat template ({error}); give prompts as text"
            ) from error
        self._pid = os.getpid()
        self.close = weakref.finalize(self, _end, self._process)

    @property
    def usable(self) -> bool:
        """Whether it runs, and is not that of a process which this one was forked from."""
        return self._pid == os.getpid() and self.close.alive and self._process.poll() is None

    def ask(self, request: bytes) -> dict[str, str]:
        """Its answer to a request; an error where it does not give one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = b""
        try:
            write(self._process.stdin, request)
            if select.select([self._process.stdout], [], [], _WAIT)[0]:
                answer = read(self._process.stdout)
        except OSError:
            pass  # it has ended
        except BaseException:  # the next request would get the answer of this one
            self.close()
            raise
        if answer:
            found: dict[str, str] = json.loads(answer)
            if "fatal" in found:
                self.close()
            return found
        self.close()
        late = self._process.returncode in (-signal.SIGPROF, -signal.SIGKILL)
        reason = f"it runs for more than {_SECONDS:g} s" if late else "it ends its process"
        return {"error": reason}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was not written
                pipe.close()


def _as_part(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text as a part."""
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a mark where the last one ends."""
    if not messages:
        raise ArgumentError("there is no message to continue")
    content = messages[-1].get("content")
    if isinstance(content, list) and content and isinstance(content[-1], Mapping):
        last: Any = [*content[:-1], {**content[-1], "text": f"{content[-1].get('text', '')}{_END}"}]
    else:
        last = f"{content or ''}{_END}"
    return [*messages[:-1], {**messages[-1], "content": last}]

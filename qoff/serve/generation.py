"""Chat and text completions: one document, or a stream of them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qoff.api.answers import DONE, encoded, event, usage
from qoff.api.errors import ClientGone
from qoff.api.requests import Asked, answer_error, check_answer
from qoff.api.thinking import Thinking
from qoff.api.token_bytes import Place
from qoff.api.tools import ended, may_be_calls
from qoff.engine import Completion

from .engine import Answers, Engine, Piece
from .faults import told
from .text import AnswerStream, TextStream

LOG = "qoff.log"  # key of a scope: what the request's line in the log has beside the usual


class Generated(Response):
    """Computes answers while it sends them."""

    def __init__(self, engine: Engine, asked: Asked) -> None:
        super().__init__()
        self._engine, self._asked = engine, asked
        self._tokens: dict[int, int] = {}  # by answer
        self._last: dict[int, float] = {}  # when the last of them came

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        said: dict[str, Any] = scope.setdefault(LOG, {})
        said["id"] = self._asked.form.id
        try:
            if self._asked.stream:
                await self._send_events(receive, send, said)
            else:
                whole = await self._whole(receive, said)
                await Response(whole, media_type="application/json")(scope, receive, send)
        finally:
            said["tokens"] = sum(self._tokens.values())

    def _answering(self, receive: Receive) -> AbstractAsyncContextManager[Answers]:
        asked = self._asked
        return self._engine.answering(asked.prompts, asked.params, receive, asked.adapter)

    async def _whole(self, receive: Receive, said: dict[str, Any]) -> bytes:
        asked, done = self._asked, dict[int, Completion]()
        async with self._answering(receive) as answers:
            said["prompt_tokens"] = answers.prompt_tokens
            async for piece in self._pieces(answers):
                if piece.answer is not None:
                    done[piece.number] = piece.answer
        said_all = [done[i] for i in sorted(done)]
        # Log-probabilities of a long prompt take seconds; streams go on meanwhile.
        return await self._engine.beside(
            lambda: encoded(asked.document(said_all, answers.prompt_tokens))
        )

    async def _send_events(self, receive: Receive, send: Send, said: dict[str, Any]) -> None:
        async with aclosing(self._events(receive, said)) as events:
            first = await anext(events)  # what fails before has a status of its own
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                await send({"type": "http.response.body", "body": first, "more_body": True})
                async for one in events:
                    await send({"type": "http.response.body", "body": one, "more_body": True})
                failed = b""
            except ClientGone:
                raise
            except Exception as error:
                said["error"] = str(error) or type(error).__name__
                failed = event(told(error, said).body())
            await send({"type": "http.response.body", "body": failed + DONE, "more_body": False})

    async def _events(self, receive: Receive, said: dict[str, Any]) -> AsyncGenerator[bytes]:
        form, asked = self._asked.form, self._asked
        async with self._answering(receive) as answers:
            said["prompt_tokens"] = answers.prompt_tokens
            texts, places = dict[int, AnswerStream](), dict[int, Place]()
            async for piece in self._pieces(answers):
                number, one = piece.number, piece.answer
                first = number not in texts
                if first:
                    texts[number] = self._stream(answers.prompt)
                text = texts[number]
                place = places.setdefault(number, form.place())
                logprobs = form.logprobs(piece.token_ids, piece.logprobs, place)
                thought, new, reason, tools = "", "", None, list[dict[str, Any]]()
                error = None if one is None else answer_error(one)
                if one is not None:
                    thinking, content, tools = asked.split(one)
                    thought, new = text.finish(thinking, content)
                    reason = ended(asked.calls, tools, one.finish_reason)
                elif asked.calls is None or not asked.calls.must:
                    thought, new = text.add(piece.token_ids, self._held_back)
                if thought or new or first or reason or (logprobs and piece.token_ids):
                    why = None if tools else reason
                    choice = form.delta(number, new, first, why, logprobs, tools, thought)
                    if error is not None:
                        choice |= error.body()
                    yield event(form.chunk([choice]))
                if tools:  # clients take a call for complete in a chunk after its own
                    choice = form.delta(number, "", False, reason, None, [])
                    yield event(form.chunk([choice]))
            if asked.include_usage:
                cost = usage(answers.prompt_tokens, sum(self._tokens.values()))
                yield event(form.chunk([], cost))

    def _stream(self, prompt: Sequence[int]) -> AnswerStream:
        """Of an answer to a prompt."""
        asked, form = self._asked, self._asked.form
        begins = [] if asked.calls is None else asked.calls.begins
        thinks, decode, keeps = asked.thinks, None, False
        if thinks is not None:
            decode = partial(form.with_marks, marks=thinks.marks)
            keeps = form.shows(thinks.marks[0])
        text = TextStream(form.tokenizer, asked.params.stops, decode)
        thinking = Thinking(thinks, asked.begins_thinking(prompt), keeps)
        return AnswerStream(text, thinking, begins)

    def _held_back(self, text: str) -> bool:
        """Whether an answer that begins so may be calls, and is not to be shown before it ends."""
        calls = self._asked.calls
        return calls is not None and calls.whole and may_be_calls(text, calls.tools)

    async def _pieces(self, answers: Answers) -> AsyncIterator[Piece]:
        """The pieces of answers, counted. Raises ApiError where the only one cannot go on."""
        metrics = self._engine.metrics
        metrics.prompt_tokens.inc(answers.prompt_tokens)
        metrics.prompt_length.observe(answers.prompt_tokens)
        async for piece in answers.pieces():
            now, new, number = time.perf_counter(), len(piece.token_ids), piece.number
            if new and number in self._last:
                metrics.between_tokens.observe((now - self._last[number]) / new)
            elif new and not self._last:
                metrics.first_token.observe(now - answers.started)
            self._last[number] = now
            self._tokens[number] = self._tokens.get(number, 0) + new
            metrics.generated.inc(new)
            if piece.answer is not None:
                if answers.count == 1:
                    check_answer(piece.answer)
                metrics.ended(piece.answer.finish_reason)
                metrics.answer_length.observe(self._tokens[number])
                if number in answers.times:
                    metrics.phases(answers.started, *answers.times[number], now)
            yield piece
        metrics.whole.observe(time.perf_counter() - answers.started)

"""From a line of a job to what the engine is asked, and from its answers to lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from qoff.engine import LLM, Completion, SamplingParams
from qoff.engine.prompts import Chat
from qoff.errors import ArgumentError, QoffError

from .lines import IdSet, Line, prompt

if TYPE_CHECKING:  # needs pydantic
    from qoff.api.errors import ApiError
    from qoff.api.protocol import BatchLine
    from qoff.api.requests import Asked

_ENDPOINTS = ("/v1/chat/completions", "/v1/completions")


class Request(Protocol):
    """A line that was understood."""

    @property
    def line(self) -> Line: ...

    @property
    def prompts(self) -> Any: ...

    @property
    def params(self) -> SamplingParams: ...

    @property
    def adapter(self) -> str | None: ...

    def answered(self, answers: Sequence[Completion], prompt_tokens: int) -> list[bytes]:
        """Lines of output; `answers`: n of each prompt in order. Raises what `failed` takes."""

    def failed(self, error: Exception) -> bytes:
        """The line of what went wrong."""


@dataclass(frozen=True)
class Bad:
    """A line that is no request. text: what is said of it."""

    line: Line
    text: bytes


class Reader(Protocol):
    """Makes requests of lines."""

    def read(self, line: Line) -> Request | Bad: ...

    def skip(self, line: Line) -> None:
        """Take notice of a line that is done."""


@dataclass(frozen=True)
class PromptReader:
    """Lines with a prompt each: text, a JSON string or {"prompt": ...}.

    chats: whether they are put into the model's chat template. params: of all of them. job: part of
    the lines of what fails.
    """

    params: SamplingParams
    chats: bool
    job: str

    def read(self, line: Line) -> Request | Bad:
        try:
            text = prompt(line)
        except QoffError as error:
            return Bad(line, _prompt_error(line, error, self.job))
        wanted = Chat([{"role": "user", "content": text}]) if self.chats else text
        return PromptRequest(line, wanted, self.params, self.job)

    def skip(self, line: Line) -> None:
        pass


@dataclass(frozen=True)
class PromptRequest:
    """A line with a prompt."""

    line: Line
    prompts: Any
    params: SamplingParams
    job: str
    adapter: str | None = None

    def answered(self, answers: Sequence[Completion], prompt_tokens: int) -> list[bytes]:
        if all(one.finish_reason == "error" for one in answers):
            raise ArgumentError(answers[0].error)
        return [self._line(one, prompt_tokens) for one in answers]

    def failed(self, error: Exception) -> bytes:
        return _prompt_error(self.line, error, self.job)

    def _line(self, answer: Completion, prompt_tokens: int) -> bytes:
        """An answer without its prompt, of which only the number of tokens is told."""
        said = {key: value for key, value in asdict(answer).items() if value is not None}
        for name in ("prompt", "prompt_token_ids", *(() if answer.error else ("error",))):
            said.pop(name, None)
        return _encoded({**said, "index": self.line.number, "prompt_tokens": prompt_tokens})


class OpenAILines:
    """The frame of OpenAI's batch lines: `custom_id`, `method`, `url`; needs no model.

    job: part of the answers' ids. endpoint: the only `url` that is right; None: any of those that
    there are.
    """

    def __init__(self, job: str, endpoint: str | None = None) -> None:
        self._job = job
        self._endpoints = _ENDPOINTS if endpoint is None else (endpoint,)
        self._ids = IdSet()

    def skip(self, line: Line) -> None:
        from pydantic import ValidationError

        from qoff.api.protocol import BatchLine

        with suppress(ValidationError):  # as `check` does it: a wrong line's id does not count
            self._ids.add(BatchLine.model_validate_json(line.data or b"").custom_id)

    def check(self, line: Line) -> tuple[Known, BatchLine] | Bad:
        """A line whose frame is right and whose id is new, or what is wrong with it."""
        from pydantic import ValidationError

        from qoff.api.body import wrong_body
        from qoff.api.errors import ApiError
        from qoff.api.protocol import BatchLine

        known = Known(line, f"batch_req_{self._job}_{line.number}", None)
        try:
            if line.data is None:
                raise ApiError(400, "the line is too long", code="line_too_long")
            given = BatchLine.model_validate_json(line.data)
            known = Known(line, known.id, given.custom_id)
            if not self._ids.add(given.custom_id):
                raise ApiError(400, "the custom_id occurs twice", code="duplicate_custom_id")
            if given.url not in self._endpoints:
                message = f"url is {given.url[:100]!r}; use {' or '.join(self._endpoints)}"
                raise ApiError(400, message, param="url", code="invalid_url")
        except (ApiError, ValidationError) as error:
            wrong = wrong_body(error) if isinstance(error, ValidationError) else error
            return Bad(line, known.bad(wrong))
        return known, given


class OpenAIReader(OpenAILines):
    """OpenAI's batch lines. model: the name that the lines have to give, if they give one.

    thinking: whether it is told apart from what answers say. where: the model is, for errors. told:
    what lines say of requests that failed, by default all.
    """

    def __init__(
        self,
        llm: LLM,
        model: str,
        job: str,
        endpoint: str | None = None,
        thinking: bool = True,
        where: str = "this server",
        told: Callable[[Exception, str], ApiError] | None = None,
    ) -> None:
        super().__init__(job, endpoint)
        self._llm, self.model, self._thinking, self._where = llm, model, thinking, where
        self._told = told

    def read(self, line: Line) -> Request | Bad:
        from pydantic import ValidationError

        from qoff.api.body import wrong_body
        from qoff.api.errors import ApiError, as_api_error
        from qoff.api.protocol import ChatRequest, CompletionRequest
        from qoff.api.requests import asked, check_model

        found = self.check(line)
        if isinstance(found, Bad):
            return found
        known, given = found
        try:
            kind = ChatRequest if given.url == _ENDPOINTS[0] else CompletionRequest
            body = kind.model_validate(given.body)
            if body.stream:
                raise ApiError(400, "an answer in a batch is not streamed", param="stream")
            check_model(body.model, self.model, self._llm.adapters, self._where)
            request = asked(body, self.model, self._llm, self._thinking)
            return OpenAIRequest(known, request, self._told or as_api_error)
        except ValidationError as error:
            return Bad(line, known.error(wrong_body(error)))
        except (ApiError, QoffError) as error:
            return Bad(line, known.error(as_api_error(error)))


@dataclass(frozen=True)
class Known:
    """What all lines about one of OpenAI's lines say."""

    line: Line
    id: str
    custom_id: str | None

    def bad(self, error: ApiError) -> bytes:
        """Of a line that is no request."""
        said = {"code": error.code or "invalid_line", "message": error.body()["error"]["message"]}
        return self._encoded(None, said, {"line": self.line.at})

    def error(self, error: ApiError) -> bytes:
        """Of a request that cannot be answered."""
        return self.response(error.status, error.body(), {"line": self.line.at})

    def response(self, status: int, body: Any, more: dict[str, Any] | None = None) -> bytes:
        request_id = self.id.replace("batch_req", "req", 1)
        said = {"status_code": status, "request_id": request_id, "body": body}
        return self._encoded(said, None, more or {})

    def _encoded(self, response: Any, error: Any, more: dict[str, Any]) -> bytes:
        said = {"id": self.id, "custom_id": self.custom_id, "response": response, "error": error}
        return _encoded({**said, **more})


class OpenAIRequest:
    """One of OpenAI's lines."""

    def __init__(
        self, known: Known, asked: Asked, told: Callable[[Exception, str], ApiError]
    ) -> None:
        self._known, self._asked, self._told, self.line = known, asked, told, known.line
        self.prompts, self.params = asked.prompts, asked.params
        self.adapter = asked.adapter

    def answered(self, answers: Sequence[Completion], prompt_tokens: int) -> list[bytes]:
        return [self._known.response(200, self._asked.document(answers, prompt_tokens))]

    def failed(self, error: Exception) -> bytes:
        prompt = "messages" if isinstance(self.prompts, Chat) else "prompt"
        return self._known.error(self._told(error, prompt))


def _prompt_error(line: Line, error: Exception, job: str) -> bytes:
    said = {"index": line.number, "line": line.at, "job": job, "finish_reason": "error"}
    return _encoded({**said, "error": str(error)})


def _encoded(said: dict[str, Any]) -> bytes:
    return json.dumps(said, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"

"""The routes: what is asked for at which path."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from qoff.api.answers import encoded
from qoff.api.body import Body, wrong_body
from qoff.api.errors import ApiError
from qoff.api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from qoff.api.requests import Asked, asked, check_model
from qoff.engine import LLM
from qoff.engine.prompts import Chat, Prompt
from qoff.errors import ArgumentError, QoffError, raised_as

from .batch_routes import BatchRoutes
from .bodies import BodyRoom, read_data
from .embeddings import Embedded
from .engine import Engine
from .faults import told
from .generation import LOG, Generated
from .guard import Guard
from .options import ServeOptions
from .page import page

_B = TypeVar("_B", bound=Body)
_T = TypeVar("_T")
_PROMPTS = {  # the field that has them, by path
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/embeddings": "input",
}
_MOST = 16  # contexts: tokens of a text that is turned into them for a client, or back


class Routes:
    """What the server does for each path."""

    def __init__(self, engine: Engine, options: ServeOptions) -> None:
        self._engine, self._options = engine, options
        self._created = int(time.time())

    async def chat(self, request: Request) -> Response:
        return Generated(self._engine, await self._read(request, ChatRequest, self._asked))

    async def completion(self, request: Request) -> Response:
        return Generated(self._engine, await self._read(request, CompletionRequest, self._asked))

    def _asked(self, body: ChatRequest | CompletionRequest, llm: LLM) -> Asked:
        return asked(body, self._engine.name, llm, self._options.thinking)

    async def embeddings(self, request: Request) -> Response:
        return Embedded(self._engine, await self._read(request, EmbeddingRequest, _itself))

    async def tokenize(self, request: Request) -> Response:
        prompt, llm = await self._read(request, TokenizeRequest, _prompt), self._engine.ready()
        context = llm.plan.context

        def work() -> bytes:
            tokens = llm.encode(prompt, _MOST * context)
            return encoded({"count": len(tokens), "max_model_len": context, "tokens": tokens})

        found = await self._engine.in_turn(work)
        return Response(found, media_type="application/json")

    async def detokenize(self, request: Request) -> dict[str, str]:
        body, llm = await self._read(request, DetokenizeRequest, _itself), self._engine.ready()
        tokenizer, most = llm.tokenizer, _MOST * llm.plan.context
        if tokenizer is None:
            raise ApiError(400, "the model has no tokenizer")
        if len(body.tokens) > most:
            raise ApiError(400, f"{len(body.tokens)} tokens are more than {most}", param="tokens")

        def work() -> str:
            with raised_as(ArgumentError, "the tokenizer does not take these tokens"):
                return str(tokenizer.decode(body.tokens))

        return {"prompt": await self._engine.in_turn(work)}

    async def models(self) -> dict[str, Any]:
        names = [self._engine.name, *self._adapters()]
        return {"object": "list", "data": [self._model(name) for name in names]}

    async def model(self, name: str) -> dict[str, Any]:
        check_model(name, self._engine.name, self._adapters())
        return self._model(name)

    async def health(self) -> Response:
        self._engine.ready()
        return Response()

    async def stats(self) -> dict[str, Any]:
        return self._engine.stats()

    async def page(self) -> Response:
        return page()

    async def metrics(self) -> Response:
        return Response(self._engine.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    def _adapters(self) -> tuple[str, ...]:
        return () if self._engine.llm is None else self._engine.llm.adapters

    def _model(self, name: str) -> dict[str, Any]:
        llm, own = self._engine.llm, self._engine.name
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "qoff",
            "parent": None if name == own else own,
            "max_model_len": None if llm is None else llm.plan.context,
        }

    async def _read(self, request: Request, kind: type[_B], use: Callable[[_B, LLM], _T]) -> _T:
        """What `use` makes of the body of a request; of a large one beside the loop.

        Raises ApiError for one that is too large, slow or wrong.
        """
        data = await read_data(request, self._options)
        llm = self._engine.ready()

        def read() -> _T:
            try:
                found = kind.model_validate_json(data)
            except ValidationError as error:
                raise wrong_body(error) from error
            check_model(getattr(found, "model", None), self._engine.name, self._adapters())
            return use(found, llm)

        return await self._engine.of_body(len(data), read)


def _itself(body: _B, llm: LLM) -> _B:
    return body


def _prompt(body: TokenizeRequest, llm: LLM) -> Prompt:
    if body.messages is None:
        return body.prompt or ""
    options = {"add_generation_prompt": body.add_generation_prompt}
    return Chat([message.plain() for message in body.messages], options)


def build_app(engine: Engine, options: ServeOptions) -> ASGIApp:
    """The ASGI application over an engine that may still be loading."""
    app = FastAPI(title="qoff", docs_url=None, redoc_url=None, openapi_url=None)
    routes = Routes(engine, options)
    for path, post in (
        ("/v1/chat/completions", routes.chat),
        ("/v1/completions", routes.completion),
        ("/v1/embeddings", routes.embeddings),
        ("/tokenize", routes.tokenize),
        ("/detokenize", routes.detokenize),
    ):
        app.add_api_route(path, post, methods=["POST"], response_model=None)
    for path, get in (
        ("/v1/models", routes.models),
        ("/v1/models/{name:path}", routes.model),
        ("/health", routes.health),
        ("/metrics", routes.metrics),
        ("/stats", routes.stats),
        ("/", routes.page),
    ):
        app.add_api_route(path, get, methods=["GET", "HEAD"], response_model=None)

    BatchRoutes(engine, options).add_to(app)

    async def failed(request: Request, error: Exception) -> Response:
        if isinstance(error, ValidationError):
            known = wrong_body(error)
        elif isinstance(error, RequestValidationError):
            known = ApiError(400, f"{error.errors()[0]['loc'][-1]}: {error.errors()[0]['msg']}")
        elif isinstance(error, HTTPException):
            known = ApiError(error.status_code, str(error.detail), headers=error.headers)
        else:
            known = told(error, request.scope[LOG], _PROMPTS.get(request.url.path))
        return JSONResponse(known.body(), known.status, known.headers)

    for kind in (ApiError, QoffError, ValidationError, RequestValidationError, HTTPException,
                 TimeoutError, Exception):  # fmt: skip
        app.add_exception_handler(kind, failed)
    room = BodyRoom(options.max_request_bytes)
    guarded = Guard(app, options.api_keys, options.cors_origins, room)
    if not options.cors_origins:
        return guarded
    return CORSMiddleware(
        guarded,
        allow_origins=list(options.cors_origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],  # clients send some of their own
        expose_headers=["Retry-After", "X-Request-Id"],
    )

"""The routes: what is asked for at which path."""

from __future__ import annotations

import time
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from qoff.api.errors import ApiError, as_api_error
from qoff.api.protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
    wrong_body,
)
from qoff.api.requests import asked, check_model
from qoff.engine.prompts import Chat
from qoff.errors import ArgumentError, QoffError, raised_as

from .batch_routes import BatchRoutes
from .bodies import read_data
from .embeddings import Embedded
from .engine import Engine
from .generation import Generated
from .guard import Guard
from .options import ServeOptions
from .page import page

_B = TypeVar("_B", bound=Body)


class Routes:
    """What the server does for each path."""

    def __init__(self, engine: Engine, options: ServeOptions) -> None:
        self._engine, self._options = engine, options
        self._created = int(time.time())

    async def chat(self, request: Request) -> Response:
        return self._generated(await self._read(request, ChatRequest))

    async def completion(self, request: Request) -> Response:
        return self._generated(await self._read(request, CompletionRequest))

    def _generated(self, body: ChatRequest | CompletionRequest) -> Response:
        return Generated(self._engine, asked(body, self._engine.name, self._engine.ready()))

    async def embeddings(self, request: Request) -> Response:
        return Embedded(self._engine, await self._read(request, EmbeddingRequest))

    async def tokenize(self, request: Request) -> dict[str, Any]:
        body, llm = await self._read(request, TokenizeRequest), self._engine.ready()
        prompt: Any = body.prompt
        if body.messages is not None:
            options = {"add_generation_prompt": body.add_generation_prompt}
            prompt = Chat([message.plain() for message in body.messages], options)
        tokens = await self._engine.beside(lambda: llm.encode(prompt))
        return {"count": len(tokens), "max_model_len": llm.plan.context, "tokens": tokens}

    async def detokenize(self, request: Request) -> dict[str, str]:
        body, llm = await self._read(request, DetokenizeRequest), self._engine.ready()
        tokenizer = llm.tokenizer
        if tokenizer is None:
            raise ApiError(400, "the model has no tokenizer")
        with raised_as(ArgumentError, "the tokenizer does not take these tokens"):
            text = await self._engine.beside(lambda: str(tokenizer.decode(body.tokens)))
        return {"prompt": text}

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

    async def _read(self, request: Request, kind: type[_B]) -> _B:
        """The body of a request. Raises ApiError for one that is too large, slow or wrong."""
        data = await read_data(request, self._options)
        self._engine.ready()
        found = kind.model_validate_json(data)
        check_model(getattr(found, "model", None), self._engine.name, self._adapters())
        return found


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
        app.add_api_route(path, get, methods=["GET"], response_model=None)

    BatchRoutes(engine, options).add_to(app)

    async def failed(request: Request, error: Exception) -> Response:
        if isinstance(error, ValidationError):
            known = wrong_body(error)
        elif isinstance(error, RequestValidationError):
            known = ApiError(400, f"{error.errors()[0]['loc'][-1]}: {error.errors()[0]['msg']}")
        elif isinstance(error, HTTPException):
            known = ApiError(error.status_code, str(error.detail), headers=error.headers)
        else:
            known = as_api_error(error)
        return JSONResponse(known.body(), known.status, known.headers)

    for kind in (ApiError, QoffError, ValidationError, RequestValidationError, HTTPException,
                 TimeoutError, Exception):  # fmt: skip
        app.add_exception_handler(kind, failed)
    guarded = Guard(app, options.api_keys, options.cors_origins)
    if not options.cors_origins:
        return guarded
    return CORSMiddleware(
        guarded,
        allow_origins=list(options.cors_origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],  # clients send some of their own
        expose_headers=["Retry-After"],
    )

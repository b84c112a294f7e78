"""Embeddings: a vector for each input, in one document."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qoff.api.answers import encoded
from qoff.api.protocol import EmbeddingRequest
from qoff.api.requests import check_answer

from .engine import Engine


class Embedded(Response):
    """Computes vectors, and sends them."""

    def __init__(self, engine: Engine, body: EmbeddingRequest) -> None:
        super().__init__()
        self._engine, self._body, self._params = engine, body, body.params()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, there = self._body, self._engine.ready().adapters
        adapter = body.model if body.model in there else None  # which the engine refuses
        asked = self._engine.answering(body.input, self._params, receive, adapter)
        async with asked as answers:
            async for piece in answers.pieces():
                if piece.answer is not None:
                    check_answer(piece.answer)
        tokens, found = answers.prompt_tokens, answers.vectors
        self._engine.metrics.count(tokens, 0)
        whole = {
            "object": "list",
            "model": self._engine.name,
            "data": [
                {"object": "embedding", "index": i, "embedding": self._form(found[i])}
                for i in sorted(found)
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        await Response(encoded(whole), media_type="application/json")(scope, receive, send)

    def _form(self, vector: list[float]) -> Any:
        """A vector as numbers, or as the base64 of little-endian float32."""
        if self._body.encoding_format != "base64":
            return vector
        return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()

"""`/v1/files` and `/v1/batches`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response

from qoff.api.errors import ApiError
from qoff.api.protocol import BatchRequest

from .batches import Batches
from .bodies import read_data
from .engine import Engine
from .forms import UploadForm, disk_full
from .options import ServeOptions

_T = TypeVar("_T")
_PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")


class BatchRoutes:
    """What the server does with files and batches."""

    def __init__(self, engine: Engine, options: ServeOptions) -> None:
        self._engine, self._options = engine, options

    def add_to(self, app: FastAPI) -> None:
        """Have an application answer these paths."""
        for path, get, post in (
            ("/v1/files", self.files, self.upload),
            ("/v1/files/{file_id}", self.file, None),
            ("/v1/files/{file_id}/content", self.content, None),
            ("/v1/batches", self.batches, self.create),
            ("/v1/batches/{batch_id}", self.batch, None),
            ("/v1/batches/{batch_id}/cancel", None, self.cancel),
        ):
            for methods, route in ((["GET", "HEAD"], get), (["POST"], post)):
                if route is not None:
                    app.add_api_route(path, route, methods=methods, response_model=None)
        app.add_api_route("/v1/files/{file_id}", self.remove, methods=["DELETE"])

    @property
    def _batches(self) -> Batches:
        if self._engine.batches is None:
            raise ApiError(404, "this server keeps no files", code="no_files")
        return self._engine.batches

    async def _on_disk(self, work: Callable[[], _T]) -> _T:
        """As `Engine.on_disk`. Raises ApiError where the disk is full."""
        try:
            return await self._engine.on_disk(work)
        except OSError as error:
            raise disk_full(error) from error

    async def upload(self, request: Request) -> dict[str, Any]:
        store, headers = self._batches.files, request.headers
        form = UploadForm(headers.get("content-type", ""), store.uploads, store.max_file_bytes)
        try:
            with store.coming() as more:
                got = await form.read(request, self._options.read_timeout_s, more)
                if got.purpose not in _PURPOSES:
                    message = f"purpose is {got.purpose[:64]!r}; use one of {', '.join(_PURPOSES)}"
                    raise ApiError(400, message, param="purpose")
                return await self._on_disk(
                    lambda: store.add(got.path, got.name, got.purpose, store.new_id())
                )
        finally:
            form.close()

    async def files(
        self, purpose: str | None = None, limit: int = 10_000, after: str | None = None,
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:  # fmt: skip
        found = self._batches.files.all()
        if purpose is not None:
            found = [one for one in found if one["purpose"] == purpose]
        return _page(found if order == "asc" else found[::-1], limit, after)

    async def file(self, file_id: str) -> dict[str, Any]:
        return self._batches.files.get(file_id)

    async def content(self, file_id: str) -> Response:
        path = self._batches.files.path(file_id)
        return FileResponse(path, media_type="application/octet-stream")

    async def remove(self, file_id: str) -> dict[str, Any]:
        batches = self._batches
        await self._on_disk(lambda: batches.remove_file(file_id))
        return {"id": file_id, "object": "file", "deleted": True}

    async def create(self, request: Request) -> dict[str, Any]:
        batches = self._batches
        data = await read_data(request, self._options)
        body = await self._engine.of_body(len(data), lambda: BatchRequest.model_validate_json(data))
        return await self._on_disk(
            lambda: batches.create(
                body.input_file_id, body.endpoint, body.completion_window, body.metadata
            )
        )

    async def batches(self, limit: int = 20, after: str | None = None) -> dict[str, Any]:
        return _page(self._batches.store.all()[::-1], limit, after)

    async def batch(self, batch_id: str) -> dict[str, Any]:
        return self._batches.store.get(batch_id)

    async def cancel(self, batch_id: str) -> dict[str, Any]:
        batches = self._batches
        return await self._on_disk(lambda: batches.cancel(batch_id))


def _page(found: Sequence[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """A part of a list. Raises ApiError for what is not in it."""
    start = 0
    if after is not None:
        place = next((i for i, one in enumerate(found) if one["id"] == after), None)
        if place is None:
            raise ApiError(404, f"there is no {after[:100]!r}", param="after")
        start = place + 1
    shown = list(found[start : start + min(max(limit, 1), 10_000)])
    ids = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    more = start + len(shown) < len(found)
    return {"object": "list", "data": shown, "has_more": more, **ids}

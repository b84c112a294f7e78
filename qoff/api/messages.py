"""Conversations in the bodies of requests, and the tools that their answers may call."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from qoff.errors import ArgumentError, raised_as

from .body import Body

Tools = Field(fail_fast=True, max_length=512)


class TextPart(Body):
    type: Literal["text"]
    text: str


class CalledFunction(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # in what a client put together of a stream


class Message(Body):
    """One of a conversation. The last four are what OpenAI's client sends back of an answer."""

    role: Annotated[str, Field(max_length=64)]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=4096)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Tools] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # what an answer of this server has as its thinking
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)

    @field_validator("content", mode="before")
    @classmethod
    def _texts(cls, given: Any) -> Any:
        for part in given if isinstance(given, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise ValueError(f"parts of type {kind[:100]!r} are not supported, only text")
        return given

    def plain(self) -> dict[str, Any]:
        """As a chat template reads it; parts of a text are its lines."""
        found = self.model_dump(exclude_none=True, exclude={"annotations"})
        if isinstance(self.content, list):
            found["content"] = "\n".join(part.text for part in self.content)
        for call in found.get("tool_calls", ()):  # templates write them as JSON themselves
            call.pop("index", None)
            with raised_as(ArgumentError, "the arguments of a tool call are no JSON"):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        return found


Messages = Annotated[list[Message], Field(fail_fast=True, max_length=16_384)]


class Function(Body):
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction

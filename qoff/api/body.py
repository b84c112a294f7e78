"""What all bodies of requests have in common: bounds, and what is said of a wrong one."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from .errors import ApiError

_MOST_FIELDS = 100  # of an object
# What there may be in all of a body, and the signs in JSON that each of it has.
_BOUNDS = (
    ("objects and lists", (b"[", b"{"), 1 << 16),  # each takes up to 15 us to validate
    ("fields", (b":",), 1 << 17),  # and each of these 1 us
)
# Of a list only the first thing that is wrong is told: there may be a million.
First = Field(fail_fast=True)


class Body(BaseModel):
    """What is not named here is refused, never ignored."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """As pydantic's; one of very many objects, lists or fields is refused before it is read."""
        data = json_data.encode() if isinstance(json_data, str) else json_data
        for what, signs, most in _BOUNDS:
            if _count(data, signs) > most and _count(_outside_texts(data), signs) > most:
                wrong = PydanticCustomError("too_many", f"more than {most} {what}")
                raise ValidationError.from_exception_data(
                    cls.__name__, [{"type": wrong, "input": None}]
                )
        return super().model_validate_json(data, **options)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > _MOST_FIELDS:
            raise ValueError(f"an object with {len(given)} fields")
        return given


def _count(data: bytes | bytearray, signs: tuple[bytes, ...]) -> int:
    """How often some signs are in JSON, its texts included."""
    return sum(map(data.count, signs))


def _outside_texts(data: bytes | bytearray) -> bytes:
    """What some JSON has between its texts."""
    return b"".join(data.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])


def wrong_body(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a request's JSON; of a list with too many, that."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = next((one for one in errors if one["type"] == "too_long"), errors[0])
    where = [str(part) for part in first["loc"] if not str(part).startswith("function-")]
    if first["type"] == "extra_forbidden":
        message = f"{where[-1][:100]!r} is not supported by this server"
    elif first["type"] == "json_invalid":
        message = f"the request is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}"
    else:
        message = first["msg"].removeprefix("Value error, ")
        message += f" (in {'.'.join(where)[:100]})" if where else ""
    return ApiError(400, message, param=where[0][:100] if where else None)

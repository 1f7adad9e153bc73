"""Field types that several schemas use, with their limits."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any

from fastapi import Path, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

#: What may stand in a Valkey key, a workflow id and a path: no braces, no bars, no slashes. It begins with
#: a letter or digit, so that it is never the pool's `-1`.
ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"

UserId = Annotated[str, Field(pattern=ID_PATTERN, max_length=64, examples=["alice"])]
AccountId = Annotated[str, Field(pattern=ID_PATTERN, max_length=64, examples=["9A95-0123456"])]
UserIdInPath = Annotated[str, Path(pattern=ID_PATTERN, max_length=64, examples=["alice"])]
AccountIdInPath = Annotated[str, Path(pattern=ID_PATTERN, max_length=64, examples=["9A95-0123456"])]


def _plain(price: Decimal) -> str:
    return format(price.normalize(), "f")


#: A price as text, without an exponent and without trailing zeros.
Price = Annotated[Decimal, PlainSerializer(_plain, return_type=str, when_used="json")]


class Body(BaseModel):
    """A request body: unknown fields are refused, because a misspelt one would be ignored silently."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class View(BaseModel):
    """What the API returns; `model_validate` also takes a row or a dataclass with the same names."""

    model_config = ConfigDict(frozen=True, from_attributes=True)


#: For a field of a view whose source has 0 or an empty text for what is not known.
EMPTY_IS_NONE = BeforeValidator(lambda value: value or None)


def view_response(view: View, status: int = 200, location: str | None = None) -> Response:
    """A view as bytes: FastAPI would validate and convert what has just been built."""
    headers = {"Location": location} if location else None
    return Response(view.model_dump_json(), status, headers, "application/json")


def examples(*bodies: dict[str, Any]) -> ConfigDict:
    """The configuration of a schema that shows these examples in OpenAPI; the rest is inherited."""
    return ConfigDict(json_schema_extra={"examples": list(bodies)})

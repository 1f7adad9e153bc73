"""Field types that several schemas use, with their limits."""

import json
from decimal import Decimal
from importlib.resources import files
from typing import Annotated, Any

from fastapi import Query, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from worker_runtime.protocol.bounds import plain_number

#: The form of a name that fits a Valkey key, a workflow id and a path: no braces, no bars, no
#: slashes. It begins with a letter or digit, so that it is never the pool's `-1`.
ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"

#: Text in any script: no control characters (PostgreSQL
#: takes no NUL), line ends or marks of direction.
_REFUSED = r"\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069"
PlainText = Annotated[str, Field(pattern=rf"^[^{_REFUSED}]*$")]
#: The pattern of one that is not of spaces alone.
NOT_BLANK = rf"^[^{_REFUSED}]*[^\s{_REFUSED}][^{_REFUSED}]*$"
#: Why something is done.
Reason = Annotated[PlainText, Field(max_length=200)]
#: The same in a body that a person fills in.
LongReason = Annotated[
    PlainText, Field(max_length=500, description="The reason; kept in the audit trail.")
]
UserId = Annotated[str, Field(pattern=ID_PATTERN, max_length=64, examples=["alice"])]
AccountId = Annotated[str, Field(pattern=ID_PATTERN, max_length=64, examples=["9A95-0123456"])]
OfUser = Annotated[
    str | None, Query(pattern=ID_PATTERN, max_length=64, description="Only of this user.")
]
UserPrefix = Annotated[
    str | None,
    Query(pattern=ID_PATTERN, max_length=64, description="Only of users whose ids begin like it."),
]
#: Most rows of a page.
Rows = Annotated[int, Query(ge=1, le=1000, description="Most rows of a page.")]


def plain_price(price: Decimal | None) -> str:
    """Returns a price as text, without an exponent and without trailing zeros; '' for none."""
    return "" if price is None else plain_number(price)


Price = Annotated[Decimal, PlainSerializer(plain_price, return_type=str, when_used="json")]


#: Examples of bodies and views, by the name of the model.
EXAMPLES: dict[str, list[dict[str, Any]]] = json.loads(
    (files("api.http") / "examples.json").read_bytes()
)


def with_examples(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Adds a model's examples to its schema in OpenAPI."""
    if model.__name__ in EXAMPLES:
        schema["examples"] = EXAMPLES[model.__name__]


class Body(BaseModel):
    """A request body, with finite numbers.
    Unknown fields are refused: a misspelt one would be ignored."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, json_schema_extra=with_examples
    )


class View(BaseModel):
    """The base of what the API returns. `model_validate` also takes a row or a dataclass with the
    same names."""

    model_config = ConfigDict(frozen=True, from_attributes=True, json_schema_extra=with_examples)


#: Marks a field of a view whose source has 0 or an empty text for what is not known.
EMPTY_IS_NONE = BeforeValidator(lambda value: value or None)


def view_response(view: View, status: int = 200, location: str | None = None) -> Response:
    """Returns a view as bytes: FastAPI would validate and convert what has just been built."""
    headers = {"Location": location} if location else None
    return Response(view.model_dump_json(), status, headers, "application/json")

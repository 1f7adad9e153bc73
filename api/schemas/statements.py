"""Where a user's daily statements go."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from api.schemas.fields import Body, View
from api.schemas.jobs import MailAddress, WebUrl

_EXAMPLE: dict[str, Any] = {"email": "alice@example.com", "webhook_url": None}


class PutStatementAddresses(Body):
    """Both addresses; what is null or left out is none."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra={"examples": [_EXAMPLE]})

    email: MailAddress | None = None
    webhook_url: Annotated[
        WebUrl | None,
        Field(description="Gets the statement as JSON, signed with the user's key."),
    ] = None


class StatementAddresses(View):
    """Where the daily statements go; null: not there."""

    model_config = ConfigDict(frozen=True, json_schema_extra={"examples": [_EXAMPLE]})

    email: str | None
    webhook_url: str | None

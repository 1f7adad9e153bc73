"""Users and their API keys."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import ConfigDict, Field

from api.schemas.fields import Body, UserId, View


class NewUser(Body):
    """A user to be. Without a `user_id` one is made up."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, json_schema_extra={"examples": [{"user_id": "alice"}, {}]}
    )

    user_id: UserId | None = None


class User(View):
    user_id: str
    created_at: datetime


class UserWithKey(User):
    """A new user with a key of the role `user`. The key is shown here once, and kept only as a hash."""

    model_config = ConfigDict(
        frozen=True,
        json_schema_extra={
            "examples": [
                {
                    "user_id": "alice",
                    "created_at": "2026-11-21T01:00:00Z",
                    "api_key": "bk_shown-here-once-and-never-again",
                }
            ]
        },
    )

    api_key: Annotated[str, Field(repr=False)]

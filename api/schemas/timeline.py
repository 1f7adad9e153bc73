"""The timeline of a user's worker: every change of state, as list and as server-sent events."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import ConfigDict, Field, JsonValue

from api.schemas.fields import View

_EXAMPLE: dict[str, JsonValue] = {
    "id": 17,
    "at": "2026-11-21T01:00:00.034000Z",
    "before": "Connecting",
    "after": "Active",
    "reason": "",
    "worker_id": "w-7c3e9d4f",
    "epoch": 3,
    "deadline": "2026-11-21T01:30:00.034000Z",
}


class Transition(View):
    """One change of state."""

    model_config = ConfigDict(frozen=True, json_schema_extra={"examples": [_EXAMPLE]})

    id: Annotated[int, Field(description="Grows with each change of this user's worker.")]
    at: datetime
    before: str
    after: str
    reason: str
    worker_id: str | None
    epoch: int | None
    deadline: Annotated[datetime | None, Field(description="Until when the new state may last.")]


class Timeline(View):
    """Changes in the order in which they happened."""

    model_config = ConfigDict(
        frozen=True,
        json_schema_extra={"examples": [{"user_id": "alice", "transitions": [_EXAMPLE], "next_after": 17}]},
    )

    user_id: str
    transitions: list[Transition]
    next_after: Annotated[int, Field(description="`after` of the next look.")]


class PresentState(View):
    """The state in which an event stream begins; nulls for a user who never had a worker."""

    user_id: str
    state: str | None
    since: datetime | None
    reason: str | None
    worker_id: str | None
    epoch: int | None
    deadline: datetime | None

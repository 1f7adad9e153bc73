"""The fields of dead letters in answers."""

from datetime import datetime
from typing import Annotated
from uuid import UUID

from pydantic import BeforeValidator, Field

from api.http.fields import EMPTY_IS_NONE, View
from api.orders.schemas import NextCursor
from worker_runtime.jobs.protocol import keys as job_keys


def _user_of_owner(owner: str) -> str | None:
    """Return the user; None for the fleet, and for an application (`source` names it)."""
    return owner if owner and not job_keys.application_of_tag(owner) else None


class DeadLetterView(View):
    """Something that failed for good."""

    id: UUID
    kind: str = Field(
        description="`workflow`, `order` (it waits for a person), `job`, `alert`; of messages who "
        "gave them up: `event`, `recorder`, `relay`, `late`, `outcome`. `overflow` counts what is "
        "not kept."
    )
    subject: Annotated[str | None, EMPTY_IS_NONE] = Field(
        description="Id of the workflow, order or job, to be opened."
    )
    source: str = Field(description="At most 100 open letters have the same.")
    user_id: Annotated[str | None, BeforeValidator(_user_of_owner)] = Field(
        description="The user whose it is; null for what is the fleet's or an application's."
    )
    reason: str
    text: Annotated[str | None, EMPTY_IS_NONE] = Field(description="The beginning of a message.")
    count: int = Field(description="How often it failed.")
    first_at: datetime
    last_at: datetime
    closed_at: datetime | None = Field(description="When it was redriven or dismissed.")


class DeadLetterPage(View):
    """Letters, the newest first."""

    letters: list[DeadLetterView]
    next_cursor: NextCursor

"""Bodies and views of a user's worker, and of the timeline of its states."""

from datetime import datetime
from typing import Annotated

from fastapi import Depends
from pydantic import Field

from api.http.fields import EMPTY_IS_NONE, Body, Reason, View


class ReasonBody(Body):
    """Why it is done; for the audit trail,
    and when a worker is stopped for the workflow's history."""

    reason: Reason = "requested"


async def given_reason(body: ReasonBody | None = None) -> str:
    return (body or ReasonBody()).reason


#: The reason in the body of a request, which may have none.
GivenReason = Annotated[str, Depends(given_reason)]


class SignalledView(View):
    """The workflow has the signal; it acts on it by itself."""

    user_id: str
    signal: str = Field(examples=["shutdown"])


class ReloadedView(View):
    """The worker has the credentials that are stored now, or there is none that would need them."""

    user_id: str
    detail: str


class StartedWorkerView(View):
    """The worker is Active: connected with one account at least."""

    user_id: str
    state: str
    worker_id: str
    epoch: int
    pool: str
    version: str
    warm: bool = Field(description="Taken from the pool, not launched for this user.")
    claimed_at: Annotated[datetime | None, EMPTY_IS_NONE]
    connected_at: Annotated[datetime | None, EMPTY_IS_NONE]


class MarkView(View):
    """The key that a live worker refreshes."""

    worker_id: str
    epoch: int


class LifecycleView(View):
    """The answer of the user's workflow."""

    state: str
    since: datetime
    worker_id: str | None
    task_id: str | None
    epoch: int | None
    attempts: int
    reason: str
    next_step: str
    deadline: Annotated[datetime | None, EMPTY_IS_NONE]
    health: str = Field(
        description="What is last known of the broker connections: `well`, or `degraded: …`; then "
        "what went wrong with the last reload of credentials."
    )
    health_at: Annotated[datetime | None, EMPTY_IS_NONE]
    crashes: int = Field(description="Within the window that backoff and parking count.")
    last_activity: Annotated[datetime | None, EMPTY_IS_NONE] = Field(
        description="Last known order or control message."
    )


class WorkerView(View):
    """A user's worker from both sides."""

    user_id: str
    live: bool = Field(description="The worker's mark is there.")
    state: str | None = Field(
        description="The worker's own word if it is live, else its workflow's."
    )
    mark: MarkView | None
    metadata: dict[str, str]
    lifecycle: LifecycleView | None


class TransitionView(View):
    """Describes a change of state."""

    id: int = Field(description="Grows with each change of this user's worker.")
    at: datetime
    before: str
    after: str
    reason: str
    worker_id: Annotated[str | None, EMPTY_IS_NONE]
    epoch: Annotated[int | None, EMPTY_IS_NONE]
    deadline: datetime | None = Field(description="Until when the new state may last.")


class TimelineView(View):
    """Changes in the order in which they happened."""

    user_id: str
    transitions: list[TransitionView]
    next_after: int = Field(description="`after` of the next page.")


class PresentState(View):
    """The state in which an event stream begins; nulls for a user who never had a worker."""

    user_id: str
    state: str | None
    since: datetime | None
    reason: str | None
    worker_id: str | None
    epoch: int | None
    deadline: datetime | None

"""Bodies and views of jobs, and of the limits of job types."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from api.http.fields import ID_PATTERN, AccountId, Body, View, examples
from api.orders.schemas import OrderFilter
from api.workers.schemas import ReasonBody

JobId = Annotated[
    str,
    Field(
        pattern=ID_PATTERN,
        max_length=64,
        description="The job's id, if the caller chooses it: the same call with the same id is done once.",
    ),
]
#: Days far outside of a market's life are typing errors.
_Day = Annotated[date, Field(ge=date(2000, 1, 1), le=date(2199, 12, 31))]


#: What a job of the fleet takes as an address.
WebUrl = Annotated[str, Field(max_length=2048, pattern=r"^https?://[!-~]+$")]
MailAddress = Annotated[
    str, Field(max_length=254, pattern=r"^[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]+@[A-Za-z0-9.-]+$")
]


class _JobRequest(Body):
    job_id: JobId | None = None

    def asked(self) -> dict[str, Any]:
        """What was asked for, without the id: the same again is the same job."""
        return self.model_dump(mode="json", exclude={"job_id"})


class StatementJobRequest(_JobRequest):
    """The statement of one day."""

    type: Literal["statement"]
    day: Annotated[_Day, Field(description="Orders accepted on this day in Taiwan.")]


class ExportJobRequest(_JobRequest):
    """Orders as CSV."""

    type: Literal["order_export"]
    orders: Annotated[OrderFilter, Field(description="As of `GET …/orders`.")] = OrderFilter()


class SnapshotJobRequest(_JobRequest):
    """Positions and balance of one account."""

    type: Literal["position_snapshot"]
    account_id: AccountId


UserJob = StatementJobRequest | ExportJobRequest | SnapshotJobRequest


class UserJobRequest(Body):
    """A job of one user."""

    model_config = examples(
        {"job": {"type": "statement", "day": "2026-11-20", "job_id": "statement-2026-11-20"}},
        {"job": {"type": "order_export", "orders": {"state": ["filled"]}}},
        {"job": {"type": "position_snapshot", "account_id": "9A95-0123456"}},
    )

    job: Annotated[UserJob, Field(discriminator="type")]


class PingJobRequest(_JobRequest):
    """Shows that the fleet runs jobs."""

    type: Literal["ping"]
    text: Annotated[str, Field(max_length=1000)] = ""


class WebhookJobRequest(_JobRequest):
    """A webhook."""

    type: Literal["webhook"]
    url: WebUrl
    recipient: Annotated[
        str,
        Field(pattern=ID_PATTERN, max_length=64, description="Whose key signs it: a user's id, or a name."),
    ]
    event: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$", examples=["order.filled"])]
    body: JsonValue


class MailJobRequest(_JobRequest):
    """An e-mail."""

    type: Literal["email"]
    to: MailAddress
    subject: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{1,200}$")]
    text: Annotated[str, Field(max_length=16_000)]


class FleetJobRequest(Body):
    """A job of the fleet, for operators."""

    model_config = examples(
        {
            "job": {
                "type": "webhook",
                "url": "https://example.com/hook",
                "recipient": "alice",
                "event": "order.filled",
                "body": {"order": "0199"},
            }
        },
        {"job": {"type": "email", "to": "alice@example.com", "subject": "Hello", "text": "Hello"}},
        {"job": {"type": "ping"}, "priority": 9},
    )

    job: Annotated[PingJobRequest | WebhookJobRequest | MailJobRequest, Field(discriminator="type")]
    priority: Annotated[int, Field(ge=0, le=9, description="A higher one comes earlier.")] = 5
    delay: Annotated[
        float, Field(ge=0, le=86_400, allow_inf_nan=False, description="Seconds until it may run.")
    ] = 0.0

    @model_validator(mode="after")
    def _body_fits(self) -> Self:
        if isinstance(self.job, WebhookJobRequest):
            _check_body(self.job.body)
        return self


def _check_body(value: JsonValue, level: int = 1) -> None:
    """Raises `ValueError` for what cannot be sent as JSON, or is nested too deep."""
    if level > 32:
        raise ValueError("a body is at most 32 levels deep")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a body has no NaN and no number beyond 1.8e308: JSON cannot say them")
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        _check_body(part, level + 1)


class JobFailureView(View):
    code: str
    detail: str
    retryable: bool


class JobStateView(View):
    """A job as it stands."""

    model_config = examples(
        {
            "id": "statement-2026-11-20",
            "type": "statement",
            "state": "done",
            "ended": True,
            "cancelling": False,
            "attempt": 1,
            "queued_at": None,
            "due_at": None,
            "started_at": "2026-11-21T01:00:00.000000Z",
            "finished_at": "2026-11-21T01:00:00.020000Z",
            "progress": None,
            "value": {"user_id": "alice", "day": "2026-11-20", "orders": 0, "lines": []},
            "failure": None,
        }
    )

    id: str
    type: Annotated[str | None, Field(description="Not told any more once it has ended well.")]
    state: Annotated[
        str,
        Field(description="`waiting`, `delayed`, `grouped`, `running`, `done`, `failed` or `cancelled`."),
    ]
    ended: bool
    cancelling: Annotated[bool, Field(description="It runs, and is being ended.")]
    attempt: int
    queued_at: datetime | None
    due_at: Annotated[datetime | None, Field(description="When it may run, while it is delayed.")]
    started_at: datetime | None
    finished_at: datetime | None
    progress: Any
    value: Annotated[Any, Field(description="What it returned. Kept for 500 s.")]
    failure: Annotated[JobFailureView | None, Field(description="Why it failed; or the last attempt did.")]


def time_of_ms(milliseconds: int | None) -> datetime | None:
    return datetime.fromtimestamp(milliseconds / 1000, UTC) if milliseconds else None


_LIMITS_EXAMPLE: dict[str, Any] = {"running": 8, "per_node": 4, "per_second": 5.0, "burst": 10}
_LIMITS_VIEW_EXAMPLE: dict[str, Any] = {"type": "webhook", "running_now": 3, **_LIMITS_EXAMPLE}
_Count = Annotated[int, Field(strict=True, ge=0, le=100_000)]


class JobLimitsRequest(ReasonBody):
    """All limits of one type of job; what is null or left out has none."""

    model_config = examples(_LIMITS_EXAMPLE | {"reason": "the mail server asked for it"})

    running: Annotated[
        _Count | None, Field(description="Jobs that run at once, everywhere; 0: none is begun.")
    ] = None
    per_node: Annotated[_Count | None, Field(description="Jobs that run at once on one node.")] = None
    per_second: Annotated[
        float | None,
        Field(
            ge=0.0001,
            le=10_000,
            allow_inf_nan=False,
            description="Jobs a second for each rate key (a webhook's host, a mail's domain).",
        ),
    ] = None
    burst: Annotated[
        int | None,
        Field(strict=True, ge=1, le=100_000, description="How many of them may come at once after a rest."),
    ] = None

    @model_validator(mode="after")
    def _burst_has_a_rate(self) -> Self:
        if self.burst is not None and self.per_second is None:
            raise ValueError("burst is part of a rate: per_second is needed, too")
        return self


class JobLimitsView(View):
    """Limits of one type of job; null: without."""

    model_config = examples(_LIMITS_VIEW_EXAMPLE)

    type: str
    running_now: Annotated[int, Field(description="Jobs of this type that run now, by the queue's count.")]
    running: int | None
    per_node: int | None
    per_second: float | None
    burst: int | None


class JobLimitsList(View):
    """Of every type that the fleet runs."""

    limits: list[JobLimitsView]

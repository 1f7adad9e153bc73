"""Bodies and views of jobs, and of the limits of job types."""

import math
from datetime import UTC, date, datetime
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, JsonValue, model_validator

from api.http.fields import ID_PATTERN, AccountId, Body, View
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


def _has_host(url: str) -> str:
    """Raises `ValueError` for a URL of no host; the fleet checks where it leads."""
    if not urlsplit(url).hostname:
        raise ValueError("it has no host")
    return url


#: What a job of the fleet takes as an address.
WebUrl = Annotated[str, Field(max_length=2048, pattern=r"^https?://[!-~]+$"), AfterValidator(_has_host)]
MailAddress = Annotated[
    str, Field(max_length=254, pattern=r"^[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]+@[A-Za-z0-9.-]+$")
]


class _JobRequest(Body):
    job_id: JobId | None = None


class StatementJobRequest(_JobRequest):
    """The statement of one day."""

    type: Literal["statement"]
    day: _Day = Field(description="Orders accepted on this day in Taiwan.")


class ExportJobRequest(_JobRequest):
    """Orders as CSV."""

    type: Literal["order_export"]
    orders: OrderFilter = Field(default=OrderFilter(), description="As of `GET …/orders`.")


class SnapshotJobRequest(_JobRequest):
    """Positions and balance of one account."""

    type: Literal["position_snapshot"]
    account_id: AccountId


UserJob = StatementJobRequest | ExportJobRequest | SnapshotJobRequest


class UserJobRequest(Body):
    """A job of one user."""

    job: UserJob = Field(discriminator="type")


class PingJobRequest(_JobRequest):
    """Shows that the fleet runs jobs."""

    type: Literal["ping"]
    text: str = Field(default="", max_length=1000)


class WebhookJobRequest(_JobRequest):
    """A webhook."""

    type: Literal["webhook"]
    url: WebUrl
    recipient: str = Field(
        pattern=ID_PATTERN, max_length=64, description="Whose key signs it: a user's id, or a name."
    )
    event: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$", examples=["order.filled"])
    body: JsonValue


class MailJobRequest(_JobRequest):
    """An e-mail."""

    type: Literal["email"]
    to: MailAddress
    subject: str = Field(pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]{1,200}$")
    text: str = Field(max_length=16_000)


_Number = Annotated[
    str, Field(pattern=r"^\+[1-9]\d{6,14}$", examples=["+886912345678"], description="E.164.")
]
_Message = Annotated[str, Field(min_length=1, max_length=1600)]
_Word = Annotated[str, Field(min_length=1, max_length=64)]
_Values = Annotated[dict[_Word, Annotated[str, Field(max_length=512)]], Field(max_length=20)]


class SmsJobRequest(_JobRequest):
    """An SMS."""

    type: Literal["sms"]
    to: _Number
    text: _Message


class WhatsappJobRequest(_JobRequest):
    """A WhatsApp message: `text` within 24 h of the recipient's last one, else a `template`."""

    type: Literal["whatsapp"]
    to: _Number
    text: _Message | None = None
    template: str | None = Field(
        default=None, pattern=r"^HX[0-9a-fA-F]{32}$", description="Id of an approved template."
    )
    variables: _Values = Field(default_factory=dict)


class PushJobRequest(_JobRequest):
    """A notification to one installed app."""

    type: Literal["push"]
    token: str = Field(pattern=r"^[!-~]{1,4096}$", description="Its registration token.")
    title: str = Field(max_length=200)
    text: str = Field(max_length=2000)
    data: _Values = Field(default_factory=dict, description="For the app; nobody sees it.")


#: What begins the ids of jobs that Berth itself makes, which it would then take for made.
_OWN_IDS = ("alert-", "report-", "statement-")
MESSAGES = (SmsJobRequest, WhatsappJobRequest, PushJobRequest)
FleetJob = (
    PingJobRequest | WebhookJobRequest | MailJobRequest | SmsJobRequest | WhatsappJobRequest | PushJobRequest
)


class FleetJobRequest(Body):
    """A job of the fleet: a ping for operators, all of them for administrators."""

    job: FleetJob = Field(discriminator="type")
    priority: int = Field(default=5, ge=0, le=9, description="A higher one comes earlier.")
    delay: float = Field(default=0.0, ge=0, le=86_400, description="Seconds until it may run.")

    @model_validator(mode="after")
    def _is_acceptable(self) -> Self:
        if self.job.job_id is not None and self.job.job_id.startswith(_OWN_IDS):
            raise ValueError("ids that begin like this are those of Berth's own jobs")
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

    id: str
    type: str | None = Field(description="Not told any more once it has ended well.")
    state: str = Field(
        description="`waiting`, `delayed`, `grouped`, `running`, `done`, `failed` or `cancelled`."
    )
    ended: bool
    cancelling: bool = Field(description="It runs, and is being ended.")
    attempt: int
    queued_at: datetime | None
    due_at: datetime | None = Field(description="When it may run, while it is delayed.")
    started_at: datetime | None
    finished_at: datetime | None
    progress: Any
    value: Any = Field(description="What it returned. Kept for 500 s.")
    failure: JobFailureView | None = Field(description="Why it failed; or the last attempt did.")


def time_of_ms(milliseconds: int | None) -> datetime | None:
    return datetime.fromtimestamp(milliseconds / 1000, UTC) if milliseconds else None


_Count = Annotated[int, Field(strict=True, ge=0, le=100_000)]


class JobLimitsRequest(ReasonBody):
    """All limits of one type of job; what is null or left out has none."""

    running: _Count | None = Field(
        default=None, description="Jobs that run at once, everywhere; 0: none is begun."
    )
    per_node: _Count | None = Field(default=None, description="Jobs that run at once on one node.")
    per_second: float | None = Field(
        default=None,
        ge=0.0001,
        le=10_000,
        description="Jobs a second for each rate key (a webhook's host, a mail's domain).",
    )
    burst: int | None = Field(
        default=None,
        strict=True,
        ge=1,
        le=100_000,
        description="How many of them may come at once after a rest.",
    )

    @model_validator(mode="after")
    def _burst_has_a_rate(self) -> Self:
        if self.burst is not None and self.per_second is None:
            raise ValueError("burst is part of a rate: per_second is needed, too")
        return self


class JobLimitsView(View):
    """Limits of one type of job; null: without."""

    type: str
    running_now: int = Field(description="Jobs of this type that run now, by the queue's count.")
    running: int | None
    per_node: int | None
    per_second: float | None
    burst: int | None


class JobLimitsList(View):
    """Of every type that the fleet runs."""

    limits: list[JobLimitsView]

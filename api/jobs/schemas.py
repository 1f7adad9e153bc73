"""Bodies and views of jobs, and of the limits of job types."""

import math
from datetime import UTC, date, datetime
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    AliasChoices,
    AwareDatetime,
    ConfigDict,
    Field,
    JsonValue,
    model_validator,
)

from api.http.fields import ID_PATTERN, AccountId, Body, View
from api.orders.schemas import OrderFilter
from api.workers.schemas import ReasonBody
from infra.market.calendar import HOME_ZONE_NAME

#: Jobs of one batch.
MAX_BATCH_JOBS = 500

JobId = Annotated[
    str,
    Field(
        pattern=ID_PATTERN,
        max_length=64,
        description="The job's id, if the caller chooses it: the same call with the same id is "
        "done once.",
    ),
]
#: Days far outside of a market's life are typing errors.
_Day = Annotated[date, Field(ge=date(2000, 1, 1), le=date(2199, 12, 31))]


def _has_host(url: str) -> str:
    """Raises `ValueError` for a URL of no host; the fleet checks where it leads."""
    if not urlsplit(url).hostname:
        raise ValueError("it has no host")
    return url


#: An address as a job of the fleet takes it.
WebUrl = Annotated[
    str, Field(max_length=2048, pattern=r"^https?://[!-~]+$"), AfterValidator(_has_host)
]
MailAddress = Annotated[
    str, Field(max_length=254, pattern=r"^[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]+@[A-Za-z0-9.-]+$")
]


class _JobRequest(Body):
    job_id: JobId | None = None


class StatementJobRequest(_JobRequest):
    """The statement of one day."""

    type: Literal["statement"]
    day: _Day = Field(description=f"Orders accepted on this day ({HOME_ZONE_NAME}).")


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
    priority: int = Field(
        default=5,
        ge=0,
        le=9,
        description="Among the jobs of this user: a higher one comes earlier.",
    )
    group: str = Field(
        default="",
        pattern=r"^[!-z|~]*$",
        max_length=128,
        description="Jobs of one group run one after the other, in the order in which they came: "
        "also a retry comes before the next one.",
    )


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


#: The prefixes of the ids of jobs that Berth itself makes. It would take its own job for made if a
#: caller had used such an id.
_BUILT_IN_IDS = ("alert-", "report-", "statement-")
MESSAGES = (SmsJobRequest, WhatsappJobRequest, PushJobRequest)
FleetJob = (
    PingJobRequest
    | WebhookJobRequest
    | MailJobRequest
    | SmsJobRequest
    | WhatsappJobRequest
    | PushJobRequest
)


class FleetJobRequest(Body):
    """A job of the fleet: a ping for operators, all of them for administrators."""

    job: FleetJob = Field(discriminator="type")
    priority: int = Field(default=5, ge=0, le=9, description="A higher one comes earlier.")
    delay: float = Field(default=0.0, ge=0, le=86_400, description="Seconds until it may run.")

    @model_validator(mode="after")
    def _is_acceptable(self) -> Self:
        if self.job.job_id is not None and self.job.job_id.startswith(_BUILT_IN_IDS):
            raise ValueError("ids that begin like this are those of Berth's built-in jobs")
        if isinstance(self.job, WebhookJobRequest):
            check_body(self.job.body)
        return self


def check_body(value: JsonValue, level: int = 1) -> None:
    """Raises `ValueError` for what cannot be sent as JSON, or is nested too deep."""
    if level > 32:
        raise ValueError("a body is at most 32 levels deep")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a body has no NaN and no number beyond 1.8e308: JSON cannot say them")
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        check_body(part, level + 1)


#: The form of an application's type: the application, a slash, the name of the function with its
#: module.
_OWN_TYPE = r"^[a-z][a-z0-9-]{0,31}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$"
_OwnKey = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$", max_length=128)]
_ANY_TYPE = r"^([a-z][a-z0-9-]{0,31}/)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$"


class OwnJobOptions(Body):
    """Says how a job is enqueued. A field that is left out is as the job's type says."""

    model_config = ConfigDict(populate_by_name=True)

    job_id: JobId | None = None
    queue: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")
    priority: int | None = Field(
        default=None, ge=0, le=9, description="A higher one comes earlier."
    )
    timeout_s: float | None = Field(
        default=None, gt=0, le=86_400, description="Seconds after which a run is killed."
    )
    max_attempts: int | None = Field(default=None, ge=1, le=1000)
    delay_s: float = Field(
        default=0.0,
        ge=0,
        le=366 * 86_400,
        validation_alias=AliasChoices("delay_s", "delay"),
        description="Seconds until the job may run.",
    )
    run_at: AwareDatetime | None = Field(
        default=None, description="When the job may run, with a time zone; instead of `delay_s`."
    )
    group: _OwnKey | None = Field(
        default=None,
        description="Jobs of one group run one after the other, in the order in which they came.",
    )
    unique: _OwnKey | None = Field(
        default=None,
        description="While a job of this type with the same key has not ended, no other one is "
        "enqueued: the answer shows the earlier job.",
    )
    result_ttl_s: int | None = Field(
        default=None, ge=1, le=14 * 86_400, description="Seconds for which the result is kept."
    )
    rate_key: _OwnKey | None = Field(
        default=None, description="Jobs of one type with the same key share the rate of the type."
    )

    @model_validator(mode="after")
    def _has_one_time(self) -> Self:
        if self.run_at is not None and self.delay_s:
            raise ValueError("give run_at or delay_s, not both")
        if self.run_at is not None and (self.run_at - datetime.now(UTC)).days > 366:
            raise ValueError("run_at is at most a year ahead")
        if self.job_id is not None and self.job_id.startswith(_BUILT_IN_IDS):
            raise ValueError("job ids that begin like this belong to Berth's built-in jobs")
        return self


class OwnJobRequest(Body):
    """A job by its type and arguments: of an application, or one of Berth's built-in types."""

    type: str = Field(pattern=_ANY_TYPE, max_length=160, examples=["shop/jobs.resize_image"])
    args: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="The arguments by name, at most 64 KiB as JSON. They are checked against the "
        "JSON Schema that `GET /v1/job-types/{application}/{name}` shows.",
    )
    options: OwnJobOptions = OwnJobOptions()

    @property
    def is_of_application(self) -> bool:
        """False for one of Berth's built-in types."""
        return "/" in self.type


class ApplicationJobRequest(OwnJobRequest):
    """A job of an application."""

    type: str = Field(pattern=_OWN_TYPE, max_length=160, examples=["shop/jobs.resize_image"])


class JobBatchRequest(Body):
    """Jobs of one application."""

    jobs: list[ApplicationJobRequest] = Field(min_length=1, max_length=MAX_BATCH_JOBS)


class JobFailureView(View):
    code: str
    detail: str
    retryable: bool


class JobStateView(View):
    """A job as it stands."""

    id: str
    type: str | None = Field(
        description="Not shown any more once a job of a built-in type has ended well."
    )
    type_version: int | None = Field(
        default=None,
        description="Of an application's type: the version that has checked the arguments.",
    )
    state: str = Field(
        description="`waiting`, `delayed`, `grouped`, `running`, `done`, `failed` or `cancelled`."
    )
    ended: bool
    cancelling: bool = Field(description="It runs, and is being ended.")
    waits_for_runner: bool = Field(
        default=False,
        description="It waits because no live runner knows this version of its type. It loses "
        "no attempt.",
    )
    attempt: int
    queued_at: datetime | None
    due_at: datetime | None = Field(description="When it may run, while it is delayed.")
    started_at: datetime | None
    finished_at: datetime | None
    progress: Any
    value: Any = Field(
        description="What it returned. Kept for 500 s, unless the job says otherwise."
    )
    failure: JobFailureView | None = Field(description="Why it failed; or the last attempt did.")


class JobBatchView(View):
    """The jobs of a batch, in the order of the request."""

    jobs: list[JobStateView]


class JobTypeVersionView(View):
    """Describes a version of a job type."""

    version: int
    package: str | None = Field(
        description="The distribution that declares it; null: no runner ever has."
    )
    package_version: str | None
    announced_at: datetime | None = Field(description="When a runner announced it last.")
    runners: int | None = Field(
        description="Live runners that take jobs of it; null: Valkey is away."
    )
    waiting: int | None = Field(description="Jobs that wait in its queue; null: Valkey is away.")
    waits_for_runner: bool = Field(description="Jobs wait, and no live runner takes them.")
    summary: str
    options: dict[str, Any] = Field(
        description="How its jobs are enqueued unless a call says otherwise."
    )
    arguments_schema: dict[str, Any] | None = Field(
        default=None, description="JSON Schema of the arguments; null in the list of all types."
    )
    refusal: str | None = Field(description="Why the API takes no jobs of it; null if it does.")


class JobTypeView(View):
    """A job type of an application."""

    type: str
    application: str
    summary: str
    versions: list[JobTypeVersionView] = Field(
        description="The version that was announced last comes first."
    )


class JobTypeList(View):
    """The job types of applications."""

    types: list[JobTypeView]


class ApplicationView(View):
    """An application."""

    name: str
    created_at: datetime
    created_by: str
    generation: int = Field(description="Of its key.")
    former_generation: int | None = Field(description="The one before, while it still counts.")
    types: int = Field(description="Job types that its runners have announced.")


class ApplicationList(View):
    """All applications."""

    applications: list[ApplicationView]


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
    """The limits of every type that the fleet runs."""

    limits: list[JobLimitsView]


class QueueWeightRequest(ReasonBody):
    """The weight of a queue."""

    weight: float | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="Turns for each turn of a queue with weight 1; null: 1.",
    )
    application: str | None = Field(
        default=None,
        pattern=r"^[a-z][a-z0-9-]{0,31}$",
        description="Whose queue it is; null: the fleet's.",
    )


class QueueView(View):
    """A queue."""

    queue: str
    weight: float
    suspended: bool = Field(description="No runner takes jobs of it: `berth jobs resume`.")
    waiting: int = Field(description="Jobs that could run now.")


class QueueList(View):
    """Queues with work, a weight or a suspension; of the fleet also those of Berth's built-in
    types."""

    queues: list[QueueView]

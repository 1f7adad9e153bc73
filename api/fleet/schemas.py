"""Holds the bodies by which the API shows the fleet, maintenance and its own health."""

from datetime import date, datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, AliasChoices, Field

from api.http.fields import EMPTY_IS_NONE, View
from api.workers.schemas import ReasonBody

#: Seconds to the millisecond.
Milliseconds = Annotated[float, AfterValidator(lambda seconds: round(seconds, 3))]


class FleetRowView(View):
    """Describes a user's running workflow. It has no worker while it claims one or is parked."""

    user_id: str
    state: str | None
    worker_id: str | None
    pool: str | None
    started_at: datetime = Field(description="When the present run of the workflow began.")


class MaintenanceRequest(ReasonBody):
    override_guard: bool = Field(
        default=False, description="Act though so much looks odd at once that it may be an outage."
    )


class MaintenancePassView(View):
    """Says what maintenance saw when it scanned all workers, and what it did."""

    began_at: datetime
    workers: int = Field(validation_alias=AliasChoices("scanned", "workers"))
    found: dict[str, int] = Field(description="Anomalies by kind.")
    outcomes: dict[str, int] = Field(
        description="What was done with those that two scans had found, and how often."
    )
    guarded: Annotated[str | None, EMPTY_IS_NONE] = Field(
        description="Why nothing was done; null: it might have been."
    )
    scan_seconds: Milliseconds
    total_seconds: Milliseconds | None = Field(description="Null while the pass is under way.")


class MaintenancePassList(View):
    """Passes, the newest first."""

    passes: list[MaintenancePassView]


class FleetView(View):
    """The fleet as a whole."""

    states: dict[str, int] | None = Field(
        description="Users by the state of their worker; null: Temporal does not answer."
    )
    maintenance: MaintenancePassView | None = Field(
        description="The last pass; null: there was none yet."
    )


class StartupTaskView(View):
    """A one-time task of the primary: the parts of it that are done, and when the last one was."""

    name: str
    steps: int
    ended_at: datetime | None


class PrimaryView(View):
    """The primary among the API processes (nulls:
    none at the moment), and what primaries have done."""

    host: str | None = Field(description="The beginning of its host's name.")
    pid: int | None
    since: datetime | None
    tasks: list[StartupTaskView]


class ReportView(View):
    """Figures of all users in a trading day, as they were stored, or of one user until now."""

    day: date | None = Field(default=None, description="The trading day; null: of one user.")
    since: datetime
    until: datetime
    made_at: datetime | None = None
    mailed_at: datetime | None = Field(
        default=None, description="When its mails were on their queue."
    )
    #: Counts, lots, counts by name, and `seconds`: how long stages of orders and claims lasted.
    figures: dict[str, int | dict[str, int] | dict[str, dict[str, int | float]]]


class MaintenanceRunView(View):
    """Says what a pass that was asked for saw and did."""

    ended: bool = Field(description="False: it takes longer than `wait`, and continues.")
    workers: int
    found: int = Field(description="Anomalies in this scan.")
    confirmed: int = Field(description="Those that the scan before had found, too.")
    outcomes: dict[str, int] = Field(description="What was done with these, and how often.")
    guarded: Annotated[str | None, EMPTY_IS_NONE] = Field(
        description="Why nothing was done; null: it might have been."
    )


class FleetPage(View):
    """A page of running workers."""

    workers: list[FleetRowView]
    next_cursor: str | None = Field(description="For the next page; null on the last one.")


class AliveView(View):
    status: Literal["ok"] = "ok"


class ServerView(View):
    """A server, as this process meets it, or as others met it last."""

    state: Literal["up", "down", "unknown", "paused"]
    ms: float | None = Field(default=None, description="Milliseconds that its answer to us took.")
    reason: str = Field(default="", description="Why it is not up; or what it serves.")
    seen_at: datetime | None = Field(
        default=None, description="When others met it; null: we, just now."
    )


class ServerList(View):
    """Every server by its name, each task queue that no orchestrator serves, the pool's workflow,
    schedules, and other workflows that were found paused or ended."""

    servers: dict[str, ServerView]


class ReadinessView(View):
    ready: bool
    dependencies: dict[str, ServerView]

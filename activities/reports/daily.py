"""Sends what goes out every day: the report, with a mail to each operator, and a job for each
user's statement."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, date, datetime, time, timedelta
from hashlib import sha256
from urllib.parse import urlsplit

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncSession
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.heartbeat import beating
from infra.database import audit, reports
from infra.database import users as user_table
from infra.database.engine import Database
from infra.database.models import StatementAddress
from infra.database.orders import listing as order_list
from infra.jobs.kept import KeptJobs
from infra.market.calendar import HOME_ZONE, Calendar
from infra.settings import Settings
from worker_runtime.jobs.protocol import catalog
from worker_runtime.protocol.errors import MalformedMessage
from worker_runtime.protocol.messages import Failure
from workflows.reports.messages import (
    EnqueueStatements,
    MakeReport,
    PlanStatements,
    ReportResult,
    StatementsPage,
    StatementsPlan,
)

log = structlog.get_logger()


#: Most orders of one user that are read: more do not fit into a job.
MAX_ORDERS = 20_000
_DAY = timedelta(days=1)


@dataclass(eq=False, repr=False)
class DailyActivities:
    """Activities `plan_statements`, `enqueue_statements`, `make_report`.

    A repeat does what is left: a report is stored once, and job ids repeat.
    """

    database: Database
    jobs: KeptJobs
    calendar: Calendar
    settings: Settings
    _: KW_ONLY
    most_orders: int = MAX_ORDERS

    def __post_init__(self) -> None:
        self._end = timedelta(seconds=self.settings.trading_day_end)
        #: Ways for which the fleet has what they need.
        anyway = self.settings.statements == "on"
        self._email = anyway or bool(self.settings.mail_host)
        self._webhook = anyway or bool(self.settings.webhook_key_file)

    @activity.defn
    async def plan_statements(self, request: PlanStatements) -> StatementsPlan:
        now = (
            datetime.fromtimestamp(request.at, HOME_ZONE) if request.at else datetime.now(HOME_ZONE)
        )
        last = last_ended(now, self._end)
        day = _asked_day(request.day, last) or last
        if not self.calendar.trades_on(day):
            return StatementsPlan(day=day.isoformat(), reason=f"{day} was no trading day")
        users = await self.database.write(
            user_table.count_addresses, email=self._email, webhook=self._webhook
        )
        log.info("statements_planned", day=day.isoformat(), users=users)
        return StatementsPlan(day=day.isoformat(), users=users)

    @activity.defn
    async def enqueue_statements(self, request: EnqueueStatements) -> StatementsPage:
        async with beating():
            return await self._enqueue(request, parse_day(request.day))

    async def _enqueue(self, request: EnqueueStatements, day: date) -> StatementsPage:
        async with self.database.session() as session:
            rows = await user_table.addresses_after(
                session,
                email=self._email,
                webhook=self._webhook,
                after=request.after,
                limit=request.limit,
            )
        counts = Counter[str]()
        for number, row in enumerate(rows):
            packed = await self._packed(row.user_id, day)
            counts["too_many"] += packed is None
            for job_id, work, rate_key in self._work(row, day, packed):
                outcome = await self._put(job_id, work, rate_key, delay=number / request.rate)
                counts[outcome] += 1
        if rows:
            log.info("statements_enqueued", day=request.day, users=len(rows), **counts)
        return StatementsPage(users=len(rows), after=rows[-1].user_id if rows else "", **counts)

    async def _put(
        self, job_id: str, work: msgspec.Struct, rate_key: str = "", *, delay: float = 0.0
    ) -> str:
        """Enqueues one job; returns the field of `StatementsPage` that counts it."""
        try:
            job = catalog.make_job(job_id, work, unique=job_id, rate_key=rate_key, delay=delay)
            return "enqueued" if await self.jobs.enqueue(job) else "known"
        except MalformedMessage as error:  # a bad address must not stop the others
            log.error("daily_job_refused", job_id=job_id, reason=error.detail)
            return "refused"

    async def _packed(self, user_id: str, day: date) -> bytes | None:
        """Returns the day's orders, packed for a job; None if they are too many."""
        until = datetime.combine(day, time(), HOME_ZONE) + self._end
        rows = await self.database.write(
            order_list.orders_of_statement,
            user_id,
            until - _DAY,
            until,
            limit=self.most_orders + 1,
        )
        if len(rows) > self.most_orders:
            return None
        try:
            return await asyncio.to_thread(catalog.pack_orders, rows)  # some ms of compression
        except catalog.TooManyOrders:
            return None

    def _work(
        self, row: StatementAddress, day: date, packed: bytes | None
    ) -> Iterator[tuple[str, msgspec.Struct, str]]:
        """Yields the id, the arguments and the rate key of each job. Without `packed` it only says
        where the list is."""
        user, text = row.user_id, day.isoformat()
        too_large = {"user_id": user, "day": text, "code": catalog.TooManyOrders.code}
        if self._email and row.email is not None:
            domain = row.email.rpartition("@")[2].lower()[:128]
            mail: msgspec.Struct = (
                catalog.SendEmail(
                    to=row.email, subject=f"Statement of {text}", text=_TOO_MANY.format(text)
                )
                if packed is None
                else catalog.MailStatement(user_id=user, day=text, orders=packed, to=row.email)
            )
            yield f"statement-mail.{text}.{user}", mail, domain
        if self._webhook and row.webhook_url is not None:
            post: msgspec.Struct = (
                catalog.DeliverWebhook(
                    url=row.webhook_url,
                    recipient=user,
                    event="statement.too_large",
                    body=msgspec.Raw(msgspec.json.encode(too_large)),
                )
                if packed is None
                else catalog.PostStatement(
                    user_id=user, day=text, orders=packed, url=row.webhook_url
                )
            )
            yield f"statement-post.{text}.{user}", post, _host(row.webhook_url)

    @activity.defn
    async def make_report(self, request: MakeReport) -> ReportResult:
        now = datetime.fromtimestamp(request.at, UTC).astimezone(HOME_ZONE)
        last = last_ended(now, self._end)
        due = last if self.calendar.trades_on(last) else self.calendar.trading_day_before(last)
        day = _asked_day(request.day, last) or due
        trading_day = day if request.day else now.date()
        if not self.calendar.trades_on(trading_day):
            return ReportResult(day=day.isoformat(), reason=f"{trading_day} is not a trading day")
        async with beating():
            report = await self.database.write(reports.make_report, self.calendar, day, self._end)
            mails = 0 if report.mailed_at else await self._mail(report)
        log.info("report_made", day=day.isoformat(), mails=mails)
        return ReportResult(day=day.isoformat(), mails=mails)

    async def _mail(self, report: reports.DailyReport) -> int:
        """Enqueues the report's mails; returns the number that were not on their queue before."""
        day, mails = report.day.isoformat(), 0
        lines = [f"{name}: {value}" for name, value in reports.report_lines(report.figures)]
        for address in self.settings.report_to:
            job_id = f"report-mail.{day}.{sha256(address.encode()).hexdigest()[:16]}"
            mail = catalog.SendEmail(
                to=address, subject=f"Berth on {day}", text="\n".join(lines)[:16_000]
            )
            mails += await self._put(job_id, mail) == "enqueued"
        await self.database.write(reports.set_mailed, report.day)
        return mails


async def note_failed_statement(session: AsyncSession, job_id: str, failure: Failure) -> None:
    """Notes in the user's audit trail that a statement never arrived."""
    _, day, user_id = job_id.split(".", 2)
    about = {"id": job_id, "day": day, "code": failure.code, "detail": failure.detail}
    await audit.append_entry_once(session, "jobs", "statement.failed", f"user:{user_id}", **about)


_TOO_MANY = (
    "There are more orders on {} than a statement can hold.\n"
    "The list of orders (orders.csv of the API) has all of them.\n"
)


def _host(url: str) -> str:
    """Returns the receiver of a webhook, which has a rate of its own."""
    try:
        return (urlsplit(url).hostname or "-")[:128]
    except ValueError:
        return "-"


def parse_day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise ApplicationError(str(error), type="INVALID_DAY", non_retryable=True) from None


def _asked_day(text: str, last: date) -> date | None:
    """Returns the day that was asked for, if any; it must be over: `last` is the last such one."""
    day = parse_day(text) if text else None
    if day is not None and day > last:
        raise ApplicationError(f"{day} is not over", type="DAY_NOT_OVER", non_retryable=True)
    return day


def last_ended(now: datetime, end: timedelta) -> date:
    """Returns the last day in the home zone whose orders have ended: `end` after its midnight."""
    return (now.astimezone(HOME_ZONE) - end).date()

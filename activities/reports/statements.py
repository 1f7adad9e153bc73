"""The activities of the daily statements: find the day, and enqueue a job for each user with an address."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from urllib.parse import urlsplit

import msgspec
import structlog
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.heartbeat import Heartbeat
from infra.database import users as statement_addresses
from infra.database.engine import Database
from infra.database.models import StatementAddress
from infra.database.orders import listing as statement_orders
from infra.jobs.client import JobClient
from infra.market.calendar import TAIPEI, Calendar
from infra.settings import Settings
from worker_runtime.jobs.protocol import catalog
from worker_runtime.protocol.errors import MalformedMessage
from workflows.reports import messages as sm

#: Most orders of one user that are read: more do not fit into a job.
MOST_ORDERS = 20_000
#: Seconds that the result and the job's id are kept: a page that is repeated days later sends nothing twice.
KNOWN = 3 * 86_400
_DAY = timedelta(days=1)

log = structlog.get_logger()


class StatementActivities:
    """Activities `plan_statements`, `enqueue_statements`. Both may be repeated."""

    def __init__(
        self,
        database: Database,
        jobs: JobClient,
        calendar: Calendar,
        settings: Settings,
        *,
        most_orders: int = MOST_ORDERS,
    ) -> None:
        self._database = database
        self._jobs = jobs
        self._calendar = calendar
        self._most = most_orders
        self._end = timedelta(seconds=settings.trading_day_end)
        #: Ways for which the fleet has what they need.
        anyway = settings.statements == "on"
        self._email = anyway or bool(settings.mail_host)
        self._webhook = anyway or bool(settings.webhook_key_files)

    @activity.defn
    async def plan_statements(self, request: sm.PlanStatements) -> sm.StatementsPlan:
        last = last_ended(datetime.now(TAIPEI), self._end)
        day = _parse_day(request.day) if request.day else last
        if day > last:
            raise ApplicationError(f"{day} is not over", type="DAY_NOT_OVER", non_retryable=True)
        if not self._calendar.trades_on(day):
            return sm.StatementsPlan(day=day.isoformat(), reason=f"{day} was no trading day")
        async with self._database.session() as session:
            users = await statement_addresses.count_addresses(
                session, email=self._email, webhook=self._webhook
            )
        log.info("statements_planned", day=day.isoformat(), users=users)
        return sm.StatementsPlan(day=day.isoformat(), users=users)

    @activity.defn
    async def enqueue_statements(self, request: sm.EnqueueStatements) -> sm.StatementsPage:
        async with Heartbeat():
            return await self._enqueue(request, _parse_day(request.day))

    async def _enqueue(self, request: sm.EnqueueStatements, day: date) -> sm.StatementsPage:
        async with self._database.session() as session:
            rows = await statement_addresses.addresses_after(
                session, email=self._email, webhook=self._webhook, after=request.after, limit=request.limit
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
        return sm.StatementsPage(users=len(rows), after=rows[-1].user_id if rows else "", **counts)

    async def _put(self, job_id: str, work: msgspec.Struct, rate_key: str, *, delay: float) -> str:
        """Enqueues one job; returns the field of `StatementsPage` that counts it."""
        try:
            job = catalog.make_job(
                job_id, work, unique=job_id, rate_key=rate_key, delay=delay, result_ttl=KNOWN
            )
            return "enqueued" if await self._jobs.enqueue(job) else "known"
        except MalformedMessage as error:  # a bad address must not stop the others
            log.error("statement_refused", job_id=job_id, reason=error.detail)
            return "refused"

    async def _packed(self, user_id: str, day: date) -> bytes | None:
        """The day's orders, packed for a job; None: they are too many."""
        until = datetime.combine(day, time(), TAIPEI) + self._end
        async with self._database.session() as session:
            rows = await statement_orders.orders_of_statement(
                session, user_id, until - _DAY, until, limit=self._most + 1
            )
        if len(rows) > self._most:
            return None
        try:
            return await asyncio.to_thread(catalog.pack_orders, rows)  # some ms of compression
        except catalog.TooManyOrders:
            return None

    def _work(
        self, row: StatementAddress, day: date, packed: bytes | None
    ) -> Iterator[tuple[str, msgspec.Struct, str]]:
        """Id, arguments and rate key of each job. Without `packed` it only says where the list is."""
        user, text = row.user_id, day.isoformat()
        if self._email and row.email is not None:
            domain = row.email.rpartition("@")[2].lower()[:128]
            mail: msgspec.Struct = (
                catalog.SendEmail(to=row.email, subject=f"Statement of {text}", text=_TOO_MANY.format(text))
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
                    body=msgspec.Raw(msgspec.json.encode(_TooLargeBody(user_id=user, day=text))),
                )
                if packed is None
                else catalog.PostStatement(user_id=user, day=text, orders=packed, url=row.webhook_url)
            )
            yield f"statement-post.{text}.{user}", post, _host(row.webhook_url)


class _TooLargeBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of the webhook instead of the statement."""

    user_id: str
    day: str
    code: str = catalog.TooManyOrders.code


_TOO_MANY = (
    "There are more orders on {} than a statement can hold.\n"
    "The list of orders (orders.csv of the API) has all of them.\n"
)


def _host(url: str) -> str:
    """The receiver of a webhook, which has a rate of its own."""
    try:
        return (urlsplit(url).hostname or "-")[:128]
    except ValueError:
        return "-"


def _parse_day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise ApplicationError(str(error), type="INVALID_DAY", non_retryable=True) from None


def last_ended(now: datetime, end: timedelta) -> date:
    """The last day in Taiwan whose orders have ended: `end` after its midnight."""
    return (now.astimezone(TAIPEI) - end).date()

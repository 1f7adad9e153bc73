"""Tests signals without placing orders,
exports a webhook's calls, and reports failures to its owner."""

import asyncio
import csv
import io
import json
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
import structlog
from redis.exceptions import RedisError

from api.http import errors
from api.webhook_calls.schemas import (
    SignalPlanView,
    SignalTestRequest,
    SignalTestView,
    WebhookCallView,
)
from api.webhooks.meaning import SignalInterpreter
from api.webhooks.queue import SignalQueue
from api.webhooks.schemas import parse_signal
from api.webhooks.service import require_open, shown_body
from infra.database import users
from infra.database.engine import Database
from infra.database.trading import signals, webhook_calls, webhooks
from infra.database.trading.models import Webhook, WebhookCall
from infra.database.trading.webhook_calls import WebhookFailures
from infra.jobs.kept import KeptJobs
from infra.market.calendar import HOME_ZONE
from worker_runtime.jobs.protocol.catalog import DeliverWebhook, SendEmail, cell_text, make_job
from worker_runtime.jobs.protocol.messages import Job
from worker_runtime.protocol.errors import BerthError, MalformedMessage

#: Seconds for which a test waits for the broker's positions: a worker may have to be started.
TEST_TIMEOUT_S = 20.0
#: Seconds between two checks for failures that are due to be reported.
CHECK_INTERVAL_S = 5.0
#: Name of the event in deliveries to a user's own receiver (`DeliverWebhook.event`).
FAILURE_EVENT = "webhook.signals_failed"
#: Columns of the export, which are fields of `WebhookCallView`.
CSV_COLUMNS = (
    "id",
    "received_at",
    "source",
    "test",
    "state",
    "outcome",
    "reason",
    "action",
    "symbol",
    "unit",
    "quantity",
    "order_ids",
    "repeats",
    "answered_ms",
    "completed_ms",
    "body",
)

log = structlog.get_logger()


class SignalTester:
    """Checks and plans a signal as if it came now."""

    def __init__(
        self, database: Database, queue: SignalQueue, interpreter: SignalInterpreter
    ) -> None:
        self._database = database
        self._queue = queue
        self._interpreter = interpreter

    async def test_signal(self, webhook: Webhook, request: SignalTestRequest) -> SignalTestView:
        """Plans a signal, records the test, and places nothing.
        A refusal is recorded and raised, too.

        Raises `InvalidRequest`, `WebhookUnknown` for a revoked webhook, `WebhookPaused`,
        `WebhookExpired`, `UnknownSymbol`, `OddLotRefused`, `PriceOffTick`, `CloseInvalid`, what
        checks and switches refuse, and why the broker's positions could not be read.
        """
        now = datetime.now(UTC)
        # The test needs no secret: its sender has an API key of the webhook's owner.
        words = {"time": now.isoformat(), **request.signal, "secret": "-"}
        body = json.dumps(words).encode()
        columns: dict[str, Any] = {}
        try:
            signal = parse_signal(body)
            require_open(webhook)
            received = await self._interpreter.interpret(signal, webhook, now)
            columns = received.columns
            plan = await self._queue.plan_from_position(
                webhook.user_id,
                webhook.account_id,
                received.meaning,
                held=request.position,
                until=time.monotonic() + TEST_TIMEOUT_S,
            )
        except BerthError as error:
            outcome = {"state": signals.REFUSED, "outcome": error.code, "reason": error.detail}
            await self._record(webhook, body, **columns, **outcome)
            raise
        outcome = {"state": signals.DONE, "outcome": plan.outcome.value, "reason": plan.note}
        call = await self._record(webhook, body, **columns, **outcome, plan=plan.to_json())
        return SignalTestView(
            symbol=received.meaning.symbol,
            unit=received.meaning.unit,
            quantity=call.quantity,
            plan=SignalPlanView.of(plan),
            call_id=call.id,
        )

    async def _record(self, webhook: Webhook, body: bytes, **columns: Any) -> WebhookCall:
        call = WebhookCall(
            webhook_id=webhook.id,
            user_id=webhook.user_id,
            account_id=webhook.account_id,
            test=True,
            body=shown_body(body),
            **{**columns, "reason": columns["reason"][: signals.MAX_REASON_LENGTH] or None},
        )
        async with self._database.session() as session:
            now = await webhooks.database_time(session)
            call.received_at = call.completed_at = now
            return await webhook_calls.add_test(session, call)


class FailureNotices:
    """Reports failed signals to a webhook's owner, at the addresses of their daily statements."""

    def __init__(
        self, database: Database, jobs: KeptJobs, require_schema: Callable[[], None]
    ) -> None:
        """Takes `require_schema`, which raises `DatabaseUnavailable` until the tables are there."""
        self._database = database
        self._jobs = jobs
        self._require_schema = require_schema

    async def run(self) -> None:
        """Sends the reports that are due, for ever."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                self._require_schema()
                while await self.send_due():
                    pass
            except (BerthError, RedisError) as error:  # a server is away
                log.warning("failure_notices_wait", error=type(error).__name__)
            except Exception:  # the boundary of a loop
                log.exception("failure_notices_failed")

    async def send_due(self) -> bool:
        """Sends the report of one webhook; returns False if none is due. Raises
        `DatabaseUnavailable`.

        The jobs are made before the failures are marked as reported, and are named after the first
        failure: a process that dies in between sends nothing twice.
        """
        async with self._database.session() as session:
            failures = await webhook_calls.take_failures(session)
            if failures is None:
                return False
            addresses = await users.get_addresses(session, failures.user_id)
            for job in _notice_jobs(failures, addresses.email, addresses.webhook_url):
                await self._jobs.enqueue(job)
        return True


def _notice_jobs(failures: WebhookFailures, email: str | None, url: str | None) -> Iterable[Job]:
    first = failures.calls[0].id
    subject = f"{failures.count} signals of webhook {failures.webhook_id} failed"
    work: list[tuple[str, SendEmail | DeliverWebhook]] = []
    if email:
        lines = [_failure_line(call) for call in failures.calls]
        if failures.count > len(failures.calls):
            lines.append(f"… and {failures.count - len(failures.calls)} more")
        text = "\n".join([*lines, "", "`berth webhooks calls` lists them with their reasons."])
        work.append(("mail", SendEmail(to=email, subject=subject, text=f"{text}\n")))
    if url:
        views = [WebhookCallView.of(call) for call in failures.calls]
        shown = [view.model_dump(mode="json", exclude={"body"}) for view in views]
        body = {"webhook_id": str(failures.webhook_id), "count": failures.count, "calls": shown}
        raw = msgspec.Raw(msgspec.json.encode(body))
        work.append(
            (
                "post",
                DeliverWebhook(url=url, recipient=failures.user_id, event=FAILURE_EVENT, body=raw),
            )
        )
    for kind, payload in work:
        try:
            yield make_job(f"signals-failed-{failures.webhook_id}-{first}-{kind}", payload)
        except MalformedMessage as error:  # a wrong address keeps the other from the message
            log.warning(
                "failure_notice_not_sent", webhook=str(failures.webhook_id), reason=error.detail
            )


def _failure_line(call: WebhookCall) -> str:
    at = call.received_at.astimezone(HOME_ZONE)
    subject = (
        " ".join(part for part in ((call.signal or {}).get("action"), call.symbol) if part)
        or "a call"
    )
    reason = "".join(char if char.isprintable() else " " for char in call.reason or "")
    return f"{at:%Y-%m-%d %H:%M:%S} {subject}: {call.outcome}: {reason}"


async def export_calls(database: Database, webhook_id: UUID, *, bom: bool) -> bytes:
    """Returns a webhook's calls as CSV (RFC 4180), the newest first, times in the market's zone.

    `bom`: with a byte order mark, without which Excel takes UTF-8 for its country's code page.
    """
    calls = await database.fetch(webhook_calls.list_calls, webhook_id)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(CSV_COLUMNS)
    for call in calls:
        view = WebhookCallView.of(call)
        row = {name: getattr(view, name) for name in CSV_COLUMNS}
        row["received_at"] = view.received_at.astimezone(HOME_ZONE).isoformat(
            timespec="milliseconds"
        )
        row["order_ids"] = " ".join(str(order_id) for order_id in view.order_ids)
        writer.writerow([cell_text(row[name]) for name in CSV_COLUMNS])
    return out.getvalue().encode("utf-8-sig" if bom else "utf-8")


async def get_webhook(database: Database, user_id: str, webhook_id: UUID) -> Webhook:
    """Returns a webhook of the user. Raises `NotFound`."""
    webhook = await database.fetch(webhooks.get_webhook, user_id, webhook_id)
    if webhook is None:
        raise errors.NotFound
    return webhook

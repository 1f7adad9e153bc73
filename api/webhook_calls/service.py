"""Tests signals without placing orders,
exports a webhook's calls, and reports failures to its owner."""

import asyncio
import csv
import io
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Self
from uuid import UUID

import msgspec
import structlog
from redis.exceptions import RedisError

from api.http import errors
from api.http.errors import AlertOutdated
from api.webhook_calls.schemas import (
    EarlierSignalView,
    SignalPlanView,
    SignalTestRequest,
    SignalTestView,
    WebhookCallView,
)
from api.webhooks.meaning import ReceivedSignal, SignalInterpreter
from api.webhooks.planning import Outcome, QuantityUnit, SignalPlan
from api.webhooks.queue import SignalQueue
from api.webhooks.schemas import Signal, parse_signal
from api.webhooks.service import require_open, require_time, shown_body
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
#: Signals that come before a tested one, of which its answer tells.
MAX_SHOWN_AHEAD = 20
#: Columns of a call that say what the signal means.
_MEANING = ("signal", "symbol", "unit", "quantity", "settings")
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


@dataclass(frozen=True, kw_only=True)
class TriedSignal:
    """Holds what a test has found."""

    #: With sentences about all of the rest in its note.
    plan: SignalPlan
    #: The same signal, which came before.
    first: WebhookCall | None = None
    #: Signals of its lane that are carried out before it.
    ahead: Sequence[WebhookCall] = ()
    #: The order that it would wait for, in a sentence.
    obstacle: str | None = None

    @classmethod
    def repeat(cls, first: WebhookCall) -> Self:
        """Returns what becomes of a signal that came before: nothing is placed."""
        became = first.state if first.outcome is None else f"{first.state}, {first.outcome}"
        because = f": {first.reason}" if first.reason else ""
        note = (
            f"it is a repeat of {_described(first)}, and would get the outcome of that one "
            f"({became}{because})"
        )
        plan = SignalPlan(before=None, after=None, outcome=Outcome.NOTHING_TO_DO, note=note)
        return cls(plan=plan, first=first)


def _described(call: WebhookCall) -> str:
    at = call.received_at.astimezone(UTC)
    action = (call.signal or {}).get("action", "?")
    return f"signal {call.id} ({action} {call.symbol}), received at {at:%Y-%m-%d %H:%M:%S} UTC"


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

        A repeat is not planned: it would get the outcome of the first signal. The plan is made from
        the position of this moment, also if the signal would wait until another one is carried out.

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
            first = await self._find_first(webhook, signal)
            if first is not None:
                tested = TriedSignal.repeat(first)
                columns = {name: getattr(first, name) for name in _MEANING}
            else:
                require_open(webhook)
                received = await self._interpreter.interpret(signal, webhook, now)
                columns = received.columns
                tested = await self._plan(webhook, signal, received, request.position)
        except BerthError as error:
            outcome = {"state": signals.REFUSED, "outcome": error.code, "reason": error.detail}
            await self._record(webhook, body, **columns, **outcome)
            raise
        plan = tested.plan
        outcome = {"state": signals.DONE, "outcome": plan.outcome.value, "reason": plan.note}
        call = await self._record(webhook, body, **columns, **outcome, plan=plan.to_json())
        return SignalTestView(
            symbol=call.symbol or "",
            unit=QuantityUnit(call.unit or ""),
            quantity=call.quantity,
            plan=SignalPlanView.of(plan),
            repeat_of=EarlierSignalView.of(tested.first) if tested.first is not None else None,
            waits_behind=[EarlierSignalView.of(waiting) for waiting in tested.ahead],
            waits_for=tested.obstacle,
            call_id=call.id,
        )

    async def _find_first(self, webhook: Webhook, signal: Signal) -> WebhookCall | None:
        """Returns the same signal if it came before, without counting a repeat. Raises what the
        release before refused it with."""
        digest = signal.digest(webhook)
        async with self._database.session(autocommit=True) as session:
            first = await signals.find_signal(session, webhook.id, digest)
            if first is None:
                refusal = await signals.refused_before(session, webhook.id, digest)
                if refusal is not None:
                    raise refusal
        return first

    async def _plan(
        self, webhook: Webhook, signal: Signal, received: ReceivedSignal, position: int | None
    ) -> TriedSignal:
        where = (webhook.user_id, webhook.account_id)
        meaning = received.meaning
        until = time.monotonic() + TEST_TIMEOUT_S
        plan = await self._queue.plan_from_position(*where, meaning, held=position, until=until)
        lane = signals.Lane(*where, received.lane)
        ahead = await self._database.fetch(signals.list_waiting, lane, MAX_SHOWN_AHEAD)
        obstacle = await self._queue.find_obstacle(*where, meaning, plan)
        notes = [plan.note, *(f"it would wait behind {_described(call)}" for call in ahead[:1])]
        if len(ahead) > 1:
            notes.append(f"{len(ahead) - 1} more signals come before it")
        if obstacle is not None:
            notes.append(f"it would wait, because {obstacle}")
        try:
            require_time(signal, webhook)
        except AlertOutdated as error:
            notes.append(f"sent now it would be refused: {error.detail}")
        plan = replace(plan, note="; ".join(filter(None, notes)))
        return TriedSignal(plan=plan, ahead=ahead, obstacle=obstacle)

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

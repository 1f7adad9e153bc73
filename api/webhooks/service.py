"""Turns signals into orders: checks the sender, and places the orders of each signal once.

The secret is in the body, because TradingView sends no custom headers. The content of a signal gives its
orders their client order ids, so a repeat is always recognised. A refused signal stays refused; one that
failed for another reason may be sent again within its own time window.

Nobody sends a signal again after a 202. So PostgreSQL holds the signal with a lease, which the process that
works on it renews. Any process takes over a signal whose lease has run out. No order is placed twice: its
client order id comes from the signal's content. After the deadline the signal is closed in the audit trail
instead.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from ipaddress import ip_network
from uuid import UUID

import structlog
from pydantic import ValidationError
from redis.exceptions import RedisError

from api.http import errors
from api.http.limits import RequestLimits, is_within, source_of
from api.http.problems import ProblemError
from api.orders.outcomes import OrderReader
from api.orders.placer import OrderPlacer
from api.orders.schemas import OrderRequest, OrderView
from api.positions.closer import PositionClose, PositionCloser
from api.positions.intents import IntentRunner
from api.positions.schemas import IntentRequest
from api.webhooks import schemas
from api.webhooks.schemas import Signal
from infra.database.engine import Database
from infra.database.orders import checks as closing
from infra.database.trading import webhooks
from infra.database.trading.models import Webhook, WebhookDelivery
from infra.settings import Settings
from infra.tasks import SharedTasks
from infra.tracing import Traces
from worker_runtime.protocol.errors import BerthError

#: Bytes; a signal of TradingView has 300 or so, and at most 4,096 characters.
MAX_BODY = 16 * 1024
#: Seconds that a signal stays with the process that carries it out, unless that renews the lease.
LEASE = 10.0
#: Seconds between two rounds: a lease is renewed several times before it runs out.
PERIOD = 2.0
#: Alerts taken over in one round.
MOST = 20
#: Seconds within which a webhook's signals are counted.
COUNTED = 60.0


@dataclass(frozen=True, slots=True)
class AcceptedSignal:
    """How far a signal has come."""

    signal: Signal
    client_order_id: str
    #: Its orders so far.
    legs: Sequence[OrderView]
    #: False: it goes on without the caller.
    complete: bool
    #: False: the signal was taken before.
    new: bool


@dataclass(eq=False, repr=False)
class SignalProcessor:
    database: Database
    limits: RequestLimits
    placer: OrderPlacer
    positions: PositionCloser
    intents: IntentRunner
    reader: OrderReader
    settings: Settings
    _: KW_ONLY
    #: Raises `DatabaseUnavailable` until the tables are there.
    require_schema: Callable[[], None]
    #: False: the token was made up.
    is_genuine: Callable[[str], bool]
    traces: Traces | None = None

    def __post_init__(self) -> None:
        #: Alerts under way, by their digest.
        self._tasks: SharedTasks[str, list[OrderView]] = SharedTasks(self._log_failure)
        self._proxies = [ip_network(proxy) for proxy in self.settings.trusted_proxies]
        self._log = structlog.get_logger()

    async def close(self) -> None:
        """Cancels what is under way. An entry whose close is not filled opens nothing."""
        await self._tasks.close()

    async def receive_signal(
        self, token: str, peer: str, forwarded: Sequence[str], body: bytes
    ) -> AcceptedSignal:
        """Does what a signal asks for; a repeat of the signal returns the first outcome.

        `peer` is who is connected, `forwarded` the values of X-Forwarded-For. Raises `WebhookUnknown`,
        `WebhookBusy`, `SourceNotAllowed`, `BodyTooLarge`, `InvalidRequest`, `WebhookSecretWrong`,
        `AlertOutdated`, and what `OrderPlacer`, `PositionCloser` and `IntentRunner` raise.
        """
        webhook = await self._find(token)
        source = source_of(peer, forwarded, self._proxies)
        try:
            signal = _checked_signal(webhook, source, body)
        except BerthError as error:
            # In a count of their own: whoever found the token cannot use up the owner's calls.
            self._count(webhook, "refused")
            self._log.warning("webhook_refused", webhook=str(webhook.id), source=source, code=error.code)
            raise
        self._count(webhook)
        plan = schemas.plan_of(signal, webhook)
        new, left = await self._register(signal, webhook, plan)
        until = time.monotonic() + left
        task = self._begin(webhook, plan, until)
        await asyncio.wait({task}, timeout=self.settings.webhook_wait)
        if task.done() and not task.cancelled():
            return AcceptedSignal(signal, plan.client_order_id, task.result(), complete=True, new=new)
        try:
            legs = [await self.reader.get(order_id) for order_id in await self._orders(webhook, plan)]
            await self._promise(webhook, plan, until)
        except (BerthError, RedisError):
            task.cancel()  # its sender gets an error
            raise
        return AcceptedSignal(signal, plan.client_order_id, legs, complete=False, new=new)

    @property
    def under_way(self) -> list[str]:
        """Digests of the signals that this process carries out."""
        return self._tasks.keys

    async def run(self) -> None:
        """Keeps and takes over signals for ever."""
        while True:
            await asyncio.sleep(PERIOD)
            try:
                self.require_schema()
                await self.keep_signals()
            except BerthError as error:  # PostgreSQL is away, or has no tables yet
                self._log.warning("signal_keeper_waits", code=error.code)
            except Exception:  # the boundary of a loop: one bad row must not stop it
                self._log.exception("signal_keeper_failed")

    async def keep_signals(self) -> int:
        """Renews the leases of this process's signals, and takes over those whose lease has run out.

        Returns how many it took over. Raises `DatabaseUnavailable`."""
        mine = self.under_way
        async with self.database.session() as session:
            if mine:
                await webhooks.hold_signals(session, mine, LEASE)
            found = await webhooks.take_abandoned_signals(session, lease=LEASE, most=MOST)
        for one in found:
            try:
                await self._resume_signal(one)
            except BerthError as error:  # the next one may fare better; this one comes again
                self._log.warning("signal_not_resumed", code=error.code)
            except Exception:  # the boundary of one signal: it must not hold up the others
                self._log.exception("signal_not_resumed")
        return len(found)

    async def _resume_signal(self, found: webhooks.AbandonedSignal) -> None:
        """Carries out a signal whose process died, or writes its end if it is too late."""
        until = time.monotonic() + found.left
        try:
            signal = Signal.model_validate({**(found.signal or {}), "secret": "-"})
            plan = schemas.plan_of(signal, found.webhook)
        except (ValidationError, errors.InvalidRequest):  # this release cannot read it
            unread = errors.InvalidRequest("the signal cannot be read any more")
            async with self.database.session() as session:
                await webhooks.note_refusal(session, found.webhook.id, found.digest, unread)
            self._log.warning("signal_unreadable", webhook=str(found.webhook.id))
            return
        if found.left <= 0:
            await self._close_signal(found.webhook, plan, _late())
            return
        if found.webhook.revoked_at is not None:
            await self._close_signal(found.webhook, plan, errors.WebhookUnknown("the webhook was revoked"))
            return
        self._log.warning("signal_resumed", webhook=str(found.webhook.id), left=round(found.left, 1))
        self._begin(found.webhook, plan, until)

    async def _promise(self, webhook: Webhook, plan: schemas.SignalPlan, until: float) -> None:
        """Records that the signal is carried on after a 202. Raises the refusal that it met meanwhile."""
        async with self.database.session() as session:
            left = max(0.0, until - time.monotonic())
            now = await webhooks.promise_signal(session, webhook.id, plan.digest, left=left, lease=LEASE)
        if now is not None and now.refused is not None:
            raise webhooks.refusal_of(now)

    def _begin(
        self, webhook: Webhook, plan: schemas.SignalPlan, until: float
    ) -> asyncio.Task[list[OrderView]]:
        """`until`: its deadline, an instant on `time.monotonic`."""
        return self._tasks.join(plan.digest, lambda: self._run_signal(webhook, plan, until))

    async def _close_signal(self, webhook: Webhook, plan: schemas.SignalPlan, error: BerthError) -> None:
        """Ends a signal: records its orders, or its refusal if it has none. Of an entry only the opening
        order counts."""
        enters = isinstance(plan.what, IntentRequest) and plan.what.intent.enters
        wanted = plan.ids[-1:] if enters else plan.ids
        async with self.database.session() as session:
            found = await closing.orders_by_client_ids(session, webhook.user_id, wanted)
            for order in found.values():
                await webhooks.note_order_of_signal(session, webhook.id, plan.digest, order.id)
            if not found:
                await webhooks.note_refusal(session, webhook.id, plan.digest, error)
                self._log.warning("signal_ended", webhook=str(webhook.id), code=error.code)

    async def _register(
        self, signal: Signal, webhook: Webhook, plan: schemas.SignalPlan
    ) -> tuple[bool, float]:
        """Records a signal; returns whether it is new, and the seconds left for it. Raises `AlertOutdated`,
        and the refusal that it met before."""
        placed = await self._orders(webhook, plan)
        async with self.database.session() as session:
            before = await session.get(WebhookDelivery, (webhook.id, plan.digest))
            if before is not None and before.refused is not None:
                raise webhooks.refusal_of(before)
            left = self.settings.order_deadline
            if before is not None and before.held_until is not None and before.until is not None:
                left = (before.until - await closing.database_clock(session)).total_seconds()
            if placed:
                return False, left
            if left <= 0:
                raise _late()
            self._in_time(signal, webhook)
            said = signal.model_dump(mode="json", exclude={"secret"})
            return await webhooks.note_signal(session, webhook.id, plan.digest, said), left

    async def _run_signal(self, webhook: Webhook, plan: schemas.SignalPlan, until: float) -> list[OrderView]:
        """Carries out a signal and returns its orders; nothing is written or sent after `until`."""
        about = {"webhook": str(webhook.id)}  # the path of its request is a secret, so that has no span
        try:
            with self.traces.span("webhook signal", **about) if self.traces else nullcontext():
                legs = await self._execute(webhook, plan, until)
        except (BerthError, ProblemError) as raised:
            error = raised.error if isinstance(raised, ProblemError) else raised
            # What may pass ends nothing: a promised signal is carried on, any other may be sent again.
            if not error.retryable and type(error) is not BerthError:
                await self._close_signal(webhook, plan, error)
            raise
        async with self.database.session(autocommit=True) as session:
            await webhooks.note_order_of_signal(session, webhook.id, plan.digest, UUID(legs[-1].id))
        return legs

    async def _execute(self, webhook: Webhook, plan: schemas.SignalPlan, until: float) -> list[OrderView]:
        user, what, actor = webhook.user_id, plan.what, schemas.actor_of(webhook)
        wait = max(0.0, until - time.monotonic())
        if isinstance(what, IntentRequest):
            result = await self.intents.run_intent(
                user, webhook.account_id, what, wait, actor, not_after=until
            )
            if not result.complete:
                await self._close_signal(webhook, plan, _late())
            return result.legs
        if isinstance(what, PositionClose):
            placed = await self.positions.close_position(what, wait, not_after=until)
        else:
            assert isinstance(what, OrderRequest)  # noqa: S101
            placed = await self.placer.place_order(
                user, what, self.settings.webhook_wait, actor, not_after=until
            )
        if placed.failure is not None:
            raise ProblemError(placed.failure, order=placed.order)
        return [placed.order]

    async def _orders(self, webhook: Webhook, plan: schemas.SignalPlan) -> list[UUID]:
        """Ids of the orders that the signal has become, in its order of them."""
        async with self.database.session(autocommit=True) as session:
            found = await closing.orders_by_client_ids(session, webhook.user_id, plan.ids)
        return [found[one].id for one in plan.ids if one in found]

    def _log_failure(self, _digest: str, error: BaseException) -> None:
        found = error.error if isinstance(error, ProblemError) else error
        if isinstance(found, BerthError):
            self._log.warning("signal_refused", code=found.code)
        else:
            self._log.error("signal_crashed", exc_info=error)

    async def _find(self, token: str) -> Webhook:
        if not self.is_genuine(token):
            raise errors.WebhookUnknown
        self.require_schema()
        async with self.database.session(autocommit=True) as session:
            found = await webhooks.find_webhook(session, token)
        if found is None:
            raise errors.WebhookUnknown
        return found

    def _count(self, webhook: Webhook, kind: str = "") -> None:
        """Counts a call. Raises `WebhookBusy` when too many of its kind came within a minute."""
        try:
            self.limits.charge(
                "webhook", f"{webhook.id}{kind}", self.settings.webhook_rate / COUNTED, COUNTED
            )
        except errors.TooManyRequests as error:
            busy = errors.WebhookBusy(f"more than {self.settings.webhook_rate} calls in a minute")
            busy.retry_after = error.retry_after
            raise busy from None

    def _in_time(self, signal: Signal, webhook: Webhook) -> None:
        late = (datetime.now(UTC) - signal.time).total_seconds()
        if abs(late) > webhook.window_s:
            word = "old" if late > 0 else "in the future"
            raise errors.AlertOutdated(
                f"the signal is {abs(late):.0f} s {word}; {webhook.window_s} s are allowed"
            )


def _checked_signal(webhook: Webhook, source: str, body: bytes) -> Signal:
    """The signal, if it is from one of the webhook's sources and has its secret: 256 bits, which nobody
    guesses. Raises `SourceNotAllowed`, `BodyTooLarge`, `InvalidRequest`, `WebhookSecretWrong`."""
    if webhook.sources and not is_within(source, [ip_network(one) for one in webhook.sources]):
        raise errors.SourceNotAllowed
    if len(body) > MAX_BODY:
        raise errors.BodyTooLarge(f"a signal has at most {MAX_BODY} bytes")
    signal = schemas.parse_signal(body)
    if not webhooks.has_secret(webhook, signal.secret):
        raise errors.WebhookSecretWrong
    return signal


def _late() -> errors.IntentExpired:
    return errors.IntentExpired("the signal could not be carried out before its deadline")

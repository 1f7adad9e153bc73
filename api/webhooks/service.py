"""Takes signals: checks the sender, stores each signal once, and answers what became of it.

The secret is in the body, because TradingView sends no custom headers. What a signal says gives its
orders their client order ids, so a repeat is always recognised. A signal is in PostgreSQL before it
is answered; from then on it is carried out, or refused, whatever becomes of its sender and of this
process (`SignalQueue`).
"""

import asyncio
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime

import structlog
from redis.exceptions import RedisError

from api.http import errors
from api.http.limits import RequestLimits
from api.http.problems import ProblemError
from api.orders.outcomes import UNANSWERED, OrderReader
from api.orders.schemas import OrderView
from api.positions.parts import part_ids
from api.webhooks import schemas
from api.webhooks.meaning import ReceivedSignal, SignalInterpreter
from api.webhooks.planning import QuantityUnit
from api.webhooks.queue import SignalQueue, stored_error
from api.webhooks.schemas import Signal, SignalOutcome
from infra.database.engine import Database
from infra.database.orders import checks as order_checks
from infra.database.trading import signals, webhooks
from infra.database.trading.models import Webhook, WebhookCall
from infra.database.trading.signals import Lane
from infra.networks import is_within, parse_network
from infra.settings import Settings
from worker_runtime.protocol.errors import BerthError

#: Bytes; a signal of TradingView has 300 or so, and at most 4,096 characters.
MAX_BODY_BYTES = 16 * 1024
#: Seconds past the wait for a signal's end within which its answer is made: TradingView gives up
#: 3 s after it has sent a signal, and the wait is 2 s.
ANSWER_MARGIN_S = 0.5
#: Seconds between two rounds of the queue's keeper.
KEEPER_INTERVAL_S = 2.0
#: Signals that one round takes over from the release before.
MAX_TAKEOVERS_PER_ROUND = 20
#: Seconds within which a webhook's signals are counted.
COUNT_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class AnsweredSignal:
    """Holds how far a signal has come, for its answer."""

    view: OrderView | SignalOutcome
    #: False: it continues without the caller.
    settled: bool
    #: False: the signal was taken before.
    new: bool


@dataclass(eq=False, repr=False)
class SignalReceiver:
    database: Database
    limits: RequestLimits
    queue: SignalQueue
    reader: OrderReader
    interpreter: SignalInterpreter
    settings: Settings
    _: KW_ONLY
    #: Raises `DatabaseUnavailable` until the tables are there.
    require_schema: Callable[[], None]
    #: False: the token was made up.
    is_genuine: Callable[[str], bool]

    def __post_init__(self) -> None:
        self._log = structlog.get_logger()

    async def receive_signal(self, token: str, source: str, body: bytes) -> AnsweredSignal:
        """Stores a signal and waits for its end as long as its sender does;
        a repeat gets the first outcome.

        `source` is the address that sent it. Raises `WebhookUnknown`, `WebhookBusy`,
        `WebhookPaused`, `WebhookExpired`, `SourceNotAllowed`, `BodyTooLarge`, `InvalidRequest`,
        `WebhookSecretWrong`, `AlertOutdated`, `UnknownSymbol`, and what the signal was refused for.
        """
        began = time.monotonic()
        webhook = await self._find(token)
        signal: Signal | None = None
        try:
            signal = _checked_signal(webhook, source, body)
            self._count(webhook)
            digest = signal.digest(webhook)
            # A repeat gets its first outcome, whatever was changed since: the webhook, or a
            # symbol's meaning.
            earlier = await self._find_before(webhook, signal, digest)
            received = None
            if earlier is None:
                require_open(webhook)
                require_time(signal, webhook)
                received = await self.interpreter.interpret(signal, webhook, datetime.now(UTC))
        except BerthError as error:
            await self._note_refusal(webhook, error, source, body, signal, began)
            raise
        if isinstance(earlier, AnsweredSignal):
            return earlier
        call = earlier
        if received is not None:
            call = await self._add(webhook, received, source, body, began)
        new = received is not None and call is not None
        if call is None:  # the same signal was stored a moment before
            call = await self._get(webhook, digest)
        if new:
            self._log.info("signal_taken", signal=call.id, webhook=str(webhook.id))
        return await self._answer(call, signal, new=new, began=began)

    async def run(self) -> None:
        """Runs a round of the queue's keeper every `KEEPER_INTERVAL_S` seconds, for ever."""
        while True:
            await asyncio.sleep(KEEPER_INTERVAL_S)
            try:
                self.require_schema()
                await self.keep_signals()
            except BerthError as error:  # PostgreSQL is away, or has no tables yet
                self._log.warning("signal_keeper_waits", code=error.code)
            except Exception:  # the boundary of a loop: one bad row must not stop it
                self._log.exception("signal_keeper_failed")

    async def keep_signals(self) -> int:
        """Runs one round of the queue's keeper; returns the number of lanes that it took up.

        Raises `DatabaseUnavailable`.
        """
        for _ in range(MAX_TAKEOVERS_PER_ROUND):
            if not await self._take_over_delivery():
                break
        return await self.queue.keep()

    async def _find(self, token: str) -> Webhook:
        if not self.is_genuine(token):
            raise errors.WebhookUnknown
        self.require_schema()
        async with self.database.session(autocommit=True) as session:
            webhook = await webhooks.find_webhook(session, token)
        self.limits.note_webhook(token, is_known=webhook is not None)
        if webhook is None:
            raise errors.WebhookUnknown
        return webhook

    async def _find_before(
        self, webhook: Webhook, signal: Signal, digest: str
    ) -> WebhookCall | AnsweredSignal | None:
        """Returns the signal if this release or the previous one has had it. Raises the earlier
        refusal."""
        async with self.database.session(autocommit=True) as session:
            call = await signals.find_signal(session, webhook.id, digest)
            if call is not None:
                await signals.count_repeat(session, call.id)
                return call
            if (refusal := await signals.refused_before(session, webhook.id, digest)) is not None:
                raise refusal
            names = [name for base, _ in signal.names(digest).both for name in part_ids(base)]
            known = await order_checks.orders_by_client_ids(session, webhook.user_id, names)
        if not known:
            return None
        legs = [
            await self.reader.get(known[name].id) for name in dict.fromkeys(names) if name in known
        ]
        return self._answered(signal, digest, None, legs, complete=True, new=False)

    async def _add(
        self, webhook: Webhook, received: ReceivedSignal, source: str, body: bytes, began: float
    ) -> WebhookCall | None:
        lane = Lane(webhook.user_id, webhook.account_id, received.lane)
        lasts = self.settings.order_deadline - (time.monotonic() - began)
        async with self.database.session() as session:
            return await signals.add_signal(
                session,
                webhook,
                lane,
                received.digest,
                lasts=lasts,
                source=source[:64],
                body=shown_body(body),
                **received.columns,
            )

    async def _get(self, webhook: Webhook, digest: str) -> WebhookCall:
        call = await self.database.fetch(signals.find_signal, webhook.id, digest)
        if call is None:
            raise BerthError("the signal was deleted while it was taken")
        return call

    async def _answer(
        self, call: WebhookCall, signal: Signal, *, new: bool, began: float
    ) -> AnsweredSignal:
        """Returns the outcome, or how far the signal is when the wait ends; it continues alone.

        The answer is in time also while a server stands still: then it has no orders.
        """
        wait_until = began + self.settings.webhook_wait
        if call.completed_at is None:
            self.queue.work(signals.lane_of(call))
            await self.queue.wait(call.id, max(0.0, wait_until - time.monotonic()))
        legs: list[OrderView] | None = None
        try:
            remaining_s = max(0.0, wait_until - time.monotonic())
            async with asyncio.timeout(remaining_s + ANSWER_MARGIN_S):
                async with self.database.session() as session:
                    call = await signals.note_answer(session, call.id) or call
                legs = await self._legs(call, signal)
        except TimeoutError:
            self._log.warning("signal_answered_without_orders", signal=call.id)
        except (BerthError, RedisError):
            if call.completed_at is not None:
                raise
            # It is stored, and continues.
        if call.state == signals.REFUSED:
            error = stored_error(call)
            if signal.plain and legs and len(legs) == 1:
                raise ProblemError(error, order=legs[0])
            raise ProblemError(error, legs=legs or [])
        complete = call.completed_at is not None and legs is not None
        return self._answered(
            signal, call.digest or "", call, legs or [], complete=complete, new=new
        )

    async def _legs(self, call: WebhookCall, signal: Signal) -> list[OrderView]:
        ids = call.order_ids
        if call.completed_at is None:
            names = [
                name for base, _ in signal.names(call.digest or "").both for name in part_ids(base)
            ]
            async with self.database.session(autocommit=True) as session:
                known = await order_checks.orders_by_client_ids(session, call.user_id, names)
            ids = [known[name].id for name in dict.fromkeys(names) if name in known]
        return [await self.reader.get(order_id) for order_id in ids]

    def _answered(
        self,
        signal: Signal,
        digest: str,
        call: WebhookCall | None,
        legs: Sequence[OrderView],
        *,
        complete: bool,
        new: bool,
    ) -> AnsweredSignal:
        settled = complete and all(leg.state not in UNANSWERED for leg in legs)
        if signal.plain and len(legs) == 1 and (call is None or len(_planned(call)) < 2):
            return AnsweredSignal(legs[0], settled, new)
        view = SignalOutcome(
            client_order_id=signal.client_order_id(digest),
            action=signal.action,
            legs=list(legs),
            complete=complete,
            outcome=call.outcome if call is not None else None,
            reason=call.reason if call is not None else None,
            signal_id=call.id if call is not None else None,
            symbol=call.symbol if call is not None else None,
            unit=QuantityUnit(call.unit) if call is not None and call.unit else None,
            quantity=call.quantity if call is not None else None,
        )
        return AnsweredSignal(view, settled, new)

    async def _note_refusal(
        self,
        webhook: Webhook,
        error: BerthError,
        source: str,
        body: bytes,
        signal: Signal | None,
        began: float,
    ) -> None:
        """Records a call that is no signal, unless there are too many."""
        self._log.warning(
            "webhook_refused", webhook=str(webhook.id), source=source, code=error.code
        )
        if isinstance(error, errors.WebhookBusy):
            return
        if signal is None:
            # In a count of their own: a stranger with the token cannot use up the owner's calls.
            self._count(webhook, "refused" if error.code in signals.STRANGERS_OUTCOMES else "")
        async with self.database.session() as session:
            await signals.add_refusal(
                session,
                webhook,
                error,
                source=source,
                body=shown_body(body),
                answered_ms=math.ceil((time.monotonic() - began) * 1000),
            )

    async def _take_over_delivery(self) -> bool:
        """Takes over a signal that the release before has accepted. Returns False if none waits."""
        async with self.database.session() as session:
            delivery = await signals.take_promised_delivery(session)
            if delivery is None:
                return False
            try:
                signal = schemas.stored_signal(delivery.signal or {})
                received = await self.interpreter.interpret(
                    signal, delivery.webhook, datetime.now(UTC)
                )
            except BerthError as error:
                await signals.add_refusal(
                    session, delivery.webhook, error, source="", body=None, answered_ms=None
                )
                self._log.warning(
                    "signal_unreadable", webhook=str(delivery.webhook.id), code=error.code
                )
                return True
            lane = Lane(delivery.webhook.user_id, delivery.webhook.account_id, received.lane)
            call = await signals.add_signal(
                session,
                delivery.webhook,
                lane,
                delivery.digest,
                lasts=delivery.remaining_s,
                **received.columns,
            )
            if call is not None:
                await signals.note_answer(session, call.id)
        return True

    def _count(self, webhook: Webhook, kind: str = "") -> None:
        """Counts a call. Raises `WebhookBusy` when too many of its kind came within a minute."""
        try:
            self.limits.charge(
                "webhook",
                f"{webhook.id}{kind}",
                self.settings.webhook_rate / COUNT_WINDOW_S,
                COUNT_WINDOW_S,
            )
        except errors.TooManyRequests as error:
            busy = errors.WebhookBusy(f"more than {self.settings.webhook_rate} calls in a minute")
            busy.retry_after = error.retry_after
            raise busy from None


def _planned(call: WebhookCall) -> Sequence[object]:
    planned: Sequence[object] = (call.plan or {}).get("orders", ())
    return planned


#: What may be a secret, of this webhook or another one, under whatever name.
_SECRET_LIKE = re.compile(r"[A-Za-z0-9_-]{24,}")


def shown_body(body: bytes) -> str:
    """Returns a call's text as its owner may see it:
    bounded, and without anything that may be a secret."""
    text = body[: 2 * MAX_BODY_BYTES].decode("utf-8", "replace")
    with suppress(ValueError, RecursionError):
        words = json.loads(text)
        if isinstance(words, dict):
            text = json.dumps({name: value for name, value in words.items() if name != "secret"})
    return _SECRET_LIKE.sub("…", text).replace("\0", "")[: signals.MAX_TEXT_LENGTH]


def require_open(webhook: Webhook) -> None:
    """Raises `WebhookUnknown` for a revoked webhook, `WebhookExpired`, `WebhookPaused`."""
    if webhook.revoked_at is not None:
        raise errors.WebhookUnknown("the webhook was revoked: make another one")
    if webhook.expires_at is not None and webhook.expires_at <= datetime.now(UTC):
        raise errors.WebhookExpired(
            f"this webhook expired at {webhook.expires_at:%Y-%m-%d %H:%M} UTC"
        )
    if webhook.paused_at is not None:
        raise errors.WebhookPaused


def require_time(signal: Signal, webhook: Webhook) -> None:
    """Raises `AlertOutdated` if a signal's own time is too far from ours."""
    late = (datetime.now(UTC) - signal.time).total_seconds()
    if abs(late) <= webhook.window_s:
        return
    word = "old" if late > 0 else "in the future"
    hint = " (send {{timenow}}: {{time}} is when the bar opened)" if late > 0 else ""
    raise errors.AlertOutdated(
        f"the signal is {abs(late):.0f} s {word}; {webhook.window_s} s are allowed{hint}"
    )


#: What a text gives as its secret, also one that is no JSON.
#: Typographic quotes, too: the owner then hears of the quotes.
_QUOTE = rb"(?:[\"']|\xe2\x80[\x98-\x9f]|\xef\xbc\x82)?"
_GIVEN_SECRET = re.compile(
    rb"(?i)secret" + _QUOTE + rb"\s*[:=]\s*" + _QUOTE + rb"([A-Za-z0-9_-]{1,256})"
)


def _checked_signal(webhook: Webhook, source: str, body: bytes) -> Signal:
    """Returns the signal if it comes from one of the webhook's sources and has its secret (256
    bits, which nobody guesses).

    Nothing else of a call is looked at before the secret: what it says otherwise is its owner's.
    Raises `SourceNotAllowed`, `WebhookSecretWrong`, `BodyTooLarge`, `InvalidRequest`.
    """
    if webhook.sources and not is_within(source, map(parse_network, webhook.sources)):
        raise errors.SourceNotAllowed
    given = {secret.decode() for secret in _GIVEN_SECRET.findall(body)}
    if not any(webhooks.has_secret(webhook, secret) for secret in given):
        if given:
            raise errors.WebhookSecretWrong
        raise errors.WebhookSecretWrong('the body has no secret: send "secret": "…" with it')
    if len(body) > MAX_BODY_BYTES:
        raise errors.BodyTooLarge(f"a signal has at most {MAX_BODY_BYTES} bytes")
    signal = schemas.parse_signal(body)
    if not webhooks.has_secret(webhook, signal.secret):
        raise errors.WebhookSecretWrong
    return signal

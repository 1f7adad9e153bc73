"""Errors with stable codes.

A code is part of the contract: it travels in answers, in problem+json and in Temporal failures, and
is never renamed. The docstring of a class is the sentence a person reads.
"""

from typing import ClassVar


class BerthError(Exception):
    """Something went wrong inside Berth."""

    code: ClassVar[str] = "INTERNAL"
    #: Whether the same call may succeed later without anyone changing anything.
    retryable: ClassVar[bool] = False
    #: HTTP status of the API's answer; 0: 503 if it is retryable, else 500.
    status: ClassVar[int] = 0

    def __init_subclass__(
        cls, *, code: str | None = None, retryable: bool | None = None, status: int | None = None
    ) -> None:
        """Sets `code`, `retryable` and `status`, which are inherited unless the class names its
        own."""
        super().__init_subclass__()
        if status is not None:
            cls.status = status
        if code is not None:
            cls.code = code
            _BY_CODE.setdefault(code, cls)
        if retryable is not None:
            cls.retryable = retryable

    def __init__(self, detail: str = "", *, retry_after: float | None = None) -> None:
        """Takes `retry_after`, the seconds after which the same call may succeed, where that is
        known. An adapter that raises `LoginLimited`, `BrokerMaintenance` or `OutcomeUnknown` with
        it reports a pause: the seconds for which the broker wants no call."""
        self.detail = detail or self.title()
        self.retry_after = retry_after
        super().__init__(self.detail)

    @classmethod
    def title(cls) -> str:
        """Returns the first paragraph of the docstring, on one line."""
        paragraph = (cls.__doc__ or cls.__name__).strip().partition("\n\n")[0]
        return " ".join(paragraph.split())


#: Of several errors with one code the first.
_BY_CODE: dict[str, type[BerthError]] = {BerthError.code: BerthError}


class MalformedMessage(BerthError, code="MALFORMED_MESSAGE"):
    """The message cannot be read."""


class UnsupportedSchema(MalformedMessage, code="UNSUPPORTED_SCHEMA"):
    """The message has a schema version that this release does not know."""


class InvalidSeal(BerthError, code="INVALID_SEAL"):
    """The sealed credentials cannot be opened here: altered, or meant for another worker or
    user."""


class InvalidSignature(BerthError, code="INVALID_SIGNATURE"):
    """The message was not signed by the sender that it names, or was altered on its way."""


class NewerKeyNeeded(InvalidSignature, code="NEWER_KEY_NEEDED"):
    """The message names a newer version of the message secret than this process has read."""


class DeadlineExceeded(BerthError, code="DEADLINE_EXCEEDED", status=422):
    """The deadline passed before the broker was called; the order was not sent."""


class Fenced(BerthError, code="FENCED", retryable=True):
    """This worker no longer owns the user; the order was not sent."""


class LeaseLost(BerthError, code="LEASE_LOST", retryable=True):
    """The worker could not renew its lease in time; the order was not sent."""


class Draining(BerthError, code="DRAINING", retryable=True):
    """The user's worker is shutting down; try again in a moment."""


class ClaimRefused(BerthError, code="CLAIM_REFUSED", retryable=True):
    """The worker did not accept the claim: it belongs to another user, or the claim has ended."""


class WorkerUnavailable(BerthError, code="WORKER_UNAVAILABLE", retryable=True):
    """No worker could be made ready in time."""


class PoolExhausted(WorkerUnavailable, code="POOL_EXHAUSTED"):
    """All workers of the pool are in use, and it may have no more; retry within 30 s to keep your
    place in the queue."""

    #: Seconds after which the caller may ask again (`retry_after`).
    RETRY_AFTER_S: ClassVar[float] = 5.0


class MemoryShort(BerthError, code="MEMORY_SHORT", retryable=True):
    """Valkey's memory is short: new orders and new workers are refused for now; cancels and running
    workers continue."""

    #: Seconds after which the caller may ask again (`retry_after`).
    RETRY_AFTER_S: ClassVar[float] = 5.0


class Parked(BerthError, code="PARKED", status=409):
    """The user's worker crashed too often; an operator has to let it start again."""


class WorkerLost(BerthError, code="WORKER_LOST", retryable=True):
    """The worker died or stopped answering."""


class UnknownAccount(BerthError, code="UNKNOWN_ACCOUNT", status=422):
    """The user has no such broker account, or no credentials are stored for it."""


class BrokerError(BerthError, code="BROKER_ERROR", status=503):
    """The broker refused the request or could not be reached."""


class LoginRejected(BrokerError, code="LOGIN_REJECTED", status=422):
    """The broker refused the login: wrong key, unsigned account or expired certificate."""


class LoginLimited(BrokerError, code="LOGIN_LIMITED", retryable=True, status=429):
    """The broker's login limit is used up: too many connections or logins for this person."""


class BrokerVersionRefused(LoginLimited, code="BROKER_VERSION_REFUSED", status=503):
    """The broker no longer takes the installed version of its SDK. An operator has to update it."""


class BrokerUnreachable(BrokerError, code="BROKER_UNREACHABLE", retryable=True):
    """The broker could not be reached."""


class BrokerClockRefused(BrokerUnreachable, code="BROKER_CLOCK_REFUSED"):
    """The broker found the login's time stamp too old: this host's clock is off, or its network is
    slow."""


class BrokerMaintenance(BrokerUnreachable, code="BROKER_MAINTENANCE"):
    """The broker is closed for maintenance; nothing was sent to it."""


class SessionDown(BrokerError, code="SESSION_DOWN", retryable=True):
    """The broker session is no longer alive."""


class InstrumentsUnsupported(BrokerError, code="INSTRUMENTS_UNSUPPORTED", status=422):
    """This broker does not list its instruments: its record says what symbols mean."""


class InstrumentsUnavailable(BrokerError, code="INSTRUMENTS_UNAVAILABLE", retryable=True):
    """The broker lists no instruments now, as may happen before it opens. Try again later."""


class InstrumentsLoading(BrokerError, code="INSTRUMENTS_LOADING", retryable=True):
    """The worker is reading the broker's list of instruments. Ask for the page again."""

    #: Seconds after which the caller may ask again (`retry_after`).
    RETRY_AFTER_S: ClassVar[float] = 0.5


class InstrumentsTooMany(BrokerError, code="INSTRUMENTS_TOO_MANY", status=422):
    """The broker lists more instruments than a worker holds: nothing of the list was taken."""


class OrderRejected(BrokerError, code="ORDER_REJECTED", status=422):
    """The broker rejected the order."""


class QuantityChangeUnconfirmed(OrderRejected, code="QUANTITY_CHANGE_UNCONFIRMED"):
    """What the broker does with a changed quantity is unconfirmed: cancel the order and place a new
    one."""


class CertificateExpired(OrderRejected, code="CERTIFICATE_EXPIRED"):
    """The account's certificate has expired: get a new one from the broker and store it."""


class OutcomeUnknown(BrokerError, code="OUTCOME_UNKNOWN"):
    """The order may or may not have reached the broker: do not send it again; Berth asks the
    broker."""


class TradingHalted(BerthError, code="TRADING_HALTED", status=423):
    """Trading is halted for this user or account; cancels still pass."""


class ReducingOnly(BerthError, code="REDUCING_ONLY", status=423):
    """Only orders that make a position smaller are taken now; cancels still pass."""


class SymbolBlocked(BerthError, code="SYMBOL_BLOCKED", status=409):
    """An earlier order in this symbol has an unknown outcome; it has to be settled first."""


class AccountBlocked(BerthError, code="ACCOUNT_BLOCKED", status=409):
    """The account's books differ from the broker's. An operator has to settle the difference
    first."""


class RateLimited(BerthError, code="RATE_LIMITED", retryable=True, status=429):
    """The broker's rate limit for this person is used up; nothing was sent."""


class CheckFailed(BerthError, code="CHECK_FAILED", status=422):
    """The order was refused before it went anywhere."""


class QuantityLimit(CheckFailed, code="QUANTITY_LIMIT"):
    """The quantity exceeds the limit for one order."""


class NotionalLimit(CheckFailed, code="NOTIONAL_LIMIT"):
    """The order's value exceeds the limit for one order."""


class PriceBand(CheckFailed, code="PRICE_BAND"):
    """The price is too far from the day's reference price."""


class PriceOffTick(CheckFailed, code="PRICE_OFF_TICK"):
    """The price is between two price steps of the symbol, and the order does not ask for
    rounding."""


class PriceLimit(CheckFailed, code="PRICE_LIMIT"):
    """The price is above the day's highest price of this symbol, or below its lowest."""


class DailyOrderLimit(CheckFailed, code="DAILY_ORDER_LIMIT", status=429):
    """The account has reached its daily limit of orders."""


class PriceTypeRule(CheckFailed, code="PRICE_TYPE_RULE"):
    """The exchange does not accept this price type with this time in force."""


class OrderTermsRule(CheckFailed, code="ORDER_TERMS_RULE"):
    """The market does not accept these terms, or this quantity, in one order."""


class BrokerNotInstalled(CheckFailed, code="BROKER_NOT_INSTALLED", status=409):
    """This installation does not have the broker of this account any more. Ask an operator to
    install it."""


class DuplicateOrder(CheckFailed, code="DUPLICATE_ORDER", status=409):
    """The same order was placed a moment ago under another client order id."""


class UnknownSymbol(CheckFailed, code="UNKNOWN_SYMBOL"):
    """There is no such symbol."""


class InstrumentExpired(CheckFailed, code="INSTRUMENT_EXPIRED"):
    """The last trading day of this contract is over."""


class MarketClosed(CheckFailed, code="MARKET_CLOSED"):
    """The market of this symbol is closed."""


def from_code(code: str, detail: str = "", retry_after: float | None = None) -> BerthError:
    """Returns the error that a code from another process stands for; `BerthError` if this release
    lacks it."""
    cls = _BY_CODE.get(code)
    error = BerthError(f"{code}: {detail}") if cls is None else cls(detail)
    error.retry_after = retry_after
    return error

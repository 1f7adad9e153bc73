"""Errors with stable codes.

A code is part of the contract: it travels in answers, in problem+json and in Temporal failures, and is
never renamed. The docstring of a class is the sentence a person reads.
"""

from __future__ import annotations

from typing import ClassVar


class BerthError(Exception):
    """Something went wrong inside Berth."""

    code: ClassVar[str] = "INTERNAL"
    #: Whether the same call may succeed later without anyone changing anything.
    retryable: ClassVar[bool] = False

    def __init__(self, detail: str = "", *, retry_after: float | None = None) -> None:
        """`retry_after`: seconds after which the same call may succeed, where that is known."""
        self.detail = detail or self.title()
        self.retry_after = retry_after
        super().__init__(self.detail)

    @classmethod
    def title(cls) -> str:
        """The first line of the docstring."""
        return (cls.__doc__ or cls.__name__).strip().splitlines()[0]


class MalformedMessage(BerthError):
    """The message cannot be read."""

    code = "MALFORMED_MESSAGE"


class UnsupportedSchema(MalformedMessage):
    """The message has a schema version that this release does not know."""

    code = "UNSUPPORTED_SCHEMA"


class InvalidSeal(BerthError):
    """The sealed credentials cannot be opened here: altered, or meant for another worker or user."""

    code = "INVALID_SEAL"


class InvalidSignature(BerthError):
    """The message was not signed by the orchestrator, or was altered on its way."""

    code = "INVALID_SIGNATURE"


class DeadlineExceeded(BerthError):
    """The deadline passed before the broker was called; the order was not sent."""

    code = "DEADLINE_EXCEEDED"


class Fenced(BerthError):
    """This worker no longer owns the user; the order was not sent."""

    code = "FENCED"
    retryable = True


class LeaseLost(BerthError):
    """The worker could not renew its lease in time; the order was not sent."""

    code = "LEASE_LOST"
    retryable = True


class Draining(BerthError):
    """The user's worker is shutting down; try again in a moment."""

    code = "DRAINING"
    retryable = True


class ClaimRefused(BerthError):
    """The worker already belongs to someone."""

    code = "CLAIM_REFUSED"
    retryable = True


class WorkerUnavailable(BerthError):
    """No worker could be made ready in time."""

    code = "WORKER_UNAVAILABLE"
    retryable = True


class PoolExhausted(WorkerUnavailable):
    """All workers that there may be are in use; who asks again soon keeps his place in the line."""

    code = "POOL_EXHAUSTED"
    #: Seconds after which to ask again.
    PAUSE: ClassVar[float] = 5.0


class Parked(BerthError):
    """The user's worker crashed too often; an operator has to let it start again."""

    code = "PARKED"


class WorkerLost(BerthError):
    """The worker died or stopped answering."""

    code = "WORKER_LOST"
    retryable = True


class UnknownAccount(BerthError):
    """The user has no such broker account, or no credentials are stored for it."""

    code = "UNKNOWN_ACCOUNT"


class BrokerError(BerthError):
    """The broker refused or could not be reached."""

    code = "BROKER_ERROR"


class LoginRejected(BrokerError):
    """The broker refused the login: wrong key, unsigned account or expired certificate."""

    code = "LOGIN_REJECTED"


class LoginLimited(BrokerError):
    """The broker's login limit is used up: too many connections or logins for this person."""

    code = "LOGIN_LIMITED"
    retryable = True


class BrokerUnreachable(BrokerError):
    """The broker could not be reached."""

    code = "BROKER_UNREACHABLE"
    retryable = True


class BrokerMaintenance(BrokerUnreachable):
    """The broker is closed for maintenance; nothing was sent on."""

    code = "BROKER_MAINTENANCE"


class SessionDown(BrokerError):
    """The broker session is no longer alive."""

    code = "SESSION_DOWN"
    retryable = True


class OrderRejected(BrokerError):
    """The broker rejected the order."""

    code = "ORDER_REJECTED"


class OutcomeUnknown(BrokerError):
    """The order may or may not have reached the broker: reconcile, do not resend."""

    code = "OUTCOME_UNKNOWN"


class TradingHalted(BerthError):
    """Trading is halted for this user or account; cancels still pass."""

    code = "TRADING_HALTED"


class ReducingOnly(BerthError):
    """Only orders that make a position smaller are taken now; cancels still pass."""

    code = "REDUCING_ONLY"


class SymbolBlocked(BerthError):
    """An earlier order in this symbol has an unknown outcome; it has to be settled first."""

    code = "SYMBOL_BLOCKED"


class AccountBlocked(BerthError):
    """The account's books differ from the broker's; a person has to look first."""

    code = "ACCOUNT_BLOCKED"


class RateLimited(BerthError):
    """The broker's rate limit for this person is used up; nothing was sent."""

    code = "RATE_LIMITED"
    retryable = True


class CheckFailed(BerthError):
    """The order was refused before it went anywhere."""

    code = "CHECK_FAILED"


class QuantityLimit(CheckFailed):
    """The quantity is above what one order may have."""

    code = "QUANTITY_LIMIT"


class NotionalLimit(CheckFailed):
    """The order's value is above what one order may have."""

    code = "NOTIONAL_LIMIT"


class DailyOrderLimit(CheckFailed):
    """The account has placed as many orders today as it may."""

    code = "DAILY_ORDER_LIMIT"


class PriceTypeRule(CheckFailed):
    """The exchange does not take this price type with this time in force."""

    code = "PRICE_TYPE_RULE"


class DuplicateOrder(CheckFailed):
    """The same order was placed a moment ago under another client order id."""

    code = "DUPLICATE_ORDER"


class UnknownSymbol(CheckFailed):
    """There is no such symbol."""

    code = "UNKNOWN_SYMBOL"


class MarketClosed(CheckFailed):
    """The market of this symbol is closed."""

    code = "MARKET_CLOSED"


def _all_subclasses(cls: type[BerthError]) -> list[type[BerthError]]:
    return [cls, *(found for sub in cls.__subclasses__() for found in _all_subclasses(sub))]


def from_code(code: str, detail: str = "", retry_after: float | None = None) -> BerthError:
    """The error that a code from another process stands for; `BerthError` if this release lacks it."""
    for cls in _all_subclasses(BerthError):
        if cls.code == code:
            error = cls(detail)
            error.retry_after = retry_after
            return error
    return BerthError(f"{code}: {detail}")

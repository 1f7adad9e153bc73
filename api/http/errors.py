"""Errors that only the API raises. Those that also cross Valkey or Temporal are in the protocol; those of
the database are its own."""

from __future__ import annotations

from typing import Any

from infra.temporal.client import OrchestratorUnavailable as OrchestratorUnavailable
from infra.temporal.client import TemporalUnavailable as TemporalUnavailable
from worker_runtime.protocol.errors import BerthError


class InvalidRequest(BerthError):
    """The request does not fit its schema."""

    code = "INVALID_REQUEST"

    def __init__(self, detail: str = "", errors: list[dict[str, Any]] | None = None) -> None:
        super().__init__(detail)
        #: Where and why: `loc`, `msg` and `type` of each error. Never the value: it may be a secret.
        self.errors = errors or []


class Unauthenticated(BerthError):
    """The API key is missing or not valid."""

    code = "UNAUTHENTICATED"


class Forbidden(BerthError):
    """This API key may not do that."""

    code = "FORBIDDEN"


class NotFound(BerthError):
    """It does not exist, or this API key may not see it."""

    code = "NOT_FOUND"


class NoWorker(NotFound):
    """The user has no running worker."""

    code = "NO_WORKER"


class NoPool(NotFound):
    """There is no such pool."""

    code = "NO_POOL"


class PoolChanged(BerthError):
    """Somebody else has changed the pool; read it again."""

    code = "POOL_CHANGED"


class NoRollout(NotFound):
    """No rollout of this pool is under way, and none has ended."""

    code = "NO_ROLLOUT"


class RolloutUnderWay(BerthError):
    """Another rollout of this pool is under way; wait for it, or abort it."""

    code = "ROLLOUT_UNDER_WAY"


class RolloutInvalid(BerthError):
    """The pool cannot be moved to this release."""

    code = "ROLLOUT_INVALID"


class NoMaintenance(NotFound):
    """Maintenance is switched off: there is no schedule."""

    code = "NO_MAINTENANCE"


class TooManyJobs(BerthError):
    """The user has too many jobs waiting, or had 50 within 500 s; wait for some of them to end."""

    code = "TOO_MANY_JOBS"
    retryable = True


class MethodNotAllowed(BerthError):
    """This address does not support that method."""

    code = "METHOD_NOT_ALLOWED"


class BodyTooLarge(BerthError):
    """The request's body is larger than 64 KiB."""

    code = "BODY_TOO_LARGE"


class ClientOrderIdReused(BerthError):
    """This client order id was used before, for another order."""

    code = "CLIENT_ORDER_ID_REUSED"


class RequestIdReused(BerthError):
    """This request id was used before, for another change of the order."""

    code = "REQUEST_ID_REUSED"


class NotAtBroker(BerthError):
    """The order has not reached the broker yet; cancel it instead."""

    code = "NOT_AT_BROKER"
    retryable = True


class OrderUnknown(BerthError):
    """It is not known whether the broker has the order; wait until it is."""

    code = "ORDER_UNKNOWN"


class ReplaceInvalid(BerthError):
    """The order cannot be changed like this."""

    code = "REPLACE_INVALID"


class NoAnswer(BerthError):
    """The user's worker did not answer in time."""

    code = "NO_ANSWER"
    retryable = True


class NoPosition(BerthError):
    """There is no such position to close."""

    code = "NO_POSITION"


class PositionBusy(BerthError):
    """Another order is working on this position, or has just changed it."""

    code = "POSITION_BUSY"
    retryable = True


class CloseInvalid(BerthError):
    """The position cannot be closed like this."""

    code = "CLOSE_INVALID"


class CloseNotFilled(BerthError):
    """The opposite position was not closed in full, so nothing was opened."""

    code = "CLOSE_NOT_FILLED"


class IntentExpired(BerthError):
    """The opposite position was closed too long ago to open the new one; use a new id."""

    code = "INTENT_EXPIRED"


class TooManyStreams(BerthError):
    """There are too many open event streams already."""

    code = "TOO_MANY_STREAMS"
    retryable = True


class ValkeyUnavailable(BerthError):
    """Valkey cannot be reached."""

    code = "VALKEY_UNAVAILABLE"
    retryable = True


class WebhookUnknown(NotFound):
    """There is no such webhook, or it was revoked."""

    code = "WEBHOOK_UNKNOWN"


class WebhookSecretWrong(Forbidden):
    """The secret in the alert is not this webhook's."""

    code = "WEBHOOK_SECRET_WRONG"


class SourceNotAllowed(Forbidden):
    """This webhook accepts no alerts from this address."""

    code = "SOURCE_NOT_ALLOWED"


class AlertOutdated(BerthError):
    """The time of the alert is too far from the server's time."""

    code = "ALERT_OUTDATED"


class WebhookBusy(BerthError):
    """Too many alerts came to this webhook within a minute."""

    code = "WEBHOOK_BUSY"
    retryable = True

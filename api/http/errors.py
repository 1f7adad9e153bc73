"""Errors that only the API raises. Those that also cross Valkey or Temporal are in the protocol;
those of the database and of calls to a worker are their own."""

from collections.abc import Sequence
from typing import Any

from infra.temporal.client import OrchestratorUnavailable as OrchestratorUnavailable
from infra.temporal.client import TemporalUnavailable as TemporalUnavailable
from infra.temporal.client import WorkflowPaused as WorkflowPaused
from infra.valkey.failures import ValkeyUnavailable as ValkeyUnavailable
from infra.worker_calls.client import NoAnswer as NoAnswer
from worker_runtime.protocol.errors import BerthError


class InvalidRequest(BerthError, code="INVALID_REQUEST", status=422):
    """The request does not fit its schema."""

    def __init__(self, detail: str = "", errors: list[dict[str, Any]] | None = None) -> None:
        super().__init__(detail)
        #: Where and why: `loc`, `msg` and `type` of each error. Never the value: it may be a
        #: secret.
        self.errors = errors or []


class Unauthenticated(BerthError, code="UNAUTHENTICATED", status=401):
    """The API key is missing or not valid."""


class Forbidden(BerthError, code="FORBIDDEN", status=403):
    """This API key may not do that."""


class ScopeMissing(Forbidden, code="SCOPE_MISSING"):
    """This API key does not have the scope that the call needs. Use a key that has it."""


class GrantTooWide(Forbidden, code="GRANT_TOO_WIDE"):
    """An API key cannot give another key more than it may do itself."""


class KeySourceRefused(Forbidden, code="KEY_SOURCE_NOT_ALLOWED"):
    """This API key may not be used from this address."""


class NotFound(BerthError, code="NOT_FOUND", status=404):
    """It does not exist, or this API key may not see it."""


class NoWorker(NotFound, code="NO_WORKER"):
    """The user has no running worker."""


class NoPool(NotFound, code="NO_POOL"):
    """There is no such pool."""


class PoolRebuilding(BerthError, code="POOL_REBUILDING", retryable=True):
    """The pool's workflow was ended in Temporal; an orchestrator rebuilds it within a minute."""


class PoolChanged(BerthError, code="POOL_CHANGED", status=409):
    """Somebody else has changed the pool; read it again."""


class LetterRefused(BerthError, code="DEAD_LETTER_REFUSED", status=409):
    """This cannot be done with the dead letter."""


class NoRollout(NotFound, code="NO_ROLLOUT"):
    """No rollout of this pool is under way, and none has ended."""


class RolloutUnderWay(BerthError, code="ROLLOUT_UNDER_WAY", status=409):
    """Another rollout of this pool is under way; wait for it, or abort it."""


class RolloutInvalid(BerthError, code="ROLLOUT_INVALID", status=422):
    """The pool cannot be moved to this release."""


class NoMaintenance(NotFound, code="NO_MAINTENANCE"):
    """Maintenance is switched off: there is no schedule."""


class TooManyJobs(BerthError, code="TOO_MANY_JOBS", retryable=True, status=429):
    """The user has too many jobs waiting, or had 50 within 500 s; wait for some of them to end."""


class JobArgumentsTooLarge(BerthError, code="JOB_ARGUMENTS_TOO_LARGE", status=413):
    """The arguments of a job are larger than 64 KiB. Store large data elsewhere and pass its
    address."""


class MethodNotAllowed(BerthError, code="METHOD_NOT_ALLOWED", status=405):
    """This address does not support that method."""


class BodyTooLarge(BerthError, code="BODY_TOO_LARGE", status=413):
    """The request's body is larger than the call allows: 64 KiB, 128 KiB for a job, 1 MiB for a
    batch."""


class BodyTooSlow(BerthError, code="BODY_TOO_SLOW", retryable=True, status=408):
    """The request's body did not arrive within 10 s."""


class HeadTooLarge(BerthError, code="HEAD_TOO_LARGE", status=431):
    """The request's address and headers are larger than 64 KiB."""


class TooManyRequests(BerthError, code="TOO_MANY_REQUESTS", retryable=True, status=429):
    """Too many requests came with this API key, for this user, or from this address."""

    #: The RateLimit headers of the limit.
    headers: Sequence[tuple[bytes, bytes]] = ()


class ClientOrderIdReused(BerthError, code="CLIENT_ORDER_ID_REUSED", status=409):
    """This client order id was used before, for another order."""


class RequestIdReused(BerthError, code="REQUEST_ID_REUSED", status=409):
    """This request id was used before, for another change of the order."""


class ChangeUnconfirmed(BerthError, code="CHANGE_UNCONFIRMED", status=409):
    """Nothing shows that the broker made this change; it is never sent again: use a new request
    id."""


class NotAtBroker(BerthError, code="NOT_AT_BROKER", retryable=True, status=409):
    """The order has not reached the broker yet; cancel it instead."""


class OrderUnknown(BerthError, code="ORDER_UNKNOWN", status=409):
    """It is not known whether the broker has the order; wait until it is."""


class ReplaceInvalid(BerthError, code="REPLACE_INVALID", status=422):
    """The order cannot be changed like this."""


class NoPosition(BerthError, code="NO_POSITION", status=409):
    """There is no such position to close."""


class PositionBusy(BerthError, code="POSITION_BUSY", retryable=True, status=409):
    """Another order is working on this position, or has just changed it."""


class CloseInvalid(BerthError, code="CLOSE_INVALID", status=422):
    """The position cannot be closed as requested; the detail says why."""


class CloseNotFilled(BerthError, code="CLOSE_NOT_FILLED", status=409):
    """The opposite position was not closed in full, so nothing was opened."""


class IntentExpired(BerthError, code="INTENT_EXPIRED", status=409):
    """The request could not be carried out before its deadline; the detail says why."""


class OddLotRefused(BerthError, code="ODD_LOT_REFUSED", status=422):
    """The quantity is not a multiple of the lot, and this webhook or the exchange does not accept
    the rest."""


class TooManyStreams(BerthError, code="TOO_MANY_STREAMS", retryable=True, status=429):
    """There are too many open event streams already."""


class WebhookUnknown(NotFound, code="WEBHOOK_UNKNOWN"):
    """There is no such webhook, or it was revoked."""


class WebhookPaused(BerthError, code="WEBHOOK_PAUSED", status=409):
    """This webhook is paused and takes no signals. Resume it, then send the signal again."""


class WebhookExpired(BerthError, code="WEBHOOK_EXPIRED", status=410):
    """This webhook has expired and takes no signals. Give it a later expiry, or make another
    one."""


class WebhookSecretWrong(Forbidden, code="WEBHOOK_SECRET_WRONG"):
    """The secret in the signal is not this webhook's."""


class SourceNotAllowed(Forbidden, code="SOURCE_NOT_ALLOWED"):
    """This webhook accepts no signals from this address."""


class AlertOutdated(BerthError, code="ALERT_OUTDATED", status=422):
    """The time of the signal is too far from the server's time."""


class WebhookBusy(BerthError, code="WEBHOOK_BUSY", retryable=True, status=429):
    """Too many signals came to this webhook within a minute."""

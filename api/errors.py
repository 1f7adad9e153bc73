"""Errors that only the API raises. Those that also cross Valkey or Temporal are in the protocol; those of
the database are its own."""

from __future__ import annotations

from typing import Any

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
    """There is no such thing, or it is not yours to see."""

    code = "NOT_FOUND"


class NoWorker(NotFound):
    """The user has no running worker."""

    code = "NO_WORKER"


class MethodNotAllowed(BerthError):
    """This address does not take that method."""

    code = "METHOD_NOT_ALLOWED"


class BodyTooLarge(BerthError):
    """The request's body is larger than 64 KiB."""

    code = "BODY_TOO_LARGE"


class ClientOrderIdReused(BerthError):
    """This client order id was used before, for another order."""

    code = "CLIENT_ORDER_ID_REUSED"


class OrchestratorUnavailable(BerthError):
    """Temporal answers, but no orchestrator took the work in time."""

    code = "ORCHESTRATOR_UNAVAILABLE"
    retryable = True


class DependencyUnavailable(BerthError):
    """A server that the API needs cannot be reached."""

    code = "DEPENDENCY_UNAVAILABLE"
    retryable = True


class TemporalUnavailable(DependencyUnavailable):
    """Temporal cannot be reached."""

    code = "TEMPORAL_UNAVAILABLE"


class ValkeyUnavailable(DependencyUnavailable):
    """Valkey cannot be reached."""

    code = "VALKEY_UNAVAILABLE"

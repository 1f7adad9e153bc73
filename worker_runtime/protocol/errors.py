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

    def __init__(self, detail: str = "") -> None:
        self.detail = detail or self.title()
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


def _all_subclasses(cls: type[BerthError]) -> list[type[BerthError]]:
    return [cls, *(found for sub in cls.__subclasses__() for found in _all_subclasses(sub))]


def from_code(code: str, detail: str = "") -> BerthError:
    """The error that a code from another process stands for; `BerthError` if this release lacks it."""
    for cls in _all_subclasses(BerthError):
        if cls.code == code:
            return cls(detail)
    return BerthError(f"{code}: {detail}")

"""Errors of the producer: why a job was not enqueued, or has no result."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
from msgspec import Struct


class BerthJobsError(Exception):
    """Base class of all errors that this package raises on purpose."""


class NotConfigured(BerthJobsError):
    """The API's address or key is missing or malformed."""


class Unreachable(BerthJobsError):
    """The API, or Valkey, did not answer: the connection failed, was lost, or timed out."""

    def __init__(self, message: str, *, sent: bool = False) -> None:
        #: False if the request was certainly not sent.
        self.sent = sent
        super().__init__(message)

    @classmethod
    def of(cls, url: str, error: httpx.RequestError) -> Unreachable:
        """Return the error for a request to the API that was not answered."""
        sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
        timed_out = sent and isinstance(error, httpx.TimeoutException)
        reason = (
            "did not answer in time" if timed_out else f"cannot be reached ({type(error).__name__})"
        )
        return cls(f"the API at {url} {reason}", sent=sent)


class UnexpectedAnswer(BerthJobsError):
    """The server that answered is not a Berth API,
    or has a release that this package does not know."""


class ProblemField(Struct, frozen=True):
    """One field of the request that the API refused, and why."""

    loc: list[str | int] = []
    msg: str = ""


class ProblemDetails(Struct, frozen=True, kw_only=True):
    """RFC 9457 problem details, as the API sends them."""

    code: str = ""
    title: str = ""
    detail: str = ""
    retryable: bool = False
    request_id: str = ""
    errors: list[ProblemField] = []


class Refused(BerthJobsError):
    """The API refused the request. Subclasses name the usual reasons; `code` is stable."""

    def __init__(
        self, status: int, problem: ProblemDetails, retry_after_s: float | None = None
    ) -> None:
        #: The HTTP status.
        self.status = status
        #: The stable error code, such as `JOB_TYPE_UNKNOWN`; empty if a proxy answered.
        self.code = problem.code
        self.detail = problem.detail or problem.title
        #: True if the same request may succeed later.
        self.retryable = problem.retryable
        #: Seconds after which to try again, if the API gave a number.
        self.retry_after_s = retry_after_s
        #: The id under which the API's log has this request.
        self.request_id = problem.request_id
        #: The refused fields as (path, reason); an argument's path begins with `args.`.
        self.fields = [(_path(field.loc), field.msg) for field in problem.errors]
        sentence = f"{self.code}: {self.detail}" if self.code else self.detail
        fields = [f"{path}: {reason}" for path, reason in self.fields]
        if fields:
            sentence = "; ".join([sentence.removesuffix("."), *fields])
        super().__init__(sentence)


class InvalidArguments(Refused):
    """An argument or option does not fit the job type. `fields` names each of them."""


class UnknownJobType(Refused):
    """No runner has announced a job type of this name.
    Start a runner that has it, or check the name."""


class JobTooLarge(Refused):
    """The job is larger than the API accepts. Store the data elsewhere and pass its address."""


class JobIdReused(Refused):
    """Another job was enqueued under this job id. Choose another id."""


class JobNotFound(Refused):
    """There is no job with this id, or its result has expired."""


_BY_STATUS: dict[int, type[Refused]] = {413: JobTooLarge}
_BY_CODE: dict[str, type[Refused]] = {
    "APPLICATION_NOT_FOUND": UnknownJobType,
    "INVALID_REQUEST": InvalidArguments,
    "JOB_ARGUMENTS_INVALID": InvalidArguments,
    "JOB_ID_REUSED": JobIdReused,
    "JOB_TYPE_UNKNOWN": UnknownJobType,
    "JOB_TOO_LARGE": JobTooLarge,
    "NOT_FOUND": JobNotFound,
}


def refusal_of(status: int, problem: ProblemDetails, retry_after_s: float | None = None) -> Refused:
    """Return the error for an answer of 400 or above."""
    kind = _BY_CODE.get(problem.code) or _BY_STATUS.get(status) or Refused
    return kind(status, problem, retry_after_s)


def invalid_arguments(message: str) -> InvalidArguments:
    """Return the error for arguments that msgspec refuses
    with "Expected `int`, got `str` - at `$.width`"."""
    reason, _, path = message.partition(" - at `")
    field = ProblemField(
        loc=["args", *path.rstrip("`").removeprefix("$").strip(".").split(".")], msg=reason
    )
    problem = ProblemDetails(
        code="INVALID_ARGUMENTS", detail="an argument does not fit the job type", errors=[field]
    )
    return InvalidArguments(422, problem)


class EnqueueUnsettled(BerthJobsError):
    """The API may or may not have accepted the job.
    Enqueue it again with the same `job_id`: it runs once.

    `__cause__` is the last error.
    """

    def __init__(self, job_id: str) -> None:
        #: The id to repeat the call with.
        self.job_id = job_id
        super().__init__(
            f"it is not known whether job {job_id} was enqueued; repeat the call with this id"
        )


class ValkeyRefused(BerthJobsError):
    """Valkey refused a job of a direct producer, such as for lack of memory or rights."""


class JobEnded(BerthJobsError):
    """The job ended without a result."""

    def __init__(self, job_id: str, code: str, detail: str) -> None:
        self.job_id = job_id
        #: The error's stable code, such as `JOB_TIMEOUT`.
        self.code = code
        self.detail = detail
        super().__init__(f"job {job_id}: {code}: {detail}" if code else f"job {job_id}: {detail}")


class JobFailed(JobEnded):
    """The job's last attempt failed."""


class JobCancelled(JobEnded):
    """The job was cancelled."""


class ResultExpired(JobEnded):
    """The job ended well, and its result is no longer kept."""


class JobNotEnded(BerthJobsError, TimeoutError):
    """The job had not ended when the wait was over. It is still there: wait again."""

    def __init__(self, job_id: str, state: str) -> None:
        self.job_id = job_id
        #: The job's state when it was last seen, such as `waiting`.
        self.state = state
        super().__init__(f"job {job_id} has not ended yet; it is {state}")


def _path(location: list[str | int]) -> str:
    parts = [str(part) for part in location if part != "body"]
    return ".".join(parts) or "?"


def decode_answer(answer: httpx.Response, kind: Any) -> Any:
    """Return the body of a successful answer as `kind`. Raises `Refused` or `UnexpectedAnswer`."""
    url = answer.request.url
    origin = f"{url.scheme}://{url.netloc.decode()}"
    if answer.status_code >= 400:
        try:
            problem = msgspec.json.decode(answer.content, type=ProblemDetails)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            problem = ProblemDetails(detail=f"{origin} answered {answer.status_code}")
        given = answer.headers.get("retry-after", "")
        raise refusal_of(answer.status_code, problem, float(given) if given.isdigit() else None)
    if answer.status_code >= 300:
        raise UnexpectedAnswer(f"{url} redirects elsewhere. Give the API's own address.")
    try:
        return msgspec.json.decode(answer.content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnexpectedAnswer(f"{origin} is not a Berth API of this release: {error}") from None

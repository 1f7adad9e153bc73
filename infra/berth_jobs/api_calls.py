"""The producer's calls of the API, without I/O:
each is written once, for blocking code and for asyncio.

A call is a generator. It yields a `JobRequest` to send, or seconds to sleep; it is sent the
response, or the `Unreachable` error; it returns the result. `send.py` has the two drivers.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict, TypeVar
from urllib.parse import quote

import httpx
import msgspec
from msgspec import Struct

from .declaration import convert_value
from .errors import (
    EnqueueUnsettled,
    JobCancelled,
    JobFailed,
    JobNotEnded,
    Refused,
    ResultExpired,
    UnexpectedAnswer,
    Unreachable,
    decode_answer,
)
from .options import JobOptions

#: Seconds to connect, and to wait for an answer in addition to what the API itself may wait.
CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 5.0, 10.0
#: Seconds for which an enqueue is repeated until the API has answered.
RETRY_FOR_S = 30.0
#: Seconds before the first repeat; the pause doubles with each repeat up to the maximum.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 5.0
#: Seconds that one request waits for a job's end;
#: most proxies cut connections that are silent for 60 s.
MAX_WAIT_S = 30.0
#: Jobs and bytes of one batch.
MAX_BATCH_JOBS, MAX_BATCH_BYTES = 500, 900_000

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A request to the API."""

    method: str
    #: Without `/v1`.
    path: str
    query: Mapping[str, Any] = field(default_factory=dict)
    body: bytes | None = None
    #: Seconds that the API may wait before it answers.
    wait_s: float = 0.0

    def httpx_arguments(self) -> dict[str, Any]:
        """Return the arguments for `httpx.Client.request`."""
        arguments: dict[str, Any] = {
            "method": self.method,
            "url": self.path,
            "timeout": httpx.Timeout(ANSWER_TIMEOUT_S + self.wait_s, connect=CONNECT_TIMEOUT_S),
        }
        if self.query:
            arguments["params"] = dict(self.query)
        if self.body is not None:
            arguments["content"] = self.body
            arguments["headers"] = {"Content-Type": "application/json"}
        return arguments


Call = Generator[JobRequest | float, Any, T]


class EnqueueOptions(JobOptions, frozen=True, kw_only=True, omit_defaults=True):
    """Says how a job is enqueued. A field that is left out is as the job's type says."""

    #: 1 to 64 of letters, digits, `_`, `.` and `-`. The same call with the same id is done once.
    job_id: str = ""
    #: When the job may run, instead of `delay_s`.
    run_at: datetime | None = None


class OptionValues(TypedDict, total=False):
    """The keyword arguments of `Producer.with_options`. Durations are seconds."""

    #: The job's id: the same call with the same id is done once, another call under it is refused
    #: (by a direct producer until the job has ended).
    job_id: str
    queue: str
    #: 0 to 9. A job with a higher priority runs earlier.
    priority: int
    #: After which the job is killed.
    timeout: float | timedelta
    #: Runs at most, the first one counted.
    max_attempts: int
    #: Until the job may run.
    delay: float | timedelta
    #: Jobs of one group run one after the other, in the order in which they were enqueued.
    group: str
    #: While a job of the type with the same key has not ended, no other one is accepted.
    unique: str
    #: The time for which a result is kept; of a job over REST at least a day.
    result_ttl: float | timedelta
    #: Jobs of the type with the same key share the type's rate.
    rate_key: str


_IN_SECONDS = ("timeout", "delay", "result_ttl")


def options_with(options: EnqueueOptions, changes: OptionValues) -> EnqueueOptions:
    """Return options with these changes.
    Raises `ValueError` or `TypeError`, which name the option."""
    fields: dict[str, Any] = msgspec.to_builtins(options)
    for name, value in changes.items():
        if name not in OptionValues.__annotations__:
            raise TypeError(
                f"there is no option {name}; there are {', '.join(OptionValues.__annotations__)}"
            )
        if name in _IN_SECONDS:
            fields[f"{name}_s"] = seconds_of(value, name)
        else:
            fields[name] = value
    if "result_ttl_s" in fields:
        fields["result_ttl_s"] = math.ceil(fields["result_ttl_s"])
    try:
        return msgspec.convert(fields, EnqueueOptions)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        raise ValueError(f"{path.rstrip('`').removesuffix('_s') or 'options'}: {reason}") from None


class JobCall(Struct, frozen=True, kw_only=True):
    """A job type with arguments and options, ready to be enqueued (`Producer.call`)."""

    type: str
    #: A JSON object.
    args: msgspec.Raw
    options: EnqueueOptions
    #: The type of what the job returns; not sent.
    result_type: Any = Any

    @property
    def job_id(self) -> str:
        """The job's id: the caller's, or one that was made for it."""
        return self.options.job_id

    @property
    def application(self) -> str:
        """The application whose type it is."""
        return self.type.partition("/")[0]

    def encode(self) -> bytes:
        """Return the JSON body of the request."""
        return msgspec.json.encode({"type": self.type, "args": self.args, "options": self.options})


class JobFailure(Struct, frozen=True):
    """Why a job, or its last attempt, failed."""

    code: str = ""
    detail: str = ""
    retryable: bool = False


class JobSnapshot(Struct, frozen=True, kw_only=True):
    """A job as the API shows it. Fields that this release does not know are left out."""

    id: str
    #: `waiting`, `delayed`, `grouped`, `running`, `done`, `failed` or `cancelled`.
    state: str
    #: True once the job runs no more.
    ended: bool
    type: str | None = None
    #: True while a running job is being ended.
    cancelling: bool = False
    attempt: int = 0
    queued_at: datetime | None = None
    #: When a delayed job may run.
    due_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    #: The progress that the job last reported.
    progress: Any = None
    #: The value that the job returned.
    value: Any = None
    failure: JobFailure | None = None


def new_job_id() -> str:
    """Return a new job id."""
    return os.urandom(16).hex()


def seconds_of(duration: Any, name: str = "delay") -> float:
    """Return a number or timedelta in seconds. Raises `ValueError` unless it is 0 or more."""
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else float(duration)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{name}: a number of seconds, 0 or more")
    return seconds


def checked_time(when: datetime) -> datetime:
    """Return a time. Raises `ValueError` if it has no time zone."""
    if when.tzinfo is None:
        raise ValueError(
            "when: a datetime with a time zone, such as datetime.now(UTC) + timedelta(hours=1)"
        )
    return when


def seconds_until(when: datetime) -> float:
    """Return the seconds from now to `when`; 0 if it is past.
    Raises `ValueError` without a time zone."""
    return max(0.0, (checked_time(when) - datetime.now(UTC)).total_seconds())


def _response_to(request: JobRequest) -> Call[httpx.Response]:
    answer = yield request
    if isinstance(answer, Unreachable):
        raise answer
    response: httpx.Response = answer
    return response


def _job_path(job_id: str, *action: str) -> str:
    # httpx would resolve a part that is `.` or `..`, but not its escaped form.
    part = quote(job_id, safe="") if job_id.strip(".") else "%2E" * len(job_id)
    return "/".join(("/jobs", part, *action))


def _repeat(request: JobRequest, kind: Any, job_id: str, retry_for_s: float) -> Call[Any]:
    """Send a request until the API has answered it.
    Its jobs have ids, so a repeat enqueues nothing twice."""
    deadline = time.monotonic() + retry_for_s
    pause_s = FIRST_PAUSE_S
    may_be_done = False
    while True:
        failure: Exception
        retry_after_s = 0.0
        try:
            response = yield from _response_to(request)
            return decode_answer(response, kind)
        except Unreachable as error:
            failure = error
            may_be_done = may_be_done or error.sent
        except UnexpectedAnswer as error:
            failure = error
            may_be_done = True
        except Refused as error:
            if not error.retryable and error.status < 500:
                raise
            failure = error
            may_be_done = may_be_done or error.status >= 500
            retry_after_s = error.retry_after_s or 0.0
        sleep_s = max(retry_after_s, pause_s * random.uniform(0.75, 1.25))  # noqa: S311 - no secret
        if time.monotonic() + sleep_s > deadline:
            if may_be_done:
                raise EnqueueUnsettled(job_id) from failure
            raise failure
        yield sleep_s
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def enqueue(call: JobCall, retry_for_s: float) -> Call[JobSnapshot]:
    """Enqueue one job. Raises `Refused`, `Unreachable`, `EnqueueUnsettled`."""
    request = JobRequest(method="POST", path="/jobs", body=call.encode())
    snapshot: JobSnapshot = yield from _repeat(request, JobSnapshot, call.job_id, retry_for_s)
    return snapshot


class _BatchAnswer(Struct, frozen=True):
    jobs: list[JobSnapshot]


def enqueue_many(calls: Sequence[JobCall], retry_for_s: float) -> Call[list[JobSnapshot]]:
    """Enqueue jobs in their order, in batches. A batch is enqueued whole or not at all.

    Raises what `enqueue` raises; the batches before the failed one are enqueued.
    """
    snapshots: list[JobSnapshot] = []
    for batch_calls, body in _batches(calls):
        request = JobRequest(method="POST", path="/jobs/batch", body=body)
        batch: _BatchAnswer = yield from _repeat(
            request, _BatchAnswer, batch_calls[0].job_id, retry_for_s
        )
        snapshots += batch.jobs
    return snapshots


def _batches(calls: Sequence[JobCall]) -> Generator[tuple[list[JobCall], bytes], None, None]:
    """Split calls into batches that the API accepts:
    of one application, each with its JSON body."""
    batch: list[JobCall] = []
    encoded: list[bytes] = []
    size = 0
    for call in calls:
        body = call.encode()
        is_full = len(batch) == MAX_BATCH_JOBS or size + len(body) > MAX_BATCH_BYTES
        if batch and (is_full or batch[0].application != call.application):
            yield batch, b'{"jobs":[' + b",".join(encoded) + b"]}"
            batch, encoded, size = [], [], 0
        batch.append(call)
        encoded.append(body)
        size += len(body) + 1
    if batch:
        yield batch, b'{"jobs":[' + b",".join(encoded) + b"]}"


def get(job_id: str) -> Call[JobSnapshot]:
    """Look at a job. Raises `JobNotFound`, `Refused`, `Unreachable`."""
    response = yield from _response_to(JobRequest(method="GET", path=_job_path(job_id)))
    snapshot: JobSnapshot = decode_answer(response, JobSnapshot)
    return snapshot


def wait(job_id: str, timeout_s: float | None) -> Call[JobSnapshot]:
    """Wait until a job has ended; None: for ever. An API that is away for a while is asked again.

    Raises `JobNotEnded` when the time is over, `JobNotFound`, `Refused`, `Unreachable`.
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    pause_s = FIRST_PAUSE_S
    state = "unknown"
    while True:
        wait_s = max(0.0, min(MAX_WAIT_S, deadline - time.monotonic()))
        request = JobRequest(
            method="GET", path=_job_path(job_id), query={"wait": wait_s}, wait_s=wait_s
        )
        asked_at = time.monotonic()
        failure: Exception | None = None
        try:
            response = yield from _response_to(request)
            snapshot: JobSnapshot = decode_answer(response, JobSnapshot)
        except (Unreachable, Refused) as error:
            if isinstance(error, Refused) and not error.retryable and error.status < 500:
                raise
            failure = error
        else:
            if snapshot.ended:
                return snapshot
            state = snapshot.state
        if time.monotonic() + pause_s >= deadline:
            if failure is not None:
                raise failure
            if time.monotonic() >= deadline:
                raise JobNotEnded(job_id, state)
        # An API on which too many calls wait answers at once.
        if failure is not None or time.monotonic() - asked_at < min(wait_s, 1.0):
            yield min(pause_s, max(0.0, deadline - time.monotonic()))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        else:
            pause_s = FIRST_PAUSE_S


def cancel(job_id: str) -> Call[JobSnapshot]:
    """Cancel a job: one that waits ends,
    one that runs is killed, one that has ended stays as it is.

    Raises `JobNotFound`, `Refused`, `Unreachable`.
    """
    response = yield from _response_to(JobRequest(method="POST", path=_job_path(job_id, "cancel")))
    snapshot: JobSnapshot = decode_answer(response, JobSnapshot)
    return snapshot


def value_of(snapshot: JobSnapshot, result_type: Any = Any) -> Any:
    """Return what an ended job returned, as `result_type` if JSON can become that.

    Raises `JobFailed`, `JobCancelled`,
    and `UnexpectedAnswer` for a value that does not fit `result_type`.
    """
    failure = snapshot.failure or JobFailure()
    if snapshot.state == "cancelled":
        detail = failure.detail or "it was cancelled"
        raise JobCancelled(snapshot.id, failure.code or "JOB_CANCELLED", detail)
    if snapshot.state != "done":
        raise JobFailed(snapshot.id, failure.code, failure.detail or f"it is {snapshot.state}")
    if snapshot.value is None and snapshot.finished_at is None:
        raise ResultExpired(snapshot.id, "", "it is done, and its result is no longer kept")
    try:
        return convert_value(snapshot.value, result_type)
    except msgspec.ValidationError as error:
        raise UnexpectedAnswer(
            f"job {snapshot.id} returned something else than declared: {error}"
        ) from None

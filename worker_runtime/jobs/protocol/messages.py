"""Defines the messages of the job queue: a job and its result, each as its MAC, a space, and JSON.

A job names its type, and the runner finds the code in its registry. Nothing in a message is
imported or executed: `args` is data that must fit the type's struct.

Valkey's scripts have no key, so the result that they write for a job whose runner died is not
trusted.
"""

import re
from enum import StrEnum

import msgspec

from worker_runtime.protocol import bounds
from worker_runtime.protocol.authentication import MessageKeys, read_payload, sign_payload
from worker_runtime.protocol.errors import BerthError, InvalidSignature, MalformedMessage
from worker_runtime.protocol.messages import Failure, Message, decode, encode

#: JSON of nothing: the value of a job that returned none. (A `Raw` cannot be optional.)
NULL = msgspec.Raw(b"null")
#: Bytes of a job's arguments as JSON, and of one encoded job.
#: Producer and runner refuse a larger one.
MAX_ARGUMENTS_BYTES = 64 * 1024
MAX_JOB_BYTES = MAX_ARGUMENTS_BYTES + 4096
#: Bytes of one encoded result.
MAX_RESULT_BYTES = 64 * 1024
#: Seconds that a result is kept. Results of the fleet are kept longer, because the process that
#: notes the end in PostgreSQL may be away for a day.
RESULT_TTL_S, FLEET_RESULT_TTL_S = 500, 86_400
#: Seconds that a failed job is kept.
FAILED_TTL_S = 14 * 86_400
#: A job is not run again once it, or its runner, has died this often.
MAX_CRASHES = 3
#: Seconds that a runner's entry lives without a renewal.
RUNNER_TTL_S = 420
#: Milliseconds of waiting that one step of priority is worth,
#: unless a queue's settings say otherwise.
BOOST_MS = 60_000
#: The queue without priorities: first in, first out.
FIFO_QUEUE = "scheduler"

_JOB_USE, _RESULT_USE = b"job/1", b"job_result/1"

_NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
#: A type of ours, or of an application: `shop/jobs.resize_image`.
_TYPE_PATTERN = re.compile(
    r"[a-z0-9][a-z0-9_.-]{0,63}|[a-z][a-z0-9-]{0,31}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"
)
# Printable, no space, no braces: hash tags stay what they are.
_KEY_PATTERN = re.compile(r"[!-z|~]{1,128}")


class UnknownJob(BerthError, code="JOB_UNKNOWN", retryable=True):
    """This runner does not run jobs of that type. Another runner may, if it is newer or has the
    keys."""


class JobFailed(BerthError, code="JOB_FAILED"):
    """The job failed."""


class JobTimeout(JobFailed, code="JOB_TIMEOUT"):
    """The job was killed because it took longer than its timeout."""


class JobCrashed(JobFailed, code="JOB_CRASHED"):
    """The job's process, or its runner, died while it ran."""


class JobMemoryExceeded(JobFailed, code="JOB_MEMORY_EXCEEDED"):
    """The job was killed because it took more memory than its type may have."""


class JobOutcomeUnknown(JobFailed, code="JOB_OUTCOME_UNKNOWN"):
    """It is not known whether the job did its work: its process or runner died, or the receiver's
    answer was lost. It must not run twice."""


class JobCancelled(JobFailed, code="JOB_CANCELLED"):
    """Someone cancelled the job."""


class ResultTooLarge(JobFailed, code="RESULT_TOO_LARGE"):
    """The job's result is larger than a result may be."""


class JobStatus(StrEnum):
    """Says how a run ended; after `RETRY` the job runs again."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RETRY = "retry"


class Job(Message, frozen=True, kw_only=True, tag="job"):
    """Describes one job, as a producer makes it. Times are seconds."""

    job_id: str
    #: The type of job, by its name in the registry;
    #: an application's own begins with its name and a slash.
    name: str
    #: The version of an own type that validated the arguments; 0 for a type of ours.
    type_version: int = 0
    queue: str = "default"
    #: The arguments, as JSON of the type's own struct.
    args: msgspec.Raw = msgspec.Raw(b"{}")
    #: 0 to 9; higher runs earlier.
    priority: int = 5
    #: Whether it may run again after its runner or process has died in the middle.
    idempotent: bool = False
    #: Seconds after which it is killed.
    timeout: float = 180.0
    #: The number of runs, if its errors are retryable.
    attempts: int = 10
    #: Seconds between two attempts, before jitter.
    retry_delay: float = 120.0
    #: Seconds until it may run.
    delay: float = 0.0
    #: While a job with this key has not ended, no other one is accepted.
    unique: str = ""
    #: Seconds for which the unique key counts at most; 0: until the job has ended.
    unique_for: float = 0.0
    #: Jobs of one group run one after the other, in the order they came. A retry holds the group.
    group: str = ""
    #: The own type that is enqueued with the failure once this job has failed for good.
    on_failed: str = ""
    #: Jobs of this type with the same key share the rate that the type's settings give.
    rate_key: str = ""
    #: The server that the job has to wait for.
    #: Each runner runs only so many jobs of one receiver at once.
    receiver: str = ""
    result_ttl: int = RESULT_TTL_S

    @property
    def queued_type(self) -> str:
        """The type as the queue knows it: an own type with its version,
        `shop/jobs.resize_image@2`."""
        return f"{self.name}@{self.type_version}" if self.type_version else self.name


class JobResult(Message, frozen=True, kw_only=True, tag="job_result"):
    """Says how a job, or one attempt, ended. `value` is what the job returned, as JSON."""

    job_id: str
    status: JobStatus
    value: msgspec.Raw = NULL
    failure: Failure | None = None
    #: Where it failed; empty unless an error was raised inside the job.
    traceback: str = ""
    #: Its standard output and error; only the beginning and the end if it was long.
    output: str = ""
    attempt: bounds.Counter = 0
    runner: str = ""
    started_at_ms: bounds.TimeMsOrZero = 0
    finished_at_ms: bounds.TimeMsOrZero = 0

    @property
    def ended_as(self) -> JobStatus:
        """Returns how the job ended. A `RETRY` that ended it means `CANCELLED`: somebody had
        cancelled the job, so nothing runs again."""
        return JobStatus.CANCELLED if self.status is JobStatus.RETRY else self.status


def encode_job(job: Job) -> bytes:
    """Returns the encoded job; raises `MalformedMessage` if no runner would accept it."""
    if not _NAME_PATTERN.fullmatch(job.queue):
        raise MalformedMessage("queue: 1 to 64 of a-z, 0-9, '_', '.', '-'")
    if not _TYPE_PATTERN.fullmatch(job.name):
        raise MalformedMessage(
            "name: 1 to 64 of a-z, 0-9, '_', '.', '-', or an application, '/' and a name"
        )
    if ("/" in job.name) != (job.type_version > 0) or job.type_version > 1_000_000:
        raise MalformedMessage(
            "type_version is 1 to 1,000,000 for an application's type, and 0 for others"
        )
    if job.on_failed and not ("/" in job.name and _TYPE_PATTERN.fullmatch(job.on_failed)):
        raise MalformedMessage("on_failed names a type of the same application")
    if job.on_failed.partition("/")[0] not in ("", job.name.partition("/")[0]):
        raise MalformedMessage("on_failed names a type of the same application")
    if not 0 <= job.unique_for <= 366 * 86_400:
        raise MalformedMessage("unique_for is at most a year")
    keys = {"unique": job.unique or "-", "group": job.group or "-", "rate_key": job.rate_key or "-"}
    keys["receiver"] = job.receiver or "-"
    for field, value in (("job_id", job.job_id), *keys.items()):
        if not _KEY_PATTERN.fullmatch(value):
            raise MalformedMessage(f"{field}: 1 to 128 printable characters, no space, no braces")
    if not 0 <= job.priority <= 9:
        raise MalformedMessage("priority is 0 to 9")
    if not 0 < job.timeout <= 86_400:
        raise MalformedMessage("timeout is more than 0 s and at most a day")
    if not 1 <= job.attempts <= 1000 or not 0 <= job.retry_delay <= 86_400:
        raise MalformedMessage("attempts are 1 to 1000, retry_delay is at most a day")
    if not 0 <= job.delay <= 366 * 86_400:
        raise MalformedMessage("delay is at most a year")
    if not 1 <= job.result_ttl <= 14 * 86_400:
        raise MalformedMessage("result_ttl is 1 s to 14 days")
    body = encode(job)
    if len(body) > MAX_JOB_BYTES:
        raise MalformedMessage(f"{len(body)} bytes are more than {MAX_JOB_BYTES}")
    return body


def read_job(body: bytes) -> Job:
    """Reads a job without its MAC; raises `MalformedMessage`."""
    job: Job = decode(body, Job, limit=MAX_JOB_BYTES)
    return job


def read_result(entry: bytes) -> JobResult:
    """Reads a result, whoever wrote it; raises `MalformedMessage`."""
    result: JobResult = decode(entry[max(0, entry.find(b"{")) :], JobResult)
    return result


def sign_job(job: Job, keys: MessageKeys) -> bytes:
    """Raises `MalformedMessage` if no runner would accept the job."""
    return sign_payload(keys, _JOB_USE, encode_job(job))


def sign_result(result: JobResult, keys: MessageKeys) -> bytes:
    return sign_payload(keys, _RESULT_USE, encode(result))


def read_signed_job(entry: bytes, job_id: str, keys: MessageKeys) -> tuple[Job, bytes]:
    """Returns the job under this id, and its JSON.

    Raises what `read_payload` does, or `MalformedMessage`.
    """
    body = read_payload(keys, _JOB_USE, entry, f"job {job_id}")
    job = read_job(body)
    if job_id != job.job_id:
        raise InvalidSignature(f"job {job_id}")
    return job, body


def read_signed_result(entry: bytes, job_id: str, keys: MessageKeys) -> JobResult:
    """Raises what `read_signed_job` does."""
    result = read_result(read_payload(keys, _RESULT_USE, entry, f"result of job {job_id}"))
    if result.job_id != job_id:
        raise InvalidSignature(f"result of job {job_id}")
    return result

"""The calls of producers and operators to the job queue: each a script with its keys and arguments.

No client is imported here. Servers run a call with redis-py (`run_script(client, *call)`), a worker
with its own client (`client.run(*call)`). All are safe to repeat.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import scripts as job_scripts
from worker_runtime.jobs.protocol.messages import (
    BOOST_MS,
    FIFO_QUEUE,
    FLEET_RESULT_TTL_S,
    RESULT_TTL_S,
    Job,
    JobCancelled,
    JobResult,
    JobStatus,
    sign_job,
    sign_result,
)
from worker_runtime.protocol import bounds
from worker_runtime.protocol.authentication import MessageKeys
from worker_runtime.protocol.messages import Failure
from worker_runtime.protocol.scripts import Script


class QueueCall(NamedTuple):
    """Holds one script with its keys and arguments."""

    script: Script
    keys: list[str]
    args: list[Any]


def reply_number(value: bytes | str | None) -> int:
    """Returns a number in a job's hash, which its runner writes; 0 for what is none, at most
    `bounds.LATEST_MS`."""
    try:
        return min(max(int(float(value or 0)), 0), bounds.LATEST_MS)
    except (ValueError, OverflowError):
        return 0


def reply_progress(value: bytes | str | None) -> Any:
    """Returns what a job said of its progress; None if that is no JSON."""
    try:
        return None if value is None else msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def reply_text(value: bytes | str) -> str:
    """Returns part of a reply as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def enqueue(job: Job, keys: MessageKeys, tag: str = job_keys.FLEET_TAG) -> QueueCall:
    """Puts a job on its queue; raises `MalformedMessage`. `keys`: the tag's.

    The reply: `[b"queued", id]`, `[b"seen", id]` for a repeat, `[b"duplicate", id]` when another
    job has the unique key.
    """
    body = sign_job(job, keys)
    priority = 0 if job.queue == FIFO_QUEUE else job.priority
    args: list[Any] = [job.job_id, body, job.queued_type, job.queue, priority, int(job.idempotent)]
    args += [
        job.unique,
        job.group,
        max(0, round(job.delay * 1000)),
        BOOST_MS,
        job.rate_key,
        job.receiver,
    ]
    args += [round(job.unique_for * 1000), job.on_failed]
    return QueueCall(job_scripts.ENQUEUE, [job_keys.meta(tag)], args)


def cancel(job_id: str, keys: MessageKeys, tag: str = job_keys.FLEET_TAG) -> QueueCall:
    """Cancels a job. The reply: `cancelled`,
    `asked` (its runner will kill it), `failed`, `unknown`."""
    failure = Failure.of(JobCancelled("cancelled before it ran"))
    result = JobResult(job_id=job_id, status=JobStatus.CANCELLED, failure=failure)
    kept = FLEET_RESULT_TTL_S if tag == job_keys.FLEET_TAG else RESULT_TTL_S
    return QueueCall(
        job_scripts.CANCEL, [job_keys.meta(tag)], [job_id, sign_result(result, keys), kept]
    )


def requeue(job_ids: Sequence[str], tag: str = job_keys.FLEET_TAG) -> QueueCall:
    """Puts failed jobs back on their queues; at most some hundreds. The reply: the ids that went
    back."""
    return QueueCall(job_scripts.REQUEUE, [job_keys.meta(tag)], [BOOST_MS, *job_ids])


def suspend(*, queue: str = "", runner: str = "", tag: str = job_keys.FLEET_TAG) -> QueueCall:
    """Stops claims of this queue, by runners of this name, or all, until `resume`. Running jobs
    continue."""
    return configure({halt_field(queue, runner): "1"}, tag)


def resume(*, queue: str = "", runner: str = "", tag: str = job_keys.FLEET_TAG) -> QueueCall:
    """Ends one `suspend` with the same arguments."""
    return configure({halt_field(queue, runner): None}, tag)


def configure(settings: Mapping[str, str | None], tag: str = job_keys.FLEET_TAG) -> QueueCall:
    """Sets these fields of the settings, or removes them (None).
    The reply: how many have changed."""
    args = [part for name, value in settings.items() for part in (name, value or "")]
    return QueueCall(job_scripts.CONFIGURE, [job_keys.meta(tag)], args)


def halt_field(queue: str, runner: str) -> str:
    """Returns the field of the settings that halts claims of this queue, by runners of this name,
    or all claims."""
    if queue:
        return f"halt_queue:{queue}"
    return f"halt_runner:{runner}" if runner else "halt"


def _field(setting: str) -> Callable[[str], str]:
    """Builds the field of this setting from the name of a queue or of a type of job."""
    return lambda name: f"{setting}:{name}"


# Fields of the settings.
weight_field = _field("weight")  # turns of this queue for each turn of a queue with weight 1
limit_field = _field("limit")  # jobs of this type that may run at once, everywhere
node_limit_field = _field("node_limit")  # the same on one node
#: Ms between two jobs of this type with the same rate key, in the long run.
rate_field = _field("rate")
# How many of them may come at once after a rest (1 by default).
rate_burst_field = _field("rate_burst")

"""The job queue as an operator sees it: queues, runners,
running and failed jobs; puts failed ones back.

It is read in several steps, so a job that moves meanwhile may be in none of the lists.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Self

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError
from redis.retry import Retry

from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import scripts as job_scripts
from worker_runtime.jobs.protocol.calls import reply_number, reply_progress, reply_text
from worker_runtime.jobs.protocol.messages import JobResult, JobStatus, read_result
from worker_runtime.protocol.errors import MalformedMessage

#: Jobs that one call puts back or reads.
_PAGE_SIZE = 200


@dataclass(frozen=True, kw_only=True)
class QueueSnapshot:
    """A queue that has work or is suspended. `types`: waiting jobs by type."""

    queue: str
    waiting: int
    #: Seconds that its oldest job has waited.
    waited: float
    #: Runners that serve it.
    runners: int
    weight: float
    suspended: bool
    types: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class RunnerSnapshot:
    """Describes a registered runner. Times are Unix milliseconds."""

    runner: str
    name: str
    node: str
    queues: str
    state: str
    jobs: list[str]
    pid: int
    version: str
    born_at_ms: int
    seen_at_ms: int
    suspended: bool


@dataclass(frozen=True, kw_only=True)
class JobSnapshot:
    """Describes a job that runs or has failed. Times are Unix milliseconds."""

    job_id: str
    name: str
    queue: str
    attempt: int
    state: str
    runner: str = ""
    started_at_ms: int = 0
    failed_at_ms: int = 0
    progress: Any = None
    code: str = ""
    detail: str = ""
    traceback: str = ""
    output: str = ""


@dataclass(frozen=True, kw_only=True)
class QueueOverview:
    """All queues, and what runs."""

    suspended: bool
    delayed: int
    failed: int
    queues: list[QueueSnapshot]
    running: list[JobSnapshot]
    runners: list[RunnerSnapshot]


class JobInspector:
    """Reads one tag's queues. Use it as a context manager. Every call raises `RedisError` when
    Valkey is down."""

    def __init__(self, url: str, tag: str = job_keys.FLEET_TAG) -> None:
        self._client: Any = Redis.from_url(
            url, retry=Retry(NoBackoff(), 0), socket_timeout=5.0, socket_connect_timeout=2.0
        )
        self.tag = tag

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._client.close()

    def run(self, call: job_calls.QueueCall) -> Any:
        """Runs one call of the protocol; all may be repeated."""
        script, keys, args = call
        try:
            return self._client.evalsha(script.sha, len(keys), *keys, *args)
        except NoScriptError:  # refused before anything ran
            return self._client.eval(script.source, len(keys), *keys, *args)

    def overview(self) -> QueueOverview:
        settings = _decoded(self._client.hgetall(job_keys.meta(self.tag)))
        runners = self._runners(settings)
        return QueueOverview(
            suspended="halt" in settings,
            delayed=int(self._client.zcard(job_keys.delayed(self.tag))),
            failed=int(self._client.zcard(job_keys.failed(self.tag))),
            queues=self._queues(settings, runners),
            running=self._running(runners),
            runners=runners,
        )

    def waits(self, max_jobs: int = 100) -> dict[str, float]:
        """Returns the seconds that the oldest of the first `max_jobs` jobs has waited, by queue;
        without suspended queues."""
        settings = _decoded(self._client.hgetall(job_keys.meta(self.tag)))
        scan = job_calls.QueueCall(job_scripts.SCAN, [job_keys.meta(self.tag)], [max_jobs])
        waits: dict[str, float] = {}
        for raw, _, _, ms in self.run(scan)[3:]:
            queue = reply_text(raw)
            if not {"halt", f"halt_queue:{queue}"} & settings.keys():
                waits[queue] = max(waits.get(queue, 0.0), ms / 1000)
        return waits

    def failed(self) -> Iterator[JobSnapshot]:
        """Yields failed jobs, the newest first."""
        first = 0
        while page := self._client.zrevrange(
            job_keys.failed(self.tag), first, first + _PAGE_SIZE - 1, withscores=True
        ):
            first += _PAGE_SIZE
            fields = self._fields([reply_text(job_id) for job_id, _ in page])
            for (job_id, at), job_fields in zip(page, fields, strict=True):
                if job_fields:
                    yield _snapshot(reply_text(job_id), job_fields, None, int(at))

    def job(self, job_id: str) -> JobSnapshot | None:
        """Returns one job; None if there is none, or its result has expired."""
        (fields,) = self._fields([job_id])
        stored = self._client.get(job_keys.result(self.tag, job_id))
        if not fields and stored is None:
            return None
        failed_at = self._client.zscore(job_keys.failed(self.tag), job_id)
        return _snapshot(job_id, fields, stored, reply_number(failed_at))

    def requeue(self, job_ids: Iterable[str]) -> list[str]:
        """Puts failed jobs back, page by page; returns the ids that went back."""
        source, back = iter(job_ids), []
        while page := list(islice(source, _PAGE_SIZE)):
            back += [reply_text(job_id) for job_id in self.run(job_calls.requeue(page, self.tag))]
        return back

    def _queues(
        self, settings: dict[str, str], runners: list[RunnerSnapshot]
    ) -> list[QueueSnapshot]:
        waits = self.waits()
        names = {
            reply_text(queue) for queue in self._client.zrange(job_keys.ready(self.tag), 0, -1)
        }
        halted = {name.partition(":")[2] for name in settings if name.startswith("halt_queue:")}
        queues = []
        for queue in sorted(names | halted):
            names_of_types = map(
                reply_text, self._client.zrange(job_keys.subqueues(self.tag, queue), 0, -1)
            )
            types = {
                name: int(self._client.zcard(job_keys.subqueue(self.tag, queue, name)))
                for name in names_of_types
            }
            queues.append(
                QueueSnapshot(
                    queue=queue,
                    waiting=sum(types.values()),
                    waited=waits.get(queue, 0.0),
                    runners=sum(
                        bool({"*", queue} & set(runner.queues.split(","))) for runner in runners
                    ),
                    weight=float(settings.get(job_calls.weight_field(queue), 1)),
                    suspended=queue in halted,
                    types=types,
                )
            )
        return queues

    def _runners(self, settings: dict[str, str]) -> list[RunnerSnapshot]:
        runners = []
        for runner in sorted(
            reply_text(runner_id) for runner_id in self._client.hkeys(job_keys.beats(self.tag))
        ):
            entry = _decoded(self._client.hgetall(job_keys.runner(self.tag, runner)))
            name = entry.get("name", "")
            runners.append(
                RunnerSnapshot(
                    runner=runner,
                    name=name,
                    node=entry.get("node", ""),
                    queues=entry.get("queues", ""),
                    state=entry.get("state", "lost"),
                    jobs=sorted(
                        reply_text(job)
                        for job in self._client.smembers(job_keys.held(self.tag, runner))
                    ),
                    pid=reply_number(entry.get("pid")),
                    version=entry.get("version", ""),
                    born_at_ms=reply_number(entry.get("born_at")),
                    seen_at_ms=reply_number(entry.get("seen_at")),
                    suspended=f"halt_runner:{name}" in settings,
                )
            )
        return runners

    def _running(self, runners: Iterable[RunnerSnapshot]) -> list[JobSnapshot]:
        job_ids = [job_id for runner in runners for job_id in runner.jobs]
        fields = self._fields(job_ids)
        jobs = [
            _snapshot(job_id, job_fields, None)
            for job_id, job_fields in zip(job_ids, fields, strict=True)
            if job_fields
        ]
        return sorted(jobs, key=lambda job: job.started_at_ms)

    def _fields(self, job_ids: list[str]) -> list[dict[str, str]]:
        if not job_ids:
            return []
        pipeline = self._client.pipeline(transaction=False)
        for job_id in job_ids:
            pipeline.hgetall(job_keys.job(self.tag, job_id))
        return [_decoded(reply) for reply in pipeline.execute()]


def matching(
    jobs: Iterable[JobSnapshot], *, queue: str = "", name: str = "", code: str = ""
) -> Iterator[JobSnapshot]:
    """Yields the jobs that fit all filters that are not empty."""
    return (
        job
        for job in jobs
        if queue in ("", job.queue) and name in ("", job.name) and code in ("", job.code)
    )


def _snapshot(
    job_id: str, fields: dict[str, str], stored: bytes | None, failed_at_ms: int = 0
) -> JobSnapshot:
    """Makes a job's snapshot from its hash, or, once that is gone, from its stored result."""
    kept = fields["failure"].encode() if "failure" in fields else None if fields else stored
    result = None if kept is None else _read_result(job_id, kept)
    failure = result.failure if result is not None else None
    snapshot = JobSnapshot(
        job_id=job_id,
        name=fields.get("name", ""),
        queue=fields.get("queue", ""),
        attempt=reply_number(fields.get("attempt")),
        state=fields.get("state", ""),
        runner=fields.get("runner", "") if fields.get("state") == "running" else "",
        started_at_ms=reply_number(fields.get("started_at")),
        failed_at_ms=failed_at_ms,
        progress=reply_progress(fields.get("progress")),
        code="" if failure is None else failure.code,
        detail="" if failure is None else failure.detail,
        traceback="" if result is None else result.traceback,
        output="" if result is None else result.output,
    )
    if fields or result is None:
        return snapshot
    ended: dict[str, Any] = {"state": result.ended_as.value, "started_at_ms": result.started_at_ms}
    return replace(snapshot, attempt=result.attempt, runner=result.runner, **ended)


def _read_result(job_id: str, stored: bytes) -> JobResult:
    try:
        return read_result(stored)
    except MalformedMessage as error:
        return JobResult(
            job_id=job_id, status=JobStatus.FAILED, output=f"unreadable: {error.detail}"
        )


def _decoded(fields: dict[bytes, bytes]) -> dict[str, str]:
    return {reply_text(name): reply_text(value) for name, value in fields.items()}

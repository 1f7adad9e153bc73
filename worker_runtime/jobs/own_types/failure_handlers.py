"""Enqueues the failure handlers of own jobs: the type that a failed job's `on_failed` names.

The script that ends a job as failed notes it in `jobs:{tag}:handlers`, whoever calls it: its
runner, or another one that has found its runner dead. Every runner looks there when it renews its
lease. The handler's id is made from the job's and the time of its failure, so it is enqueued once,
however many runners try. Of a job that PostgreSQL keeps, orchestrators keep the handler, too
(`activities/maintenance/kept_jobs.py`). A failure whose handler this runner does not have stays
noted for one that has it, and holds up no other.
"""

from berth_jobs.manifest import ManifestType
from berth_jobs.options import JobDefaults, JobFailureReport, handler_fields, handler_id

from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import (
    FAILED_TTL_S,
    FLEET_RESULT_TTL_S,
    MAX_ARGUMENTS_BYTES,
    Job,
    JobFailed,
    read_result,
    read_signed_job,
)
from worker_runtime.process.clock import wall_ms
from worker_runtime.process.log import Log
from worker_runtime.process.valkey import Valkey
from worker_runtime.protocol.authentication import MessageKeys
from worker_runtime.protocol.errors import BerthError

#: Jobs that one pass reads.
_MAX_JOBS_PER_PASS = 50
#: Failures that one call reads.
_PAGE_SIZE = 500
#: Failures for other runners that are remembered: 10 MB.
_MAX_FOREIGN_FAILURES = 100_000


class FailureHandlers:
    """The failure handlers of one application."""

    def __init__(
        self, tag: str, message_keys: MessageKeys, defaults: JobDefaults, log: Log
    ) -> None:
        """Takes `defaults`, which apply to handlers whose type says nothing else."""
        self._tag = tag
        self._message_keys = message_keys
        self._defaults = defaults
        self._log = log
        #: The newest version of each type that this runner knows, by name.
        self.types: dict[str, ManifestType] = {}
        #: Failures whose handlers this runner does not have, by job and time: it reads each once.
        self._foreign: set[tuple[bytes, bytes]] = set()
        #: Handlers that it does not have, and has logged.
        self._unknown: set[str] = set()

    def enqueue_due(self, client: Valkey) -> None:
        """Enqueues the handlers of the failures that are noted. Raises `ValkeyFailed`; may be
        repeated."""
        key = job_keys.handlers(self._tag)
        oldest = wall_ms() - FAILED_TTL_S * 1000
        read, skipped, is_page_full = 0, 0, True
        while is_page_full:
            noted = client.execute("ZRANGE", key, skipped, skipped + _PAGE_SIZE - 1, "WITHSCORES")
            is_page_full = len(noted) == 2 * _PAGE_SIZE
            for failure in zip(noted[::2], noted[1::2], strict=True):
                job_id, failed_at = failure[0], int(float(failure[1]))
                # Beyond its time a failed job is gone, and another look removes its note.
                if failure in self._foreign and failed_at > oldest:
                    skipped += 1
                    continue
                if read == _MAX_JOBS_PER_PASS:
                    return
                read += 1
                if self._enqueue(client, job_id.decode("utf-8", "replace"), failed_at):
                    client.execute("ZREM", key, job_id)
                else:
                    skipped += 1
                    self._remember(failure)

    def _remember(self, failure: tuple[bytes, bytes]) -> None:
        if len(self._foreign) >= _MAX_FOREIGN_FAILURES:
            self._foreign.clear()
        self._foreign.add(failure)

    def _enqueue(self, client: Valkey, job_id: str, failed_at: int) -> bool:
        """Enqueues one handler; False if another runner has to."""
        fields = ("body", "failure", "attempt")
        body, failure, attempt = client.execute("HMGET", job_keys.job(self._tag, job_id), *fields)
        if body is None or failure is None:  # dismissed, or put back
            return True
        try:
            job, _ = read_signed_job(body, job_id, self._message_keys)
            kind = self.types.get(job.on_failed)
            if kind is None:
                self._log_unknown(job)
                return not job.on_failed
            handler = self._handler(kind, job, failure, int(attempt or 0), failed_at)
        except (BerthError, ValueError) as error:
            self._log.error("failure_handler_not_enqueued", job=job_id, error=type(error).__name__)
            return True
        client.run(*job_calls.enqueue(handler, self._message_keys, self._tag))
        return True

    def _log_unknown(self, job: Job) -> None:
        if job.on_failed and job.on_failed not in self._unknown:
            self._unknown.add(job.on_failed)
            self._log.warning(
                "failure_handler_unknown",
                handler=job.on_failed,
                job=job.job_id,
                hint="this runner lacks the type; failures wait 14 days for a runner that has it",
            )

    def _handler(
        self, kind: ManifestType, job: Job, failure: bytes, attempt: int, failed_at: int
    ) -> Job:
        result = read_result(failure)
        report = JobFailureReport(
            job_id=job.job_id,
            type=job.name,
            code=result.failure.code if result.failure else JobFailed.code,
            detail=result.failure.detail if result.failure else "",
            attempt=attempt,
            arguments=job.args,
        )
        fields = handler_fields(kind, report, MAX_ARGUMENTS_BYTES, self._defaults)
        if job.result_ttl >= FLEET_RESULT_TTL_S:  # it is kept, and so is its handler
            fields["result_ttl"] = max(fields["result_ttl"], FLEET_RESULT_TTL_S)
        return Job(job_id=handler_id(job.job_id, failed_at), **fields)

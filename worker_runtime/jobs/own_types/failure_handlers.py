"""Enqueues the failure handlers of own jobs: the type that a failed job's `on_failed` names.

The script that ends a job as failed notes it in `jobs:{tag}:handlers`, whoever calls it: its
runner, or another one that has found its runner dead. Every runner looks there when it renews its
lease. The handler's id is made from the job's and the time of its failure, so it is enqueued once,
however many runners try.
"""

from typing import Any

import msgspec
from berth_jobs.manifest import ManifestType
from berth_jobs.options import JobDefaults, job_fields

from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import (
    MAX_ARGUMENTS_BYTES,
    Job,
    read_result,
    read_signed_job,
)
from worker_runtime.process.log import Log
from worker_runtime.process.valkey import Valkey
from worker_runtime.protocol.authentication import MessageKeys
from worker_runtime.protocol.errors import BerthError

#: Failures that one look handles.
_MAX_FAILURES_PER_PASS = 20


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

    def enqueue_due(self, client: Valkey) -> None:
        """Enqueues the handlers of all failures that are noted. Raises `ValkeyFailed`; may be
        repeated."""
        noted = client.execute(
            "ZRANGE", job_keys.handlers(self._tag), 0, _MAX_FAILURES_PER_PASS - 1, "WITHSCORES"
        )
        for job_id, failed_at in zip(noted[::2], noted[1::2], strict=True):
            if self._enqueue(client, job_id.decode("utf-8", "replace"), int(float(failed_at))):
                client.execute("ZREM", job_keys.handlers(self._tag), job_id)

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
                return not job.on_failed
            handler = self._handler(kind, job, failure, int(attempt or 0), failed_at)
        except (BerthError, ValueError) as error:
            self._log.error("failure_handler_not_enqueued", job=job_id, error=type(error).__name__)
            return True
        client.run(*job_calls.enqueue(handler, self._message_keys, self._tag))
        return True

    def _handler(
        self, kind: ManifestType, job: Job, failure: bytes, attempt: int, failed_at: int
    ) -> Job:
        result = read_result(failure)
        about: dict[str, Any] = {
            "job_id": job.job_id,
            "type": job.name,
            "code": result.failure.code if result.failure else "JOB_FAILED",
            "detail": result.failure.detail if result.failure else "",
            "attempt": attempt,
            "arguments": job.args,
        }
        arguments = msgspec.json.encode(about)
        if len(arguments) > MAX_ARGUMENTS_BYTES:
            arguments = msgspec.json.encode({**about, "arguments": None})
        fields = job_fields(kind, arguments, defaults=self._defaults)
        # A handler's failure has no handler.
        fields |= {"on_failed": "", "unique": "", "unique_for": 0.0}
        suffix = f".failed.{failed_at}"
        return Job(job_id=f"{job.job_id[: 128 - len(suffix)]}{suffix}", **fields)

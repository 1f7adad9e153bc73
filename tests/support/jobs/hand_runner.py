"""Contains a runner whose jobs a test takes and ends by hand, and manifests to announce."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from infra.berth_jobs.manifest import read_manifest
from infra.settings import Settings
from infra.vault.message_secret import MessageSecretFile
from worker_runtime.jobs.own_types.announcement import declared_settings
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import manifest as wire
from worker_runtime.jobs.protocol.messages import (
    Job,
    JobResult,
    JobStatus,
    read_signed_job,
    sign_result,
)
from worker_runtime.jobs.queue import ClaimedJob, FinishedRun, JobQueue, RunnerIdentity
from worker_runtime.process.valkey import Valkey
from worker_runtime.protocol.messages import Failure


def make_manifest(
    *names: str,
    package: str = "shop-jobs",
    application: str = "shop",
    version: int = 1,
    packages: Mapping[str, str] | None = None,
) -> bytes:
    """Returns a manifest of these types. `packages`: a type → its package, where that is another
    one."""
    types = [
        {
            "name": f"{application}/{name}",
            "version": version,
            "arguments_schema": {"type": "object"},
            "package": (packages or {}).get(name, ""),
        }
        for name in names
    ]
    manifest = {
        "application": application,
        "package": package,
        "package_version": "1.0",
        "types": types,
    }
    return msgspec.json.encode(manifest, order="sorted")


SHOP_TAG = job_keys.application_tag("shop")


class HandRunner:
    """A runner of an application whose jobs a test takes and ends by hand."""

    def __init__(self, settings: Settings, name: str = "hand", application: str = "shop") -> None:
        self.application = application
        tag = job_keys.application_tag(application)
        self.keys = MessageSecretFile(settings.message_key_file).job_keys(tag)
        self.client = Valkey(settings.valkey_url, timeout=25)
        self.queue = JobQueue(self.client, RunnerIdentity(f"{name}-1", name, "n"), tag)
        self.queue.join()

    def publish(self, *manifests: bytes) -> None:
        """Announces manifests that no runner would have made."""
        reply = self.client.run(
            *wire.publish(self.queue.identity.runner_id, manifests, self.keys, self.application)
        )
        assert wire.check_reply(reply)

    def announce(self, *manifests: bytes) -> None:
        self.publish(*manifests)
        for body in manifests:
            self.queue.declare(declared_settings(read_manifest(body)))

    def claim(self, count: int = 1) -> list[ClaimedJob]:
        claims = self.queue.finish_and_claim([], count)[1]
        assert claims is not None
        return claims.jobs

    def read(self, claimed: ClaimedJob) -> Job:
        return read_signed_job(claimed.body, claimed.job_id, self.keys)[0]

    def end(self, claimed: ClaimedJob, value: Any) -> None:
        result = JobResult(
            job_id=claimed.job_id,
            status=JobStatus.DONE,
            value=msgspec.Raw(msgspec.json.encode(value)),
            attempt=claimed.attempt,
            finished_at_ms=1_795_000_000_000,
        )
        signed = sign_result(result, self.keys)
        kept = self.read(claimed).result_ttl
        ended = FinishedRun(claimed.job_id, claimed.fence, JobStatus.DONE, signed, kept)
        assert self.queue.finish_and_claim([ended], 0)[0] == ["done"]

    def fail(self, claimed: ClaimedJob, detail: str) -> None:
        result = JobResult(
            job_id=claimed.job_id,
            status=JobStatus.FAILED,
            failure=Failure(code="JOB_FAILED", detail=detail),
            attempt=claimed.attempt,
            finished_at_ms=round(time.time() * 1000),
        )
        signed = sign_result(result, self.keys)
        ended = FinishedRun(claimed.job_id, claimed.fence, JobStatus.FAILED, signed, 500)
        assert self.queue.finish_and_claim([ended], 0)[0] == ["failed"]

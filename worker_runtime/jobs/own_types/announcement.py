"""Announces a runner's own types to the queue: the signed manifest, and the limits and rates that
the types declare."""

import msgspec
from berth_jobs.manifest import JobManifest, read_manifest
from berth_jobs.options import JobDefaults

from worker_runtime.jobs.config import RunnerConfig
from worker_runtime.jobs.own_types.failure_handlers import FailureHandlers
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.queue import JobQueue
from worker_runtime.process.log import Log
from worker_runtime.process.valkey import ValkeyFailed
from worker_runtime.protocol.errors import BerthError


class SecretMissing(BerthError, code="JOB_SECRET_MISSING"):
    """The runner lacks a secret that a job type of its queues names. Put it into the folder of
    `BERTH_JOBS_SECRETS_DIR`, as a file of its name."""


class Announcement:
    """Announces one runner's types each time it registers."""

    def __init__(self, config: RunnerConfig, manifest: bytes, log: Log) -> None:
        """Raises `SecretMissing`."""
        self._config = config
        self._manifest = manifest
        described = read_manifest(manifest)
        _require_secrets(config, described)
        self._declared = declared_settings(described)
        defaults = msgspec.convert(config.own.defaults if config.own else {}, JobDefaults)
        self.handlers = FailureHandlers(config.tag, config.message_keys, defaults, log)
        self.handlers.types = {kind.name: kind for kind in described.types}
        self._application = described.application

    def make(self, queue: JobQueue) -> None:
        """Announces the types of a runner that has just joined. Safe to repeat.

        Raises `PackageConflict` and `ValkeyFailed`.
        """
        if not queue.announce(self._manifest, self._config.message_keys, self._application):
            raise ValkeyFailed("the runner's entry is gone")
        queue.declare(self._declared)


def _require_secrets(config: RunnerConfig, manifest: JobManifest) -> None:
    """Raises `SecretMissing` for a type in a queue that the runner serves."""
    secrets = config.own.secrets if config.own else {}
    queues = config.served_queues
    missing = [
        f"{kind.name} names the secret {secret}"
        for kind in manifest.types
        if "*" in queues or kind.options.queue in queues
        for secret in kind.options.secrets
        if secret not in secrets
    ]
    if missing:
        raise SecretMissing(
            f"{', '.join(missing[:10])}, which this runner does not have. Put it into the folder "
            "of BERTH_JOBS_SECRETS_DIR, as a file of its name."
        )


def declared_settings(manifest: JobManifest) -> dict[str, str]:
    """Returns the settings of limits and rates that the types declare, '' for those that they do
    not."""
    settings = {}
    for kind in manifest.types:
        options = kind.options
        settings[job_calls.limit_field(kind.name)] = str(options.max_running or "")
        settings[job_calls.node_limit_field(kind.name)] = str(options.max_running_per_node or "")
        interval = options.rate_interval_ms
        settings[job_calls.rate_field(kind.name)] = f"{interval:g}" if interval else ""
    return settings

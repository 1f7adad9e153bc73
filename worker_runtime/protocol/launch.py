"""What a worker is told when it is launched: one JSON document on its standard input.

Standard input, because it shows up neither in the environment nor in the arguments nor in
`docker inspect` (requirement V3).
"""

from __future__ import annotations

import msgspec

from worker_runtime.protocol.limits import Allowance


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a worker process needs to know. Durations are seconds."""

    worker_id: str
    pool: str
    #: Unix socket path or host and port: `redis://127.0.0.1:6379/0`, `unix:///run/valkey.sock`.
    valkey_url: str
    #: One-time token by which the worker proves that its public key is its own.
    launch_token: bytes
    #: The orchestrator's Ed25519 public key, 32 bytes: claims that it did not sign are refused.
    orchestrator_key: bytes
    #: Identifier of the launcher's task (what `stop` takes); shown in the metadata.
    task_id: str = ""
    version: str = ""
    #: Set when the worker was launched for one claim, because the pool was empty.
    reserved_claim: str = ""
    #: `host:port` of the paper exchange, for accounts of the broker `paper`.
    paper_exchange: str = ""
    #: How the limits of brokers are kept.
    allowance: Allowance = Allowance()
    mark_ttl: float = 30.0
    mark_period: float = 5.0
    #: Seconds that a claimed worker waits for the claim's message; the orchestrator tries for as long.
    confirm_timeout: float = 30.0
    #: Seconds without a pulse of the session, beyond the limit of a broker call under way, after which it
    #: counts as frozen and is replaced in place.
    pulse_timeout: float = 10.0
    #: Seconds between two pings of an idle broker connection.
    health_period: float = 60.0
    #: Longest time one broker call may take.
    broker_timeout: float = 10.0
    #: Seconds a graceful shutdown may take.
    shutdown_timeout: float = 10.0
    #: Seconds without a job after which the user's job runner ends.
    jobs_idle: float = 60.0
    log_level: str = "INFO"

    def __repr__(self) -> str:  # the launch token must not reach a log
        return f"WorkerConfig(worker_id={self.worker_id!r}, pool={self.pool!r})"

"""A worker's configuration, its exit codes, and the limits of its brokers.

A launcher passes the configuration as one JSON document on standard input, which shows up neither
in the environment nor in the arguments nor in `docker inspect`.
"""

from enum import IntEnum
from pathlib import Path
from typing import Annotated

import msgspec

#: Memory-backed: what is written there never reaches a disk.
MEMORY = Path("/dev/shm")  # noqa: S108


def memory_prefix(main_pid: int) -> str:
    """Returns how the names of a worker's folders in `MEMORY` begin, from its main process's
    number."""
    return f"berth-sj-{main_pid}-"


#: How many persons' calls an address may make where neither the broker's record nor an operator
#: says it: most brokers publish no limit for an address.
DEFAULT_EGRESS_PERSONS = 10


class BrokerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """A broker's limits for one person id. Its record has the numbers; the defaults are for others.

    A person who exceeds them is banned, and in the end the address, too.
    One connection too many is only refused.
    """

    connections: int = 5
    #: From midnight to midnight where the broker is.
    logins_per_day: int = 1000
    #: Place, replace and cancel; updates of status count as well.
    orders_per_10s: int = 250
    #: Lists of orders, positions, balance.
    queries_per_5s: int = 25


class Allowance(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker keeps the limits of its brokers."""

    #: The share of a broker's limit that we use. The rest is for calls that arrive closer together
    #: than they were sent, and for the last second that a promoted replica of Valkey has lost.
    share: float = 0.9
    #: Names of the budgets that all workers behind one address share. Only for workers of
    #: 0.1.0, and for those that an orchestrator of 0.1.0 claims:
    #: `SealedAccount.address_budgets` comes first.
    egress: tuple[str, ...] = ()
    #: How many persons' calls such an address may make.
    egress_persons: int = DEFAULT_EGRESS_PERSONS
    #: The limits of the paper exchange, for workers of 0.1.0.
    paper: BrokerLimits = BrokerLimits()
    #: Limits by broker, where they differ from those of its record.
    limits: dict[str, BrokerLimits] = {}


class ExitCode(IntEnum):
    """How a worker's processes end: 0 is graceful; the rest start at 64, above Python's own 1 and
    2.

    A worker that was killed has none: its launcher reports the signal.
    """

    OK = 0
    #: The configuration on standard input cannot be read. The same launch would fail again.
    BAD_CONFIG = 64
    #: A process ended with an uncaught error.
    INTERNAL = 65
    #: A later epoch owns the user: this worker must not submit anything any more.
    FENCED = 66
    #: The claim was released, unknown or never completed.
    CLAIM_REFUSED = 67
    #: The session process died before its user was connected,
    #: or too often to be replaced once more.
    SESSION_LOST = 68
    #: The session did not end within `shutdown_timeout` and was killed.
    SHUTDOWN_TIMEOUT = 69
    #: A process died again and again, or could not be forked.
    CRASH_LOOP = 70
    #: Not even a fresh session process could open a broker session; the event FAILED says why.
    BROKER_FAILED = 71
    #: Of a session process only: it asks to be replaced,
    #: because its broker's SDK does not come back.
    SESSION_REPLACE = 72


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a worker process needs to know. Durations are seconds."""

    worker_id: str
    pool: str
    #: Unix socket path or host and port: `redis://127.0.0.1:6379/0`, `unix:///run/valkey.sock`.
    valkey_url: str
    #: One-time token by which the worker proves that its public key is its own.
    launch_token: bytes
    #: The orchestrator's Ed25519 public keys, 32 bytes each:
    #: claims that none of them fits are refused.
    orchestrator_keys: tuple[bytes, ...]
    #: Identifier of the launcher's task (what `stop` takes); shown in the metadata.
    task_id: str = ""
    version: str = ""
    #: Set when the worker was launched for one claim, because the pool was empty.
    reserved_claim: str = ""
    #: `host:port` of the paper exchange, for accounts of the broker `paper`.
    paper_exchange: str = ""
    #: The operator's options by broker, such as its address; they come to its adapter.
    broker_options: dict[str, dict[str, str]] = {}
    #: How the limits of brokers are kept.
    allowance: Allowance = Allowance()
    mark_ttl: float = 30.0
    mark_period: float = 5.0
    #: Seconds that a claimed worker waits for the claim's message;
    #: the orchestrator tries for as long.
    confirm_timeout: float = 30.0
    #: Seconds without a pulse of the session, beyond the limit of a broker call under way, after
    #: which it counts as frozen and is replaced in place.
    pulse_timeout: float = 3.0
    #: Seconds between two pings of an idle broker connection.
    health_period: float = 60.0
    #: Seconds between the first failed login to a broker and the next one;
    #: doubled each time up to a minute.
    login_pause: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    #: Longest time one broker call may take.
    broker_timeout: float = 10.0
    #: Seconds a graceful shutdown may take.
    shutdown_timeout: float = 10.0
    #: Seconds without a job after which the user's job runner ends.
    jobs_idle: float = 60.0
    log_level: str = "INFO"

    def __repr__(self) -> str:  # the launch token must not reach a log
        return f"WorkerConfig(worker_id={self.worker_id!r}, pool={self.pool!r})"

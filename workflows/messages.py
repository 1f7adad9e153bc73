"""What goes into and out of workflows and activities: one frozen dataclass each.

New fields get defaults, so that histories and messages of the last release still fit. Durations are
seconds, times are Unix seconds. Never a credential.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class WorkerState(StrEnum):
    """Requirement W2. Processing and HealthCheck are the worker's own and stand in its metadata."""

    POOL_IDLE = "PoolIdle"
    CLAIMED = "Claimed"
    CONNECTING = "Connecting"
    ACTIVE = "Active"
    RECONNECTING = "Reconnecting"
    FAILED = "Failed"
    IDLE_TIMEOUT = "IdleTimeout"
    DRAINING = "Draining"
    PARKED = "Parked"
    TERMINATED = "Terminated"


@dataclass(frozen=True, kw_only=True)
class WorkerRef:
    """One worker and its assignment to one user."""

    worker_id: str
    task_id: str
    epoch: int
    claim_id: str
    pool: str
    version: str = ""
    #: Taken from the pool (True) or launched while the user waited.
    warm: bool = True
    #: Hexadecimal; proven at the claim to be the worker's own. A credential reload is sealed to it.
    public_key: str = ""


# --- UserWorkerWorkflow ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class UserWorkerSettings:
    """Durations that the API's settings give to a user's workflow."""

    idle_timeout: float = 1800.0
    connect_attempts: int = 3
    connect_timeout: float = 20.0
    claim_timeout: float = 30.0
    drain_timeout: float = 30.0


@dataclass(frozen=True, kw_only=True)
class UserWorkerInput:
    user_id: str
    pool: str = "default"
    settings: UserWorkerSettings = field(default_factory=UserWorkerSettings)
    #: Set by continue-as-new only: `workflows.user_worker_state.UserWorkerState` as a plain dict.
    carried: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class EnsureActive:
    """Update `ensure_active`: returns when the worker is Active, or fails with a reason."""

    request_id: str = ""
    #: The caller saw no mark: an Active state is checked before it is believed.
    mark_missing: bool = False


@dataclass(frozen=True, kw_only=True)
class ActiveWorker:
    """Answer of `ensure_active`."""

    worker: WorkerRef
    state: str
    claimed_at: float
    connected_at: float


@dataclass(frozen=True, kw_only=True)
class ShutdownRequest:
    """Signal `shutdown`. All fields have defaults, so that a plain signal needs no payload."""

    reason: str = "requested"


@dataclass(frozen=True, kw_only=True)
class WorkerLost:
    """Signal `worker_lost`: the launcher saw this task end."""

    task_id: str
    worker_id: str
    exit_code: int | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class WorkerEventSignal:
    """Signal `worker_event`: what the worker told on its stream."""

    worker_id: str
    epoch: int
    sequence: int
    kind: str
    at: float
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class UserWorkerView:
    """Answer of the query `view`."""

    user_id: str
    state: str
    since: float
    worker: WorkerRef | None
    attempts: int
    reason: str
    next_step: str
    deadline: float | None


# --- activities of a user worker --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ClaimRequest:
    """Activity `claim_worker`: assignment row, pool claim, owner key, sealed credentials, first reply.

    Safe to run twice: everything in it is idempotent by `claim_id`.
    """

    user_id: str
    pool: str
    claim_id: str
    connect_timeout: float
    #: How long to wait for the worker's first reply before the answer is `connecting`.
    reply_wait: float = 1.5


class ClaimStatus(StrEnum):
    ACTIVE = "active"  # connected within `reply_wait`
    CONNECTING = "connecting"  # claimed, no reply yet: wait with `await_connected`
    FAILED = "failed"  # the worker replied with a failure
    EMPTY = "empty"  # no ready worker in the pool: launch one
    GONE = "gone"  # this claim's worker is dead or was released: take a new claim id


@dataclass(frozen=True, kw_only=True)
class ClaimResult:
    status: str
    worker: WorkerRef | None = None
    claimed_at: float = 0.0
    connected_at: float = 0.0
    failure_code: str = ""
    failure_detail: str = ""
    retryable: bool = True


@dataclass(frozen=True, kw_only=True)
class LaunchForClaim:
    """Activity `launch_for_claim`: cold path, a worker reserved for this claim.

    Returns `Launched` when it is ready.
    """

    user_id: str
    pool: str
    claim_id: str
    timeout: float = 30.0


@dataclass(frozen=True, kw_only=True)
class ConnectRequest:
    """Activities `await_connected` (attempt 1: only wait) and `connect_again` (later attempts)."""

    user_id: str
    worker: WorkerRef
    attempt: int
    timeout: float


@dataclass(frozen=True, kw_only=True)
class StopWorker:
    """Activity `stop_worker`: shutdown message, then the launcher; returns when the task has ended."""

    user_id: str
    worker: WorkerRef
    reason: str
    #: Seconds that the worker gets to finish by itself; 0: stop at once.
    grace: float = 10.0


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """Answer of `stop_worker`: the task has ended."""

    #: Orders that still wait in the user's queue.
    waiting: int = 0


@dataclass(frozen=True, kw_only=True)
class CheckWorker:
    """Activity `check_worker`: is this worker alive, and when was it last used?"""

    user_id: str
    worker: WorkerRef


@dataclass(frozen=True, kw_only=True)
class WorkerHealth:
    #: The mark is there and carries this worker's epoch.
    marked: bool
    #: The launcher still lists the task; None if the launcher did not answer.
    running: bool | None
    #: Unix seconds of the last order or control message; 0 if unknown.
    last_activity: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ReloadRequest:
    """Activity `reload_credentials`."""

    user_id: str
    worker: WorkerRef
    reload_id: str
    timeout: float = 20.0


@dataclass(frozen=True, kw_only=True)
class ReloadResult:
    ok: bool
    failure_code: str = ""
    failure_detail: str = ""


# --- WorkerPoolWorkflow -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PoolInput:
    pool: str = "default"
    target: int = 4
    #: Longest time between two looks at the pool when nothing is signalled.
    check_period: float = 60.0
    launch_timeout: float = 30.0
    #: Set by continue-as-new only.
    carried: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """Signal `claimed`: a worker left the pool."""

    worker_id: str = ""


@dataclass(frozen=True, kw_only=True)
class SetTarget:
    """Update `set_target`."""

    target: int


@dataclass(frozen=True, kw_only=True)
class WorkerGone:
    """Signal `worker_gone` of a pool: the launcher saw a worker end that belonged to no user."""

    worker_id: str = ""


@dataclass(frozen=True, kw_only=True)
class CountPool:
    """Activity `count_pool`."""

    pool: str
    #: Tokens of the launches under way: their workers are left out of the count.
    launching: tuple[str, ...] = ()
    launch_timeout: float = 30.0


@dataclass(frozen=True, kw_only=True)
class PoolCount:
    #: Ready workers (alive and free).
    ready: int
    #: Launched, not ready yet, not older than the launch timeout.
    starting: int


@dataclass(frozen=True, kw_only=True)
class LaunchPoolWorker:
    """Activity `launch_pool_worker`; `token` makes a repeat return the same task."""

    pool: str
    token: str
    timeout: float = 30.0


@dataclass(frozen=True, kw_only=True)
class Launched:
    worker_id: str
    task_id: str


@dataclass(frozen=True, kw_only=True)
class StopPoolWorkers:
    """Activity `shrink_pool`: takes this many free workers out of the pool and stops them."""

    pool: str
    count: int
    #: Makes a repeat stop the same workers.
    token: str = ""


@dataclass(frozen=True, kw_only=True)
class PoolView:
    """Answer of the pool's query `view`."""

    pool: str
    target: int
    ready: int
    starting: int
    launches: int
    failures: int
    last_failure: str
    paused: bool = False

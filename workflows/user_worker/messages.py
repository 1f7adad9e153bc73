"""The messages of a user worker's workflow and its activities: one frozen dataclass each.

The rules for all `messages.py`: new fields get defaults, so that histories of the last release
still fit; durations are seconds, times are Unix seconds; no message carries a credential.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

#: Seconds that a launcher may take to kill what did not end by itself.
STOP_TIMEOUT_S = 20.0
#: Seconds that a crash of a user's worker counts for backoff and parking.
CRASH_WINDOW_S = 600.0
#: The reason for replacing a worker that a check found not running, before its launcher reported
#: an end.
WAS_GONE = "the worker was gone"


class WorkerState(StrEnum):
    """States of a user's worker. A worker shows finer ones, such as Processing, in its metadata."""

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
    """Names one worker and its assignment to one user."""

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


# --- UserWorkerWorkflow ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class UserWorkerSettings:
    """Durations that the API's settings give to a user's workflow."""

    idle_timeout: float = 1800.0
    connect_attempts: int = 3
    connect_timeout: float = 20.0
    claim_timeout: float = 30.0
    launch_timeout: float = 90.0
    drain_timeout: float = 30.0


@dataclass(frozen=True, kw_only=True)
class UserWorkerInput:
    user_id: str
    pool: str = "default"
    settings: UserWorkerSettings = field(default_factory=UserWorkerSettings)
    #: The run was started anew for a worker that PostgreSQL knows; it ends if there is none.
    adopt: bool = False
    #: Set by continue-as-new only: `workflows.user_worker.state.UserWorkerState` as a plain dict.
    carried: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class EnsureActive:
    """Update `ensure_active`: returns when the worker is Active, or fails with a reason."""

    request_id: str = ""
    #: The caller saw no mark: an Active state is checked before it is believed.
    mark_missing: bool = False
    #: Unix seconds before which the worker does not count as idle: its idle time counts from there
    #: at the earliest.
    stay_until: float = 0.0


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
class WorkerLostSignal:
    """Signal `worker_lost`: the launcher saw this task end."""

    task_id: str
    worker_id: str
    exit_code: int | None = None
    reason: str = ""
    #: Somebody asked for the end, or its host went away: no crash.
    planned: bool = False


@dataclass(frozen=True, kw_only=True)
class WorkerEventSignal:
    """Signal `worker_event`: an event from the worker's stream."""

    worker_id: str
    epoch: int
    sequence: int
    kind: str
    at: float
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class WorkerUnmarked:
    """Signal `worker_unmarked`: this mark expired;
    it counts only under the same generation of Valkey."""

    worker_id: str
    epoch: int
    generation: str
    #: The infrastructure is the cause: it makes later starts wait, and parks nobody.
    outage: bool = False


@dataclass(frozen=True, kw_only=True)
class MoveWhenQuiet:
    """Signal `move_when_quiet`: the user's worker is to make room for one of another version."""

    #: A later worker of the user is left alone.
    worker_id: str
    #: The version of its successor; only for the reason shown.
    version: str
    #: Unix seconds at which it moves, quiet or not.
    deadline: float
    #: Seconds without an order or a control message that count as quiet.
    quiet: float


@dataclass(frozen=True, kw_only=True)
class Examine:
    """Signal `examine`: maintenance found an anomaly of this worker, which has to be checked."""

    worker_id: str
    epoch: int
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Transition:
    """Describes one change of state in the life of a user's worker, as the timeline keeps it."""

    #: Grows by one within all runs of one chain; unique together with `RecordTimeline.chain`.
    number: int
    #: Unix seconds.
    at: float
    before: str
    after: str
    reason: str = ""
    worker_id: str = ""
    epoch: int = 0
    #: Unix seconds until which the new state may last; None for the last state.
    deadline: float | None = None


@dataclass(frozen=True, kw_only=True)
class RecordTimeline:
    """Activity `record_timeline`: writes transitions to PostgreSQL; a repeat writes none twice."""

    user_id: str
    #: The first run's id of this chain of runs.
    chain: str
    transitions: tuple[Transition, ...]


@dataclass(frozen=True, kw_only=True)
class UserWorkerFacts:
    """Holds what a user's workflow knows of its worker and shows as it is."""

    user_id: str
    since: float = 0.0
    deadline: float | None = None
    #: The worker that belongs to the user, or did and is not yet confirmed to have stopped.
    worker: WorkerRef | None = None
    #: Connects tried with the present worker.
    attempts: int = 0
    #: The time of the last known order or control message.
    last_activity: float = 0.0
    #: The last known state of the broker connections: "well" (healthy), or "degraded: …" with the
    #: reason.
    health: str = ""
    health_at: float = 0.0
    #: Says what went wrong with the last reload of credentials; empty: nothing.
    note: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class UserWorkerView(UserWorkerFacts):
    """Answer of the query `view`."""

    state: str
    next_step: str
    #: Crashes and failed broker sessions within the window that backoff and parking count.
    crashes: int = 0


# --- activities of a user worker ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ClaimRequest:
    """Activity `claim_worker`; everything in it is idempotent by `claim_id`."""

    user_id: str
    pool: str
    claim_id: str
    connect_timeout: float
    #: Seconds to wait for the worker's first reply before the answer is `connecting`.
    reply_wait: float = 1.5
    #: The first claim of a run: if the user's workers
    #: crashed recently, the answer is `back_off`, once.
    check_crashes: bool = False
    #: Versions of the workers that failed earlier claims of this start, the last one last.
    failed: tuple[str, ...] = ()
    #: Only a worker that the user has already: nothing is claimed.
    adopt_only: bool = False


class ClaimStatus(StrEnum):
    ACTIVE = "active"  # connected within `reply_wait`
    CONNECTING = "connecting"  # claimed, no reply yet: wait with `await_connected`
    FAILED = "failed"  # the worker replied with a failure
    EMPTY = "empty"  # no ready worker in the pool: launch one
    GONE = "gone"  # this claim's worker is dead or was released: take a new claim id
    BACK_OFF = "back_off"  # nothing was claimed: `ClaimResult.crashes` tells why
    #: The user has a worker already, of a run that somebody ended: it keeps its user. Without
    #: `connected_at` it may still be logging in.
    ADOPTED = "adopted"
    NONE = "none"  # with `adopt_only`: the user has no worker


@dataclass(frozen=True, kw_only=True)
class ClaimResult:
    status: str
    worker: WorkerRef | None = None
    claimed_at: float = 0.0
    connected_at: float = 0.0
    failure_code: str = ""
    failure_detail: str = ""
    retryable: bool = True
    #: Unix seconds of the user's recent crashes,
    #: as PostgreSQL knows them (status `back_off` or `adopted`).
    crashes: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LaunchForClaim:
    """Activity `launch_for_claim`: launches a worker that is reserved for this claim."""

    user_id: str
    pool: str
    claim_id: str
    timeout: float = 30.0
    #: As in `ClaimRequest`.
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Launched:
    worker_id: str
    task_id: str


@dataclass(frozen=True, kw_only=True)
class ConnectRequest:
    """Activities `await_connected` (attempt 1: only wait) and `connect_again` (later attempts)."""

    user_id: str
    worker: WorkerRef
    attempt: int
    timeout: float


@dataclass(frozen=True, kw_only=True)
class StopWorker:
    """Activity `stop_worker`: shutdown message,
    then the launcher; returns when the task has ended."""

    user_id: str
    worker: WorkerRef
    reason: str
    #: Seconds that the worker gets to finish by itself; 0: stop at once.
    grace: float = 10.0
    #: It died in service, or could not get its broker back: counted for backoff and parking.
    crashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """Answer of `stop_worker`: the task has ended."""

    #: Orders that still wait in the user's queue,
    #: and whether jobs do: not zero if another worker is needed.
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
    #: Valkey's generation at this check.
    generation: str = ""
    #: The state that the worker reports itself, such as `Active` or `Reconnecting`.
    worker_state: str = ""
    #: It is gone, and nobody has reported how it ended. A worker's own crash is always reported, so
    #: the infrastructure ended it.
    unreported: bool = False
    #: It has an order in hand, and its lease may not have ended.
    in_flight: bool = False
    #: By PostgreSQL its assignment is over: the workflow was reset to an earlier event.
    over: bool = False


@dataclass(frozen=True, kw_only=True)
class ReloadRequest:
    """Activity `reload_credentials`."""

    user_id: str
    worker: WorkerRef
    reload_id: str
    timeout: float = 20.0
    #: Says who asked, for the audit trail: "signal", "update", "session replaced".
    cause: str = "signal"


@dataclass(frozen=True, kw_only=True)
class ReloadResult:
    ok: bool
    failure_code: str = ""
    failure_detail: str = ""

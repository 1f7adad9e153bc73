"""The messages of a pool's workflow and its activities; the rules are those of
`user_worker/messages.py`."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from workflows.rollout.messages import Release
from workflows.worker_pool.policy import PoolPolicy

#: Type of a launch's failure: the worker was launched, and ended or hung before it was ready. The
#: pool counts these: an image that never becomes ready is not launched for ever.
NEVER_READY = "NEVER_READY"
#: First detail of a launch's failure: no worker of this token runs or will run.
NOTHING_RUNS = "nothing runs"
#: Type of a failed `set_policy`: somebody else changed the pool in between.
POOL_CHANGED = "POOL_CHANGED"


class PoolMode(StrEnum):
    RUNNING = "running"
    #: Nothing is launched, and workers leave only by a claim.
    PAUSED = "paused"
    #: Free workers are stopped, and nothing is launched.
    DRAINING = "draining"


@dataclass(frozen=True, kw_only=True)
class PoolInput:
    pool: str = "default"
    policy: PoolPolicy = field(default_factory=PoolPolicy)
    #: The policy that the settings gave last. A changed one replaces `policy`.
    configured: PoolPolicy | None = None
    #: Grows with every change of the policy.
    revision: int = 0
    #: Longest time between two counts of the pool when nothing is signalled.
    check_period: float = 60.0
    launch_timeout: float = 30.0
    #: Set by continue-as-new only.
    carried: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerLeft:
    """Signals `claimed`: a worker left the pool;
    and `worker_gone`: one ended that belonged to no user."""

    worker_id: str = ""


@dataclass(frozen=True, kw_only=True)
class SetTarget:
    """Update `set_target`: the rest of the policy stays."""

    target: int


@dataclass(frozen=True, kw_only=True)
class SetPolicy:
    """Update `set_policy`; fails with `POOL_POLICY_INVALID` or `POOL_CHANGED`."""

    policy: PoolPolicy
    #: The revision that the caller has seen; None: any.
    revision: int | None = None
    #: Set by the settings, not by an operator.
    from_settings: bool = False


@dataclass(frozen=True, kw_only=True)
class SetRelease:
    """Update `set_release`: the release of new workers,
    and how many more than wanted are kept ready."""

    release: Release
    surge: int = 0


@dataclass(frozen=True, kw_only=True)
class KeptPool:
    """Holds what operators have set for a pool, and its last good release: PostgreSQL keeps it,
    too."""

    #: Grows with each change: the newer of two counts.
    number: int = 0
    policy: PoolPolicy = field(default_factory=PoolPolicy)
    configured: PoolPolicy | None = None
    revision: int = 0
    paused: bool = False
    draining: bool = False
    version: str = ""
    image: str = ""
    #: Version and image; None: not known.
    good_release: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class KeepPool:
    """Activity `keep_pool`: writes this to PostgreSQL,
    and returns what PostgreSQL has if that is newer."""

    pool: str
    kept: KeptPool


@dataclass(frozen=True, kw_only=True)
class CountPool:
    pool: str
    #: Tokens of the launches under way: their workers are left out of the count.
    launching: tuple[str, ...] = ()
    launch_timeout: float = 30.0
    #: The policy for windows and demand.
    policy: PoolPolicy = field(default_factory=PoolPolicy)


@dataclass(frozen=True, kw_only=True)
class WindowNow:
    """The window of a policy that applies now."""

    #: Empty: none applies.
    name: str = ""
    #: Unix seconds at which that changes; None: not within two weeks.
    until: float | None = None


@dataclass(frozen=True, kw_only=True)
class PoolCount:
    #: Ready workers (alive and free).
    ready: int
    #: Launched, not ready yet, not older than the launch timeout.
    starting: int
    #: Workers of the pool that belong to users, or were launched for one.
    in_use: int = 0
    #: Claims within the policy's `demand_minutes`; None: not wanted, or not known.
    claims: int | None = None
    window: WindowNow = field(default_factory=WindowNow)


@dataclass(frozen=True, kw_only=True)
class LaunchPoolWorker:
    """Activity `launch_pool_worker`; `token` makes a repeat return the same task."""

    pool: str
    token: str
    timeout: float = 30.0
    #: The outcome of an earlier launch under this token is unknown:
    #: its worker may have a user by now.
    again: bool = False
    release: Release = field(default_factory=Release)


@dataclass(frozen=True, kw_only=True)
class StopPoolWorkers:
    """Activity `shrink_pool`: takes this many free workers out of the pool and stops them."""

    pool: str
    count: int
    #: Makes a repeat stop the same workers.
    token: str = ""


@dataclass(frozen=True, kw_only=True)
class PoolFigures:
    """Holds what a pool knows of its workers and launches."""

    #: By an operator: nothing is launched, and workers leave only by a claim.
    paused: bool = False
    ready: int = 0
    starting: int = 0
    in_use: int = 0
    claims: int = 0
    #: The number of free workers that there should be as of the last count, and why.
    wanted: int = 0
    reasons: tuple[str, ...] = ()
    launches: int = 0
    failures: int = 0
    last_failure: str = ""
    #: Rounds of failures since the last successful launch. Concurrent launches fail in one round: a
    #: restarted orchestrator interrupts a hundred of them.
    failing: int = 0
    #: Those of them in which the worker never became ready.
    never_ready: int = 0
    #: Free workers beyond what is wanted, while a rollout replaces others.
    surge: int = 0


@dataclass(frozen=True, kw_only=True)
class PoolView(PoolFigures):
    """Answer of the query `view` and of the updates. Launches under way count as starting."""

    pool: str
    target: int
    mode: str = PoolMode.RUNNING
    #: Unix seconds at which the wanted number changes by itself.
    changes_at: float | None = None
    #: Refilling stopped, because no worker became ready.
    circuit_open: bool = False
    #: Unix seconds before which nothing is launched; None: at any time.
    next_launch: float | None = None
    policy: PoolPolicy = field(default_factory=PoolPolicy)
    configured: PoolPolicy | None = None
    revision: int = 0
    #: The release of new workers.
    release: Release = field(default_factory=Release)
    #: The last release of which a worker became ready; None: none did yet.
    good: Release | None = None

"""The messages of a rollout; the rules are those of `user_worker/messages.py`."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class RolloutPhase(StrEnum):
    #: Free workers of other versions are replaced, new ones first.
    REPLACING = "replacing"
    #: Users move at their next quiet moment.
    MOVING = "moving"
    DONE = "done"
    #: The version before is put back in the same way.
    ROLLING_BACK = "rolling_back"
    MOVING_BACK = "moving_back"
    ROLLED_BACK = "rolled_back"


#: Phases of a rollout that is over.
ENDED = (RolloutPhase.DONE, RolloutPhase.ROLLED_BACK)


@dataclass(frozen=True, kw_only=True)
class Release:
    """Version and image of a pool's new workers."""

    #: Empty: what the orchestrator's settings say.
    version: str = ""
    #: The image of the container; empty: what the settings say.
    image: str = ""


@dataclass(frozen=True, kw_only=True)
class RolloutInput:
    pool: str
    release: Release
    #: Free workers that are replaced at a time; as many more than wanted are ready meanwhile.
    batch: int = 5
    #: Seconds from the start after which a user's worker moves, quiet or not.
    deadline: float = 8 * 3600.0
    #: Seconds without an order after which a worker counts as quiet while its market is open.
    quiet: float = 300.0
    #: Workers in a row that never became ready, or users in a row whom a worker did not serve,
    #: after which the version is rolled back.
    failures: int = 3
    #: Seconds that a rollout waits at its end until
    #: the version has served a first user; 0: it does not wait.
    proof: float = 0.0
    #: Seconds between two rounds while free workers are replaced, and while users move.
    pause: float = 2.0
    moving_pause: float = 15.0
    #: The actor in the audit trail: who asked.
    actor: str = ""
    reason: str = ""
    #: Set by continue-as-new only: `workflows.rollout.state.RolloutState` as a plain dict.
    carried: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class AbortRollout:
    """Signal `abort`."""

    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckRelease:
    """Activity `check_release`: gives the pool its release and its surge, and counts."""

    pool: str
    #: The release that "new" means.
    release: Release
    #: Workers that the pool keeps ready beyond what it wants.
    surge: int
    #: Set both on the pool; else only count.
    change: bool
    #: The canary, and what the pool had before; None: not known yet.
    canary: Release | None = None
    before: Release | None = None
    #: When the rollout began (Unix seconds).
    since: float = 0.0
    #: The canary failed: nobody gets a worker of it any more.
    condemned: bool = False


@dataclass(frozen=True, kw_only=True)
class ReleaseSnapshot:
    #: The pool's release before this call.
    before: Release
    #: Free workers of the release, and of all others.
    new: int
    old: int
    #: Users whose workers are of another version.
    users: int
    #: The number of workers that the pool wants ready, without the surge.
    wanted: int
    starting: int = 0
    #: Rounds of launches in a row after which no worker became ready.
    never_ready: int = 0
    last_failure: str = ""
    #: The pool's mode: nothing is launched unless it runs.
    mode: str = "running"
    #: Users served by workers of the canary, and users whom one failed since the last of them.
    served: int = 0
    failed: int = 0
    #: Unix seconds.
    at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RetireWorkers:
    """Activity `retire_workers`: ends free workers of other versions than `version`."""

    pool: str
    version: str
    count: int


@dataclass(frozen=True, kw_only=True)
class AskToMove:
    """Activity `ask_to_move`: signals the users whose workers are of another version."""

    pool: str
    version: str
    #: Unix seconds.
    deadline: float
    quiet: float
    #: Users who are asked at a time, so that they do not all move at once.
    most: int = 20


@dataclass(frozen=True, kw_only=True)
class TellRollout:
    """Activity `tell_rollout`: writes an event of a rollout into the audit trail, once."""

    pool: str
    rollout: str
    event: str
    release: Release
    actor: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class RolloutView:
    """Answer of the query `view`."""

    pool: str
    phase: str
    release: Release
    #: The release that the pool had before.
    before: Release = field(default_factory=Release)
    #: Unix seconds; users may stay where they are until the deadline.
    began_at: float
    deadline: float
    #: Free workers of the wanted version and of others, and users on others, as of the last round.
    new: int = 0
    old: int = 0
    users: int = 0
    wanted: int = 0
    #: Free workers that were ended so far, and users who were asked to move in the last round.
    retired: int = 0
    asked: int = 0
    #: Why it was rolled back; empty: it was not.
    reason: str = ""
    #: Why it waits; empty: it does not.
    held: str = ""

"""Bodies and views of pools and of their rollouts."""

from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Self

from pydantic import Field

from api.http.fields import EMPTY_IS_NONE, Body, LongReason, View
from infra.market.calendar import HOME_ZONE_NAME
from workflows.rollout.messages import ENDED, Release, RolloutInput, RolloutPhase, RolloutView
from workflows.worker_pool.messages import PoolMode, PoolView
from workflows.worker_pool.policy import PoolPolicy, PoolWindow

Count = Annotated[int, Field(ge=0)]
Clock = Annotated[str, Field(max_length=5, examples=["08:00"])]


class PoolWindowBody(Body):
    """Hours with a target of their own. One that does not end after it begins ends on the next
    day."""

    name: str = Field(min_length=1, max_length=64)
    target: Count
    begins: Clock
    ends: Clock
    days: str = Field(
        default="mon-sun", max_length=64, description="Such as `mon-fri` or `mon,wed`."
    )
    zone: str = Field(default=HOME_ZONE_NAME, max_length=64)
    calendar: str = Field(
        default="any",
        max_length=16,
        description="`any` day, only days on which the exchange is `trading`, or `closed`. On a "
        "trading day that begins late or ends early, so does the window.",
    )


class PoolPolicyBody(Body):
    """Says how many free workers there should be. A field that is left out has its default, not its
    present value."""

    target: Count
    minimum: Count = Field(default=0, description="Never fewer, but for the limit.")
    maximum: Count | None = Field(default=None, description="Never more.")
    buffer: str = Field(
        default="0",
        max_length=8,
        description="On top of all else: `3`, or `20%` of the workers in use.",
    )
    demand_minutes: float = Field(
        default=0.0,
        ge=0,
        description="At least as many as were claimed within this many minutes; 0: demand is "
        "ignored.",
    )
    limit: Count | None = Field(default=None, description="Workers in all, free and in use.")
    shrink_after: float = Field(
        default=300.0, ge=0, description="Seconds that there may be too many free workers."
    )
    windows: tuple[PoolWindowBody, ...] = Field(
        default=(), description="The first that holds counts."
    )

    def policy(self) -> PoolPolicy:
        given = self.model_dump(include=set(PoolPolicy.__dataclass_fields__), exclude={"windows"})
        windows = tuple(PoolWindow(**window.model_dump()) for window in self.windows)
        return PoolPolicy(**given, windows=windows)


class PoolPolicyRequest(PoolPolicyBody):
    """A whole policy. It counts at once: what is too much is stopped without waiting."""

    revision: int | None = Field(
        default=None,
        description="The one that you saw: if the policy was changed since, nothing is done.",
    )
    reason: LongReason = "requested"


class PoolStatusView(View):
    """A pool now: how many workers it wants and why, and what it has."""

    pool: str
    mode: PoolMode = Field(
        description="`paused`: nothing is launched; `draining`: free ones are stopped, too."
    )
    wanted: int = Field(description="Free workers that there should be, as of the last check.")
    reasons: tuple[str, ...] = Field(description="How the number came about, a step each.")
    changes_at: Annotated[datetime | None, EMPTY_IS_NONE] = Field(
        description="When a window begins or ends next."
    )
    ready: int
    starting: int
    in_use: int
    claims: int = Field(description="Within the policy's `demand_minutes`.")
    launches: int
    failures: int
    failing: int = Field(description="Rounds of launches that failed since the last good one.")
    circuit_open: bool = Field(
        description="No worker became ready in several rounds: one launch is tried every ten "
        "minutes, until one does, the policy changes, or the pool is resumed."
    )
    last_failure: str
    next_launch: Annotated[datetime | None, EMPTY_IS_NONE] = Field(
        description="Nothing is launched before."
    )
    revision: int = Field(description="Grows with every change of the policy.")
    policy: PoolPolicyBody

    @classmethod
    def of(cls, view: PoolView) -> Self:
        return cls.model_validate(asdict(view))


Version = Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._+-]*)?$", max_length=64)]
Image = Annotated[str, Field(pattern=r"^[!-~]*$", max_length=300)]


class ReleaseView(View):
    """Says what new workers of a pool are. Empty: what the orchestrator's settings say."""

    version: str
    image: str


class RolloutRequest(Body):
    """The version that a pool is brought to. What is left out has its default."""

    version: Version = Field(
        description="What the new workers report. Empty: what the settings say."
    )
    image: Image = Field(
        default="",
        description="A container image, or a task definition on ECS. Empty: what the settings say.",
    )
    batch: int = Field(default=5, ge=1, le=1000, description="Free workers replaced at a time.")
    deadline_seconds: float = Field(
        default=8 * 3600.0, ge=0, le=7 * 86400, description="Then users move, quiet or not."
    )
    quiet_seconds: float = Field(
        default=300.0, ge=0, le=86400, description="Without an order, until a worker is quiet."
    )
    failures: int = Field(
        default=3,
        ge=1,
        le=100,
        description="Times in a row that no worker became ready, or users in a row whom a worker "
        "of it did not serve, until it goes back.",
    )
    proof_seconds: float = Field(
        default=120.0,
        ge=0,
        le=86400,
        description="How long it waits for a first user served by it.",
    )
    reason: LongReason = "requested"

    def given(self, pool: str, actor: str) -> RolloutInput:
        return RolloutInput(
            pool=pool,
            release=Release(version=self.version, image=self.image),
            batch=self.batch,
            deadline=self.deadline_seconds,
            quiet=self.quiet_seconds,
            failures=self.failures,
            proof=self.proof_seconds,
            actor=actor,
            reason=self.reason,
        )


class RolloutStatusView(View):
    """A rollout: where it is, and what is left."""

    pool: str
    phase: RolloutPhase = Field(
        description="Free workers are replaced first, then users move; the same on the way back."
    )
    release: ReleaseView
    before: ReleaseView = Field(description="What the pool had, and gets when it is rolled back.")
    began_at: datetime
    deadline: datetime = Field(description="When users move, quiet or not.")
    new: int = Field(description="Free workers of the version that is wanted now.")
    old: int = Field(description="Free workers of all others.")
    wanted: int = Field(description="Free workers that the pool wants.")
    users: int = Field(description="Users whose workers are of another version.")
    retired: int = Field(description="Free workers that were ended so far.")
    asked: int = Field(description="Users who were asked to move.")
    ended: bool
    reason: str = Field(description="Why it was rolled back; empty: it was not.")
    held: str = Field(description="Why it does not continue just now; empty: it does.")

    @classmethod
    def of(cls, view: RolloutView) -> Self:
        return cls(**asdict(view), ended=view.phase in ENDED)

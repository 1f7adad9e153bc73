"""Pools in and out: how large they should be, and what they are."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field

from api.schemas.fields import Body, View
from workflows.pool_messages import PoolMode, PoolView
from workflows.pool_policy import PoolPolicy, PoolWindow

_MORNING: dict[str, Any] = {
    "name": "morning",
    "target": 40,
    "begins": "08:00",
    "ends": "09:30",
    "days": "mon-fri",
    "zone": "Asia/Taipei",
    "calendar": "trading",
}
_POLICY: dict[str, Any] = {
    "target": 4,
    "minimum": 2,
    "maximum": 60,
    "buffer": "20%",
    "demand_minutes": 5.0,
    "limit": 400,
    "shrink_after": 300.0,
    "windows": [_MORNING],
}
_POOL: dict[str, Any] = {
    "pool": "default",
    "mode": "running",
    "wanted": 49,
    "reasons": ["window morning: 40 instead of 4", "buffer (20% of 45 in use): 9 more, 49"],
    "changes_at": "2026-11-23T01:30:00Z",
    "ready": 48,
    "starting": 1,
    "in_use": 45,
    "claims": 12,
    "launches": 93,
    "failures": 0,
    "failing": 0,
    "circuit_open": False,
    "last_failure": "",
    "next_launch": None,
    "revision": 3,
    "policy": _POLICY,
}

Count = Annotated[int, Field(ge=0)]
Clock = Annotated[str, Field(max_length=5, examples=["08:00"])]


class Window(Body):
    """Hours with a target of their own. One that does not end after it begins ends on the next day."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    target: Count
    begins: Clock
    ends: Clock
    days: Annotated[str, Field(max_length=64, description="Such as `mon-fri` or `mon,wed`.")] = "mon-sun"
    zone: Annotated[str, Field(max_length=64)] = "Asia/Taipei"
    calendar: Annotated[
        str,
        Field(
            max_length=16,
            description="`any` day, only days on which the exchange is `trading`, or `closed`. On a trading"
            " day that begins late or ends early, so does the window.",
        ),
    ] = "any"


class Policy(Body):
    """How many free workers there should be. What is left out has its default, not its present value."""

    target: Count
    minimum: Annotated[Count, Field(description="Never fewer, but for the limit.")] = 0
    maximum: Annotated[Count | None, Field(description="Never more.")] = None
    buffer: Annotated[
        str, Field(max_length=8, description="On top of all else: `3`, or `20%` of the workers in use.")
    ] = "0"
    demand_minutes: Annotated[
        float,
        Field(
            ge=0,
            allow_inf_nan=False,
            description="At least as many as were claimed within the last so many minutes; 0: not looked at.",
        ),
    ] = 0.0
    limit: Annotated[Count | None, Field(description="Workers in all, free and in use.")] = None
    shrink_after: Annotated[
        float,
        Field(ge=0, allow_inf_nan=False, description="Seconds that there may be too many free workers."),
    ] = 300.0
    windows: Annotated[tuple[Window, ...], Field(description="The first that holds counts.")] = ()

    def policy(self) -> PoolPolicy:
        given = self.model_dump(include=set(PoolPolicy.__dataclass_fields__), exclude={"windows"})
        windows = tuple(PoolWindow(**window.model_dump()) for window in self.windows)
        return PoolPolicy(**given, windows=windows)

    @classmethod
    def of(cls, policy: PoolPolicy) -> Policy:
        return Policy(**asdict(policy))


class PutPool(Policy):
    """A whole policy. It counts at once: what is too much is stopped without waiting."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, json_schema_extra={"examples": [{**_POLICY, "reason": "more users"}]}
    )

    revision: Annotated[
        int | None,
        Field(description="The one that you saw: if the policy was changed since, nothing is done."),
    ] = None
    reason: Annotated[str, Field(max_length=500, description="It stands in the audit trail.")] = "requested"


class Pool(View):
    """A pool now: how many workers it wants and why, and what it has."""

    model_config = ConfigDict(frozen=True, json_schema_extra={"examples": [_POOL]})

    pool: str
    mode: Annotated[
        PoolMode,
        Field(description="`paused`: nothing is launched; `draining`: free ones are stopped, too."),
    ]
    wanted: Annotated[int, Field(description="Free workers that there should be, as of the last look.")]
    reasons: Annotated[tuple[str, ...], Field(description="How the number came about, a step each.")]
    changes_at: Annotated[datetime | None, Field(description="When a window begins or ends next.")]
    ready: int
    starting: int
    in_use: int
    claims: Annotated[int, Field(description="Within the policy's `demand_minutes`.")]
    launches: int
    failures: int
    failing: Annotated[int, Field(description="Rounds of launches that failed since the last good one.")]
    circuit_open: Annotated[
        bool,
        Field(
            description="No worker became ready in several rounds: one launch is tried every ten minutes,"
            " until one does, the policy changes, or the pool is resumed."
        ),
    ]
    last_failure: str
    next_launch: Annotated[datetime | None, Field(description="Nothing is launched before.")]
    revision: Annotated[int, Field(description="Grows with every change of the policy.")]
    policy: Policy

    @classmethod
    def of(cls, view: PoolView) -> Self:
        return cls(
            pool=view.pool,
            mode=PoolMode(view.mode),
            wanted=view.wanted,
            reasons=view.reasons,
            changes_at=_time(view.changes_at),
            ready=view.ready,
            starting=view.starting,
            in_use=view.in_use,
            claims=view.claims,
            launches=view.launches,
            failures=view.failures,
            failing=view.failing,
            circuit_open=view.circuit_open,
            last_failure=view.last_failure,
            next_launch=_time(view.next_launch),
            revision=view.revision,
            policy=Policy.of(view.policy or PoolPolicy(target=view.target)),
        )


def _time(seconds: float | None) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds else None

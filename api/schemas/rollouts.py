"""Rollouts in and out: which version a pool is brought to, and how far that is."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field

from api.schemas.fields import Body, View
from workflows.rollout_messages import ENDED, Release, RolloutInput, RolloutPhase, RolloutView

_NEW: dict[str, Any] = {"version": "0.2.0", "image": "berth-worker:0.2.0", "reason": "release 0.2.0"}
_ROLLOUT: dict[str, Any] = {
    "pool": "default",
    "phase": "moving",
    "release": {"version": "0.2.0", "image": "berth-worker:0.2.0"},
    "before": {"version": "", "image": ""},
    "began_at": "2026-11-23T01:30:00Z",
    "deadline": "2026-11-23T09:30:00Z",
    "new": 8,
    "old": 0,
    "wanted": 8,
    "users": 12,
    "retired": 8,
    "asked": 12,
    "ended": False,
    "reason": "",
    "held": "",
}

Version = Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._+-]*)?$", max_length=64)]
Image = Annotated[str, Field(pattern=r"^[!-~]*$", max_length=300)]


class ReleaseView(View):
    """What new workers of a pool are. Empty: what the orchestrator's settings say."""

    version: str
    image: str

    @classmethod
    def of(cls, release: Release) -> ReleaseView:
        return cls(version=release.version, image=release.image)


class StartRollout(Body):
    """The version that a pool is brought to. What is left out has its default."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra={"examples": [_NEW]})

    version: Annotated[
        Version, Field(description="What the new workers report. Empty: what the settings say.")
    ]
    image: Annotated[
        Image,
        Field(description="A container image, or a task definition on ECS. Empty: what the settings say."),
    ] = ""
    batch: Annotated[int, Field(ge=1, le=1000, description="Free workers replaced at a time.")] = 5
    deadline_seconds: Annotated[
        float,
        Field(ge=0, le=7 * 86400, allow_inf_nan=False, description="Then users move, quiet or not."),
    ] = 8 * 3600.0
    quiet_seconds: Annotated[
        float,
        Field(ge=0, le=86400, allow_inf_nan=False, description="Without an order, until a worker is quiet."),
    ] = 300.0
    failures: Annotated[
        int,
        Field(
            ge=1,
            le=100,
            description="Times in a row that no worker became ready, or users in a row whom a worker of it "
            "did not serve, until it goes back.",
        ),
    ] = 3
    proof_seconds: Annotated[
        float,
        Field(
            ge=0,
            le=86400,
            allow_inf_nan=False,
            description="How long it waits for a first user served by it.",
        ),
    ] = 120.0
    reason: Annotated[str, Field(max_length=500, description="It stands in the audit trail.")] = "requested"

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


class Rollout(View):
    """A rollout: where it is, and what is left."""

    model_config = ConfigDict(frozen=True, json_schema_extra={"examples": [_ROLLOUT]})

    pool: str
    phase: Annotated[
        RolloutPhase,
        Field(description="Free workers are replaced first, then users move; the same on the way back."),
    ]
    release: ReleaseView
    before: Annotated[ReleaseView, Field(description="What the pool had, and gets when it is rolled back.")]
    began_at: datetime
    deadline: Annotated[datetime, Field(description="When users move, quiet or not.")]
    new: Annotated[int, Field(description="Free workers of the version that is wanted now.")]
    old: Annotated[int, Field(description="Free workers of all others.")]
    wanted: Annotated[int, Field(description="Free workers that the pool wants.")]
    users: Annotated[int, Field(description="Users whose workers are of another version.")]
    retired: Annotated[int, Field(description="Free workers that were ended so far.")]
    asked: Annotated[int, Field(description="Users who were asked to move.")]
    ended: bool
    reason: Annotated[str, Field(description="Why it was rolled back; empty: it was not.")]
    held: Annotated[str, Field(description="Why it does not go on just now; empty: it does.")]

    @classmethod
    def of(cls, view: RolloutView) -> Self:
        phase = RolloutPhase(view.phase)
        return cls(
            pool=view.pool,
            phase=phase,
            release=ReleaseView.of(view.release),
            before=ReleaseView.of(view.before),
            began_at=datetime.fromtimestamp(view.began_at, UTC),
            deadline=datetime.fromtimestamp(view.deadline, UTC),
            new=view.new,
            old=view.old,
            wanted=view.wanted,
            users=view.users,
            retired=view.retired,
            asked=view.asked,
            ended=phase in ENDED,
            reason=view.reason,
            held=view.held,
        )

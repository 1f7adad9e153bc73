"""Limits of job types."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator

from api.schemas.fields import View
from api.schemas.workers import Why

_EXAMPLE: dict[str, Any] = {"running": 8, "per_node": 4, "per_second": 5.0, "burst": 10}
_SHOWN: dict[str, Any] = {"type": "webhook", "running_now": 3, **_EXAMPLE}
_Count = Annotated[int, Field(strict=True, ge=0, le=100_000)]


class PutJobLimits(Why):
    """All limits of one type of job; what is null or left out has none."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={"examples": [_EXAMPLE | {"reason": "the mail server asked for it"}]},
    )

    running: Annotated[
        _Count | None, Field(description="Jobs that run at once, everywhere; 0: none is begun.")
    ] = None
    per_node: Annotated[_Count | None, Field(description="Jobs that run at once on one node.")] = None
    per_second: Annotated[
        float | None,
        Field(
            ge=0.0001,
            le=10_000,
            allow_inf_nan=False,
            description="Jobs a second for each rate key (a webhook's host, a mail's domain).",
        ),
    ] = None
    burst: Annotated[
        int | None,
        Field(strict=True, ge=1, le=100_000, description="How many of them may come at once after a rest."),
    ] = None

    @model_validator(mode="after")
    def _burst_has_a_rate(self) -> Self:
        if self.burst is not None and self.per_second is None:
            raise ValueError("burst is part of a rate: per_second is needed, too")
        return self


class JobLimits(View):
    """Limits of one type of job; null: without."""

    model_config = ConfigDict(frozen=True, json_schema_extra={"examples": [_SHOWN]})

    type: str
    running_now: Annotated[int, Field(description="Jobs of this type that run now, by the queue's count.")]
    running: int | None
    per_node: int | None
    per_second: float | None
    burst: int | None


class AllJobLimits(View):
    """Of every type that the fleet runs."""

    model_config = ConfigDict(frozen=True)

    limits: list[JobLimits]

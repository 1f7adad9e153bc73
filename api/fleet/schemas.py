"""What the API shows of the fleet, of maintenance and of its own health."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from api.http.fields import EMPTY_IS_NONE, View, examples


class FleetRowView(View):
    """One user's running workflow. It has no worker while it claims one or is parked."""

    user_id: str
    state: str | None
    worker_id: str | None
    pool: str | None
    started_at: Annotated[datetime, Field(description="When the present run of the workflow began.")]


class MaintenancePassView(View):
    """What maintenance saw when it last scanned all workers, and what it did."""

    began_at: datetime
    workers: Annotated[int, Field(description="Workers that were scanned.")]
    found: Annotated[dict[str, int], Field(description="Anomalies by kind.")]
    outcomes: Annotated[
        dict[str, int], Field(description="What was done with those that two scans had found, and how often.")
    ]
    guarded: Annotated[
        str | None, EMPTY_IS_NONE, Field(description="Why nothing was done; null: it might have been.")
    ]
    scan_seconds: float
    total_seconds: Annotated[float | None, Field(description="Null while the pass is under way.")]


class FleetView(View):
    """The fleet as a whole."""

    model_config = examples(
        {
            "maintenance": {
                "began_at": "2026-11-21T01:00:00Z",
                "workers": 812,
                "found": {"orphan_task": 1},
                "outcomes": {"stopped": 1},
                "guarded": None,
                "scan_seconds": 0.08,
                "total_seconds": 0.31,
            }
        }
    )

    maintenance: Annotated[
        MaintenancePassView | None, Field(description="The last pass; null: there was none yet.")
    ]


class MaintenanceRunView(View):
    """What a pass that was asked for saw and did."""

    model_config = examples(
        {
            "ended": True,
            "workers": 812,
            "found": 2,
            "confirmed": 1,
            "outcomes": {"stopped": 1},
            "guarded": None,
        }
    )

    ended: Annotated[bool, Field(description="False: it takes longer than `wait`, and goes on.")]
    workers: int
    found: Annotated[int, Field(description="Anomalies in this scan.")]
    confirmed: Annotated[int, Field(description="Those that the scan before had found, too.")]
    outcomes: Annotated[dict[str, int], Field(description="What was done with these, and how often.")]
    guarded: Annotated[
        str | None, EMPTY_IS_NONE, Field(description="Why nothing was done; null: it might have been.")
    ]


class FleetPage(View):
    """One page of running workers."""

    model_config = examples(
        {
            "workers": [
                {
                    "user_id": "alice",
                    "state": "Active",
                    "worker_id": "w-7c3e9d4f",
                    "pool": "default",
                    "started_at": "2026-11-21T01:00:00Z",
                }
            ],
            "next_cursor": None,
        }
    )

    workers: list[FleetRowView]
    next_cursor: Annotated[str | None, Field(description="For the next page; null on the last one.")]


class AliveView(View):
    status: Literal["ok"] = "ok"


class DependencyView(View):
    state: Literal["up", "down"]
    ms: Annotated[float, Field(description="Milliseconds that the answer took.")]
    reason: str = ""


class ReadinessView(View):
    model_config = examples(
        {
            "ready": True,
            "dependencies": {
                "postgresql": {"state": "up", "ms": 0.7, "reason": ""},
                "valkey": {"state": "up", "ms": 0.2, "reason": ""},
                "temporal": {"state": "up", "ms": 1.1, "reason": ""},
            },
        }
    )

    ready: bool
    dependencies: dict[str, DependencyView]

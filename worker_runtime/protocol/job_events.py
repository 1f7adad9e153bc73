"""A job's events as log lines in the Elastic Common Schema: Filebeat and OpenSearch take them as they are.

One JSON line an event: queued, processing, completed, failed, retry, cancelled, returned. Never arguments,
never a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec
from msgspec import UNSET, UnsetType

_ECS = "8.11.0"
_encode = msgspec.json.Encoder().encode


class Event(msgspec.Struct, frozen=True):
    """What happened: the fields of `event`. `duration` in nanoseconds."""

    action: str
    outcome: str | UnsetType = UNSET
    duration: int | UnsetType = UNSET
    kind: str = "event"
    dataset: str = "berth.jobs"


class EventError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job failed."""

    code: str
    message: str
    stack_trace: str | None


class _Line(msgspec.Struct, frozen=True):
    at: datetime = msgspec.field(name="@timestamp")
    level: str = msgspec.field(name="log.level")
    message: str
    service: Mapping[str, object]
    event: Event
    labels: Mapping[str, object]
    error: EventError | UnsetType = UNSET
    ecs: str = msgspec.field(name="ecs.version", default=_ECS)


class EventLines:
    """Makes the lines of one service on one node."""

    def __init__(self, service: str, node: str) -> None:
        self._service = {"name": service, "node": {"name": node}}

    def line(
        self, event: Event, level: str, labels: Mapping[str, object], error: EventError | UnsetType = UNSET
    ) -> bytes:
        """One line with its end."""
        message = event.action.replace("-", " ")
        return _encode(_Line(datetime.now(UTC), level, message, self._service, event, labels, error)) + b"\n"

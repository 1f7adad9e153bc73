"""The format of the jobs' telemetry: fields of the counters, and log lines of events, errors.

An event is one JSON line in the Elastic Common Schema, which Filebeat and OpenSearch take as it is.
It never holds a job's arguments or its value.
"""

import re
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

#: Upper bounds of the histograms' buckets, ms. A last bucket holds everything above.
BOUNDS_MS = (
    1,
    2,
    5,
    10,
    25,
    50,
    100,
    250,
    500,
    1000,
    2500,
    5000,
    10_000,
    30_000,
    60_000,
    180_000,
    3_600_000,
)


class CounterKind(StrEnum):
    """The kinds of counters, with their labels."""

    #: queue, priority, then the number of the bucket or `sum` (ms).
    WAIT = "wait"
    #: type of job, then the number of the bucket or `sum` (ms).
    RUN = "run"
    #: queue, type of job, status.
    ENDED = "ended"
    #: Renewals that came more than a third of a lease after their time.
    LATE = "late"
    #: Counts dead runners' jobs by what became of them: `returned`, `failed` or `cancelled`.
    REAPED = "reaped"


def counter_field(kind: CounterKind, *labels: str) -> str:
    """Returns the field of a counter in the hash of totals. Labels hold no `|`: names are
    checked."""
    return "|".join((kind, *labels))


_ECS_VERSION = "8.11.0"
_encode_line = msgspec.json.Encoder().encode


class JobEvent(msgspec.Struct, frozen=True):
    """The field `event` of a line. `duration` in nanoseconds."""

    action: str
    outcome: str | UnsetType = UNSET
    duration: int | UnsetType = UNSET
    kind: str = "event"
    dataset: str = "berth.jobs"


class JobEventError(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str
    stack_trace: str | None


class _EventLine(msgspec.Struct, frozen=True):
    at: datetime = msgspec.field(name="@timestamp")
    level: str = msgspec.field(name="log.level")
    message: str
    service: Mapping[str, object]
    event: JobEvent
    labels: Mapping[str, object]
    error: JobEventError | UnsetType = UNSET
    ecs: str = msgspec.field(name="ecs.version", default=_ECS_VERSION)


class JobEventFormatter:
    """Makes the lines of one service on one node."""

    def __init__(self, service: str, node: str) -> None:
        self._service = {"name": service, "node": {"name": node}}

    def line(
        self,
        event: JobEvent,
        level: str,
        labels: Mapping[str, object],
        error: JobEventError | UnsetType = UNSET,
    ) -> bytes:
        """Returns one line with its end."""
        message = event.action.replace("-", " ")
        line = _EventLine(datetime.now(UTC), level, message, self._service, event, labels, error)
        return _encode_line(line) + b"\n"


#: About how many errors may wait in Valkey until they are reported to operators.
MAX_ERRORS = 1000
#: Fields of a log line that tell two errors apart, and others that operators see. None
#: holds a secret or what an order says; what an exception says stays in the log,
#: because it may quote anything.
_KEY_FIELDS = ("code", "error", "where", "loop", "kind", "check")
_SHOWN_FIELDS = (
    *_KEY_FIELDS,
    "reason",
    "detail",
    "pool",
    "task",
    "user_id",
    "worker_id",
    "order_id",
    "job_id",
)
_LOGIN = re.compile(r"//[^@\s/]+@")


def error_report(service: str, event: str, fields: Mapping[str, Any]) -> tuple[str, str]:
    """Returns how an error is reported to operators: a key, which similar errors share, and a
    sentence."""
    shown = {
        name: _LOGIN.sub("//", str(fields[name]))[:100] for name in _SHOWN_FIELDS if name in fields
    }
    key = "|".join((service, event, *(shown.get(name, "") for name in _KEY_FIELDS)))
    about = "".join(f", {name}={value}" for name, value in shown.items())
    return key[:500], f"{event} in {service} on {socket.gethostname()}{about}"[:500]

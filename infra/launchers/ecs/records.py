"""Reads ECS's descriptions of a task, in its answers and in its events.

Both have the same fields; an event has its times as text and has no tags.
https://docs.aws.amazon.com/AmazonECS/latest/developerguide/ecs_task_events.html
"""

import time
from dataclasses import replace
from datetime import datetime
from typing import Any

import msgspec

from infra.launchers.ecs.failures import task_id_of
from infra.launchers.ecs.task_cache import STOPPED, SeenTask
from infra.settings import EcsSettings
from infra.worker_task import (
    FAILED_TO_START,
    HOST_LOST,
    OOM_KILLED,
    Task,
    TaskExit,
    signed_exit_code,
    worker_exit,
)
from worker_runtime.protocol.errors import MalformedMessage

#: Prefix of a pool's task group. It tells our tasks from others in the cluster, in events too.
GROUP = "berth:"
#: Tags: a new orchestrator reads them, and so do people and bills.
TAG_WORKER, TAG_POOL, TAG_VERSION, TAG_TOKEN = (
    "berth:worker",
    "berth:pool",
    "berth:version",
    "berth:token",
)
#: Stop codes of a task whose host went away.
_HOST_GONE = frozenset({"SpotInterruption", "TerminationNotice", "InfrastructureHealth"})
#: An event of another kind has another detail type.
_TASK_CHANGE = "ECS Task State Change"


class _Tag(msgspec.Struct):
    key: str
    value: str = ""


class _Container(msgspec.Struct, rename="camel"):
    name: str = ""
    exit_code: int | None = None
    reason: str | None = None


class _Record(msgspec.Struct, rename="camel"):
    task_arn: str
    last_status: str
    cluster_arn: str = ""
    task_definition_arn: str = ""
    version: int = 0
    created_at: datetime | None = None
    stopped_at: datetime | None = None
    #: The worker's id: StopTask removes the tags, and events have none.
    started_by: str | None = None
    group: str | None = None
    stop_code: str | None = None
    stopped_reason: str | None = None
    containers: list[_Container] = []
    tags: list[_Tag] | None = None


class _Event(msgspec.Struct, rename="kebab"):
    detail_type: str
    source: str = ""
    detail: msgspec.Raw = msgspec.Raw(b"{}")


def family_of(task_definition: str) -> str:
    """Returns the family of `family`, `family:revision` or an ARN."""
    return task_definition.rpartition("/")[2].partition(":")[0]


class EcsRecords:
    """Reads the tasks of one cluster and one family
    of task definitions; returns None for others."""

    def __init__(self, settings: EcsSettings) -> None:
        self._cluster = task_id_of(settings.cluster)
        self._family = family_of(settings.task_definition)
        self._container = settings.container

    def of_answer(self, task: dict[str, Any]) -> SeenTask | None:
        """Reads one of `tasks` in an answer that includes tags."""
        return self._seen(msgspec.convert(task, _Record, strict=False), tagged=True)

    def of_event(self, body: str) -> SeenTask | None:
        """Reads the body of a message as EventBridge writes it. Raises `MalformedMessage`."""
        try:
            event = msgspec.json.decode(body, type=_Event)
            if event.detail_type != _TASK_CHANGE:
                return None
            record = msgspec.json.decode(event.detail, type=_Record)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise MalformedMessage(f"no task state change: {error}") from None
        return self._seen(record, tagged=False)

    def _seen(self, record: _Record, *, tagged: bool) -> SeenTask | None:
        ours = (record.group or "").startswith(GROUP) and bool(record.started_by)
        family, cluster = family_of(record.task_definition_arn), task_id_of(record.cluster_arn)
        if not ours or (family, cluster) != (self._family, self._cluster):
            return None
        tags = {tag.key: tag.value for tag in record.tags or ()}
        task = Task(
            task_id=task_id_of(record.task_arn),
            worker_id=record.started_by or "",
            pool=(record.group or "").removeprefix(GROUP),
            version=tags.get(TAG_VERSION, ""),
            launched_at=record.created_at.timestamp() if record.created_at else time.time(),
        )
        return SeenTask(
            task=task,
            version=record.version,
            status=record.last_status,
            token=tags.get(TAG_TOKEN, ""),
            tagged=tagged and TAG_VERSION in tags,
            end=self._end(record, task) if record.last_status == STOPPED else None,
        )

    def _end(self, record: _Record, task: Task) -> TaskExit:
        worker = next(
            (container for container in record.containers if container.name == self._container),
            _Container(),
        )
        code = None if worker.exit_code is None else signed_exit_code(worker.exit_code)
        stop_code, stopped = record.stop_code or "", (record.stopped_reason or "")[:300]
        asked = stop_code == "UserInitiated"
        reason = ""
        if not asked and (worker.reason or "").startswith("OutOfMemory"):
            reason = OOM_KILLED
        elif stop_code in _HOST_GONE or stopped.startswith("Host EC2"):
            reason = HOST_LOST
        elif stop_code == "TaskFailedToStart":
            reason = FAILED_TO_START
        at = record.stopped_at.timestamp() if record.stopped_at else time.time()
        detail = {
            "stop_code": stop_code,
            "stopped_reason": stopped,
            "container_reason": worker.reason or "",
        }
        end = worker_exit(
            task.task_id,
            task.worker_id,
            code=code,
            at=at,
            reason="" if asked else reason,
            stopped=asked,
            stop_reason=(stopped or None) if asked else None,
            seen=code is not None,
            detail={name: text for name, text in detail.items() if text},
        )
        return with_position(end)


def with_position(end: TaskExit) -> TaskExit:
    """Returns the exit with its position, time and task id: exits have no common order in ECS."""
    return replace(end, detail={**end.detail, "position": f"ecs:{end.at:.3f}:{end.task_id}"})


def position_time(position: str) -> float:
    """Returns the Unix seconds in a position; 0 for one that is not ours."""
    kind, _, rest = position.partition(":")
    try:
        return float(rest.partition(":")[0]) if kind == "ecs" else 0.0
    except ValueError:
        return 0.0

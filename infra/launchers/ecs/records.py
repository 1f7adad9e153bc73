"""ECS's words for a task, in its answers and in its events, read into ours.

Both describe a task by the same fields; an event has times as text and no tags.
https://docs.aws.amazon.com/AmazonECS/latest/developerguide/ecs_task_events.html
"""

from __future__ import annotations

import signal
import time
from datetime import datetime
from typing import Any

import msgspec

from infra.launchers.ecs.failures import task_id_of
from infra.launchers.ecs.task_cache import STOPPED, SeenTask
from infra.launchers.port import Task, TaskExit
from worker_runtime.protocol.errors import MalformedMessage

#: The group of a pool's tasks: what tells our tasks from others of the cluster, in events too.
GROUP = "berth:"
#: Tags: for people and bills, and what a new orchestrator reads.
TAG_WORKER, TAG_POOL, TAG_VERSION, TAG_TOKEN = "berth:worker", "berth:pool", "berth:version", "berth:token"
#: Stop codes of a task whose host went away under it.
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


class EcsRecords:
    """Reads tasks of one cluster and one task definition's family; others are None."""

    def __init__(self, *, cluster: str, family: str, container: str) -> None:
        self._cluster = task_id_of(cluster)
        self._family = family
        self._container = container

    def of_answer(self, task: dict[str, Any]) -> SeenTask | None:
        """One of `tasks` in an answer that was asked for tags."""
        return self._seen(msgspec.convert(task, _Record, strict=False), tagged=True)

    def of_event(self, body: str) -> SeenTask | None:
        """The body of a queue's message, as EventBridge writes it. Raises `MalformedMessage`."""
        try:
            event = msgspec.json.decode(body, type=_Event)
            if event.detail_type != _TASK_CHANGE:
                return None
            record = msgspec.json.decode(event.detail, type=_Record)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise MalformedMessage(f"no task state change: {error}") from None
        return self._seen(record, tagged=False)

    def _seen(self, record: _Record, *, tagged: bool) -> SeenTask | None:
        family = task_id_of(record.task_definition_arn).rpartition(":")[0]
        ours = (record.group or "").startswith(GROUP) and bool(record.started_by)
        if not ours or family != self._family or task_id_of(record.cluster_arn) != self._cluster:
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
        worker = next((one for one in record.containers if one.name == self._container), _Container())
        code = _exit_code(worker.exit_code)
        stop_code, stopped = record.stop_code or "", (record.stopped_reason or "")[:300]
        detail = {"stop_code": stop_code, "stopped_reason": stopped, "container_reason": worker.reason or ""}
        if code is not None and code < 0:
            detail["signal"] = _signal_name(-code)
        if stop_code == "UserInitiated":
            reason = "stopped"
            detail["stop_reason"] = stopped
        elif (worker.reason or "").startswith("OutOfMemory"):
            reason = "oom_killed"
        elif stop_code in _HOST_GONE or stopped.startswith("Host EC2"):
            reason = "host_lost"
        elif stop_code == "TaskFailedToStart":
            reason = "failed_to_start"
        elif code is None:
            reason = "lost"
        else:
            reason = "killed" if code < 0 else "exited"
        at = record.stopped_at.timestamp() if record.stopped_at else time.time()
        detail = {key: value for key, value in detail.items() if value}
        return exit_of_task(task, code, reason, at, detail)


def exit_of_task(task: Task, code: int | None, reason: str, at: float, detail: dict[str, str]) -> TaskExit:
    """The end of `task` with its position: when and which, since ends have no common order in ECS."""
    return TaskExit(
        task_id=task.task_id,
        worker_id=task.worker_id,
        exit_code=code,
        reason=reason,
        at=at,
        detail={**detail, "position": f"ecs:{at:.3f}:{task.task_id}"},
    )


def position_time(position: str) -> float:
    """Unix seconds of a position's end; 0 for one that is not ours."""
    kind, _, rest = position.partition(":")
    try:
        return float(rest.partition(":")[0]) if kind == "ecs" else 0.0
    except ValueError:
        return 0.0


def _exit_code(code: int | None) -> int | None:
    """A container ended by a signal has 128 and its number; the port has it negative."""
    return 128 - code if code is not None and 128 < code <= 128 + signal.NSIG else code


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"SIG{number}"

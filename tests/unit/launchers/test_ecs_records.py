"""Events and answers of ECS, recorded from its documentation and public reports, read into ours."""

from __future__ import annotations

import json
from copy import deepcopy
from datetime import UTC, datetime
from typing import Any

import pytest

from infra.launchers.ecs.records import EcsRecords, position_time
from infra.launchers.ecs.task_cache import SeenTask
from infra.settings import EcsSettings
from infra.worker_task import TaskExit
from worker_runtime.protocol.errors import MalformedMessage

RECORDS = EcsRecords(
    EcsSettings(
        cluster="arn:aws:ecs:us-west-2:111122223333:cluster/FargateCluster",
        task_definition="sample-fargate",
        container="FargateApp",
    )
)
TASK_ID = "c13b4cb40f1f4fe4a2971f76ae5a47ad"
ARN = f"arn:aws:ecs:us-west-2:111122223333:task/FargateCluster/{TASK_ID}"
#: The developer guide's example, with the group and the starter that our launches have.
EVENT: dict[str, Any] = {
    "version": "0",
    "id": "3317b2af-7005-947d-b652-f55e762e571a",
    "detail-type": "ECS Task State Change",
    "source": "aws.ecs",
    "account": "111122223333",
    "time": "2020-01-23T17:57:58Z",
    "region": "us-west-2",
    "resources": [ARN],
    "detail": {
        "attachments": [{"id": "1789bcae", "type": "eni", "status": "ATTACHED", "details": []}],
        "availabilityZone": "us-west-2c",
        "clusterArn": "arn:aws:ecs:us-west-2:111122223333:cluster/FargateCluster",
        "containers": [
            {
                "containerArn": "arn:aws:ecs:us-west-2:111122223333:container/cf159fd6",
                "lastStatus": "RUNNING",
                "name": "FargateApp",
                "image": "111122223333.dkr.ecr.us-west-2.amazonaws.com/hello-repository:latest",
                "taskArn": ARN,
                "cpu": "0",
            }
        ],
        "createdAt": "2020-01-23T17:57:34.402Z",
        "launchType": "FARGATE",
        "cpu": "256",
        "memory": "512",
        "desiredStatus": "RUNNING",
        "group": "berth:default",
        "startedBy": "p-0011223344556677",
        "lastStatus": "RUNNING",
        "overrides": {"containerOverrides": [{"name": "FargateApp"}]},
        "connectivity": "CONNECTED",
        "startedAt": "2020-01-23T17:57:58.103Z",
        "updatedAt": "2020-01-23T17:57:58.103Z",
        "taskArn": ARN,
        "taskDefinitionArn": "arn:aws:ecs:us-west-2:111122223333:task-definition/sample-fargate:1",
        "version": 4,
        "platformVersion": "1.3.0",
    },
}


def read(container: dict[str, Any] | None = None, **changes: Any) -> SeenTask | None:
    event = deepcopy(EVENT)
    event["detail"] |= changes
    event["detail"]["containers"][0] |= container or {}
    return RECORDS.of_event(json.dumps(event))


def end_of(stop_code: str, reason: str, container: dict[str, Any] | None = None) -> TaskExit:
    stopped_at = "2020-01-23T18:00:00.500Z"
    seen = read(
        container,
        lastStatus="STOPPED",
        desiredStatus="STOPPED",
        stopCode=stop_code,
        stoppedReason=reason,
        stoppedAt=stopped_at,
    )
    assert seen is not None
    assert seen.end is not None
    assert seen.end.at == datetime(2020, 1, 23, 18, 0, 0, 500_000, tzinfo=UTC).timestamp()
    return seen.end


def test_the_guide_s_example_is_a_running_worker() -> None:
    seen = read()
    assert seen is not None
    assert (seen.task.task_id, seen.task.worker_id, seen.task.pool) == (
        TASK_ID,
        "p-0011223344556677",
        "default",
    )
    assert (seen.version, seen.status, seen.tagged, seen.end) == (4, "RUNNING", False, None)
    assert (
        seen.task.launched_at == datetime(2020, 1, 23, 17, 57, 34, 402_000, tzinfo=UTC).timestamp()
    )


@pytest.mark.parametrize(
    ("stop_code", "reason", "container", "reported"),
    [
        ("UserInitiated", "the pool shrinks", {"exitCode": 0}, (0, "stopped")),
        (
            "EssentialContainerExited",
            "Essential container in task exited",
            {"exitCode": 71},
            (71, "exited"),
        ),
        (
            "EssentialContainerExited",
            "Essential container in task exited",
            {"exitCode": 137},
            (-9, "killed"),
        ),
        (
            "EssentialContainerExited",
            "Essential container in task exited",
            {"exitCode": 137, "reason": "OutOfMemoryError: Container killed due to memory usage"},
            (-9, "oom_killed"),
        ),
        (
            "TaskFailedToStart",
            "CannotPullContainerError: pull image manifest has been retried 1 time(s)",
            {},
            (None, "failed_to_start"),
        ),
        ("SpotInterruption", "Your Spot Task was interrupted.", {}, (None, "host_lost")),
        ("TerminationNotice", "Your Spot Task was interrupted.", {"exitCode": 0}, (0, "host_lost")),
        ("", "Host EC2 (instance i-0a1b2c3d4e5f67890) terminated.", {}, (None, "host_lost")),
        ("EssentialContainerExited", "Essential container in task exited", {}, (None, "lost")),
    ],
)
def test_each_end_has_its_reason(
    stop_code: str, reason: str, container: dict[str, Any], reported: tuple[int | None, str]
) -> None:
    end = end_of(stop_code, reason, container)
    assert (end.exit_code, end.reason) == reported
    assert end.detail["stopped_reason"] == reason
    assert position_time(end.detail["position"]) == end.at


def test_the_reason_of_a_stop_is_reported_and_a_signal_has_its_name() -> None:
    assert (
        end_of("UserInitiated", "the pool shrinks", {"exitCode": 0}).detail["stop_reason"]
        == "the pool shrinks"
    )
    assert end_of("EssentialContainerExited", "", {"exitCode": 143}).detail["signal"] == "SIGTERM"


def test_an_answer_has_tags_with_version_and_token() -> None:
    answer = deepcopy(EVENT["detail"])
    answer["createdAt"] = datetime(2020, 1, 23, 17, 57, 34, 402_000, tzinfo=UTC)
    answer["tags"] = [
        {"key": "berth:version", "value": "0.1.0"},
        {"key": "berth:token", "value": "pool-1"},
    ]
    seen = RECORDS.of_answer(answer)
    assert seen is not None
    assert (seen.task.version, seen.token, seen.tagged) == ("0.1.0", "pool-1", True)


@pytest.mark.parametrize(
    "changes",
    [
        {"group": "service:api"},
        {"group": None},
        {"startedBy": None},
        {"clusterArn": "arn:aws:ecs:us-west-2:111122223333:cluster/another"},
        {"taskDefinitionArn": "arn:aws:ecs:us-west-2:111122223333:task-definition/another:1"},
    ],
)
def test_tasks_of_other_fleets_are_ignored(changes: dict[str, Any]) -> None:
    assert read(**changes) is None


def test_events_of_another_kind_are_ignored() -> None:
    assert RECORDS.of_event(json.dumps({**EVENT, "detail-type": "ECS Service Action"})) is None


@pytest.mark.parametrize(
    "body",
    [
        "",
        "no json",
        "[]",
        "{}",
        '{"detail-type": 7}',
        json.dumps({**EVENT, "detail": {"taskArn": 7}}),
    ],
)
def test_a_message_that_is_not_an_event_is_malformed(body: str) -> None:
    with pytest.raises(MalformedMessage):
        RECORDS.of_event(body)


@pytest.mark.parametrize("position", ["", "log-1:17", "ecs:", "ecs:soon:task"])
def test_a_position_of_another_launcher_is_none(position: str) -> None:
    assert position_time(position) == 0.0

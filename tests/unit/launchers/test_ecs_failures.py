"""Each way in which ECS does not launch has its error.

Shapes and texts are those of the API reference, and of real answers in public issues.
"""

from __future__ import annotations

import pytest
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    EndpointConnectionError,
    NoCredentialsError,
    ReadTimeoutError,
)

from infra.launchers.ecs.failures import (
    HostUnavailable,
    LaunchDenied,
    LaunchMisconfigured,
    LaunchThrottled,
    NoCapacity,
    TokenInUse,
    UnknownTask,
    call_error,
    launch_error,
    placement_error,
)
from infra.worker_task import LauncherUnreachable, LaunchFailed

TASK = "arn:aws:ecs:ap-northeast-1:123456789012:task/berth/c13b4cb40f1f4fe4a2971f76ae5a47ad"
HOST = (
    "arn:aws:ecs:ap-northeast-1:123456789012:"
    "container-instance/berth/04f8c17d29e04711aa74852654e477ec"
)
NO_ROOM = (
    "Capacity is unavailable at this time. Please try again later or in a different "
    "availability zone."
)


def refusal(kind: str, message: str = "", **fields: object) -> ClientError:
    return ClientError({"Error": {"Code": kind, "Message": message}, **fields}, "RunTask")


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        ({"arn": HOST, "reason": "RESOURCE:MEMORY"}, NoCapacity),
        ({"arn": HOST, "reason": "RESOURCE:CPU"}, NoCapacity),
        ({"arn": HOST, "reason": "RESOURCE:ENI"}, NoCapacity),
        ({"reason": "RESOURCE:FARGATE"}, NoCapacity),
        ({"reason": NO_ROOM}, NoCapacity),
        ({"arn": HOST, "reason": "AGENT"}, HostUnavailable),
        ({"arn": HOST, "reason": "INACTIVE"}, HostUnavailable),
        ({"arn": HOST, "reason": "MISSING"}, LaunchMisconfigured),
        (
            {"arn": HOST, "reason": "ATTRIBUTE", "detail": "ecs.capability.task-eni"},
            LaunchMisconfigured,
        ),
        ({"arn": HOST, "reason": "LOCATION"}, LaunchMisconfigured),
        ({}, LaunchMisconfigured),
    ],
)
def test_a_task_that_was_not_placed(failure: dict[str, str], error: type[LaunchFailed]) -> None:
    made = placement_error(failure)
    assert type(made) is error
    assert failure.get("reason", "no reason")[:100] in made.detail
    assert failure.get("detail", "") in made.detail


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (refusal("ThrottlingException", "Rate exceeded"), LaunchThrottled),
        (refusal("ClientException", "Tasks provisioning capacity limit exceeded."), NoCapacity),
        (refusal("ClientException", "You've reached the limit on the number of tasks"), NoCapacity),
        (refusal("ClientException", "TaskDefinition is inactive"), LaunchMisconfigured),
        (refusal("ClusterNotFoundException", "Cluster not found."), LaunchMisconfigured),
        (
            refusal("InvalidParameterException", "No Container Instances were found."),
            LaunchMisconfigured,
        ),
        (refusal("PlatformUnknownException"), LaunchMisconfigured),
        (refusal("AccessDeniedException", "User: x is not authorized"), LaunchDenied),
        (refusal("BlockedException", "Your account is currently blocked."), LaunchDenied),
        (refusal("ExpiredTokenException"), LaunchDenied),
        (NoCredentialsError(), LaunchDenied),
        (refusal("ServerException", "Service Unavailable."), LauncherUnreachable),
        (refusal("503", "Service Unavailable"), LauncherUnreachable),
        (refusal("SomethingNewException"), LauncherUnreachable),
        (EndpointConnectionError(endpoint_url="http://127.0.0.1:1"), LauncherUnreachable),
        (ReadTimeoutError(endpoint_url="http://127.0.0.1:1"), LauncherUnreachable),
    ],
)
def test_a_launch_that_was_refused_or_whose_outcome_nobody_knows(
    raised: BotoCoreError | ClientError, error: type[Exception]
) -> None:
    assert type(launch_error(raised)) is error


def test_what_passes_by_itself_may_be_tried_again_and_what_is_wrong_may_not() -> None:
    errors = (NoCapacity, HostUnavailable, LaunchThrottled, LaunchMisconfigured, LaunchDenied)
    assert [error.retryable for error in errors] == [True, True, True, False, False]
    assert len({error.code for error in errors}) == len(errors)


def test_a_token_of_another_request_brings_the_tasks_it_made() -> None:
    made = launch_error(refusal("ConflictException", "already in use", resourceIds=[TASK]))
    assert isinstance(made, TokenInUse)
    assert made.task_ids == ("c13b4cb40f1f4fe4a2971f76ae5a47ad",)


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (refusal("InvalidParameterException", "The referenced task was not found."), UnknownTask),
        (
            refusal("InvalidParameterException", "taskId length should be one of [32,36]"),
            UnknownTask,
        ),
        (refusal("InvalidParameterException", "The reason is too long."), LauncherUnreachable),
        (refusal("ClusterNotFoundException", "Cluster not found."), LauncherUnreachable),
        (refusal("ThrottlingException", "Rate exceeded"), LauncherUnreachable),
        (ReadTimeoutError(endpoint_url="http://127.0.0.1:1"), LauncherUnreachable),
    ],
)
def test_other_calls_end_with_an_unknown_task_or_with_nobody_knowing(
    raised: BotoCoreError | ClientError, error: type[Exception]
) -> None:
    assert type(call_error(raised)) is error

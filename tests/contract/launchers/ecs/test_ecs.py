"""The ECS launcher beyond the common contract: what ECS does late, twice, in disorder or not at
all."""

from __future__ import annotations

import asyncio
import json

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from infra.launchers.ecs import launcher as ecs
from infra.launchers.ecs.failures import LaunchDenied, LaunchMisconfigured, NoCapacity
from infra.launchers.ecs.request import client_token
from infra.worker_task import LauncherUnreachable, LaunchFailed, StopFailed
from tests.support.launchers.ecs_environment import KEY, EcsHarness
from tests.support.launchers.exits import read_exits
from tests.support.launchers.worker_specs import CANARY, spec
from tests.support.waiting import until
from worker_runtime.process.config import parse_config
from worker_runtime.protocol import launch_document


def refused(kind: str, message: str, status: int = 400) -> tuple[int, dict[str, str]]:
    return status, {"__type": kind, "message": message}


def not_placed(reason: str, detail: str = "") -> tuple[int, dict[str, object]]:
    host = (
        "arn:aws:ecs:ap-northeast-1:123456789012:"
        "container-instance/berth/04f8c17d29e04711aa74852654e477ec"
    )
    failure = {"arn": host, "reason": reason, **({"detail": detail} if detail else {})}
    return 200, {"tasks": [], "failures": [failure]}


async def test_a_launch_is_asked_for_with_its_place_and_without_a_secret(
    ecs_harness: EcsHarness,
) -> None:
    await ecs_harness.client().launch(spec("w-1"), "token-1")
    (request,) = ecs_harness.aws.requests
    assert CANARY.decode() not in json.dumps(request)
    assert request["clientToken"] == "token-1"
    assert (request["startedBy"], request["group"]) == ("w-1", "berth:default")
    assert request["capacityProviderStrategy"] == [{"capacityProvider": "FARGATE", "weight": 1}]
    assert [rule["type"] for rule in request["placementStrategy"]] == ["spread", "spread"]
    (override,) = request["overrides"]["containerOverrides"]
    assert (override["cpu"], override["memory"], override["memoryReservation"]) == (64, 1024, 384)
    assert len(json.dumps(request["overrides"])) < 8192
    given = {variable["name"]: variable["value"] for variable in override["environment"]}
    document = given[launch_document.DOCUMENT]
    opened = parse_config(
        launch_document.unseal(document, KEY, worker_id=given[launch_document.WORKER])
    )
    assert opened == spec("w-1").config
    assert {tag["key"]: tag["value"] for tag in request["tags"]}["berth:token"] == "token-1"


async def test_another_image_is_another_revision_of_the_task_definition(
    ecs_harness: EcsHarness,
) -> None:
    ecs_harness.aws.ecs.register_task_definition(
        family="berth-worker",
        containerDefinitions=[{"name": "worker", "image": "new", "memory": 1024}],
    )
    launcher = ecs_harness.client()
    task = await launcher.launch(replace(spec("w-1"), image="berth-worker:1"), "token-1")
    assert ecs_harness.aws.requests[0]["taskDefinition"] == "berth-worker:1"
    assert await launcher.list() == [task]
    with pytest.raises(LaunchMisconfigured):
        await launcher.launch(replace(spec("w-2"), image="another:1"), "token-2")


def test_a_token_that_ecs_would_not_take_is_hashed() -> None:
    assert client_token("claim-0f3c") == "claim-0f3c"
    for odd in ("x" * 65, "with space", "ümlaut", ""):
        assert len(client_token(odd)) == 64
    assert client_token("x" * 65) != client_token("x" * 66)


async def test_a_launch_whose_answer_is_lost_is_made_once(ecs_harness: EcsHarness) -> None:
    launcher = ecs_harness.client()
    ecs_harness.aws.faults.lost.add("RunTask")
    task = await launcher.launch(spec("w-1"), "token-1")
    assert ecs_harness.aws.calls["RunTask"] == 2
    assert await ecs_harness.client().list() == [task]


async def test_a_token_finds_its_task_after_a_restart_that_no_listing_shows(
    ecs_harness: EcsHarness,
) -> None:
    task = await ecs_harness.client().launch(spec("w-1"), "token-1")
    ecs_harness.aws.faults.unlisted.add(task.task_id)
    after = ecs_harness.client()
    assert await after.list() == []
    assert await after.launch(spec("w-1"), "token-1") == task
    assert await after.list() == [task]


async def test_a_token_finds_its_running_task_when_ecs_has_forgotten_the_token(
    ecs_harness: EcsHarness,
) -> None:
    """ECS keeps a token for 24 hours; the task's tag keeps it longer."""
    task = await ecs_harness.client().launch(spec("w-1"), "token-1")
    ecs_harness.aws.forget_tokens()
    assert await ecs_harness.client().launch(spec("w-1"), "token-1") == task
    assert ecs_harness.aws.calls["RunTask"] == 1


async def test_a_token_with_other_parameters_gives_the_task_it_gave_first(
    ecs_harness: EcsHarness,
) -> None:
    task = await ecs_harness.client().launch(spec("w-1"), "token-1")
    ecs_harness.aws.faults.unlisted.add(task.task_id)  # or our own list would know the token
    assert await ecs_harness.client().launch(spec("w-1", "another-version"), "token-1") == task


async def test_a_token_of_another_worker_is_refused(ecs_harness: EcsHarness) -> None:
    task = await ecs_harness.client().launch(spec("w-1"), "token-1")
    ecs_harness.aws.faults.unlisted.add(task.task_id)
    with pytest.raises(LaunchFailed, match="not worker w-2"):
        await ecs_harness.client().launch(spec("w-2"), "token-1")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (not_placed("RESOURCE:MEMORY"), NoCapacity),
        (
            refused("AccessDeniedException", "User: x is not authorized to perform: ecs:RunTask"),
            LaunchDenied,
        ),
        (refused("ServerException", "Service Unavailable.", 500), LauncherUnreachable),
    ],
    ids=["not placed", "denied", "server error"],
)
async def test_a_launch_that_failed_says_why_and_the_token_is_good_for_another_try(
    ecs_harness: EcsHarness, answer: tuple[int, dict[str, object]], error: type[LaunchFailed]
) -> None:
    launcher = ecs_harness.client()
    await launcher.list()
    ecs_harness.aws.faults.answers["RunTask"].extend([answer] * 3)
    with pytest.raises(error):
        await launcher.launch(spec("w-1"), "token-1")
    ecs_harness.aws.faults.answers.clear()
    assert (await launcher.launch(spec("w-1"), "token-1")).worker_id == "w-1"


async def test_a_throttled_call_is_repeated_before_anybody_hears_of_it(
    ecs_harness: EcsHarness,
) -> None:
    launcher = ecs_harness.client()
    for operation in ("ListTasks", "RunTask", "StopTask", "DescribeTasks"):
        ecs_harness.aws.faults.answers[operation].append(
            refused("ThrottlingException", "Rate exceeded")
        )
    task = await launcher.launch(spec("w-1"), "token-1")
    await launcher.stop(task.task_id, "test")
    assert await launcher.list() == []


async def test_many_tasks_are_listed_and_described_a_hundred_at_a_time(
    ecs_harness: EcsHarness,
) -> None:
    launcher = ecs_harness.client(listing_period=600.0)
    await asyncio.gather(*(launcher.launch(spec(f"w-{n}"), f"token-{n}") for n in range(105)))
    listed = await ecs_harness.client().list()
    assert {task.worker_id for task in listed} == {f"w-{n}" for n in range(105)}
    assert listed == await launcher.list()


async def test_a_recent_launch_counts_though_no_listing_shows_it_and_ecs_denies_it(
    ecs_harness: EcsHarness,
) -> None:
    launcher = ecs_harness.client()
    task = await launcher.launch(spec("w-1"), "token-1")
    ecs_harness.aws.faults.denied.add(task.task_id)
    assert await launcher.list() == [task]
    with pytest.raises(StopFailed, match="not visible"):
        await launcher.stop(task.task_id, "test", grace=-ecs.KILL_CONFIRM_TIMEOUT_S)
    ecs_harness.aws.faults.denied.clear()
    await launcher.stop(task.task_id, "test")
    assert await launcher.list() == []


async def test_listings_that_are_empty_by_mistake_lose_nobody(ecs_harness: EcsHarness) -> None:
    launcher = ecs_harness.client()
    tasks = [await launcher.launch(spec(f"w-{n}"), f"token-{n}") for n in (1, 2)]
    watching = ecs_harness.client()
    assert await watching.list() == tasks
    ecs_harness.aws.faults.empty_listings = True
    assert await launcher.list() == await watching.list() == tasks
    ecs_harness.aws.faults.denied |= {task.task_id for task in tasks}
    assert await watching.list() == tasks


async def test_the_exit_of_a_task_without_an_event_is_found_by_a_listing(
    ecs_harness: EcsHarness,
) -> None:
    launcher = ecs_harness.client()
    task = await launcher.launch(spec("w-1"), "token-1")
    exits = launcher.exits()
    ecs_harness.aws.faults.mute = True
    listening = asyncio.ensure_future(anext(exits))
    ecs_harness.aws.crash(task.task_id)
    assert (await asyncio.wait_for(listening, 20)).task_id == task.task_id


async def test_a_worker_that_does_not_end_is_not_reported_as_stopped(
    ecs_harness: EcsHarness,
) -> None:
    launcher = ecs_harness.client()
    task = await launcher.launch(spec("w-1"), "token-1")
    ecs_harness.aws.faults.stubborn = True
    with pytest.raises(StopFailed):
        await launcher.stop(task.task_id, "test", grace=-ecs.KILL_CONFIRM_TIMEOUT_S)
    assert await launcher.list() == [task]
    ecs_harness.aws.faults.stubborn = False
    await launcher.stop(task.task_id, "test")
    assert await launcher.list() == []


async def test_an_event_that_comes_twice_is_one_end_and_leaves_no_message(
    ecs_harness: EcsHarness,
) -> None:
    queue = ecs_harness.aws.queue()
    launcher = ecs_harness.client(queue=queue)
    tasks = [await launcher.launch(spec(f"w-{n}"), f"token-{n}") for n in (1, 2)]
    exits = launcher.exits()
    for task in tasks:
        ecs_harness.aws.crash(task.task_id)
        ecs_harness.aws.send(queue, ecs_harness.aws.event(task.task_id))
    ends = await read_exits(exits, 2)
    assert {end.worker_id for end in ends} == {"w-1", "w-2"}
    listening = asyncio.ensure_future(anext(exits))
    await until(lambda: ecs_harness.aws.left(queue) == 0, "every message is deleted")
    assert not listening.done()
    listening.cancel()


async def test_the_message_of_an_end_stays_until_the_end_was_handled(
    ecs_harness: EcsHarness,
) -> None:
    queue = ecs_harness.aws.queue()
    launcher = ecs_harness.client(queue=queue)
    task = await launcher.launch(spec("w-1"), "token-1")
    exits = launcher.exits()
    listening = asyncio.ensure_future(anext(exits))
    await until(lambda: ecs_harness.aws.calls["ReceiveMessage"] > 0, "the launcher listens")
    ecs_harness.aws.crash(task.task_id)
    await asyncio.wait_for(listening, 20)
    assert ecs_harness.aws.left(queue) == 1
    following = asyncio.ensure_future(anext(exits))
    await until(lambda: ecs_harness.aws.left(queue) == 0, "the message is deleted")
    following.cancel()


async def test_an_event_that_was_overtaken_changes_nothing(ecs_harness: EcsHarness) -> None:
    queue = ecs_harness.aws.queue()
    launcher = ecs_harness.client(queue=queue, listing_period=600.0)
    task = await launcher.launch(spec("w-1"), "token-1")
    running = ecs_harness.aws.event(task.task_id)
    ecs_harness.aws.crash(task.task_id)
    ecs_harness.aws.send(queue, running)
    exits = launcher.exits()
    await read_exits(exits, 1)
    following = asyncio.ensure_future(anext(exits))
    await until(lambda: ecs_harness.aws.left(queue) == 0, "both events are read")
    assert await launcher.list() == []
    following.cancel()


async def test_an_unreadable_message_is_logged_once_and_kept_for_the_dead_letter_queue(
    ecs_harness: EcsHarness,
) -> None:
    queue = ecs_harness.aws.queue()
    ecs_harness.aws.sqs.set_queue_attributes(QueueUrl=queue, Attributes={"VisibilityTimeout": "0"})
    launcher = ecs_harness.client(queue=queue)
    task = await launcher.launch(spec("w-1"), "token-1")
    ecs_harness.aws.send(
        queue, '{"detail-type": "ECS Task State Change", "detail": {"taskArn": 7}}'
    )
    ecs_harness.aws.send(
        queue, '{"detail-type": "ECS Service Action", "detail": {"eventName": "steady"}}'
    )
    exits = launcher.exits()
    with capture_logs() as logs:
        listening = asyncio.ensure_future(anext(exits))
        seen = ecs_harness.aws.calls["ReceiveMessage"]
        await until(
            lambda: ecs_harness.aws.calls["ReceiveMessage"] > seen + 4, "the message came again"
        )
        ecs_harness.aws.crash(task.task_id)
        await asyncio.wait_for(listening, 20)
    assert [line["event"] for line in logs].count("ecs_event_unreadable") == 1
    following = asyncio.ensure_future(anext(exits))
    await until(lambda: ecs_harness.aws.left(queue) == 1, "all but the unreadable one are deleted")
    following.cancel()


async def test_while_events_come_the_list_costs_no_call(ecs_harness: EcsHarness) -> None:
    queue = ecs_harness.aws.queue()
    launcher = ecs_harness.client(queue=queue, listing_period=600.0)
    other = ecs_harness.client()
    exits = launcher.exits()
    listening = asyncio.ensure_future(anext(exits))
    await until(lambda: ecs_harness.aws.calls["ReceiveMessage"] > 0, "the launcher listens")
    task = await other.launch(spec("w-1"), "token-1")
    before = ecs_harness.aws.calls["ListTasks"]
    ecs_harness.aws.send(queue, ecs_harness.aws.event(task.task_id))
    await until(lambda: ecs_harness.aws.left(queue) == 0, "the event is read")
    # Its version, too: an event has no tags, so ECS was asked for them.
    assert await launcher.list() == [task]
    assert ecs_harness.aws.calls["ListTasks"] == before
    listening.cancel()


async def test_nobody_knows_anything_when_aws_does_not_answer(ecs_harness: EcsHarness) -> None:
    launcher = ecs_harness.client()
    for operation in ("ListTasks", "StopTask"):
        denied = refused("AccessDeniedException", "User: x is not authorized")
        ecs_harness.aws.faults.answers[operation].extend([denied] * 9)
    for call in (launcher.list(), launcher.stop("0" * 32, "test"), anext(launcher.exits())):
        with pytest.raises(LauncherUnreachable, match="not authorized"):
            await call


async def test_a_question_by_id_asks_ecs_though_a_fresh_listing_lacks_or_shows_the_task(
    ecs_harness: EcsHarness,
) -> None:
    watching, other = ecs_harness.client(listing_period=600.0), ecs_harness.client()
    task = await other.launch(spec("w-1"), "token-1")
    ecs_harness.aws.faults.unlisted.add(task.task_id)
    assert await watching.list() == []
    assert await watching.is_running(task.task_id) is True
    ecs_harness.aws.faults.mute = True
    ecs_harness.aws.crash(task.task_id)
    assert await watching.list() == [task]  # it heard of no end
    assert await watching.is_running(task.task_id) is False


async def test_a_task_that_ecs_denies_neither_runs_nor_has_ended(ecs_harness: EcsHarness) -> None:
    launcher = ecs_harness.client(listing_period=600.0)
    task = await launcher.launch(spec("w-1"), "token-1")
    ecs_harness.aws.faults.denied.add(task.task_id)
    assert await launcher.is_running(task.task_id) is None
    assert list(await launcher.find_tasks("w-1")) == [task]  # a denial proves no end


async def test_both_tasks_of_a_worker_that_runs_twice_are_found(ecs_harness: EcsHarness) -> None:
    watching = ecs_harness.client(listing_period=600.0)
    assert await watching.list() == []
    first = await ecs_harness.client().launch(spec("w-1"), "token-1")
    ecs_harness.aws.faults.unlisted.add(first.task_id)
    second = await ecs_harness.client().launch(spec("w-1"), "token-2")
    ecs_harness.aws.faults.unlisted.clear()
    task_ids = {task.task_id for task in await watching.find_tasks("w-1")}
    assert task_ids == {first.task_id, second.task_id}


async def test_many_questions_at_once_share_calls_and_an_impossible_id_spoils_none(
    ecs_harness: EcsHarness,
) -> None:
    launcher = ecs_harness.client(listing_period=600.0)
    tasks = [await launcher.launch(spec(f"w-{number}"), f"token-{number}") for number in range(30)]
    before = ecs_harness.aws.calls["DescribeTasks"]
    answers = await asyncio.gather(*(launcher.is_running(task.task_id) for task in tasks))
    assert answers == [True] * 30
    assert ecs_harness.aws.calls["DescribeTasks"] - before <= 2
    mixed = await asyncio.gather(
        launcher.is_running(tasks[0].task_id),
        launcher.is_running("task-of-nobody"),
        launcher.is_running(tasks[1].task_id),
    )
    assert list(mixed) == [True, None, True]


async def test_a_caller_that_gives_up_takes_no_answer_from_the_others(
    ecs_harness: EcsHarness,
) -> None:
    launcher = ecs_harness.client(listing_period=600.0)
    task = await launcher.launch(spec("w-1"), "token-1")
    giving_up = asyncio.create_task(launcher.is_running(task.task_id))
    waiting = asyncio.create_task(launcher.is_running(task.task_id))
    await asyncio.sleep(0)
    giving_up.cancel()
    assert await waiting is True
    with pytest.raises(asyncio.CancelledError):
        await giving_up


async def test_a_throttled_question_by_id_fails_for_each_caller_and_the_next_one_is_asked_anew(
    ecs_harness: EcsHarness,
) -> None:
    launcher = ecs_harness.client(listing_period=600.0)
    task = await launcher.launch(spec("w-1"), "token-1")
    throttled = refused("ThrottlingException", "Rate exceeded")
    ecs_harness.aws.faults.answers["DescribeTasks"].extend([throttled] * 3)
    asked = await asyncio.gather(
        *(launcher.is_running(task.task_id) for _ in range(2)), return_exceptions=True
    )
    assert [type(answer) for answer in asked] == [LauncherUnreachable] * 2
    assert await launcher.is_running(task.task_id) is True

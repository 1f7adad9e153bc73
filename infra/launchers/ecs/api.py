"""A client of ECS and SQS: the calls that the launcher needs, with our errors. Each runs in a
thread.

boto3 blocks. 16 calls run at a time and more wait; the queue has a thread of its own, since
a long poll holds it for seconds. botocore retries throttled and broken calls (standard
mode: three attempts, exponential backoff with jitter); every call here may be repeated,
RunTask because of its token.
"""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from infra.launchers.ecs.failures import (
    UnknownTask,
    call_error,
    launch_error,
    placement_error,
    task_id_of,
)
from infra.launchers.ecs.records import family_of
from infra.settings import EcsSettings
from infra.worker_task import LauncherUnreachable

#: Calls at the same time. A call takes about 0.1 s: 160 a second, more than the 20 to 50 that ECS
#: allows. https://docs.aws.amazon.com/AmazonECS/latest/APIReference/request-throttling.html
THREADS = 16
#: Tasks in one page of ListTasks, and in one DescribeTasks.
TASKS_PER_PAGE = 100
#: Seconds of one long poll. SQS allows 20, but a running poll delays the end of the process.
POLL_TIMEOUT_S = 3
#: Messages in one ReceiveMessage, and in one DeleteMessageBatch.
MESSAGES_PER_CALL = 10
#: Characters of a stop's reason that ECS takes.
MAX_REASON_LENGTH = 255

_CONFIG = Config(
    connect_timeout=3,
    read_timeout=POLL_TIMEOUT_S + 10,
    max_pool_connections=THREADS,
    retries={"mode": "standard", "total_max_attempts": 3},
)


class EcsApi:
    """Every method raises `LauncherUnreachable` when the outcome is unknown."""

    def __init__(self, settings: EcsSettings, *, endpoint: str | None = None) -> None:
        """Connects to AWS, or to another server at `endpoint`, for tests."""
        self._cluster = settings.cluster
        self._family = family_of(settings.task_definition)
        self._queue = settings.queue_url
        place = {"region_name": settings.region or None, "endpoint_url": endpoint}
        self._ecs: Any = boto3.client("ecs", config=_CONFIG, **place)
        self._sqs: Any = boto3.client("sqs", config=_CONFIG, **place)
        self._calls = ThreadPoolExecutor(THREADS, thread_name_prefix="ecs")
        self._polls = ThreadPoolExecutor(1, thread_name_prefix="sqs")

    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Launches and returns the task. Raises `TokenInUse` or a `LaunchFailed` of `failures`."""
        answer = await self._in_thread(lambda: self._ecs.run_task(**request), launch_error)
        tasks: list[dict[str, Any]] = answer.get("tasks", [])
        if not tasks:
            raise placement_error(next(iter(answer.get("failures", [])), {}))
        return tasks[0]

    async def stop(self, task_id: str, reason: str) -> None:
        """Asks ECS to stop the task and does not wait for it. Raises `UnknownTask`."""
        request = {"cluster": self._cluster, "task": task_id, "reason": reason[:MAX_REASON_LENGTH]}
        await self._in_thread(lambda: self._ecs.stop_task(**request))

    async def task_ids(self, desired: Literal["RUNNING", "STOPPED"]) -> list[str]:
        """Returns the ids of all tasks of the family with this desired status; stopped ones for
        about an hour."""

        def listed() -> list[str]:
            pages = self._ecs.get_paginator("list_tasks").paginate(
                cluster=self._cluster,
                family=self._family,
                desiredStatus=desired,
                PaginationConfig={"PageSize": TASKS_PER_PAGE},
            )
            return [task_id_of(arn) for page in pages for arn in page["taskArns"]]

        task_ids: list[str] = await self._in_thread(listed)
        return task_ids

    async def task_ids_of(self, worker_id: str) -> list[str]:
        """Returns the ids of the tasks that were started for this worker and that nobody has
        stopped: one call."""
        # With `startedBy` ECS takes no other filter.
        request = {"cluster": self._cluster, "startedBy": worker_id}
        answer = await self._in_thread(lambda: self._ecs.list_tasks(**request))
        return [task_id_of(arn) for arn in answer["taskArns"]]

    async def describe(self, task_ids: Iterable[str]) -> tuple[list[dict[str, Any]], set[str]]:
        """Returns the tasks with their tags, and the ids that ECS does not know."""
        ordered_ids = sorted(task_ids)
        batches = [
            ordered_ids[at : at + TASKS_PER_PAGE]
            for at in range(0, len(ordered_ids), TASKS_PER_PAGE)
        ]
        answers = await asyncio.gather(*(self._described(batch) for batch in batches))
        tasks = [task for answer in answers for task in answer["tasks"]]
        return tasks, set(ordered_ids) - {task_id_of(task["taskArn"]) for task in tasks}

    async def _described(self, batch: list[str]) -> dict[str, Any]:
        request = {"cluster": self._cluster, "tasks": batch, "include": ["TAGS"]}
        try:
            answer: dict[str, Any] = await self._in_thread(
                lambda: self._ecs.describe_tasks(**request)
            )
        except UnknownTask:
            if len(batch) == 1:  # an id that cannot be one of ECS
                return {"tasks": []}
            # ECS refuses all of them for one such id:
            # it must not keep the others from being described.
            halves = batch[: len(batch) // 2], batch[len(batch) // 2 :]
            answers = await asyncio.gather(*(self._described(half) for half in halves))
            return {"tasks": [task for answer in answers for task in answer["tasks"]]}
        odd = [
            failure for failure in answer.get("failures", []) if failure.get("reason") != "MISSING"
        ]
        if odd:
            raise LauncherUnreachable(f"ECS cannot describe a task: {odd[0].get('reason')}")
        return answer

    async def receive(self) -> list[dict[str, str]]:
        """Returns up to ten messages as SQS gives them; waits some seconds for the first."""
        request = {
            "QueueUrl": self._queue,
            "MaxNumberOfMessages": MESSAGES_PER_CALL,
            "WaitTimeSeconds": POLL_TIMEOUT_S,
        }
        answer = await self._in_thread(
            lambda: self._sqs.receive_message(**request), threads=self._polls
        )
        messages: list[dict[str, str]] = answer.get("Messages", [])
        return messages

    async def delete(self, receipts: list[str]) -> None:
        """Deletes messages. Those that cannot be deleted come again, which does no harm."""
        for at in range(0, len(receipts), MESSAGES_PER_CALL):
            entries = [
                {"Id": str(number), "ReceiptHandle": receipt}
                for number, receipt in enumerate(receipts[at : at + MESSAGES_PER_CALL])
            ]
            call = partial(self._sqs.delete_message_batch, QueueUrl=self._queue, Entries=entries)
            await self._in_thread(call)

    async def close(self) -> None:
        """Waits up to `POLL_TIMEOUT_S` seconds for a running poll: threads cannot be cancelled."""
        self._calls.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._polls.shutdown, wait=True, cancel_futures=True)
        self._ecs.close()
        self._sqs.close()

    async def _in_thread(
        self,
        call: Callable[[], Any],
        to_error: Callable[[Exception], Exception] = call_error,
        threads: ThreadPoolExecutor | None = None,
    ) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(threads or self._calls, call)
        except (BotoCoreError, ClientError) as error:
            raise to_error(error) from None

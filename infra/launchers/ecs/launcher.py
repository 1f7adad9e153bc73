"""The ECS launcher: workers as ECS tasks.

RunTask gets the token as `clientToken`: for 24 hours ECS answers a repeat with the same task, in
any process. Later our own cache knows the token by the task's tag, as long as the task runs. Events
feed the cache, and a full listing every 10 minutes corrects it. ECS's answers lag; `task_cache`
decides what to believe.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import structlog

from infra.launchers.ecs.api import EcsApi
from infra.launchers.ecs.failures import TokenInUse, UnknownTask
from infra.launchers.ecs.lookup import TaskLookup
from infra.launchers.ecs.records import EcsRecords, position_time, with_position
from infra.launchers.ecs.request import client_token, run_task
from infra.launchers.ecs.task_cache import MAX_EXITS_REMEMBERED, STOPPED, SeenTask, TaskCache
from infra.settings import EcsSettings
from infra.vault import key_file
from infra.worker_task import (
    LauncherUnreachable,
    LaunchFailed,
    LaunchSpec,
    StopFailed,
    Task,
    TaskExit,
    worker_exit,
)
from worker_runtime.protocol import launch_document
from worker_runtime.protocol.errors import BerthError, MalformedMessage

#: Seconds that a listing stays valid while no events come: another process reads them, or the queue
#: is out of reach. With more than 1,000 tasks it is a second for each page of 100: ECS allows some
#: 20 pages a second to all callers together.
UNFED_INTERVAL_S, UNFED_TASKS_PER_S = 10.0, 100
#: Seconds since the queue's last answer within
#: which the cache counts as fed: two long polls and a pause.
FED_TIMEOUT_S = 15.0
#: Seconds that a stopped worker gets, unless the caller says otherwise. ECS kills after the
#: container's own `stopTimeout` (30 by default), whatever we ask for.
STOP_GRACE_S = 15.0
#: Seconds beyond the grace for the kill, and until ECS shows it.
KILL_CONFIRM_TIMEOUT_S = 10.0
#: Seconds between two checks of a stopping task: at first, and at most.
CHECK_INTERVAL_S, MAX_CHECK_INTERVAL_S = 0.5, 3.0
#: Seconds for which ECS must deny a task that we did not launch before a stop gives up on it.
MIN_DENIAL_S = 5.0
#: Seconds of age from which the task in RunTask's answer is an earlier launch: clocks differ.
OLD_LAUNCH_AGE_S = 60.0
#: Seconds before a position from which exits are reported again: those of ECS have no common order.
OVERLAP_S = 120.0
#: Unreadable messages that are remembered, to log each once: they come back a few times.
MAX_UNREADABLE_REMEMBERED = 1000

log = structlog.get_logger()


class EcsQueue:
    """Task state changes from an SQS queue that EventBridge feeds:
    at least once each, in any order.

    A message is deleted when its change is in the cache; the message of an exit, when the exit was
    handled. An unreadable one is left alone: after its last delivery SQS moves it to the
    dead-letter queue.
    """

    def __init__(self, api: EcsApi, records: EcsRecords) -> None:
        self._api = api
        self._records = records
        #: Task id → receipts of the messages of an exit that is not handled yet.
        self._held: dict[str, list[str]] = {}
        self._unreadable: dict[str, None] = {}

    async def receive(self) -> list[tuple[SeenTask, str]]:
        """Returns the next changes of our tasks, each with the receipt that deletes its message.

        Waits some seconds for the first. Raises `LauncherUnreachable`.
        """
        changes, foreign = [], []
        for message in await self._api.receive():
            try:
                seen = self._records.of_event(message["Body"])
            except MalformedMessage as error:
                self._log_unreadable(message["MessageId"], error.detail)
                continue
            if seen is None:
                foreign.append(message["ReceiptHandle"])
            else:
                changes.append((seen, message["ReceiptHandle"]))
        await self._api.delete(foreign)
        return changes

    def hold(self, task_id: str, receipt: str) -> None:
        """Keeps the message until `mark_handled`; if that takes long, it comes again meanwhile."""
        self._held.setdefault(task_id, []).append(receipt)

    async def mark_handled(self, task_id: str) -> None:
        """Deletes the messages of this task's exit."""
        await self._api.delete(self._held.pop(task_id, []))

    def _log_unreadable(self, message_id: str, reason: str) -> None:
        """Logs each message once, and without its content."""
        if message_id in self._unreadable:
            return
        self._unreadable[message_id] = None
        if len(self._unreadable) > MAX_UNREADABLE_REMEMBERED:
            self._unreadable.pop(next(iter(self._unreadable)))
        log.error("ecs_event_unreadable", message_id=message_id, reason=reason[:200])


class EcsLauncher:
    """Implements `Launcher`. One process at a time may read `exits`:
    SQS gives a message to one reader."""

    def __init__(
        self, settings: EcsSettings, api: EcsApi, launch_key: bytes, *, denial: float = MIN_DENIAL_S
    ) -> None:
        """Closes `api` with itself."""
        self._settings = settings
        self._api = api
        self._key = launch_key
        self._records = EcsRecords(settings)
        self._tasks = TaskCache()
        self._queue = EcsQueue(api, self._records)
        self._lookup = TaskLookup(self._describe)
        self._period = settings.listing_period
        self._denial = denial
        #: When the last full listing began, and when the queue last answered (monotonic seconds).
        self._listed_at = self._fed_at = float("-inf")
        self._listing = asyncio.Lock()
        #: Locks that allow one launch of a worker at a time: ECS itself would run two.
        self._launching: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        #: Exits that are not handled yet, in the order in which they are reported.
        self._unhandled: dict[str, TaskExit] = {}
        self._begun = False

    async def launch(self, spec: LaunchSpec, token: str) -> Task:
        """Raises `LauncherUnreachable`, or a `LaunchFailed` of `failures` with its code."""
        await self._refresh()
        async with self._launching.setdefault(spec.config.worker_id, asyncio.Lock()):
            return await self._launch(spec, token)

    async def _launch(self, spec: LaunchSpec, token: str) -> Task:
        known = self._tasks.of_token(client_token(token))
        if known is not None:
            return known.task
        worker_id = spec.config.worker_id
        if self._tasks.of_worker(worker_id):
            raise LaunchFailed(f"worker {worker_id} runs already, launched by another token")
        began = time.time()
        try:
            answer = await self._api.run(run_task(self._settings, spec, token, self._key))
        except TokenInUse as error:
            # Launched before with other settings, or by another release: it is the same launch.
            answer = await self._first_launch(error)
        seen = self._records.of_answer(answer)
        if seen is None or seen.task.worker_id != worker_id:
            raise LaunchFailed(f"ECS answered with a task that is not worker {worker_id}")
        task_id = seen.task.task_id
        if not self._tasks.has_ended(task_id):
            self._tasks.note_launched(task_id, time.monotonic())
        self._apply(seen)
        if seen.task.launched_at < began - OLD_LAUNCH_AGE_S:
            # A repeat: ECS describes the task as it was launched. It may have ended since.
            await self._lookup.is_known(task_id)
        return seen.task

    async def _first_launch(self, conflict: TokenInUse) -> dict[str, Any]:
        tasks, _ = await self._api.describe(conflict.task_ids[:1])
        if not tasks:
            raise LauncherUnreachable(f"{conflict.detail}; its task is not to be seen")
        return tasks[0]

    async def stop(self, task_id: str, reason: str, *, grace: float | None = None) -> bool:
        """Stops a task. ECS kills it after the container's `stopTimeout`; `grace` only says how
        long we wait for that."""
        if self._tasks.has_ended(task_id):
            return True
        try:
            await self._api.stop(task_id, reason)
        except UnknownTask:
            log.info("ecs_stop_of_unknown_task", task_id=task_id)
        began = time.monotonic()
        deadline = began + (STOP_GRACE_S if grace is None else grace) + KILL_CONFIRM_TIMEOUT_S
        pause = CHECK_INTERVAL_S
        while True:
            denied = not await self._lookup.is_known(task_id)
            if self._tasks.has_ended(task_id):
                return True
            now = time.monotonic()
            if denied and not self._tasks.runs(task_id) and now - began >= self._denial:
                log.warning("ecs_task_unknown", task_id=task_id)
                return False
            if now > deadline:
                obstacle = "not visible in ECS yet" if denied else "not stopped"
                raise StopFailed(f"task {task_id}: {obstacle} after {now - began:.0f} s")
            await asyncio.sleep(min(pause, self._denial))
            pause = min(pause * 1.5, MAX_CHECK_INTERVAL_S)

    async def is_running(self, task_id: str) -> bool | None:
        if self._tasks.has_ended(task_id):  # STOPPED is final
            return False
        known = await self._lookup.is_known(task_id)
        if self._tasks.has_ended(task_id):
            return False
        return True if known and self._tasks.runs(task_id) else None

    async def find_tasks(self, worker_id: str) -> Sequence[Task]:
        """Returns a worker's tasks, also one that ECS showed before and denies now: a denial proves
        no end."""
        known = {task.task_id for task in self._tasks.of_worker(worker_id)}
        started = await self._api.task_ids_of(worker_id)
        await asyncio.gather(*(self._lookup.is_known(task_id) for task_id in known.union(started)))
        return self._tasks.of_worker(worker_id)

    async def list(self) -> list[Task]:
        await self._refresh()
        return self._tasks.running()

    async def exits(self, after: str = "") -> AsyncIterator[TaskExit]:
        """Yields exits as the port says; a new object begins with the exits ECS still knows: of the
        last hour.

        With `after`, exits of the two minutes before it are reported again. The queue's message
        goes when its exit was handled.
        """
        await self._collect_missed(position_time(after) - OVERLAP_S if after else 0.0)
        while True:
            while self._unhandled:
                end = next(iter(self._unhandled.values()))
                yield end
                self._unhandled.pop(end.task_id, None)
                await self._queue.mark_handled(end.task_id)
            await self._listen()

    async def close(self) -> None:
        await self._lookup.close()
        await self._api.close()

    async def _collect_missed(self, since: float) -> None:
        """Collects the exits that ECS still knows.
        The first time, those before `since` are dropped."""
        await self._list_all()
        kept = [item for item in self._unhandled.items() if self._begun or item[1].at >= since]
        self._unhandled = dict(sorted(kept, key=lambda item: item[1].at))
        self._begun = True

    async def _listen(self) -> None:
        """Reads one long poll into the cache, and makes a full listing when it is due."""
        changes = await self._queue.receive()
        alive = (seen.task.task_id for seen, _ in changes if seen.status != STOPPED)
        if new := self._tasks.unknown(alive):
            await self._describe(new)  # another orchestrator's launches: events have no tags
        self._fed_at = time.monotonic()
        done = []
        for seen, receipt in changes:
            self._apply(seen)
            if seen.task.task_id in self._unhandled:
                self._queue.hold(seen.task.task_id, receipt)
            else:
                done.append(receipt)
        await self._api.delete(done)
        await self._refresh()

    def _apply(self, seen: SeenTask) -> None:
        end = self._tasks.apply(seen)
        if end is not None:
            self._unhandled[end.task_id] = end
            if len(self._unhandled) > MAX_EXITS_REMEMBERED:  # nobody reads them
                self._unhandled.pop(next(iter(self._unhandled)))

    async def _refresh(self) -> None:
        """Lists all tasks when the cache is too old. Raises `LauncherUnreachable`."""
        if self._is_fresh():
            return
        async with self._listing:
            if not self._is_fresh():
                await self._list_all()

    def _is_fresh(self) -> bool:
        now = time.monotonic()
        fed = now - self._fed_at < FED_TIMEOUT_S
        unfed = max(UNFED_INTERVAL_S, len(self._tasks.running_ids()) / UNFED_TASKS_PER_S)
        return now - self._listed_at < (self._period if fed else min(self._period, unfed))

    async def _list_all(self) -> None:
        """Makes a full listing. A task that it lacks is described, not forgotten."""
        began, known = time.monotonic(), self._tasks.running_ids()
        running, stopped = await asyncio.gather(
            self._api.task_ids("RUNNING"), self._api.task_ids("STOPPED")
        )
        lacking = known.difference(running)
        await self._describe(self._tasks.unknown({*running, *stopped}) | lacking)
        self._listed_at = began
        log.debug("ecs_listed", running=len(running), stopped=len(stopped), lacking=len(lacking))

    async def _describe(self, task_ids: set[str]) -> set[str]:
        """Reads ECS's description of the tasks into the cache;
        returns those that ECS does not know."""
        answers, denied = await self._api.describe(task_ids)
        for answer in answers:
            seen = self._records.of_answer(answer)
            if seen is not None:
                self._apply(seen)
        now = time.monotonic()
        for task_id in denied:
            lost = self._tasks.note_denied(task_id, now)
            if lost is not None:
                log.warning("ecs_task_lost", task_id=task_id, worker_id=lost.task.worker_id)
                end = worker_exit(
                    lost.task.task_id,
                    lost.task.worker_id,
                    code=None,
                    at=time.time(),
                    seen=False,
                    detail={"stopped_reason": "ECS does not know it"},
                )
                self._apply(replace(lost, status=STOPPED, end=with_position(end)))
        return denied


class EcsUnconfigured(BerthError, code="ECS_UNCONFIGURED"):
    """The ECS launcher needs BERTH_ECS_QUEUE_URL."""


def create_ecs_launcher(settings: EcsSettings) -> EcsLauncher:
    """Calls nothing of AWS yet. Raises `EcsUnconfigured`,
    and the errors of a missing or exposed key file."""
    if not settings.queue_url:
        raise EcsUnconfigured
    key = launch_document.key_from(key_file.read_key_file(settings.launch_key_file, private=True))
    return EcsLauncher(settings, EcsApi(settings), key)

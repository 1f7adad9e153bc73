"""Task state changes from an SQS queue that EventBridge feeds: at least once each, in any order.

A message is deleted when its change is in the cache; the message of an exit, when the exit was handled. An
unreadable one is left alone: after its last delivery SQS moves it to the dead-letter queue.
"""

import structlog

from infra.launchers.ecs.api import EcsApi
from infra.launchers.ecs.records import EcsRecords
from infra.launchers.ecs.task_cache import SeenTask
from worker_runtime.protocol.errors import MalformedMessage

#: Unreadable messages that are remembered, to log each once: they come back a few times.
UNREADABLE_REMEMBERED = 1000

log = structlog.get_logger()


class EcsQueue:
    def __init__(self, api: EcsApi, records: EcsRecords) -> None:
        self._api = api
        self._records = records
        #: Task id → receipts of the messages of an exit that is not handled yet.
        self._held: dict[str, list[str]] = {}
        self._unreadable: dict[str, None] = {}

    async def receive(self) -> list[tuple[SeenTask, str]]:
        """The next changes of our tasks, each with the receipt that deletes its message.

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
        if len(self._unreadable) > UNREADABLE_REMEMBERED:
            self._unreadable.pop(next(iter(self._unreadable)))
        log.error("ecs_event_unreadable", message_id=message_id, reason=reason[:200])

"""A node whose workers are names only: `python -m infra.lab.bench.fleet.planted_node FILE`, in the node's
place.

It lists the tasks of the file. A task that is stopped ends at once.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
import time
from pathlib import Path

import msgspec

from infra.node.address import listen
from infra.node.protocol import LaunchTask
from infra.node.server import NodeServer
from infra.settings import Settings
from infra.worker_task import LaunchFailed, Task, TaskExit


class PlantedKeeper:
    def __init__(self, tasks: list[Task]) -> None:
        self.log = secrets.token_hex(6)
        self._tasks = {task.task_id: task for task in tasks}
        self._ends: list[TaskExit] = []
        self._news = asyncio.Event()

    def tasks(self) -> list[Task]:
        return list(self._tasks.values())

    def launch(self, request: LaunchTask) -> Task:
        raise LaunchFailed("nothing is launched here")

    async def stop(self, task_id: str, reason: str, grace: float | None = None) -> int:
        task = self._tasks.pop(task_id, None)
        if task is None:
            return 0
        end = TaskExit(
            task_id=task_id,
            worker_id=task.worker_id,
            exit_code=0,
            reason="stopped",
            at=time.time(),
            detail={"stop_reason": reason},
        )
        self._ends.append(end)
        news, self._news = self._news, asyncio.Event()
        news.set()
        return 1

    async def stop_all(self, reason: str, grace: float | None = None) -> int:
        """A stack that starts ends the workers of an earlier run by this; these belong to nobody else."""
        return 0

    async def wait_for_exit(self, timeout: float) -> None:
        try:
            await asyncio.wait_for(self._news.wait(), timeout)
        except TimeoutError:
            return

    def exits_after(self, number: int, limit: int = 100) -> list[tuple[int, TaskExit]]:
        return list(enumerate(self._ends[number : number + limit], number + 1))


async def _serve(settings: Settings, tasks: list[Task]) -> None:
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    keeper = PlantedKeeper(tasks)
    server = NodeServer(keeper, keeper, limits="none")
    await server.start(listen(settings.node_socket))
    await ending.wait()
    await server.close()
    settings.node_socket.unlink(missing_ok=True)


def main() -> int:
    tasks = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=list[Task])
    asyncio.run(_serve(Settings(), tasks))
    return 0


if __name__ == "__main__":
    sys.exit(main())

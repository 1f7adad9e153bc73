"""A node whose workers are names only:
`python -m infra.lab.bench.fleet.planted_node FILE`, in the node's place.

It lists the tasks of the file. A task that is stopped ends at once. At each ping it writes to
`FILE.counts` how often it was asked for what, and how many tasks its answers held: what a clean-up
costs a launcher.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import msgspec

from infra.node.address import listen
from infra.node.protocol import LaunchTask, NodeReply, NodeRequest, PingNode, TaskList
from infra.node.server import NodeServer
from infra.settings import Settings
from infra.worker_task import LaunchFailed, Task, TaskExit


class PlantedSupervisor:
    def __init__(self, tasks: list[Task]) -> None:
        self.log = secrets.token_hex(6)
        self._tasks = {task.task_id: task for task in tasks}
        self._by_worker: dict[str, list[Task]] = defaultdict(list)
        for task in tasks:
            self._by_worker[task.worker_id].append(task)
        self._ends: list[TaskExit] = []
        self._news = asyncio.Event()

    def tasks(self) -> list[Task]:
        return list(self._tasks.values())

    def is_running(self, task_id: str) -> bool:
        return task_id in self._tasks

    def tasks_of(self, worker_id: str) -> list[Task]:
        return [task for task in self._by_worker.get(worker_id, ()) if task.task_id in self._tasks]

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
        """Stops nothing. A stack that starts ends the workers of an earlier run by this; these
        belong to nobody else."""
        return 0

    async def wait_for_exit(self, timeout: float) -> None:
        try:
            await asyncio.wait_for(self._news.wait(), timeout)
        except TimeoutError:
            return

    def exits_after(self, number: int, limit: int = 100) -> list[tuple[int, TaskExit]]:
        return list(enumerate(self._ends[number : number + limit], number + 1))


class CountingNodeServer(NodeServer):
    def __init__(self, supervisor: PlantedSupervisor, counts: Path) -> None:
        super().__init__(supervisor, supervisor, limits="none")
        self._path = counts
        self._counts: Counter[str] = Counter()

    async def reply_to(self, request: NodeRequest) -> NodeReply:
        if isinstance(request, PingNode):
            self._path.write_bytes(msgspec.json.encode(self._counts))
            return await super().reply_to(request)
        reply = await super().reply_to(request)
        self._counts["requests"] += 1
        self._counts[type(request).__name__] += 1
        if isinstance(reply, TaskList):
            self._counts["tasks"] += len(reply.tasks)
        return reply


async def _serve(settings: Settings, tasks: list[Task], counts: Path) -> None:
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    supervisor = PlantedSupervisor(tasks)
    server = CountingNodeServer(supervisor, counts)
    await server.start(listen(settings.node_socket))
    await ending.wait()
    await server.close()
    settings.node_socket.unlink(missing_ok=True)


def main() -> int:
    planted = Path(sys.argv[1])
    tasks = msgspec.json.decode(planted.read_bytes(), type=list[Task])
    asyncio.run(_serve(Settings(), tasks, planted.with_name(f"{planted.name}.counts")))
    return 0


if __name__ == "__main__":
    sys.exit(main())

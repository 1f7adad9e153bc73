"""Keeps simulated workers as the node's keeper keeps processes, and remembers how each of them ended."""

from __future__ import annotations

import asyncio
import secrets
import time

import msgspec
import structlog

from infra import tasks
from infra.bench.simulated.habits import Habits
from infra.bench.simulated.link import Link
from infra.bench.simulated.renewals import Renewals
from infra.bench.simulated.worker import SimulatedWorker
from infra.launchers.port import LaunchFailed, Task, TaskExit
from infra.node import ends
from infra.node.protocol import Launch
from infra.node.register import Entry
from worker_runtime.protocol.exit_codes import ExitCode

log = structlog.get_logger()


class _Kept:
    """One worker that runs."""

    def __init__(self, entry: Entry, worker: SimulatedWorker) -> None:
        self.entry = entry
        self.worker = worker
        self.ended = asyncio.Event()
        self.stop_reason: str | None = None


class SimulatedKeeper:
    """Belongs to one event loop. Its log of ends lives as long as the process."""

    def __init__(self, link: Link, habits: Habits) -> None:
        self.log = secrets.token_hex(6)
        self._link = link
        self._habits = habits
        self._renewals = Renewals(link)
        self._by_token: dict[str, Task] = {}
        self._kept: dict[str, _Kept] = {}
        self._names: set[str] = set()
        self._ends: list[TaskExit] = []
        self._news = asyncio.Event()
        self._background = {asyncio.create_task(self._renewals.run())}

    def tasks(self) -> list[Task]:
        return [one.entry.task for one in self._kept.values()]

    def launch(self, request: Launch) -> Task:
        """Starts one worker, or returns the one that this token has started. Raises `LaunchFailed`."""
        known = self._by_token.get(request.token)
        if known is not None:
            return known
        config = request.config
        if config.worker_id in self._names:
            raise LaunchFailed(f"worker {config.worker_id} runs already, launched by another token")
        entry = Entry(
            task_id=f"task-{secrets.token_hex(8)}",
            token=request.token,
            worker_id=config.worker_id,
            pool=config.pool,
            version=config.version,
            launched_at=time.time(),
            grace=config.shutdown_timeout,
        )
        config = msgspec.structs.replace(config, task_id=entry.task_id)
        one = _Kept(entry, SimulatedWorker(config, self._link, self._habits))
        self._by_token[request.token] = entry.task
        self._kept[entry.task_id] = one
        self._names.add(config.worker_id)
        living = asyncio.create_task(self._live(one))
        self._background.add(living)
        living.add_done_callback(self._background.discard)
        return entry.task

    async def _live(self, one: _Kept) -> None:
        self._renewals.add(one.worker)
        try:
            code = await one.worker.run()
        except Exception:  # one worker's boundary: it ends as a process does that nobody caught
            log.exception("simulated.worker_crashed", worker=one.entry.worker_id)
            code = ExitCode.INTERNAL
        self._renewals.remove(one.worker)
        self._ends.append(ends.told(one.entry, code=int(code), stop_reason=one.stop_reason))
        del self._kept[one.entry.task_id]
        self._names.discard(one.entry.worker_id)
        one.ended.set()
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def stop(self, task_id: str, reason: str, grace: float | None = None) -> int:
        """Ends one worker: 1, or 0 for a task that does not run. They always end well within `grace`."""
        one = self._kept.get(task_id)
        if one is None:
            return 0
        one.stop_reason = one.stop_reason or reason
        one.worker.stop(ExitCode.OK, reason)
        await one.ended.wait()
        return 1

    async def stop_all(self, reason: str, grace: float | None = None) -> int:
        """Ends all workers at once."""
        return sum(await asyncio.gather(*(self.stop(task_id, reason) for task_id in list(self._kept))))

    async def news(self, timeout: float) -> None:
        """Returns when something has ended since the call, or after `timeout` seconds."""
        try:
            await asyncio.wait_for(self._news.wait(), timeout)
        except TimeoutError:
            return

    def ends_after(self, number: int, limit: int = 100) -> list[tuple[int, TaskExit]]:
        """Ends with their numbers, which begin at 1."""
        return list(enumerate(self._ends[number : number + limit], number + 1))

    async def close(self) -> None:
        await tasks.end(*self._background)

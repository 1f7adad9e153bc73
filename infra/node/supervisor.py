"""`NodeSupervisor` starts, stops and adopts the workers of this host, and sees each of them end."""

import asyncio
import contextlib
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Coroutine, Sequence
from dataclasses import InitVar, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import structlog

from infra import processes, tasks
from infra.node import worker
from infra.node.accounts import UserIds
from infra.node.protocol import KILL_CONFIRM_TIMEOUT_S, LaunchTask
from infra.node.register import NodeEntry, NodeRegister
from infra.node.worker import LOG_CHECK_INTERVAL_S, WorkerLogs, WorkerProcess
from infra.worker_task import (
    HOST_RESTARTED,
    MAX_GRACE_S,
    LaunchFailed,
    StopFailed,
    Task,
    TaskExit,
    check_worker_id,
    stop_grace,
    worker_exit,
)
from worker_runtime.process.cgroup import MemoryGroup, MemoryGroups

_log = structlog.get_logger()

#: Bytes. A pipe holds 64 KiB that nobody has read yet, so writing the config never blocks.
_MAX_CONFIG_BYTES = 60 * 1024
#: Seconds between two attempts to record an exit on a full disk,
#: and between two log lines about it.
_RECORD_RETRY_INTERVAL_S = 1.0
_COMPLAINT_INTERVAL_S = 10.0
#: Seconds that an ending node waits for exits that it is just confirming.
_LAST_WORK_TIMEOUT_S = 1.0


@dataclass(eq=False, repr=False)
class NodeSupervisor:
    """Not thread-safe: all methods are called in one event loop."""

    folder: InitVar[Path]
    register: NodeRegister
    groups: MemoryGroups | None
    command: Sequence[str]
    user_ids: UserIds | None = None

    def __post_init__(self, folder: Path) -> None:
        self._runs = folder / "run"
        self._logs = WorkerLogs(folder / "logs")
        self._boot_id = processes.boot_id()
        self._workers: dict[str, WorkerProcess] = {}
        #: The task of each running worker: a worker runs once on a host.
        self._task_ids: dict[str, str] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._exited = asyncio.Event()

    def tasks(self) -> list[Task]:
        return [worker.entry.task for worker in self._workers.values()]

    def is_running(self, task_id: str) -> bool:
        return task_id in self._workers

    def tasks_of(self, worker_id: str) -> list[Task]:
        """Return the running tasks of one worker: one or none."""
        task_id = self._task_ids.get(worker_id)
        return [] if task_id is None else [self._workers[task_id].entry.task]

    def launch(self, request: LaunchTask) -> Task:
        """Starts one worker, or returns the one that this token has started. Raises `LaunchFailed`.

        Not a coroutine: two launches cannot interleave, so a token never starts two.
        """
        try:
            known = self.register.by_token(request.token)
            if known is not None and known.state != "intended":
                return known.task
            # An attempt that failed with the disk full: it never had a config.
            if known is not None:
                self.register.forget_intent(known.task_id)
            entry = self._checked_entry(request)
            self.register.record_intent(entry)
        except sqlite3.Error as error:
            raise LaunchFailed(f"the node cannot write its register: {error}") from None
        try:
            started = self._start(entry, request)
        except (OSError, sqlite3.Error, LaunchFailed) as error:
            with contextlib.suppress(sqlite3.Error):
                self.register.forget_intent(entry.task_id)
            shutil.rmtree(self._runs / entry.task_id, ignore_errors=True)
            raise LaunchFailed(f"worker {entry.worker_id}: {error}") from None
        self._watch_worker(started)
        _log.info("node.launched", worker=entry.worker_id, task=entry.task_id, pid=started.pid)
        return entry.task

    def _checked_entry(self, request: LaunchTask) -> NodeEntry:
        config = request.config
        check_worker_id(config.worker_id)
        if not request.token or request.memory_hard <= 0:
            raise LaunchFailed("a launch needs a token and a memory limit above zero")
        if config.worker_id in self._task_ids:
            raise LaunchFailed(f"worker {config.worker_id} runs already, launched by another token")
        task_id = f"task-{secrets.token_hex(8)}"
        return NodeEntry(
            task_id=task_id,
            token=request.token,
            worker_id=config.worker_id,
            pool=config.pool,
            version=config.version,
            launched_at=time.time(),
            grace=stop_grace(config.shutdown_timeout),
            cgroup=str(self.groups.path(task_id)) if self.groups else "",
        )

    def _start(self, entry: NodeEntry, request: LaunchTask) -> WorkerProcess:
        config = msgspec.json.encode(msgspec.structs.replace(request.config, task_id=entry.task_id))
        if len(config) > _MAX_CONFIG_BYTES:
            raise OSError(f"a config of {len(config)} bytes is more than {_MAX_CONFIG_BYTES}")
        with contextlib.ExitStack() as undo:
            group = None
            if self.groups is not None:
                group = self.groups.create(
                    entry.task_id, soft=request.memory_soft, hard=request.memory_hard
                )
                undo.callback(group.remove)
            output = self._logs.open(entry.worker_id)
            try:
                home = self._runs / entry.task_id
                user = self.user_ids.take() if self.user_ids else None
                child = worker.spawn_worker(
                    self.command, entry, home=home, output=output, user=user
                )
            finally:
                os.close(output)
            undo.callback(worker.discard_child, child)
            if group is not None:
                # It does nothing before it has its config, so the limit is in time.
                group.add(child.pid)
            pidfd = os.pidfd_open(child.pid)
            undo.callback(os.close, pidfd)
            entry = replace(
                entry,
                state="running",
                boot_id=self._boot_id,
                pid=child.pid,
                started=processes.start_time(child.pid),
            )
            self.register.record_running(entry)
            undo.pop_all()
        worker.hand_over_config(child, config)
        return WorkerProcess(entry=entry, pidfd=pidfd, group=group, child=child)

    def adopt(self) -> None:
        """Takes over the workers of an earlier node: once, before the first request."""
        for entry in self.register.in_state("intended"):
            for process in processes.find_by_argument(entry.task_id):
                # Its node died before sending its config: it can never work.
                if process.pid == process.session:
                    processes.kill_group(process.pid, process.started)
            self.register.forget_intent(entry.task_id)
        for entry in self.register.in_state("running"):
            adopted = worker.adopt_worker(entry, self._boot_id)
            if adopted is None:
                self.register.record_exit(
                    worker_exit(
                        entry.task_id,
                        entry.worker_id,
                        code=None,
                        at=time.time(),
                        reason=HOST_RESTARTED,
                    )
                )
                continue
            self._watch_worker(adopted)
            _log.info(
                "node.adopted",
                worker=entry.worker_id,
                task=entry.task_id,
                pid=entry.pid,
                running=adopted.pidfd is not None,
            )
            if adopted.stop_reason is not None:
                self._in_background(self._resume_stop(adopted))
        self._clear_leftovers()

    def _clear_leftovers(self) -> None:
        """Removes folders and cgroups of workers whose node died before it could remove them."""
        groups = {group.path.name: group for group in self.groups.existing()} if self.groups else {}
        folders = {path.name for path in self._runs.iterdir()} if self._runs.exists() else set()
        for task_id in (groups.keys() | folders) - self._workers.keys():
            self._in_background(self._remove_leftovers(task_id, groups.get(task_id)))

    async def _resume_stop(self, worker: WorkerProcess) -> None:
        try:
            await self.stop(worker.entry.task_id, worker.stop_reason or "")
        except StopFailed as error:
            _log.error("node.stop_failed", task=worker.entry.task_id, detail=error.detail)

    async def stop(self, task_id: str, reason: str, grace: float | None = None) -> int:
        """Ends one worker: SIGTERM, and after `grace` seconds SIGKILL for all its processes.

        Returns 1 once its end is confirmed, 0 for a task that does not run. Raises `StopFailed`.
        """
        process = self._workers.get(task_id)
        if process is None:
            return 0
        if process.stop_reason is None:
            process.stop_reason = reason
            try:
                self.register.record_stopping(task_id, reason)
            except sqlite3.Error as error:  # the stop continues; a restarted node does not know why
                _log.warning("node.register_failed", task=task_id, detail=str(error))
            _log.info("node.stopping", worker=process.entry.worker_id, task=task_id, reason=reason)
        process.terminate()
        if await _set_within(
            process.ended, min(process.entry.grace if grace is None else grace, MAX_GRACE_S)
        ):
            return 1
        process.forced = True
        process.kill()
        _log.warning("node.killed", worker=process.entry.worker_id, task=task_id)
        if not await _set_within(process.ended, KILL_CONFIRM_TIMEOUT_S):
            raise StopFailed(
                f"task {task_id} was killed {KILL_CONFIRM_TIMEOUT_S:.0f} s ago and has not ended"
            )
        return 1

    async def stop_all(self, reason: str, grace: float | None = None) -> int:
        """Ends all workers at once. Raises `StopFailed` if one of them could not be confirmed."""
        results = await asyncio.gather(
            *(self.stop(task_id, reason, grace) for task_id in list(self._workers)),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return sum(result for result in results if isinstance(result, int))

    async def wait_for_exit(self, timeout: float) -> None:
        """Returns when a worker has ended since the call, or after `timeout` seconds."""
        await _set_within(self._exited, timeout)

    def _watch_worker(self, worker: WorkerProcess) -> None:
        self._workers[worker.entry.task_id] = worker
        self._task_ids[worker.entry.worker_id] = worker.entry.task_id
        if worker.pidfd is None:
            self._in_background(self._finish(worker))
        else:
            asyncio.get_running_loop().add_reader(worker.pidfd, self._main_ended, worker)

    def _main_ended(self, worker: WorkerProcess) -> None:
        if worker.pidfd is not None:
            asyncio.get_running_loop().remove_reader(worker.pidfd)
        self._in_background(self._finish(worker))

    async def _finish(self, worker: WorkerProcess) -> None:
        """Ends and confirms the rest of a worker whose
        main process has ended, and records its exit."""
        worker.kill()  # before the reaping: until then no other group can get its number
        code = worker.reap()
        await self._wait_until_none_left(worker)
        oom_kills = worker.group.oom_kills() if worker.group else 0
        await self._record(
            worker_exit(
                worker.entry.task_id,
                worker.entry.worker_id,
                code=code,
                at=time.time(),
                stop_reason=worker.stop_reason,
                forced=worker.forced,
                oom_killed=oom_kills > 0,
                seen=worker.pidfd is not None,
                detail={"oom_kills": str(oom_kills)} if oom_kills else None,
            )
        )
        self._workers.pop(worker.entry.task_id, None)
        if self._task_ids.get(worker.entry.worker_id) == worker.entry.task_id:
            del self._task_ids[worker.entry.worker_id]
        worker.close()
        worker.ended.set()
        exited, self._exited = self._exited, asyncio.Event()
        exited.set()
        await self._remove_leftovers(worker.entry.task_id, worker.group)

    async def _wait_until_none_left(self, worker: WorkerProcess) -> None:
        """Waits until no process of the worker is left, and kills those forked meanwhile."""
        delay, complaint = 0.001, time.monotonic() + _COMPLAINT_INTERVAL_S
        while worker.remaining():
            worker.kill()
            await asyncio.sleep(delay)
            delay = min(delay * 2, 0.1)
            if time.monotonic() > complaint:
                complaint += _COMPLAINT_INTERVAL_S
                _log.error(
                    "node.processes_remain", task=worker.entry.task_id, pids=worker.remaining()
                )

    async def _record(self, end: TaskExit) -> None:
        """Records an exit before anyone hears of it.
        On a full disk it retries until there is room."""
        while True:
            try:
                number = self.register.record_exit(end)
            except sqlite3.Error as error:
                _log.error("node.register_failed", task=end.task_id, detail=str(error))
                await asyncio.sleep(_RECORD_RETRY_INTERVAL_S)
                continue
            _log.info(
                "node.ended",
                number=number,
                worker=end.worker_id,
                task=end.task_id,
                exit_code=end.exit_code,
                reason=end.reason,
                **end.detail,
            )
            return

    async def _remove_leftovers(self, task_id: str, group: MemoryGroup | None) -> None:
        """Removes the folder and the cgroup of an ended worker."""
        shutil.rmtree(self._runs / task_id, ignore_errors=True)
        for _ in range(40):  # the kernel frees a group some milliseconds after its last process
            if group is None or group.remove():
                return
            await asyncio.sleep(0.05)
        _log.warning("node.group_left", task=task_id)

    async def sweep_logs(self) -> None:
        """Keeps the workers' logs bounded; never returns."""
        while True:
            try:
                self._logs.sweep({process.entry.worker_id for process in self._workers.values()})
            except OSError as error:
                _log.warning("node.log_sweep_failed", detail=str(error))
            await asyncio.sleep(LOG_CHECK_INTERVAL_S)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Stops watching the workers; they run on."""
        loop = asyncio.get_running_loop()
        for process in self._workers.values():
            if process.pidfd is not None:
                loop.remove_reader(process.pidfd)
        if self._background:
            # Exits under way are recorded with their exit code.
            await asyncio.wait(self._background, timeout=_LAST_WORK_TIMEOUT_S)
        await tasks.cancel_tasks(*self._background)


async def _set_within(event: asyncio.Event, timeout: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), max(timeout, 0))
    return event.is_set()

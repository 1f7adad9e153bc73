"""Workers of this host, through what serves the node's socket: the node (`python -m infra.node`),
which keeps them as processes, or the container launcher (`python -m infra.launchers.served`)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from infra.node import protocol
from infra.node.address import reachable
from infra.worker_task import MAX_GRACE_S, LauncherUnreachable, LaunchSpec, Task, TaskExit
from worker_runtime.protocol.errors import BerthError, MalformedMessage, from_code
from worker_runtime.protocol.messages import decode, encode

#: Seconds. A launch takes 5 ms of the node's time; the rest is for a host that is very busy.
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
#: Seconds of silence after which a subscribed node counts as lost: three beats.
MAX_SILENCE_S = 3 * protocol.BEAT_INTERVAL_S

_log = structlog.get_logger()

R = TypeVar("R", bound=msgspec.Struct)


@dataclass(eq=False, repr=False)
class ProcessLauncher:
    """Implements `Launcher`. Each call opens its own connection, so none can be stale."""

    path: Path
    _: KW_ONLY
    answer_timeout: float = ANSWER_TIMEOUT_S
    silence: float = MAX_SILENCE_S
    #: Seconds a worker gets to end; None: what its own config says.
    grace: float | None = None
    _position: str = field(default="", init=False)

    async def launch(self, spec: LaunchSpec, token: str) -> Task:
        request = protocol.LaunchTask(token=token, **msgspec.structs.asdict(spec))
        return (await self._ask(request, protocol.TaskLaunched)).task

    async def stop(self, task_id: str, reason: str, *, grace: float | None = None) -> bool:
        grace = self.grace if grace is None else grace
        request = protocol.StopTask(task_id=task_id, reason=reason, grace=grace)
        await self._ask(request, protocol.TasksStopped, extra=_longest_stop(grace))
        return True  # the node knows every task of its host

    async def is_running(self, task_id: str) -> bool | None:
        try:
            return (
                await self._ask(protocol.CheckTask(task_id=task_id), protocol.TaskChecked)
            ).running
        except MalformedMessage:
            # A node of 0.1, which knows no such question: it lists what runs now.
            return any(task.task_id == task_id for task in await self.list())

    async def find_tasks(self, worker_id: str) -> Sequence[Task]:
        try:
            return (
                await self._ask(protocol.FindTasks(worker_id=worker_id), protocol.TaskList)
            ).tasks
        except MalformedMessage:  # as above
            return [task for task in await self.list() if task.worker_id == worker_id]

    async def stop_all(self, reason: str) -> int:
        """Ends all workers of the host, for `berth up`; returns how many there were."""
        request = protocol.StopAllTasks(reason=reason, grace=self.grace)
        return (
            await self._ask(request, protocol.TasksStopped, extra=_longest_stop(self.grace))
        ).count

    async def list(self) -> list[Task]:
        return (await self._ask(protocol.ListTasks(), protocol.TaskList)).tasks

    async def ping(self) -> protocol.NodeStatus:
        """Returns the node's pid, number of workers, and memory limits."""
        return await self._ask(protocol.PingNode(), protocol.NodeStatus)

    async def exits(self, after: str = "") -> AsyncIterator[TaskExit]:
        log, _, number = (after or self._position).rpartition(":")
        watch = protocol.WatchExits(log=log, after=int(number) if number.isdigit() else 0)
        async with self._connected() as (reader, writer):
            await self._send(writer, watch)
            while True:
                reply = await self._receive(reader, self.silence)
                if isinstance(reply, protocol.TaskEnded):
                    position = f"{reply.log}:{reply.number}"
                    yield replace(reply.exit, detail={**reply.exit.detail, "position": position})
                    self._position = position
                elif isinstance(reply, protocol.Beat):
                    for kind, detail, count in reply.errors:
                        _log.error("node_error", kind=kind, detail=detail, count=count)
                else:
                    raise self._unexpected(reply)

    async def close(self) -> None:
        """Does nothing: no connection stays open between two calls."""

    async def _ask(self, request: msgspec.Struct, answer_type: type[R], extra: float = 0.0) -> R:
        async with self._connected() as (reader, writer):
            await self._send(writer, request)
            reply = await self._receive(reader, self.answer_timeout + extra)
        if not isinstance(reply, answer_type):
            raise self._unexpected(reply)
        return reply

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Raises `LauncherUnreachable` for what goes wrong on the connection."""
        try:
            with reachable(self.path) as short:
                opening = asyncio.open_unix_connection(short, limit=protocol.MAX_REPLY_BYTES)
                reader, writer = await asyncio.wait_for(opening, CONNECT_TIMEOUT_S)
            try:
                yield reader, writer
            finally:
                writer.close()
        except (
            OSError,
            EOFError,
            TimeoutError,
            asyncio.LimitOverrunError,
            MalformedMessage,
        ) as error:
            reason = str(error) or type(error).__name__
            raise LauncherUnreachable(
                f"the node at {self.path} does not answer: {reason}"
            ) from None

    async def _send(self, writer: asyncio.StreamWriter, request: msgspec.Struct) -> None:
        writer.write(encode(request) + b"\n")
        await asyncio.wait_for(writer.drain(), self.answer_timeout)

    async def _receive(self, reader: asyncio.StreamReader, timeout: float) -> protocol.NodeReply:
        line = await asyncio.wait_for(reader.readuntil(b"\n"), timeout)
        return decode(line, protocol.NodeReply, limit=protocol.MAX_REPLY_BYTES)

    def _unexpected(self, reply: protocol.NodeReply) -> BerthError:
        if isinstance(reply, protocol.NodeRefused):
            return from_code(reply.code, reply.detail)
        return LauncherUnreachable(f"the node at {self.path} answered {type(reply).__name__}")


def _longest_stop(grace: float | None) -> float:
    return (MAX_GRACE_S if grace is None else grace) + protocol.KILL_CONFIRM_TIMEOUT_S

"""Serves the node's socket to many clients at once, each in order.

`SocketServer` is the socket and its rules; `NodeServer` answers for a node's supervisor, and
`infra.launchers.served` for the container launcher.
"""

import asyncio
import contextlib
import os
import socket
import sqlite3
from typing import Protocol

import msgspec
import structlog

from infra import tasks
from infra.alerts.errors import collector
from infra.node import protocol
from infra.worker_task import Task, TaskExit
from worker_runtime.protocol.errors import BerthError, MalformedMessage
from worker_runtime.protocol.messages import decode, encode

_log = structlog.get_logger()

#: Seconds without a request after which a connection is closed.
_IDLE_TIMEOUT_S = 300.0
#: Connections at once; an orchestrator needs two or three.
_MAX_CONNECTIONS = 200
#: Seconds a client may take to read what it asked for.
_WRITE_TIMEOUT_S = 10.0


class SupervisorPort(Protocol):
    """What the server needs of `NodeSupervisor`, or of a simulated one. May raise `BerthError`."""

    def launch(self, request: protocol.LaunchTask) -> Task: ...

    async def stop(self, task_id: str, reason: str, grace: float | None = None) -> int: ...

    async def stop_all(self, reason: str, grace: float | None = None) -> int: ...

    def tasks(self) -> list[Task]: ...

    def is_running(self, task_id: str) -> bool: ...

    def tasks_of(self, worker_id: str) -> list[Task]:
        """Return the running tasks of one worker without going through those of all others."""

    async def wait_for_exit(self, timeout: float) -> None:
        """Returns when a worker has ended since the call, or after `timeout` seconds."""


class ExitLog(Protocol):
    """What the server needs of `NodeRegister`, or of a simulated supervisor."""

    log: str

    def exits_after(self, number: int, limit: int = 100) -> list[tuple[int, TaskExit]]: ...


class SocketServer:
    """Reads requests and sends what a subclass answers. A `BerthError` becomes `NodeRefused`."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamReader] = {}

    @property
    def has_clients(self) -> bool:
        """Returns True if a client is connected. An orchestrator that watches for exits always
        is."""
        return any(not reader.at_eof() for reader in self._connections.values())

    async def reply_to(self, request: protocol.NodeRequest) -> protocol.NodeReply:
        raise NotImplementedError

    async def send_exits(self, request: protocol.WatchExits, writer: asyncio.StreamWriter) -> None:
        """Sends exits in order, and a beat while there are none, until the client goes away."""
        raise NotImplementedError

    async def start(self, listening: socket.socket) -> None:
        self._server = await asyncio.start_unix_server(
            self._accept, sock=listening, limit=protocol.MAX_LINE_BYTES
        )

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await tasks.cancel_tasks(*self._connections)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections[task] = reader
        task.add_done_callback(self._connections.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if len(self._connections) > _MAX_CONNECTIONS:
                await send(
                    writer, protocol.NodeRefused(code="NODE_BUSY", detail="too many connections")
                )
                return
            while line := await _read_line(reader):
                await self._answer(line, writer)
        except MalformedMessage as error:  # nobody knows where the next request begins
            with contextlib.suppress(OSError, TimeoutError):
                await send(writer, protocol.NodeRefused(code=error.code, detail=error.detail))
        except (OSError, TimeoutError):
            pass  # the client went away, or has fallen silent
        finally:
            writer.close()

    async def _answer(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        try:
            request: protocol.NodeRequest = decode(line, protocol.NodeRequest)
            if isinstance(request, protocol.WatchExits):
                await self.send_exits(request, writer)
                return
            reply: protocol.NodeReply = await self.reply_to(request)
        except BerthError as error:
            reply = protocol.NodeRefused(code=error.code, detail=error.detail)
        except (OSError, TimeoutError, asyncio.CancelledError):
            raise
        except Exception as error:  # one request's failure is not the node's
            _log.exception("node.request_failed")
            reply = protocol.NodeRefused(code=BerthError.code, detail=type(error).__name__)
        await send(writer, reply)


class NodeServer(SocketServer):
    """Serves one supervisor. `limits` is what `NodeStatus` says about memory limits."""

    def __init__(self, supervisor: SupervisorPort, register: ExitLog, *, limits: str) -> None:
        super().__init__()
        self._supervisor = supervisor
        self._register = register
        self._limits = limits

    async def reply_to(self, request: protocol.NodeRequest) -> protocol.NodeReply:
        match request:
            case protocol.LaunchTask():
                return protocol.TaskLaunched(task=self._supervisor.launch(request))
            case protocol.StopTask():
                count = await self._supervisor.stop(request.task_id, request.reason, request.grace)
                return protocol.TasksStopped(count=count)
            case protocol.StopAllTasks():
                return protocol.TasksStopped(
                    count=await self._supervisor.stop_all(request.reason, request.grace)
                )
            case protocol.ListTasks():
                return protocol.TaskList(tasks=self._supervisor.tasks())
            case protocol.CheckTask():
                return protocol.TaskChecked(running=self._supervisor.is_running(request.task_id))
            case protocol.FindTasks():
                return protocol.TaskList(tasks=self._supervisor.tasks_of(request.worker_id))
            case protocol.PingNode() | protocol.WatchExits():
                return protocol.NodeStatus(
                    pid=os.getpid(),
                    log=self._register.log,
                    workers=len(self._supervisor.tasks()),
                    limits=self._limits,
                )

    async def send_exits(self, request: protocol.WatchExits, writer: asyncio.StreamWriter) -> None:
        log = self._register.log
        number = request.after if request.log == log else 0
        await send(writer, beat())  # the client is subscribed
        while True:
            try:
                missed = self._register.exits_after(number)
            except sqlite3.Error as error:
                raise BerthError(f"the node cannot read its register: {error}") from None
            for number, exit_ in missed:
                await send(writer, protocol.TaskEnded(log=log, number=number, exit=exit_))
            if not missed:
                await self._supervisor.wait_for_exit(protocol.BEAT_INTERVAL_S)
                if not self._register.exits_after(number, limit=1):
                    await send(writer, beat())


def beat() -> protocol.Beat:
    """Returns a sign of life, with this process's errors since the last one."""
    return protocol.Beat(errors=[(*report, count) for report, count in collector.take().items()])


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """Reads one line; empty at the end. Raises `MalformedMessage` for an endless or incomplete
    one."""
    try:
        return await asyncio.wait_for(reader.readuntil(b"\n"), _IDLE_TIMEOUT_S)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise MalformedMessage("the last request does not end with a newline") from None
        return b""
    except asyncio.LimitOverrunError:
        raise MalformedMessage(f"a request has at most {protocol.MAX_LINE_BYTES} bytes") from None


async def send(writer: asyncio.StreamWriter, reply: msgspec.Struct) -> None:
    """Raises OSError or TimeoutError when the client is gone or does not read."""
    writer.write(encode(reply) + b"\n")
    await asyncio.wait_for(writer.drain(), _WRITE_TIMEOUT_S)

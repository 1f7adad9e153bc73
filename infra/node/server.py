"""`NodeServer`: serves the node's socket to many clients at once, each in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sqlite3
from typing import Protocol

import msgspec
import structlog

from infra import tasks
from infra.node.protocol import (
    BEAT_PERIOD,
    MAX_LINE,
    Beat,
    LaunchTask,
    ListTasks,
    NodeRefused,
    NodeReply,
    NodeRequest,
    NodeStatus,
    PingNode,
    StopAllTasks,
    StopTask,
    TaskEnded,
    TaskLaunched,
    TaskList,
    TasksStopped,
    WatchExits,
)
from infra.worker_task import Task, TaskExit
from worker_runtime.protocol.errors import BerthError, MalformedMessage
from worker_runtime.protocol.messages import decode, encode

_log = structlog.get_logger()

#: Seconds without a request after which a connection is closed.
_IDLE = 300.0
#: Connections at once; an orchestrator needs two or three.
_CONNECTIONS_MAX = 200
#: Seconds a client may take to read what it asked for.
_WRITE_TIMEOUT = 10.0


class KeeperPort(Protocol):
    """What the server needs of `Keeper`, or of a simulated one. May raise `BerthError`."""

    def launch(self, request: LaunchTask) -> Task: ...

    async def stop(self, task_id: str, reason: str, grace: float | None = None) -> int: ...

    async def stop_all(self, reason: str, grace: float | None = None) -> int: ...

    def tasks(self) -> list[Task]: ...

    async def wait_for_exit(self, timeout: float) -> None:
        """Returns when a worker has ended since the call, or after `timeout` seconds."""
        ...


class ExitLog(Protocol):
    """What the server needs of `NodeRegister`, or of a simulated keeper."""

    log: str

    def exits_after(self, number: int, limit: int = 100) -> list[tuple[int, TaskExit]]: ...


class NodeServer:
    """Serves one keeper. `limits` is what `NodeStatus` says about memory limits."""

    def __init__(self, keeper: KeeperPort, register: ExitLog, *, limits: str) -> None:
        self._keeper = keeper
        self._register = register
        self._limits = limits
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, listening: socket.socket) -> None:
        self._server = await asyncio.start_unix_server(self._accept, sock=listening, limit=MAX_LINE)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await tasks.cancel_tasks(*self._connections)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if len(self._connections) > _CONNECTIONS_MAX:
                await _send(writer, NodeRefused(code="NODE_BUSY", detail="too many connections"))
                return
            while line := await _read_line(reader):
                await self._answer(line, writer)
        except MalformedMessage as error:  # nobody knows where the next request begins
            with contextlib.suppress(OSError, TimeoutError):
                await _send(writer, NodeRefused(code=error.code, detail=error.detail))
        except (OSError, TimeoutError):
            pass  # the client went away, or has fallen silent
        finally:
            writer.close()

    async def _answer(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        try:
            request: NodeRequest = decode(line, NodeRequest)
            if isinstance(request, WatchExits):
                await self._send_exits(request, writer)
                return
            reply: NodeReply = await self._reply_to(request)
        except BerthError as error:
            reply = NodeRefused(code=error.code, detail=error.detail)
        except (OSError, TimeoutError, asyncio.CancelledError):
            raise
        except Exception as error:  # one request's failure is not the node's
            _log.exception("node.request_failed")
            reply = NodeRefused(code=BerthError.code, detail=type(error).__name__)
        await _send(writer, reply)

    async def _reply_to(self, request: NodeRequest) -> NodeReply:
        match request:
            case LaunchTask():
                return TaskLaunched(task=self._keeper.launch(request))
            case StopTask():
                count = await self._keeper.stop(request.task_id, request.reason, request.grace)
                return TasksStopped(count=count)
            case StopAllTasks():
                return TasksStopped(count=await self._keeper.stop_all(request.reason, request.grace))
            case ListTasks():
                return TaskList(tasks=self._keeper.tasks())
            case PingNode() | WatchExits():
                return NodeStatus(
                    pid=os.getpid(),
                    log=self._register.log,
                    workers=len(self._keeper.tasks()),
                    limits=self._limits,
                )

    async def _send_exits(self, request: WatchExits, writer: asyncio.StreamWriter) -> None:
        """Sends exits in order, and a beat while there are none, until the client goes away."""
        log = self._register.log
        number = request.after if request.log == log else 0
        await _send(writer, Beat())  # the client is subscribed
        while True:
            try:
                missed = self._register.exits_after(number)
            except sqlite3.Error as error:
                raise BerthError(f"the node cannot read its register: {error}") from None
            for number, exit_ in missed:
                await _send(writer, TaskEnded(log=log, number=number, exit=exit_))
            if not missed:
                await self._keeper.wait_for_exit(BEAT_PERIOD)
                if not self._register.exits_after(number, limit=1):
                    await _send(writer, Beat())


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """One line; empty at the end. Raises `MalformedMessage` for an endless or incomplete one."""
    try:
        return await asyncio.wait_for(reader.readuntil(b"\n"), _IDLE)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise MalformedMessage("the last request does not end with a newline") from None
        return b""
    except asyncio.LimitOverrunError:
        raise MalformedMessage(f"a request has at most {MAX_LINE} bytes") from None


async def _send(writer: asyncio.StreamWriter, reply: msgspec.Struct) -> None:
    writer.write(encode(reply) + b"\n")
    await asyncio.wait_for(writer.drain(), _WRITE_TIMEOUT)

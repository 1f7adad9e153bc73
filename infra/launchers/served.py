"""The container launcher as a process of its own: `python -m infra.launchers.served`.

It alone holds the Docker engine's socket, which is as good as root on its host. Others reach it by
a Unix socket with the node's protocol, so all that they can ask for is: launch a worker of this
fleet from an image of one repository, stop one, list them, hear of their ends. What a container may
do (mounts, rights, network) is decided here and stands in no request.

Workers are containers of their own and outlive it. Only when it is stopped after all orchestrators,
as `docker compose down` does it, it ends them: nothing that could use or replace them runs then.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys

import structlog

from infra import tasks
from infra.launchers.port import Launcher, stop_all
from infra.launchers.registry import create_docker_launcher
from infra.log import configure_log
from infra.node import protocol
from infra.node.address import listen, take_lock
from infra.node.server import SocketServer, beat, send
from infra.processes import forbid_core_files
from infra.setting_names import log_unread_variables
from infra.settings import Settings, read_settings
from infra.worker_task import LaunchFailed
from worker_runtime.protocol.errors import BerthError

#: The position before the first exit, for a client that has none.
_BEGINNING = "0:0"

_log = structlog.get_logger()


class LauncherServer(SocketServer):
    """Serves one launcher. `image` is its own: a launch may name others of this name, by digest."""

    def __init__(self, launcher: Launcher, *, image: str) -> None:
        super().__init__()
        self._launcher = launcher
        self._name = re.split(r"@|:(?!.*/)", image, maxsplit=1)[0]  # without tag and digest

    async def reply_to(self, request: protocol.NodeRequest) -> protocol.NodeReply:
        match request:
            case protocol.LaunchTask():
                if request.image and not re.fullmatch(
                    re.escape(self._name) + "@sha256:[0-9a-f]{64}", request.image
                ):
                    raise LaunchFailed(f"launched here are images of {self._name} only, by digest")
                return protocol.TaskLaunched(
                    task=await self._launcher.launch(request, request.token)
                )
            case protocol.StopTask():
                await self._launcher.stop(request.task_id, request.reason, grace=request.grace)
                return protocol.TasksStopped(count=1)
            case protocol.StopAllTasks():
                count = await stop_all(self._launcher, request.reason, request.grace)
                return protocol.TasksStopped(count=count)
            case protocol.ListTasks():
                return protocol.TaskList(tasks=await self._launcher.list())
            case protocol.CheckTask():
                return protocol.TaskChecked(
                    running=await self._launcher.is_running(request.task_id)
                )
            case protocol.FindTasks():
                return protocol.TaskList(
                    tasks=list(await self._launcher.find_tasks(request.worker_id))
                )
            case _:
                running = await self._launcher.list()
                return protocol.NodeStatus(
                    pid=os.getpid(), log="", workers=len(running), limits="containers"
                )

    async def send_exits(self, request: protocol.WatchExits, writer: asyncio.StreamWriter) -> None:
        """Sends the exits. The launcher's position takes the place of the log; the number says
        nothing."""
        exits = self._launcher.exits(request.log or _BEGINNING)
        coming = asyncio.ensure_future(anext(exits))
        try:
            await send(writer, beat())  # the client is subscribed
            while True:
                await asyncio.wait({coming}, timeout=protocol.BEAT_INTERVAL_S)
                if not coming.done():
                    await send(writer, beat())
                    continue
                ended = coming.result()
                await send(
                    writer, protocol.TaskEnded(log=ended.detail["position"], number=0, exit=ended)
                )
                coming = asyncio.ensure_future(anext(exits))
        finally:
            await tasks.cancel_tasks(coming)


async def _serve(settings: Settings) -> None:
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    async with contextlib.AsyncExitStack() as closing:
        launcher = create_docker_launcher(settings)
        closing.push_async_callback(launcher.close)
        await launcher.require_limits()
        listening = listen(settings.node_socket)
        closing.callback(settings.node_socket.unlink, missing_ok=True)
        closing.callback(listening.close)
        server = LauncherServer(launcher, image=settings.docker_image)
        closing.push_async_callback(server.close)
        await server.start(listening)
        _log.info(
            "launcher.ready", socket=str(settings.node_socket), workers=len(await launcher.list())
        )
        await ending.wait()
        ended = 0
        if not server.has_clients:
            ended = await stop_all(launcher, "the whole system stops")
            await launcher.remove_ended()
        _log.info("launcher.stopped", workers_ended=ended)


def main() -> int:
    forbid_core_files()
    settings = read_settings(Settings)
    configure_log(settings.log_level)
    log_unread_variables()
    try:
        with take_lock(settings.node_socket.with_name(f"{settings.node_socket.name}.lock")):
            asyncio.run(_serve(settings))
    except BerthError as error:
        _log.error("launcher.failed", code=error.code, detail=error.detail)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A client of the Docker Engine API:
what the launcher needs, with time limits and our own errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import aiodocker
import aiohttp
from aiodocker.channel import ChannelSubscriber
from aiodocker.events import DockerEvents
from aiodocker.exceptions import DockerError

from infra import tasks
from infra.worker_task import LauncherUnreachable, LaunchFailed
from worker_runtime.protocol.errors import BerthError

#: Seconds. A launch takes 0.5 s of the daemon's time on 2 idle cores;
#: the rest is for a host that is busy.
ANSWER_TIMEOUT_S = 30.0
#: The status that aiodocker gives to a daemon which it cannot reach.
_NO_ANSWER_STATUS = 900

Document = dict[str, Any]


class DockerEngine:
    """Calls a daemon over its Unix socket. Use it as a context manager, in one event loop.

    Every call raises `LauncherUnreachable` when the daemon
    does not answer, or answers something unexpected.
    """

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path
        self._docker: aiodocker.Docker | None = None

    async def __aenter__(self) -> Self:
        self._client()
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    async def close(self) -> None:
        docker, self._docker = self._docker, None
        if docker is not None:
            await docker.close()

    async def limits_memory(self) -> bool:
        """Returns True if the host enforces memory limits; elsewhere the daemon ignores them with a
        warning."""
        async with self._call():
            return bool((await self._client().system.info())["MemoryLimit"])

    async def create(self, name: str, document: Document) -> str | None:
        """Creates a container and returns its id; None when there is one of this name. Raises
        `LaunchFailed`."""
        async with self._call(expected=(409,), refused=LaunchFailed):
            return (await self._client().containers.create(document, name=name)).id
        return None

    async def start(self, container_id: str, standard_input: bytes) -> None:
        """Starts a container, writes its standard input and closes it. Raises `LaunchFailed`.

        The connection is made before the start. If we die in between, it closes, and the worker
        reads an empty document and ends.
        """
        container = self._client().containers.container(container_id)
        async with self._call(refused=LaunchFailed), container.attach(stdin=True) as stream:
            await container.start()
            await stream.write_in(standard_input)

    async def inspect_image(self, name_or_id: str) -> Document | None:
        """Returns what the daemon knows of an image; None for one that it does not have."""
        async with self._call(expected=(404,)):
            return await self._client().images.inspect(name_or_id)
        return None

    async def inspect(self, name_or_id: str) -> Document | None:
        """Returns all that the daemon knows of a container; None for one that does not exist."""
        async with self._call(expected=(404,)):
            return await self._client().containers.container(name_or_id).show()
        return None

    async def find(self, labels: Mapping[str, str], states: Sequence[str]) -> list[Document]:
        """Returns short descriptions of the containers with all these labels and one of these
        states."""
        filters = {"label": _labels(labels), "status": list(states)}
        async with self._call():
            containers = await self._client().containers.list(all=1, filters=json.dumps(filters))
        return [
            {name: container[name] for name in ("Id", "Names", "Labels", "Created", "State")}
            for container in containers
        ]

    async def signal(self, container_id: str, name: str) -> None:
        """Sends a signal to the container's first process; one that does not run is no error."""
        async with self._call(expected=(404, 409)):
            await self._client().containers.container(container_id).kill(signal=name)

    async def wait_ended(self, container_id: str, within: float) -> bool:
        """Returns True if a container has ended, or ends within `within` seconds."""
        async with self._call(expected=(404,), extra=within):
            try:
                async with asyncio.timeout(within):
                    await self._client().containers.container(container_id).wait()
            except TimeoutError:
                return False
        return True

    async def remove(self, container_id: str) -> bool:
        """Removes a container with its log; False for one that runs."""
        async with self._call(expected=(404,)):
            try:
                await self._client().containers.container(container_id).delete(v=True)
            except DockerError as error:
                if error.status == 409:
                    return False
                raise
        return True

    async def past_events(
        self, labels: Mapping[str, str], kinds: Sequence[str], since: int
    ) -> list[Document]:
        """Returns the events of the containers with these labels, from `since` (Unix nanoseconds)
        until now.

        The daemon remembers its last 256 events.
        """
        source = DockerEvents(self._client())  # type: ignore[no-untyped-call]
        subscriber = source.subscribe(create_task=False)  # type: ignore[no-untyped-call]
        async with self._call():
            await source.run(**_span(labels, kinds, since), until=_seconds(time.time_ns()))
        events = []
        while (event := await subscriber.get()) is not None:
            events.append(dict(event))
        return events

    def events(
        self, labels: Mapping[str, str], kinds: Sequence[str], since: int
    ) -> DockerEventStream:
        """Streams the events from `since` on, as they happen. The caller closes the stream."""
        source = DockerEvents(self._client())  # type: ignore[no-untyped-call]
        subscriber = source.subscribe(create_task=False)  # type: ignore[no-untyped-call]
        running = asyncio.get_running_loop().create_task(source.run(**_span(labels, kinds, since)))
        return DockerEventStream(running, subscriber, self._path)

    def _client(self) -> aiodocker.Docker:
        if self._docker is None:
            self._docker = aiodocker.Docker(url=f"unix://{self._path.absolute()}")
        return self._docker

    @contextlib.asynccontextmanager
    async def _call(
        self,
        *,
        expected: Sequence[int] = (),
        refused: type[BerthError] = LauncherUnreachable,
        extra: float = 0.0,
    ) -> AsyncIterator[None]:
        """Wraps one call. A refusal with an `expected` status is ignored;
        any other becomes `refused`.

        `extra`: seconds that the call may take beyond the daemon's own time.
        """
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S + extra):
                yield
        except DockerError as error:
            if error.status in expected:
                return
            kind = LauncherUnreachable if error.status >= _NO_ANSWER_STATUS else refused
            raise kind(f"Docker at {self._path} ({error.status}): {error.message}"[:500]) from None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise LauncherUnreachable(f"Docker at {self._path} does not answer: {reason}") from None


class DockerEventStream:
    """A stream of events, oldest first."""

    def __init__(
        self, running: asyncio.Task[None], subscriber: ChannelSubscriber, path: Path
    ) -> None:
        self._running = running
        self._subscriber = subscriber
        self._path = path

    async def next(self, within: float) -> Document | None:
        """Returns the next event; None when none comes within `within` seconds. Raises
        `LauncherUnreachable`."""
        try:
            async with asyncio.timeout(within):
                event = await self._subscriber.get()  # type: ignore[no-untyped-call]
        except TimeoutError:
            return None
        if event is None:
            raise LauncherUnreachable(f"Docker at {self._path} has closed the stream of its events")
        return dict(event)

    async def close(self) -> None:
        # When the daemon went away, this task ends with the error that `next` has raised already.
        await tasks.cancel_tasks(self._running)


def _labels(labels: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in labels.items()]


def _span(labels: Mapping[str, str], kinds: Sequence[str], since: int) -> dict[str, Any]:
    filters = {"type": ["container"], "event": list(kinds), "label": _labels(labels)}
    return {"since": _seconds(since), "filters": json.dumps(filters)}


def _seconds(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 10**9)
    return f"{seconds}.{rest:09d}"

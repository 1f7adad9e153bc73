"""The Docker launcher: workers as containers of one host, through the daemon's socket.

The daemon is the only memory: a container's name is made from the launch token, and its labels say
which worker it is. So a restarted orchestrator finds all of them, and several orchestrators see the
same. Every fleet (a setting) sees only its own containers.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import msgspec
import structlog

from infra.launchers.docker import container
from infra.launchers.docker.engine import DockerEngine, Document
from infra.launchers.docker.exits import (
    KEPT_COUNT,
    MIN_KEPT_S,
    DockerExits,
    DockerPosition,
    StopNotes,
)
from infra.worker_task import MAX_GRACE_S, LaunchFailed, LaunchSpec, StopFailed, Task, TaskExit
from worker_runtime.process.cgroup import LimitsUnavailable

#: Seconds after which a container that was created but not started counts as abandoned: its launch
#: died in between. A start takes 0.5 s on 2 idle cores.
ABANDONED_AFTER_S = 10.0
#: Seconds between two inspections of a container that another launch is about to start.
INSPECTION_INTERVAL_S = 0.05
#: Seconds beyond `ABANDONED_AFTER_S` for which a launch goes
#: on trying while others of its token come and go.
RETRY_TIMEOUT_S = 10.0
#: Seconds the daemon may take to confirm an end after SIGKILL.
KILL_CONFIRM_TIMEOUT_S = 15.0

_RUNNING = ("running", "paused")

log = structlog.get_logger()


@dataclass(eq=False, repr=False)
class DockerLauncher:
    """Implements `Launcher`. A task's id is the container's id.
    The times are seconds; see the constants."""

    socket: Path
    _: KW_ONLY
    image: str
    #: Docker's name of the network from which workers reach Valkey and the brokers.
    network: str = "bridge"
    fleet: str = "berth"
    half_made: float = ABANDONED_AFTER_S
    kept: float = MIN_KEPT_S
    kept_count: int = KEPT_COUNT

    def __post_init__(self) -> None:
        self._engine = DockerEngine(self.socket)
        self._stops = StopNotes()
        self._position = DockerPosition()
        self._ours = {container.FLEET: self.fleet}

    async def require_limits(self) -> None:
        """Raises `LimitsUnavailable`, or `LauncherUnreachable`."""
        if not await self._engine.limits_memory():
            raise LimitsUnavailable(
                f"Docker at {self.socket} cannot limit memory: its host has no memory cgroup"
            )

    async def launch(self, spec: LaunchSpec, token: str) -> Task:
        if not token:
            raise LaunchFailed("a launch needs a token")
        name = container.container_name(self.fleet, token)
        until = time.monotonic() + self.half_made + RETRY_TIMEOUT_S
        while True:
            known = await self._engine.inspect(name)
            launched = await (self._create(spec, name) if known is None else self._adopt(known))
            if launched is not None:
                return launched
            if time.monotonic() > until:
                raise LaunchFailed(
                    f"another launch of worker {spec.config.worker_id} gets in the way"
                )
            # The daemon takes a name some time before it shows the container.
            await asyncio.sleep(INSPECTION_INTERVAL_S)

    async def _create(self, spec: LaunchSpec, name: str) -> Task | None:
        """Returns None when another launch of this token was first."""
        config = spec.config
        for other in await self._engine.find(
            {**self._ours, container.WORKER: config.worker_id}, _RUNNING
        ):
            if f"/{name}" in other["Names"]:
                return None
            raise LaunchFailed(
                f"worker {config.worker_id} runs already as container {other['Id'][:12]}"
            )
        spec = msgspec.structs.replace(spec, image=await self._known_as(spec.image or self.image))
        made = container.container_document(
            spec, image=self.image, network=self.network, fleet=self.fleet, now=time.time()
        )
        container_id = await self._engine.create(name, made)
        if container_id is None:
            return None
        try:
            await self._engine.start(
                container_id,
                msgspec.json.encode(msgspec.structs.replace(config, task_id=container_id)),
            )
        except LaunchFailed:
            await self._engine.remove(container_id)  # it has never run: its token is free again
            raise
        log.info("docker.launched", worker=config.worker_id, task=container_id)
        return container.task_of(container_id, made["Labels"])

    async def _known_as(self, image: str) -> str:
        """Returns how the daemon knows `name@digest`: an image built on this host has only its id
        for a digest.

        Raises `LaunchFailed`.
        """
        name, _, digest = image.partition("@")
        if not digest or await self._engine.inspect_image(image) is not None:
            return image
        built = await self._engine.inspect_image(digest)
        if built is None or name not in {tag.rpartition(":")[0] for tag in built["RepoTags"] or ()}:
            raise LaunchFailed(f"this host has no image {image}")
        return digest

    async def _adopt(self, known: Document) -> Task | None:
        """Returns the task of a container that this token made; None when it never started and is
        gone now."""
        until = time.monotonic() + self.half_made
        while known["State"]["Status"] == "created":
            if time.monotonic() > until:
                log.warning("docker.half_made_removed", task=known["Id"])
                await self._engine.remove(known["Id"])
                return None
            await asyncio.sleep(INSPECTION_INTERVAL_S)
            now = await self._engine.inspect(known["Id"])
            if now is None:
                return None
            known = now
        return container.task_of(known["Id"], container.labels_of(known))

    async def stop(self, task_id: str, reason: str, *, grace: float | None = None) -> bool:
        known = await self._running(task_id)
        if known is None:
            return True  # the engine knows every container of its host
        note = self._stops.begin(task_id, reason)
        own = float(container.labels_of(known).get(container.GRACE, 0))
        await self._engine.signal(task_id, "SIGTERM")
        if await self._engine.wait_ended(
            task_id, own if grace is None else min(grace, MAX_GRACE_S)
        ):
            return True
        note.forced = True
        log.warning(
            "docker.killed", worker=container.labels_of(known).get(container.WORKER), task=task_id
        )
        await self._engine.signal(task_id, "SIGKILL")
        if not await self._engine.wait_ended(task_id, KILL_CONFIRM_TIMEOUT_S):
            short = task_id[:12]
            raise StopFailed(
                f"container {short} was killed {KILL_CONFIRM_TIMEOUT_S:.0f} s ago and has not ended"
            )
        return True

    async def _running(self, task_id: str) -> Document | None:
        known = await self._engine.inspect(task_id) if task_id else None
        if known is None or not self._ours.items() <= container.labels_of(known).items():
            return None
        return known if known["State"]["Running"] else None

    async def is_running(self, task_id: str) -> bool | None:
        return await self._running(task_id) is not None

    async def find_tasks(self, worker_id: str) -> Sequence[Task]:
        return await self._find({container.WORKER: worker_id})

    async def remove_ended(self) -> None:
        """Removes what has ended, with its logs: nobody will hear of these ends."""
        for item in await self._engine.find(self._ours, ("created", "exited", "dead")):
            await self._engine.remove(item["Id"])

    async def list(self) -> list[Task]:
        return list(await self._find({}))

    async def _find(self, labels: dict[str, str]) -> Sequence[Task]:
        listed = await self._engine.find({**self._ours, **labels}, _RUNNING)
        tasks = [container.task_of(item["Id"], item["Labels"]) for item in listed]
        return sorted(tasks, key=lambda task: task.launched_at)

    async def exits(self, after: str = "") -> AsyncIterator[TaskExit]:
        """Yields exits as the port says, oldest first. Once an exit was handled, its container may
        be removed."""
        position = DockerPosition.parse(after) if after else self._position
        async with (
            DockerEngine(self.socket) as engine,
            DockerExits(
                engine,
                self._ours,
                self._stops,
                position,
                kept=self.kept,
                kept_count=self.kept_count,
            ) as exits,
        ):
            while True:
                for end in await exits.next_exits():
                    yield exits.with_position(end)
                    self._position = exits.mark_handled(end)

    async def close(self) -> None:
        await self._engine.close()

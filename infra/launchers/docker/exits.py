"""The exits of a fleet's containers:
each is reported at least once, also those while nobody listened.

The daemon remembers its last 256 events, and none beyond its own restart. So an event only says
*that* something ended; what ended is read from the exited containers, which stay until their exit
was handled. A position is the set of exited containers that exist and were handled. It needs no
clock, so exits that become known out of order are all reported. It also holds the time of the last
event, from which the daemon is asked again: that finds containers which somebody removed meanwhile.
"""

import time
from collections.abc import Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from typing import Self

import structlog

from infra.launchers.docker import container
from infra.launchers.docker.engine import DockerEngine, DockerEventStream, Document
from infra.worker_task import MAX_GRACE_S, TaskExit, signed_exit_code, worker_exit

#: Seconds between two listings of all exited containers, whatever events came.
LISTING_INTERVAL_S = 10.0
#: Seconds between two inspections of a container whose exit was announced but not yet written down.
INSPECTION_INTERVAL_S = 0.1
#: Seconds between two rounds of removal.
SWEEP_INTERVAL_S = 60.0
#: Seconds for which an exited container stays at least, and how many stay longer: a repeated token
#: finds its task, and its log can be read.
MIN_KEPT_S = 600.0
KEPT_COUNT = 200
#: The most exited and handled containers that stay: a position names each of them in 13 bytes, and
#: is written with every exit. (1,000 exits within ten minutes made it 13 kB.)
MAX_KEPT_COUNT = 400
#: Stops whose reason is remembered until the exit is reported.
MAX_STOPS_REMEMBERED = 10_000
#: Hexadecimal digits of an id in a position:
#: two of 1,000 containers share them once in 5·10⁸ fleets.
ID_DIGITS = 12
#: Signals by which `docker stop` and `docker kill` end a container.
_ENDING = frozenset({"2", "9", "15", "SIGINT", "SIGKILL", "SIGTERM"})
_EVENTS = ("die", "kill")
_RUNNING = ("running", "paused")
_ENDED = ("exited", "dead")

log = structlog.get_logger()


@dataclass
class StopNote:
    """Why we stopped a container, and whether that took SIGKILL."""

    reason: str
    forced: bool = False


class StopNotes(dict[str, StopNote]):
    """The stops by this launcher object.
    Another's show in the daemon's events, without a reason."""

    def begin(self, container_id: str, reason: str) -> StopNote:
        """Notes a stop that begins. The first reason stays."""
        note = self.setdefault(container_id, StopNote(reason))
        if len(self) > MAX_STOPS_REMEMBERED:
            del self[next(iter(self))]
        return note


@dataclass(frozen=True)
class DockerPosition:
    """Which exits were handled, of containers that still exist,
    and when the last event came (Unix ns)."""

    event_at: int = 0
    handled: frozenset[str] = field(default_factory=frozenset)

    def __str__(self) -> str:
        return f"docker:{self.event_at}:{','.join(sorted(self.handled))}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a position. Text that is none of ours is the first position: every exit is
        reported."""
        kind, _, rest = text.partition(":")
        event_at, _, handled = rest.partition(":")
        if kind != "docker" or not event_at.isdigit():
            return cls()
        return cls(int(event_at), frozenset(filter(None, handled.split(","))))


@dataclass(eq=False, repr=False)
class DockerExits:
    """Listens for the exits of a fleet's containers; use it as a context manager."""

    engine: DockerEngine
    labels: Mapping[str, str]
    stops: StopNotes
    position: InitVar[DockerPosition]
    _: KW_ONLY
    kept: float = MIN_KEPT_S
    kept_count: int = KEPT_COUNT

    def __post_init__(self, position: DockerPosition) -> None:
        self._event_at = position.event_at
        self._handled = set(position.handled)
        #: Announced by a `die` event, not yet seen as exited: id → the event.
        self._announced: dict[str, Document] = {}
        #: Containers that somebody stopped through the daemon.
        self._stopped: set[str] = set()
        #: When the handled containers that still exist exited (Unix seconds).
        self._ended_at: dict[str, float] = {}
        self._sweep_at = 0.0
        self._list_at = 0.0
        self._listed = False
        self._events: DockerEventStream | None = None

    async def __aenter__(self) -> Self:
        """Raises `LauncherUnreachable`."""
        now = time.time_ns()
        await self._read_past_events()
        self._events = self.engine.events(self.labels, _EVENTS, self._event_at or now)
        return self

    async def __aexit__(self, *failure: object) -> None:
        if self._events is not None:
            await self._events.close()

    async def next_exits(self) -> list[TaskExit]:
        """Returns new exits, oldest first; waits some seconds for the first. Raises
        `LauncherUnreachable`."""
        if self._listed:
            await self._sweep()  # before the first listing it is not known what was handled
        until_listing_s = self._list_at - time.monotonic()
        if self._events is None or until_listing_s <= 0:
            self._list_at = time.monotonic() + LISTING_INTERVAL_S
            self._listed = True
            return await self._list_exited()
        event = await self._events.next(
            INSPECTION_INTERVAL_S if self._announced else until_listing_s
        )
        if event is not None:
            self._note_event(event)
        return await self._announced_exits()

    def with_position(self, end: TaskExit) -> TaskExit:
        """Returns the exit with its position."""
        handled = frozenset(self._handled | {end.task_id[:ID_DIGITS]})
        return replace(
            end, detail={**end.detail, "position": str(DockerPosition(self._event_at, handled))}
        )

    def mark_handled(self, end: TaskExit) -> DockerPosition:
        """Notes that an exit was handled; returns the position behind it."""
        self._handled.add(end.task_id[:ID_DIGITS])
        return DockerPosition(self._event_at, frozenset(self._handled))

    async def _read_past_events(self) -> None:
        """Reads what happened since the last event,
        and the stops before it that may not have ended yet."""
        known_until = self._event_at
        since = max(0, known_until - int(MAX_GRACE_S * 1e9))
        for event in await self.engine.past_events(self.labels, _EVENTS, since):
            if event["Action"] == "kill" or int(event["timeNano"]) >= known_until:
                self._note_event(event)

    def _note_event(self, event: Document) -> None:
        container_id = event["Actor"]["ID"]
        # The daemon gives the events *from* a time on:
        # the next question is for the ones behind this.
        self._event_at = max(self._event_at, int(event["timeNano"]) + 1)
        if event["Action"] == "die":
            self._announced[container_id] = event
        elif event["Actor"]["Attributes"].get("signal") in _ENDING:
            self._stopped.add(container_id)

    async def _list_exited(self) -> list[TaskExit]:
        """Returns all exits that were not handled, oldest first."""
        ended = await self.engine.find(self.labels, _ENDED)
        present = {listed["Id"][:ID_DIGITS] for listed in ended}
        self._handled &= present
        fresh = [listed["Id"] for listed in ended if listed["Id"][:ID_DIGITS] not in self._handled]
        if fresh:  # the stream may still hold the events that say who stopped them
            await self._read_past_events()
        ends = []
        for container_id in fresh:
            known = await self.engine.inspect(container_id)
            self._announced.pop(container_id, None)
            if known is not None:
                ends.append(self._exit_of_inspected(known))
        return sorted(ends, key=lambda end: end.at)

    async def _announced_exits(self) -> list[TaskExit]:
        """Returns the exits that an event announced, as far as the daemon has written them down."""
        ends = []
        for container_id, event in list(self._announced.items()):
            if container_id[:ID_DIGITS] in self._handled:
                self._announced.pop(container_id, None)
                continue
            known = await self.engine.inspect(container_id)
            if known is None:
                ends.append(self._exit_of_event(event))
            elif known["State"]["Status"] in _ENDED:
                ends.append(self._exit_of_inspected(known))
            elif time.time() < int(event["timeNano"]) / 1e9 + LISTING_INTERVAL_S:
                continue  # later: somebody started it again, and the next listing shows what it is
            self._announced.pop(container_id, None)
        return ends

    def _exit_of_inspected(self, known: Document) -> TaskExit:
        at = container.finished_at(known)
        return self._end(known["Id"], container.labels_of(known), known["State"], at)

    def _exit_of_event(self, event: Document) -> TaskExit:
        """Returns the exit of a container that was removed before we could inspect it: the event
        says enough."""
        attributes = event["Actor"]["Attributes"]
        state = {"ExitCode": int(attributes.get("exitCode", 0)), "OOMKilled": False}
        return self._end(event["Actor"]["ID"], attributes, state, int(event["timeNano"]) / 1e9)

    def _end(
        self, container_id: str, labels: dict[str, str], state: Document, at: float
    ) -> TaskExit:
        note = self.stops.get(container_id)
        return worker_exit(
            container_id,
            labels.get(container.WORKER, ""),
            code=signed_exit_code(state["ExitCode"]),
            at=at,
            oom_killed=bool(state["OOMKilled"]),
            stopped=note is not None or container_id in self._stopped,
            stop_reason=note.reason if note else None,
            forced=note is not None and note.forced,
        )

    async def _sweep(self) -> None:
        """Removes exited containers whose exit was handled, and those that were never started."""
        if time.monotonic() < self._sweep_at:
            return
        self._sweep_at = time.monotonic() + SWEEP_INTERVAL_S
        now = time.time()
        for listed in await self.engine.find(self.labels, ("created",)):
            if now - listed["Created"] > MIN_KEPT_S:
                await self.engine.remove(listed["Id"])
        # Read first, so that a container that ends now is in one of the lists.
        running = await self.engine.find(self.labels, _RUNNING)
        ended = await self.engine.find(self.labels, _ENDED)
        ages: list[tuple[float, str]] = []
        for container_id in (listed["Id"] for listed in ended):
            if container_id[:ID_DIGITS] not in self._handled:
                continue
            if container_id not in self._ended_at:
                known = await self.engine.inspect(container_id)
                if known is None:
                    continue
                self._ended_at[container_id] = container.finished_at(known)
            ages.append((now - self._ended_at[container_id], container_id))
        ages.sort()
        for rank, (age, container_id) in enumerate(ages):
            if rank >= MAX_KEPT_COUNT or (rank >= self.kept_count and age > self.kept):
                await self.engine.remove(container_id)
                log.info("docker.removed", task=container_id)
        present = {listed["Id"] for listed in ended}
        self._ended_at = {name: at for name, at in self._ended_at.items() if name in present}
        # One that was asked to end may take its whole grace.
        self._stopped &= present | set(self._announced) | {listed["Id"] for listed in running}

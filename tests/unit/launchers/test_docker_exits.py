"""The position in the stream of exits stays small, and an exit that was requested is reported as
such."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from infra.launchers.docker import container
from infra.launchers.docker.exits import (
    ID_DIGITS,
    MAX_KEPT_COUNT,
    DockerExits,
    DockerPosition,
    StopNotes,
)


class EmptyEventStream:
    """Streams no events."""

    async def next(self, within: float) -> None:
        return None

    async def close(self) -> None:
        """Nothing to close."""


class ExitedContainers:
    """Simulates a daemon that knows ended containers, and forgets those that are removed: what
    `DockerExits` asks."""

    def __init__(self, count: int) -> None:
        now = datetime.now(UTC)
        self.ended = {
            f"{number:064x}"[::-1]: now - timedelta(seconds=number) for number in range(count)
        }

    async def past_events(
        self, labels: Mapping[str, str], kinds: Sequence[str], since: int
    ) -> list[Any]:
        return []

    def events(
        self, labels: Mapping[str, str], kinds: Sequence[str], since: int
    ) -> EmptyEventStream:
        return EmptyEventStream()

    async def find(self, labels: Mapping[str, str], states: Sequence[str]) -> list[dict[str, Any]]:
        return [{"Id": name} for name in self.ended] if "exited" in states else []

    async def inspect(self, container_id: str) -> dict[str, Any] | None:
        at = self.ended.get(container_id)
        if at is None:
            return None
        return {
            "Id": container_id,
            "Config": {"Labels": {container.WORKER: f"w-{container_id[:4]}", container.FLEET: "f"}},
            "State": {
                "Status": "exited",
                "ExitCode": 0,
                "OOMKilled": False,
                "FinishedAt": at.isoformat(),
            },
        }

    async def remove(self, container_id: str) -> bool:
        return self.ended.pop(container_id, None) is not None


class DaemonEvents:
    """Streams the events of a daemon as they are read, which may be some time after they
    happened."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def put(self, event: dict[str, Any]) -> None:
        self._queue.put_nowait(event)

    async def next(self, within: float) -> dict[str, Any] | None:
        return None if self._queue.empty() else self._queue.get_nowait()

    async def close(self) -> None:
        """Nothing to close."""


class RunningContainers(ExitedContainers):
    """Simulates a daemon with running containers, which remembers its events."""

    def __init__(self, *running: str) -> None:
        super().__init__(0)
        self.running = set(running)
        self.exit_codes: dict[str, int] = {}
        self.past: list[dict[str, Any]] = []
        self.stream = DaemonEvents()

    async def past_events(
        self, labels: Mapping[str, str], kinds: Sequence[str], since: int
    ) -> list[Any]:
        return [event for event in self.past if event["timeNano"] >= since]

    def events(  # type: ignore[override]
        self, labels: Mapping[str, str], kinds: Sequence[str], since: int
    ) -> DaemonEvents:
        return self.stream

    async def find(self, labels: Mapping[str, str], states: Sequence[str]) -> list[dict[str, Any]]:
        running = [{"Id": name} for name in self.running] if "running" in states else []
        return running + await super().find(labels, states)

    async def inspect(self, container_id: str) -> dict[str, Any] | None:
        known = await super().inspect(container_id)
        if known is not None:
            known["State"]["ExitCode"] = self.exit_codes.get(container_id, 0)
        return known

    def happens(self, container_id: str, action: str, *, is_read: bool, **attributes: str) -> None:
        event = {
            "Action": action,
            "Actor": {"ID": container_id, "Attributes": attributes},
            "timeNano": time.time_ns(),
        }
        self.past.append(event)
        if is_read:
            self.stream.put(event)

    def ask_to_end(self, container_id: str, *, is_read: bool = True) -> None:
        self.happens(container_id, "kill", is_read=is_read, signal="15")

    def end(self, container_id: str, exit_code: int, *, is_read: bool = True) -> None:
        self.running.discard(container_id)
        self.exit_codes[container_id] = exit_code
        self.ended[container_id] = datetime.now(UTC)
        self.happens(container_id, "die", is_read=is_read, exitCode=str(exit_code))


WORKER, OTHER = "a" * 64, "b" * 64
#: A worker that did not end within its grace: `docker stop` kills it then.
KILLED = 137


def listener(daemon: ExitedContainers, position: DockerPosition) -> DockerExits:
    return DockerExits(daemon, {container.FLEET: "f"}, StopNotes(), position)  # type: ignore[arg-type]


async def handle_all(exits: DockerExits) -> DockerPosition:
    ends = await exits.next_exits()
    for end in ends:
        position = exits.mark_handled(end)
    return position


async def test_of_many_ends_within_ten_minutes_the_newest_stay_in_the_position() -> None:
    daemon = ExitedContainers(550)
    newest = sorted(daemon.ended, key=lambda name: daemon.ended[name], reverse=True)[
        :MAX_KEPT_COUNT
    ]
    async with listener(daemon, DockerPosition()) as exits:
        position = await handle_all(exits)
        assert len(position.handled) == 550
        assert await exits.next_exits() == []  # removes what may go
    assert set(daemon.ended) == set(newest)
    async with listener(daemon, position) as exits:
        assert await exits.next_exits() == []  # none is reported again
        daemon.ended["f" * 64] = datetime.now(UTC)
    async with listener(daemon, position) as exits:
        (end,) = await exits.next_exits()
        position = exits.mark_handled(end)
    assert position.handled == {name[:ID_DIGITS] for name in daemon.ended}
    assert len(str(position)) <= (ID_DIGITS + 1) * (MAX_KEPT_COUNT + 1) + 30


async def test_an_end_that_was_not_handled_stays_however_many_are_newer() -> None:
    daemon = ExitedContainers(MAX_KEPT_COUNT + 3)
    async with listener(daemon, DockerPosition()) as exits:
        oldest, *others = await exits.next_exits()
        for end in others:
            exits.mark_handled(end)
        assert await exits.next_exits() == []
    assert oldest.task_id in daemon.ended
    assert len(daemon.ended) == MAX_KEPT_COUNT + 1


async def next_end(exits: DockerExits) -> tuple[str, str]:
    """Handles the next exit, and returns its task id and reason."""
    while True:
        for end in await exits.next_exits():
            exits.mark_handled(end)
            return end.task_id, end.reason


async def test_a_stop_that_takes_longer_than_a_round_of_removal_is_reported_as_a_stop() -> None:
    daemon = RunningContainers(WORKER)
    async with listener(daemon, DockerPosition()) as exits:
        assert await exits.next_exits() == []  # the listing
        daemon.ask_to_end(WORKER)
        assert await exits.next_exits() == []  # reads the event
        exits._sweep_at = 0.0
        assert await exits.next_exits() == []  # removes what may go
        daemon.end(WORKER, KILLED)
        assert await next_end(exits) == (WORKER, "stopped")


async def test_an_end_that_a_listing_shows_before_its_events_were_read_is_reported_as_a_stop() -> (
    None
):
    daemon = RunningContainers(WORKER)
    async with listener(daemon, DockerPosition()) as exits:
        assert await exits.next_exits() == []
        daemon.ask_to_end(WORKER, is_read=False)
        daemon.end(WORKER, KILLED, is_read=False)
        exits._list_at = 0.0
        assert await next_end(exits) == (WORKER, "stopped")
        for event in daemon.past:
            daemon.stream.put(event)
        for _ in daemon.past:
            assert await exits.next_exits() == []  # it is not reported twice


@pytest.mark.parametrize("code", [0, 68, KILLED])
async def test_a_stop_that_began_before_a_new_listener_is_reported_as_a_stop(code: int) -> None:
    """The position of the last end is behind the stop's beginning."""
    daemon = RunningContainers(WORKER, OTHER)
    async with listener(daemon, DockerPosition()) as exits:
        assert await exits.next_exits() == []
        daemon.ask_to_end(WORKER)
        assert await exits.next_exits() == []
        daemon.end(OTHER, 70)
        [end] = await exits.next_exits()
        assert (end.task_id, end.reason) == (OTHER, "exited")
        position = exits.mark_handled(end)
    daemon.stream = DaemonEvents()
    async with listener(daemon, position) as exits:
        daemon.end(WORKER, code)
        assert await next_end(exits) == (WORKER, "stopped")

"""The position in the stream of ends: it stays small, however many containers end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from infra.launchers.docker import container
from infra.launchers.docker.exits import DIGITS, KEPT_MOST, DockerExits, DockerPosition, StopNotes


class Silence:
    """A stream of events in which nothing happens."""

    async def next(self, within: float) -> None:
        return None

    async def close(self) -> None:
        """Nothing to close."""


class EndedOnes:
    """A daemon that knows ended containers, and forgets those that are removed: what `DockerExits` asks."""

    def __init__(self, count: int) -> None:
        now = datetime.now(UTC)
        self.ended = {f"{number:064x}"[::-1]: now - timedelta(seconds=number) for number in range(count)}

    async def past_events(self, labels: Mapping[str, str], kinds: Sequence[str], since: int) -> list[Any]:
        return []

    def events(self, labels: Mapping[str, str], kinds: Sequence[str], since: int) -> Silence:
        return Silence()

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


def listener(daemon: EndedOnes, position: DockerPosition) -> DockerExits:
    return DockerExits(daemon, {container.FLEET: "f"}, StopNotes(), position)  # type: ignore[arg-type]


async def handle_all(exits: DockerExits) -> DockerPosition:
    ends = await exits.next_exits()
    for end in ends:
        position = exits.mark_handled(end)
    return position


async def test_of_many_ends_within_ten_minutes_the_newest_stay_in_the_position() -> None:
    daemon = EndedOnes(550)
    newest = sorted(daemon.ended, key=lambda name: daemon.ended[name], reverse=True)[:KEPT_MOST]
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
    assert position.handled == {name[:DIGITS] for name in daemon.ended}
    assert len(str(position)) <= (DIGITS + 1) * (KEPT_MOST + 1) + 30


async def test_an_end_that_was_not_handled_stays_however_many_are_newer() -> None:
    daemon = EndedOnes(KEPT_MOST + 3)
    async with listener(daemon, DockerPosition()) as exits:
        oldest, *others = await exits.next_exits()
        for end in others:
            exits.mark_handled(end)
        assert await exits.next_exits() == []
    assert oldest.task_id in daemon.ended
    assert len(daemon.ended) == KEPT_MOST + 1

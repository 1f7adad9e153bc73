"""Contains what operators read: metrics, dead letters, streams of events."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import asdict
from typing import Any

import httpx

from infra.database.workers import timeline
from tests.support.systems.api import ServedApi
from workflows.user_worker.messages import Transition


async def read_metrics(api: ServedApi) -> dict[str, float]:
    async with api.client(api.admin_key) as admin:
        answer = await admin.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    lines = [line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


async def list_dead_letters(client: httpx.AsyncClient, **query: Any) -> list[dict[str, Any]]:
    answer = await client.get("/dead-letters", params=query)
    assert answer.status_code == 200, answer.text
    listed: list[dict[str, Any]] = answer.json()["letters"]
    return listed


async def act_on_letter(
    client: httpx.AsyncClient, letter: dict[str, Any], action: str
) -> httpx.Response:
    return await client.post(f"/dead-letters/{letter['id']}/{action}", json={"reason": "tried"})


#: Seconds; below the 15 s after which a stream reads without a notice.
EVENT_TIMEOUT_S = 12.0


class EventStream:
    """Reads the events of an open stream."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()

    async def event(self) -> tuple[str, int, dict[str, Any]]:
        """Name, id and data of the next event; comments are passed over."""
        fields: dict[str, str] = {}
        async with asyncio.timeout(EVENT_TIMEOUT_S):
            async for line in self._lines:
                name, _, value = line.partition(": ")
                if line:
                    fields[name] = value
                elif "data" in fields:
                    return fields["event"], int(fields["id"]), json.loads(fields["data"])
                else:
                    fields = {}
        raise EOFError


async def record_transitions(api: ServedApi, *states: str, user: str = "", first: int = 0) -> None:
    """Records a change for each step from state to state."""
    rows = [
        Transition(
            number=first + number,
            at=1_800_000_000.0 + number,
            before=before,
            after=after,
            reason=f"step {number}",
            worker_id="w-1",
            epoch=7,
        )
        for number, (before, after) in enumerate(itertools.pairwise(states))
    ]
    async with api.services.database.session() as session:
        await timeline.record_transitions(
            session,
            user_id=user or api.user,
            chain=f"chain-{user}",
            transitions=[asdict(row) for row in rows],
        )

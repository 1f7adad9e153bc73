"""The list of dead letters itself: messages that are handled again, refusals, ages, pages, the
command."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from sqlalchemy import text

from activities.events.stream import RECORDER_GROUP, EventStream
from infra.database.dead_letters import MAX_MESSAGE_BYTES, DeadLetter, DeadLetters
from infra.database.retention import purge_each_hour
from infra.valkey.client import reply_of
from tests.support.api.operators import act_on_letter, list_dead_letters
from tests.support.commands import CommandForker
from tests.support.systems.api import ServedApi, operator
from tests.support.waiting import until
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import Event, WorkerEvent, WorkerEventKind
from worker_runtime.protocol.worker_reports import EVENT, sign_event

QUEUE = "dead-letters"


class OnceBrokenHandler:
    """Fails on everything until it is mended."""

    def __init__(self) -> None:
        self.broken = True
        self.handled: list[Event] = []

    async def handle(self, events: Sequence[Event], received_ms: Sequence[int] = ()) -> None:
        if self.broken:
            raise ValueError("a bug")
        self.handled += events


async def test_a_message_is_handled_when_it_is_redriven_after_its_reader_was_mended(
    whole_api: ServedApi, staff: httpx.AsyncClient
) -> None:
    services, handler = whole_api.services, OnceBrokenHandler()
    event = WorkerEvent(
        user_id=whole_api.user,
        worker_id="w1",
        epoch=1,
        sequence=1,
        kind=WorkerEventKind.CONNECTED,
        at_ms=1_795_410_000_000,
    )
    entry = sign_event(event, services.message_secrets.assignment_keys(whole_api.user, 1))
    box = DeadLetters(services.database)
    await reply_of(services.valkey.xadd(keys.EVENTS, {EVENT: entry}))
    stream = EventStream(
        services.valkey, RECORDER_GROUP, handler, services.message_secrets, dead_letters=box
    )
    reading = asyncio.create_task(stream.run())
    try:
        async with asyncio.timeout(20):
            while not (listed := await list_dead_letters(staff, kind="recorder")):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert '"kind":"connected"' in listed[0]["text"]
        assert entry.partition(b" ")[0].decode() not in listed[0]["text"]
        handler.broken = False
        assert (await act_on_letter(staff, listed[0], "redrive")).status_code == 200
        await until(lambda: handler.handled == [event])
    finally:
        reading.cancel()
    assert await list_dead_letters(staff) == []


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("event", b"a forged mac {}"),
        ("event", b""),
        ("recorder", b"x" * (MAX_MESSAGE_BYTES + 1)),
        ("late", b"{}"),
        ("overflow", b""),
        ("alert", b""),
        ("workflow", b""),
        ("outcome", b""),
    ],
)
async def test_what_cannot_be_redriven_says_so_and_can_be_dismissed(
    whole_api: ServedApi, staff: httpx.AsyncClient, kind: str, message: bytes
) -> None:
    box = DeadLetters(whole_api.services.database)
    await box.put([DeadLetter(kind=kind, subject="nothing like it", reason="why", message=message)])
    [letter] = await list_dead_letters(staff)
    refused = await act_on_letter(staff, letter, "redrive")
    assert (refused.status_code, refused.json()["code"]) == (409, "DEAD_LETTER_REFUSED")
    assert await list_dead_letters(staff) == [letter]
    assert (await act_on_letter(staff, letter, "dismiss")).status_code == 200
    assert await list_dead_letters(staff) == []
    await box.put([DeadLetter(kind=kind, subject="nothing like it", reason="again")])
    assert [(row["id"], row["count"], row["reason"]) for row in await list_dead_letters(staff)] == [
        (letter["id"], 2, "again")
    ]


async def test_old_letters_are_deleted_without_any_pass_of_maintenance(
    whole_api: ServedApi, staff: httpx.AsyncClient
) -> None:
    database = whole_api.services.database
    box = DeadLetters(database)
    await box.put([DeadLetter(kind="event", subject="old")])
    async with database.session() as session:
        await session.execute(
            text("update dead_letters set last_at = last_at - interval '15 days'")
        )
    await box.put([DeadLetter(kind="event", subject="new")])
    purging = asyncio.create_task(purge_each_hour(database, whole_api.services.settings))
    try:
        async with asyncio.timeout(20):
            while len(listed := await list_dead_letters(staff, kind="event")) > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        purging.cancel()
    assert [row["subject"] for row in listed] == ["new"]


async def test_the_list_has_pages_and_is_for_operators(
    whole_api: ServedApi, staff: httpx.AsyncClient
) -> None:
    box = DeadLetters(whole_api.services.database)
    for number in range(5):
        await box.put([DeadLetter(kind="alert", subject=f"a{number}", reason="no receiver")])
    seen, cursor = [], None
    while True:
        page = (
            await staff.get(
                "/dead-letters", params={"limit": 2} | ({"cursor": cursor} if cursor else {})
            )
        ).json()
        seen += [row["subject"] for row in page["letters"]]
        if (cursor := page["next_cursor"]) is None:
            break
    assert seen == ["a4", "a3", "a2", "a1", "a0"]
    assert (await staff.get("/dead-letters", params={"cursor": "abc"})).status_code == 422
    unknown = {"id": str(uuid4())}
    assert (await act_on_letter(staff, unknown, "dismiss")).json()[
        "code"
    ] == "DEAD_LETTER_NOT_FOUND"
    assert (await act_on_letter(staff, unknown, "eat")).status_code == 422
    async with whole_api.client(whole_api.key) as user:
        assert (await user.get("/dead-letters")).status_code == 403
        assert (await act_on_letter(user, unknown, "dismiss")).status_code == 403


async def test_the_command_line_lists_shows_redrives_and_dismisses(
    whole_api: ServedApi, staff: httpx.AsyncClient, commands: CommandForker, tmp_path: Path
) -> None:
    async with operator(whole_api, commands, tmp_path) as berth:
        assert "nothing failed for good" in (await berth("dead-letters", "list")).out
        alert = DeadLetter(kind="alert", subject="mail-7", reason="no receiver")
        await DeadLetters(whole_api.services.database).put([alert])
        [letter] = await list_dead_letters(staff)
        assert (
            "no receiver" in (await berth("dead-letters", "list", "--kind", "alert", "--json")).out
        )
        assert "mail-7" in (await berth("dead-letters", "show", letter["id"])).out
        refused = await berth("dead-letters", "redrive", letter["id"])
        assert (refused.code, "no longer a failed one" in refused.err) == (1, True)
        gone = await berth("dead-letters", "dismiss", letter["id"], "--reason", "seen")
        assert (gone.code, gone.out.strip()) == (0, "dismiss: alert mail-7")
    assert await list_dead_letters(staff) == []

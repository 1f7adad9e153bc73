"""The watcher keeps the switches of all users in Valkey as PostgreSQL has them."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.client import Client

from activities.events.mark_watcher import LOCK_ID
from infra import tasks
from infra.database.locks import lead
from infra.database.trading import switches
from infra.database.trading.switches import TradingScope
from infra.valkey import client as valkey
from infra.valkey import switch_fanout
from infra.valkey.client import reply_of
from infra.valkey.switch_fanout import SeenSwitch, SwitchSigner
from tests.support.activities.harness import ActivityHarness
from tests.support.activities.watched_users import run_mark_watcher, start_watched_user
from worker_runtime.protocol import keys
from worker_runtime.protocol.requests import SWITCH_SERVER, SwitchState, UserSwitch


async def test_a_switch_that_valkey_lost_or_never_had_is_written_again(
    harness: ActivityHarness, temporal: Client
) -> None:
    worker, other = await start_watched_user(harness), await start_watched_user(harness)
    async with (
        harness.database.session() as session
    ):  # as if the API had died right after its commit
        await switches.put_switch(
            session, TradingScope(worker.user), SwitchState.HALTED, actor="key:1", reason="a test"
        )
    await harness.client.delete(keys.switch(other.user))
    async with run_mark_watcher(harness, temporal):
        await until_field(harness, worker.user, b"halted")
        await until_field(harness, other.user, b"open")
        await harness.client.flushall()
        await until_field(harness, worker.user, b"halted")


async def test_a_switch_that_is_thrown_and_lost_during_a_check_does_not_come_back_open(
    harness: ActivityHarness, temporal: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, find, write, written = (
        await start_watched_user(harness),
        switch_fanout.users_behind,
        switch_fanout.write_switches,
        [],
    )

    async def thrown_and_flushed(*given: Any) -> dict[str, SeenSwitch]:
        monkeypatch.setattr(switch_fanout, "users_behind", find)
        async with harness.database.session() as session:
            await switches.put_switch(
                session,
                TradingScope(worker.user),
                SwitchState.HALTED,
                actor="key:1",
                reason="a test",
            )
        await harness.client.delete(keys.switch(worker.user))
        return await find(*given)

    async def writing(
        client: Redis,
        signer: SwitchSigner,
        server: str,
        said: dict[str, UserSwitch],
        seen: dict[str, SeenSwitch],
    ) -> None:
        written.append(said[worker.user].every)
        await write(client, signer, server, said, seen)

    monkeypatch.setattr(switch_fanout, "users_behind", thrown_and_flushed)
    monkeypatch.setattr(switch_fanout, "write_switches", writing)
    async with run_mark_watcher(harness, temporal):
        await until_field(harness, worker.user, b"halted")
    assert set(written) == {SwitchState.HALTED}


@pytest.mark.parametrize(
    "forged",
    [
        {"*version": "999999", "*": "open", "*mac": "1.AAAA"},
        {"*version": "0", "*": "open", "main": "halted"},
        {"*version": "x", "*": "open"},
        {},
    ],
)
async def test_a_forged_switch_is_replaced_by_ours_whatever_its_version(
    harness: ActivityHarness, temporal: Client, forged: dict[str, str]
) -> None:
    worker = await start_watched_user(harness)
    ours = await reply_of(harness.client.hgetall(keys.switch(worker.user)))
    async with run_mark_watcher(harness, temporal):
        await until_field(harness, worker.user, b"open")
        async with harness.client.pipeline() as pipe:
            pipe.delete(keys.switch(worker.user))
            if forged:
                pipe.hset(keys.switch(worker.user), mapping=forged)  # type: ignore[arg-type]
            else:
                pipe.set(keys.switch(worker.user), "not even a hash")
            await pipe.execute()
        while True:
            if await reply_of(harness.client.type(keys.switch(worker.user))) == b"hash":
                stored = await reply_of(harness.client.hgetall(keys.switch(worker.user)))
                if stored == ours:
                    break
            await asyncio.sleep(0.02)


async def test_a_switch_that_was_written_to_another_server_is_written_again(
    harness: ActivityHarness, temporal: Client
) -> None:
    worker, other = await start_watched_user(harness), await start_watched_user(harness)
    server = (await valkey.read_server_id(harness.client)).encode()
    for user in (worker.user, other.user):  # as the claim told it
        assert await reply_of(harness.client.hget(keys.switch(user), SWITCH_SERVER)) == server
    # A copy that lagged: the same version, for nobody switched since, or an older one.
    async with harness.database.session() as session:
        await switches.put_switch(
            session, TradingScope(worker.user), SwitchState.HALTED, actor="key:1", reason="a test"
        )
    for user in (worker.user, other.user):
        await reply_of(harness.client.hset(keys.switch(user), SWITCH_SERVER, "another one"))
    async with run_mark_watcher(harness, temporal):
        await until_field(harness, worker.user, b"halted")
        await until_field(harness, other.user, server, SWITCH_SERVER)
    assert await reply_of(harness.client.hget(keys.switch(worker.user), SWITCH_SERVER)) == server


async def test_a_process_on_standby_writes_the_switches_to_a_new_server_also_when_another_leads(
    harness: ActivityHarness, temporal: Client
) -> None:
    """The leader may be frozen, or unable to reach Valkey."""
    worker = await start_watched_user(harness)
    server = (await valkey.read_server_id(harness.client)).encode()
    await reply_of(harness.client.hset(keys.switch(worker.user), SWITCH_SERVER, "another one"))
    leads = asyncio.Event()

    async def lead_and_rest(_: AsyncConnection) -> None:
        leads.set()
        await asyncio.Event().wait()

    leader = asyncio.create_task(lead(harness.settings.database_url, LOCK_ID, lead_and_rest))
    await leads.wait()
    async with run_mark_watcher(harness, temporal):
        await until_field(harness, worker.user, server, SWITCH_SERVER)
        assert not leader.done()
    await tasks.cancel_tasks(leader)


async def test_a_new_server_is_known_since_its_start_and_the_first_of_all_since_ever(
    harness: ActivityHarness, temporal: Client
) -> None:
    server = await valkey.read_server_id(harness.client)
    worker = await start_watched_user(harness)
    await reply_of(harness.client.hset(keys.switch(worker.user), SWITCH_SERVER, "another one"))
    async with run_mark_watcher(harness, temporal):
        await until_field(harness, worker.user, server.encode(), SWITCH_SERVER)
    assert await valkey.server_known_since(harness.client) == 0.0
    await reply_of(harness.client.hset(keys.SERVER_SINCE, "server", "the one before"))
    assert await valkey.server_known_since(harness.client) == math.inf
    await reply_of(harness.client.hset(keys.switch(worker.user), SWITCH_SERVER, "the one before"))
    async with run_mark_watcher(harness, temporal):
        await until_field(harness, worker.user, server.encode(), SWITCH_SERVER)
    since = await valkey.server_known_since(harness.client)
    before = (await harness.client.time())[0]
    # Asked between two looks at the clock.
    running = (await harness.client.info("server"))["uptime_in_seconds"]
    after = (await harness.client.time())[0]
    assert before - running - 1 <= since <= after - running + 1
    await valkey.note_server(harness.client, server)
    assert await valkey.server_known_since(harness.client) == since


async def until_field(harness: ActivityHarness, user: str, state: bytes, name: str = "*") -> None:
    while await reply_of(harness.client.hget(keys.switch(user), name)) != state:  # noqa: ASYNC110 — Valkey has no event
        await asyncio.sleep(0.01)

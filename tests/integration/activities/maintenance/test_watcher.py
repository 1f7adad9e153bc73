"""The watcher with real servers: who is told, who is not, and who watches."""

from __future__ import annotations

import asyncio
import math
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest
import structlog
from redis.asyncio import Redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.client import Client

from activities.events.absences import Absences
from activities.events.mark_watcher import LOCK, MarkWatcher
from infra import tasks
from infra.database.engine import DatabaseUnavailable
from infra.database.locks import lead
from infra.database.trading import switches
from infra.database.trading.switches import TradingScope
from infra.database.workers import sessions as worker_sessions
from infra.local.process import free_port
from infra.local.servers import TemporalServer
from infra.valkey import client as valkey
from infra.valkey import switch_fanout
from infra.valkey.client import reply_of
from tests.integration.activities.claims.test_ending import mark
from tests.integration.activities.conftest import Yard
from tests.integration.activities.listener import ListenerWorkflow, listening, signals
from worker_runtime.protocol import keys
from worker_runtime.protocol.requests import SWITCH_SERVER, SwitchState, UserSwitch
from workflows import names
from workflows.user_worker import messages as m

CONFIRM, SETTLE = 0.4, 0.6


@pytest.fixture
async def temporal(temporal_server: TemporalServer) -> Client:
    return await Client.connect(temporal_server.address)


@asynccontextmanager
async def watching(yard: Yard, temporal: Client) -> AsyncIterator[None]:
    settings = yard.settings.model_copy(
        update={"watch_period": 0.05, "watch_confirm": CONFIRM, "mark_ttl": SETTLE}
    )
    task = asyncio.create_task(MarkWatcher(yard.client, temporal, settings).run())
    try:
        yield
    finally:
        await tasks.cancel_tasks(task)


class WatchedUser:
    """A user with a connected worker; its mark is renewed until it dies."""

    def __init__(self, yard: Yard, user: str, ref: m.WorkerRef) -> None:
        self._yard = yard
        self.user = user
        self.ref = ref
        self._renewing: asyncio.Task[None] | None = None

    async def renew(self) -> str:
        return await mark(self._yard, self.user, self._yard.made[self.ref.worker_id], self.ref.epoch)

    async def die(self) -> None:
        await self._yard.client.delete(keys.mark(self.user), keys.metadata(self.user))


async def serving(yard: Yard) -> WatchedUser:
    user, worker = await yard.user(), await yard.worker(f"p-{uuid4().hex[:8]}")
    claim_id = f"claim-{user}"
    result, _ = await asyncio.gather(
        yard.run(yard.claiming.claim_worker, yard.claim(user, claim_id)), worker.serve()
    )
    assert result.worker is not None
    async with yard.database.session() as session:
        await worker_sessions.set_connected(session, claim_id=claim_id, at=1_000.0)
    made = WatchedUser(yard, user, result.worker)
    assert await made.renew() == "ok"
    return made


async def test_a_worker_whose_mark_expired_is_told_to_its_workflow(yard: Yard, temporal: Client) -> None:
    alive, dead = await serving(yard), await serving(yard)
    generation = await reply_of(yard.client.get(keys.GENERATION))
    async with (
        listening(temporal, names.user_worker_id(alive.user)) as quiet,
        listening(temporal, names.user_worker_id(dead.user)) as handle,
        watching(yard, temporal),
    ):
        await dead.die()
        heard = await signals(handle, 1)
        assert await quiet.query(ListenerWorkflow.heard) == []
    assert heard == [
        (
            "worker_unmarked",
            {
                "worker_id": dead.ref.worker_id,
                "epoch": dead.ref.epoch,
                "generation": generation.decode(),
            },
        )
    ]


async def test_after_a_flush_the_owners_are_back_and_the_workers_left_alone(
    yard: Yard, temporal: Client
) -> None:
    workers = [await serving(yard) for _ in range(2)]
    watcher = MarkWatcher(yard.client, temporal, yard.settings)
    absences = Absences(confirm=0.0, settle=30.0)
    async with (
        listening(temporal, names.user_worker_id(workers[0].user)) as handle,
        yard.database.engine.connect() as connection,
    ):
        await watcher.check_marks(connection, absences)
        assert absences.missing == []
        before = await reply_of(yard.client.get(keys.GENERATION))
        await yard.client.flushall()
        assert [await one.renew() for one in workers] == ["no_owner", "no_owner"]
        await watcher.check_marks(connection, absences)
        assert len(absences.missing) == 2
        assert [await one.renew() for one in workers] == ["ok", "ok"]
        await watcher.check_marks(connection, absences)
        assert absences.missing == []
        assert await handle.query(ListenerWorkflow.heard) == []
    after = await reply_of(yard.client.get(keys.GENERATION))
    assert after != before
    assert {await reply_of(yard.client.hget(keys.owner(one.user), "generation")) for one in workers} == {
        after
    }


async def test_while_valkey_is_away_the_watcher_is_blind_and_goes_on(yard: Yard, temporal: Client) -> None:
    one = await serving(yard)
    absences = Absences(confirm=0.0, settle=0.0)
    away = valkey.connect_valkey(f"redis://127.0.0.1:{free_port()}/0")
    async with (
        listening(temporal, names.user_worker_id(one.user)) as handle,
        yard.database.engine.connect() as connection,
    ):
        await one.die()
        await MarkWatcher(away, temporal, yard.settings).check_marks(connection, absences)
        assert await handle.query(ListenerWorkflow.heard) == []
        await MarkWatcher(yard.client, temporal, yard.settings).check_marks(connection, absences)
        assert len(await signals(handle, 1)) == 1
    await away.aclose()


async def test_one_without_a_workflow_is_logged_once_and_no_more(yard: Yard, temporal: Client) -> None:
    one = await serving(yard)
    await one.die()
    watcher, absences = MarkWatcher(yard.client, temporal, yard.settings), Absences(confirm=0.0, settle=0.0)
    async with yard.database.engine.connect() as connection:
        with structlog.testing.capture_logs() as logs:
            for _ in range(3):
                await watcher.check_marks(connection, absences)
    assert [line["event"] for line in logs] == ["unmarked_worker_of_no_workflow"]


async def test_a_claim_that_is_not_connected_and_an_older_assignment_are_not_watched(yard: Yard) -> None:
    one = await serving(yard)
    fresh_user, worker = await yard.user(), await yard.worker()
    await yard.run(yard.claiming.claim_worker, yard.claim(fresh_user, "fresh", reply_wait=0.05))
    async with yard.database.engine.connect() as connection:
        assert [found.user_id for found in await worker_sessions.workers_in_service(connection)] == [one.user]
        # Its connect was never written down.
        await connection.execute(
            text(
                "update worker_sessions set claimed_at = claimed_at - interval '1 h' where claim_id = 'fresh'"
            )
        )
        found = {each.worker_id for each in await worker_sessions.workers_in_service(connection)}
        assert found == {one.ref.worker_id, worker.worker_id}
        await connection.execute(text("update users set epoch = epoch + 1 where id = :id"), {"id": one.user})
        found = {each.worker_id for each in await worker_sessions.workers_in_service(connection)}
        assert found == {worker.worker_id}


async def test_one_process_leads_and_another_follows_when_its_connection_breaks(yard: Yard) -> None:
    url, lock = yard.settings.database_url, 4711
    leading: list[str] = []
    changed = asyncio.Event()

    async def work(name: str, connection: AsyncConnection) -> None:
        leading.append(name)
        changed.set()
        try:
            await asyncio.Event().wait()
        finally:
            leading.append(f"{name} stopped")
            changed.set()

    first = asyncio.create_task(lead(url, lock, lambda connection: work("first", connection)))
    await changed.wait()
    second = asyncio.create_task(lead(url, lock, lambda connection: work("second", connection)))
    await asyncio.sleep(0.3)
    assert leading == ["first"]
    async with yard.database.session() as session:
        await session.execute(
            text(
                "select pg_terminate_backend(pid) from pg_locks"
                " where locktype = 'advisory' and objid = :lock and granted"
            ),
            {"lock": lock},
        )
    with pytest.raises(DatabaseUnavailable):
        await first
    while "second" not in leading:
        changed.clear()
        await changed.wait()
    assert leading == ["first", "first stopped", "second"]
    await tasks.cancel_tasks(second)


#: Stops itself between two statements, or in the middle of one: a new statement is parsed by a message of
#: its own, and until the next one PostgreSQL does not count the session as idle.
_STUCK = """
import asyncio, os, signal, sys
from infra.database import locks as leader
leader.SILENCE = 1
stopped = []
async def work(connection):
    await connection.exec_driver_sql("select 1")
    stopped.append(True)
    print("at work", flush=True)
    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGSTOP)
    if sys.argv[2] == "between":
        await asyncio.sleep(0.1)
    while True:
        await connection.exec_driver_sql("select 2")
        await asyncio.sleep(0.1)
while True:
    try:
        asyncio.run(leader.lead(sys.argv[1], 4712, work))
    except leader.DatabaseUnavailable:
        if stopped:  # else it stood still by itself for a second before it was at work
            raise
"""


@pytest.mark.parametrize("where", ["between", "within"])
async def test_a_leader_that_is_stopped_loses_its_place(yard: Yard, where: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _STUCK, yard.settings.database_url, where),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    took_over = asyncio.Event()

    async def work(connection: AsyncConnection) -> None:
        took_over.set()

    try:
        assert process.stdout is not None
        while await process.stdout.readline() != b"at work\n":
            assert not process.stdout.at_eof()
        async with asyncio.timeout(20):
            await lead(yard.settings.database_url, 4712, work)
        assert took_over.is_set()
        process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(20):
            _, said = await process.communicate()
        assert b"DatabaseUnavailable" in said
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_switch_that_valkey_lost_or_never_heard_of_is_told_again(
    yard: Yard, temporal: Client
) -> None:
    one, other = await serving(yard), await serving(yard)
    async with yard.database.session() as session:  # as if the API had died right after its commit
        await switches.put_switch(
            session, TradingScope(one.user), SwitchState.HALTED, actor="key:1", reason="a test"
        )
    await yard.client.delete(keys.switch(other.user))
    async with watching(yard, temporal):
        await until_field(yard, one.user, b"halted")
        await until_field(yard, other.user, b"open")
        await yard.client.flushall()
        await until_field(yard, one.user, b"halted")


async def test_a_switch_that_is_thrown_and_lost_during_a_check_does_not_come_back_open(
    yard: Yard, temporal: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, find, write, written = (
        await serving(yard),
        switch_fanout.users_behind,
        switch_fanout.write_switches,
        [],
    )

    async def thrown_and_flushed(*given: Any) -> list[str]:
        monkeypatch.setattr(switch_fanout, "users_behind", find)
        async with yard.database.session() as session:
            await switches.put_switch(
                session, TradingScope(one.user), SwitchState.HALTED, actor="key:1", reason="a test"
            )
        await yard.client.delete(keys.switch(one.user))
        return await find(*given)

    async def writing(client: Redis, server: str, said: dict[str, UserSwitch]) -> None:
        written.append(said[one.user].every)
        await write(client, server, said)

    monkeypatch.setattr(switch_fanout, "users_behind", thrown_and_flushed)
    monkeypatch.setattr(switch_fanout, "write_switches", writing)
    async with watching(yard, temporal):
        await until_field(yard, one.user, b"halted")
    assert set(written) == {SwitchState.HALTED}


async def test_a_switch_that_was_told_to_another_server_is_told_again(yard: Yard, temporal: Client) -> None:
    one, other = await serving(yard), await serving(yard)
    server = (await valkey.read_server_id(yard.client)).encode()
    for user in (one.user, other.user):  # as the claim told it
        assert await reply_of(yard.client.hget(keys.switch(user), SWITCH_SERVER)) == server
    # A copy that lagged: the same version, for nobody switched since, or an older one.
    async with yard.database.session() as session:
        await switches.put_switch(
            session, TradingScope(one.user), SwitchState.HALTED, actor="key:1", reason="a test"
        )
    for user in (one.user, other.user):
        await reply_of(yard.client.hset(keys.switch(user), SWITCH_SERVER, "another one"))
    async with watching(yard, temporal):
        await until_field(yard, one.user, b"halted")
        await until_field(yard, other.user, server, SWITCH_SERVER)
    assert await reply_of(yard.client.hget(keys.switch(one.user), SWITCH_SERVER)) == server


async def test_a_process_on_standby_writes_the_switches_to_a_new_server_also_when_another_leads(
    yard: Yard, temporal: Client
) -> None:
    """The leader may be frozen, or unable to reach Valkey."""
    one = await serving(yard)
    server = (await valkey.read_server_id(yard.client)).encode()
    await reply_of(yard.client.hset(keys.switch(one.user), SWITCH_SERVER, "another one"))
    leads = asyncio.Event()

    async def lead_and_rest(_: AsyncConnection) -> None:
        leads.set()
        await asyncio.Event().wait()

    leader = asyncio.create_task(lead(yard.settings.database_url, LOCK, lead_and_rest))
    await leads.wait()
    async with watching(yard, temporal):
        await until_field(yard, one.user, server, SWITCH_SERVER)
        assert not leader.done()
    await tasks.cancel_tasks(leader)


async def test_a_new_server_is_known_since_its_start_and_the_first_of_all_since_ever(
    yard: Yard, temporal: Client
) -> None:
    server = await valkey.read_server_id(yard.client)
    one = await serving(yard)
    await reply_of(yard.client.hset(keys.switch(one.user), SWITCH_SERVER, "another one"))
    async with watching(yard, temporal):
        await until_field(yard, one.user, server.encode(), SWITCH_SERVER)
    assert await valkey.server_known_since(yard.client) == 0.0
    await reply_of(yard.client.hset(keys.SERVER_SINCE, "server", "the one before"))
    assert await valkey.server_known_since(yard.client) == math.inf
    await reply_of(yard.client.hset(keys.switch(one.user), SWITCH_SERVER, "the one before"))
    async with watching(yard, temporal):
        await until_field(yard, one.user, server.encode(), SWITCH_SERVER)
    since = await valkey.server_known_since(yard.client)
    before = (await yard.client.time())[0]
    running = (await yard.client.info("server"))["uptime_in_seconds"]  # asked between two looks at the clock
    after = (await yard.client.time())[0]
    assert before - running - 1 <= since <= after - running + 1
    await valkey.note_server(yard.client, server)
    assert await valkey.server_known_since(yard.client) == since


async def until_field(yard: Yard, user: str, state: bytes, name: str = "*") -> None:
    while await reply_of(yard.client.hget(keys.switch(user), name)) != state:  # noqa: ASYNC110 — Valkey has no event
        await asyncio.sleep(0.01)

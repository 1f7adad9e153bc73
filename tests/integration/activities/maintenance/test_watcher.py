"""The watcher with real servers: whose workflow it signals, and which process watches."""

from __future__ import annotations

import asyncio
import signal
import sys

import pytest
import structlog
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.client import Client

from activities.events.mark_watcher import MarkWatcher
from activities.events.missing_marks import MissingMarkTracker
from activities.events.valkey_restorer import ValkeyRestorer
from infra import tasks
from infra.database.engine import DatabaseUnavailable
from infra.database.locks import lead
from infra.database.workers import sessions as worker_sessions
from infra.local.process import free_port
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from tests.support.activities.harness import ActivityHarness
from tests.support.activities.listener import ListenerWorkflow, listening, signals
from tests.support.activities.watched_users import run_mark_watcher, start_watched_user
from tests.support.message_signing import SECRETS
from worker_runtime.jobs.protocol import scripts as job_scripts
from worker_runtime.protocol import keys, scripts
from workflows import names


async def test_a_worker_whose_mark_expired_is_reported_to_its_workflow(
    harness: ActivityHarness, temporal: Client
) -> None:
    alive, dead = await start_watched_user(harness), await start_watched_user(harness)
    generation = await reply_of(harness.client.get(keys.GENERATION))
    async with (
        listening(temporal, names.user_worker_id(alive.user)) as quiet,
        listening(temporal, names.user_worker_id(dead.user)) as handle,
        run_mark_watcher(harness, temporal),
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
                "outage": True,
            },
        )
    ]


async def test_after_a_flush_the_owners_are_back_and_the_workers_left_alone(
    harness: ActivityHarness, temporal: Client
) -> None:
    workers = [await start_watched_user(harness) for _ in range(2)]
    watcher = MarkWatcher(
        harness.client, temporal, harness.settings, ValkeyRestorer(harness.client, SECRETS)
    )
    absences = MissingMarkTracker(confirm=0.0, settle=30.0)
    async with (
        listening(temporal, names.user_worker_id(workers[0].user)) as handle,
        harness.database.engine.connect() as connection,
    ):
        await watcher.check_marks(connection, absences)
        assert absences.missing == []
        before = await reply_of(harness.client.get(keys.GENERATION))
        await harness.client.flushall()
        assert [await worker.renew() for worker in workers] == ["no_owner", "no_owner"]
        await watcher.check_marks(connection, absences)
        assert len(absences.missing) == 2
        assert [await worker.renew() for worker in workers] == ["ok", "ok"]
        await watcher.check_marks(connection, absences)
        assert absences.missing == []
        assert await handle.query(ListenerWorkflow.heard) == []
    after = await reply_of(harness.client.get(keys.GENERATION))
    assert after != before
    assert {
        await reply_of(harness.client.hget(keys.owner(worker.user), "generation"))
        for worker in workers
    } == {after}


async def test_workers_that_share_a_login_find_their_scripts_on_a_new_server(
    harness: ActivityHarness, temporal: Client
) -> None:
    """They may not bring any, as on ElastiCache."""
    watcher = MarkWatcher(
        harness.client,
        temporal,
        harness.settings,
        ValkeyRestorer(harness.client, SECRETS, database=harness.database),
    )
    await harness.client.script_flush()
    async with harness.database.engine.connect() as connection:
        await watcher.check_marks(connection, MissingMarkTracker(confirm=0.0, settle=30.0))
    expected_shas = [script.sha for script in (*scripts.ALL, *job_scripts.ALL)]
    assert await harness.client.script_exists(*expected_shas) == [True] * len(expected_shas)


async def test_while_valkey_is_away_the_watcher_reports_nobody_and_continues(
    harness: ActivityHarness, temporal: Client
) -> None:
    worker = await start_watched_user(harness)
    absences = MissingMarkTracker(confirm=0.0, settle=0.0)
    away = valkey.connect_valkey(f"redis://127.0.0.1:{free_port()}/0")
    async with (
        listening(temporal, names.user_worker_id(worker.user)) as handle,
        harness.database.engine.connect() as connection,
    ):
        await worker.die()
        await MarkWatcher(
            away, temporal, harness.settings, ValkeyRestorer(away, SECRETS)
        ).check_marks(connection, absences)
        assert await handle.query(ListenerWorkflow.heard) == []
        await MarkWatcher(
            harness.client, temporal, harness.settings, ValkeyRestorer(harness.client, SECRETS)
        ).check_marks(connection, absences)
        assert len(await signals(handle, 1)) == 1
    await away.aclose()


async def test_one_without_a_workflow_is_logged_once_and_no_more(
    harness: ActivityHarness, temporal: Client
) -> None:
    worker = await start_watched_user(harness)
    await worker.die()
    watcher, absences = (
        MarkWatcher(
            harness.client, temporal, harness.settings, ValkeyRestorer(harness.client, SECRETS)
        ),
        MissingMarkTracker(confirm=0.0, settle=0.0),
    )
    async with harness.database.engine.connect() as connection:
        with structlog.testing.capture_logs() as logs:
            for _ in range(3):
                await watcher.check_marks(connection, absences)
    assert [line["event"] for line in logs] == ["unmarked_worker_of_no_workflow"]


async def test_a_slow_temporal_makes_no_check_so_long_that_absences_begin_anew(
    harness: ActivityHarness, temporal: Client
) -> None:
    dead = [await start_watched_user(harness) for _ in range(3)]
    for worker in dead:
        await worker.die()
    watcher = MarkWatcher(
        harness.client,
        temporal,
        harness.settings,
        ValkeyRestorer(harness.client, SECRETS),
        signalling=0.0,
    )
    absences, told = MissingMarkTracker(confirm=0.0, settle=0.0), []
    async with harness.database.engine.connect() as connection:
        for number in range(1, 4):
            with structlog.testing.capture_logs() as logs:
                await watcher.check_marks(connection, absences)
            told += [
                line["user_id"]
                for line in logs
                if line["event"] == "unmarked_worker_of_no_workflow"
            ]
            assert len(told) == number
    assert set(told) == {worker.user for worker in dead}


async def test_a_claim_that_is_not_connected_and_an_older_assignment_are_not_watched(
    harness: ActivityHarness,
) -> None:
    connected = await start_watched_user(harness)
    fresh_user, worker = await harness.user(), await harness.worker()
    await harness.run(
        harness.claiming.claim_worker, harness.claim(fresh_user, "fresh", reply_wait=0.05)
    )
    async with harness.database.engine.connect() as connection:
        assert [
            assignment.user_id
            for assignment in await worker_sessions.workers_in_service(connection)
        ] == [connected.user]
        # Its connect was never written down.
        await connection.execute(
            text(
                "update worker_sessions set claimed_at = claimed_at - interval '1 h' where "
                "claim_id = 'fresh'"
            )
        )
        watched = {each.worker_id for each in await worker_sessions.workers_in_service(connection)}
        assert watched == {connected.ref.worker_id, worker.worker_id}
        await connection.execute(
            text("update users set epoch = epoch + 1 where id = :id"), {"id": connected.user}
        )
        watched = {each.worker_id for each in await worker_sessions.workers_in_service(connection)}
        assert watched == {worker.worker_id}


async def test_one_process_leads_and_another_follows_when_its_connection_breaks(
    harness: ActivityHarness,
) -> None:
    url, lock = harness.settings.database_url, 4711
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
    async with harness.database.session() as session:
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


#: Stops itself between two statements, or in the middle of one: a new statement is parsed by a
#: message of its own, and until the next one PostgreSQL does not count the session as idle.
_STUCK = """
import asyncio, os, signal, sys
from infra.database import locks
locks.MAX_SILENCE_S = 1
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
        asyncio.run(locks.lead(sys.argv[1], 4712, work))
    except locks.DatabaseUnavailable:
        if stopped:  # else it stood still by itself for a second before it was at work
            raise
"""


@pytest.mark.parametrize("where", ["between", "within"])
async def test_a_leader_that_is_stopped_loses_its_place(
    harness: ActivityHarness, where: str
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _STUCK,
        harness.settings.database_url,
        where,
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
            await lead(harness.settings.database_url, 4712, work)
        assert took_over.is_set()
        process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(20):
            _, said = await process.communicate()
        assert b"DatabaseUnavailable" in said
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

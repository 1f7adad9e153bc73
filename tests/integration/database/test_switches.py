"""Switches in PostgreSQL: who may trade, and who said so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import select

from infra.database import accounts, switches, users, worker_sessions
from infra.database.accounts import Encrypted
from infra.database.engine import Database
from infra.database.models import AuditEntry
from infra.database.switches import Scope
from worker_runtime.protocol.switches import OPEN, SwitchState

HALTED, REDUCING = SwitchState.HALTED, SwitchState.REDUCING
SEALED = Encrypted(ciphertext=b"c", nonce=b"n", wrapped_key=b"w", master_key_id="k")


@pytest.fixture
async def database(migrated_database: str) -> AsyncIterator[Database]:
    database = Database(migrated_database, pool_wait=30.0)
    async with database.session() as session:
        for user_id in ("alice", "bob"):
            await users.create(session, user_id)
            for account_id in ("main", "other"):
                await accounts.put(
                    session,
                    user_id=user_id,
                    account_id=account_id,
                    broker="paper",
                    broker_type="stock",
                    simulation=True,
                    encrypted=SEALED,
                )
    yield database
    await database.close()


async def put(database: Database, scope: Scope, state: SwitchState) -> int:
    async with database.session() as session:
        row = await switches.put(session, scope, state, actor="key:1", reason="a test")
        return row.version


async def test_nobody_is_switched_until_somebody_switches(database: Database) -> None:
    async with database.session() as session:
        assert await switches.of_user(session, "alice") == OPEN
        assert (await switches.all_of(session)).of("alice") == OPEN


async def test_the_strictest_of_all_scopes_counts(database: Database) -> None:
    await put(database, Scope("alice"), REDUCING)
    await put(database, Scope("alice", "main"), HALTED)
    last = await put(database, Scope("alice", by_user=True), SwitchState.OPEN)
    await put(database, Scope("bob", "main", by_user=True), HALTED)
    async with database.session() as session:
        alice, picture = await switches.of_user(session, "alice"), await switches.all_of(session)
    assert (alice.of("main"), alice.of("other"), alice.version) == (HALTED, REDUCING, last)
    assert picture.of("alice") == alice
    assert (picture.of("bob").of("main"), picture.of("bob").of("other")) == (HALTED, SwitchState.OPEN)
    assert picture.of("carol") == OPEN
    everybody = await put(database, Scope(), HALTED)
    async with database.session() as session:
        bob, picture = await switches.of_user(session, "bob"), await switches.all_of(session)
    assert (bob.of("other"), bob.version, picture.of("carol").every) == (HALTED, everybody, HALTED)


async def test_opening_ones_own_switch_does_not_open_an_operators(database: Database) -> None:
    await put(database, Scope("alice"), HALTED)
    await put(database, Scope("alice", by_user=True), HALTED)
    await put(database, Scope("alice", by_user=True), SwitchState.OPEN)
    async with database.session() as session:
        assert (await switches.of_user(session, "alice")).every is HALTED


async def test_every_change_has_a_higher_version_and_stands_in_the_audit_trail(database: Database) -> None:
    scope = Scope("alice", "main")
    versions = await asyncio.gather(*(put(database, scope, state) for state in [HALTED, REDUCING] * 4))
    assert len(set(versions)) == len(versions)
    async with database.session() as session:
        (row,) = await switches.rows(session, "alice")
        entries = list(await session.scalars(select(AuditEntry).order_by(AuditEntry.id)))
    assert row.version == max(versions)
    told = [(entry.action, entry.subject, entry.actor, entry.data["reason"]) for entry in entries]
    assert told == [("switch.set", "switch:account:alice:main", "key:1", "a test")] * len(versions)
    # Committed in the order of their versions: the trail and the row tell the same story.
    assert [entry.data["version"] for entry in entries] == sorted(versions)
    states = [entry.data["state"] for entry in entries]
    assert [entry.data["before"] for entry in entries] == ["open", *states[:-1]]
    assert row.state == states[-1]


async def test_those_with_a_worker_are_in_reach(database: Database) -> None:
    async with database.session() as session:
        for user_id in ("alice", "bob"):
            claim = f"claim-{user_id}"
            await worker_sessions.assign(session, user_id=user_id, claim_id=claim, pool="default")
            await worker_sessions.set_worker(
                session, claim_id=claim, worker_id=user_id, task_id="", warm=True
            )
    async with database.session() as session:
        assert set(await switches.in_reach(session, Scope())) == {"alice", "bob"}
        assert await switches.in_reach(session, Scope("alice", "main")) == ["alice"]
        await worker_sessions.end(session, claim_id="claim-alice", reason="a test")
    async with database.session() as session:
        assert await switches.in_reach(session, Scope("alice")) == []


@pytest.mark.parametrize(
    "scope", [Scope(), Scope("u"), Scope("u", "a"), Scope("u", by_user=True), Scope("u", "a", by_user=True)]
)
def test_a_scope_is_found_again_by_its_name(scope: Scope) -> None:
    assert Scope.of(scope.name) == scope

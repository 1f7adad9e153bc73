"""Switches in PostgreSQL: who may trade, and who said so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import select, text

from infra.database import accounts, users
from infra.database.engine import Database
from infra.database.models import AuditEntry, EncryptedCredentials
from infra.database.trading import switches
from infra.database.trading.switches import TradingScope
from infra.database.workers import sessions as worker_sessions
from tests.support.databases import assign_launched_worker
from worker_runtime.protocol.requests import OPEN_SWITCH, SwitchState

HALTED, REDUCING = SwitchState.HALTED, SwitchState.REDUCING
_RESTART = "alter sequence {} restart".format
SEALED = EncryptedCredentials(ciphertext=b"c", nonce=b"n", wrapped_key=b"w", master_key_id="k")


@pytest.fixture
async def database(migrated_database: str) -> AsyncIterator[Database]:
    database = Database(migrated_database, pool_wait=30.0)
    async with database.session() as session:
        for user_id in ("alice", "bob"):
            await users.create_user(session, user_id)
            for account_id in ("main", "other"):
                await accounts.put_account(
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


async def put(database: Database, scope: TradingScope, state: SwitchState) -> int:
    async with database.session() as session:
        row = await switches.put_switch(session, scope, state, actor="key:1", reason="a test")
        return row.version


async def test_without_a_switch_everybody_may_trade(database: Database) -> None:
    async with database.session() as session:
        assert await switches.switch_of_user(session, "alice") == OPEN_SWITCH
        assert (await switches.read_switches(session)).for_user("alice") == OPEN_SWITCH


async def test_the_strictest_of_all_scopes_counts(database: Database) -> None:
    await put(database, TradingScope("alice"), REDUCING)
    await put(database, TradingScope("alice", "main"), HALTED)
    last = await put(database, TradingScope("alice", by_user=True), SwitchState.OPEN)
    await put(database, TradingScope("bob", "main", by_user=True), HALTED)
    async with database.session() as session:
        alice, picture = (
            await switches.switch_of_user(session, "alice"),
            await switches.read_switches(session),
        )
    assert (alice.of("main"), alice.of("other"), alice.version) == (HALTED, REDUCING, last)
    assert picture.for_user("alice") == alice
    assert (picture.for_user("bob").of("main"), picture.for_user("bob").of("other")) == (
        HALTED,
        SwitchState.OPEN,
    )
    assert picture.for_user("carol") == OPEN_SWITCH
    everybody = await put(database, TradingScope(), HALTED)
    async with database.session() as session:
        bob, picture = (
            await switches.switch_of_user(session, "bob"),
            await switches.read_switches(session),
        )
    assert (bob.of("other"), bob.version, picture.for_user("carol").every) == (
        HALTED,
        everybody,
        HALTED,
    )


async def test_opening_ones_own_switch_does_not_open_an_operators(database: Database) -> None:
    await put(database, TradingScope("alice"), HALTED)
    await put(database, TradingScope("alice", by_user=True), HALTED)
    await put(database, TradingScope("alice", by_user=True), SwitchState.OPEN)
    async with database.session() as session:
        assert (await switches.switch_of_user(session, "alice")).every is HALTED


async def test_numbers_grow_though_an_earlier_state_was_restored(database: Database) -> None:
    async def control_number() -> int:
        async with database.session() as session:
            return await worker_sessions.next_control_number(session)

    before = await put(database, TradingScope("alice"), HALTED), await control_number()
    async with database.session() as session:
        for statement in (
            "delete from switches",
            *map(_RESTART, ("switch_version", "control_number")),
        ):
            await session.execute(text(statement))
    after = await put(database, TradingScope("alice"), HALTED), await control_number()
    assert after[0] > before[0]
    assert after[1] > before[1]


async def test_every_change_has_a_higher_version_and_is_in_the_audit_trail(
    database: Database,
) -> None:
    scope = TradingScope("alice", "main")
    versions = await asyncio.gather(
        *(put(database, scope, state) for state in [HALTED, REDUCING] * 4)
    )
    assert len(set(versions)) == len(versions)
    async with database.session() as session:
        (row,) = await switches.list_switches(session, "alice")
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
            await worker_sessions.assign_epoch(
                session, user_id=user_id, claim_id=claim, pool="default"
            )
            await assign_launched_worker(session, claim, user_id)
    async with database.session() as session:
        assert set(await switches.users_in_scope(session, TradingScope())) == {"alice", "bob"}
        assert await switches.users_in_scope(session, TradingScope("alice", "main")) == ["alice"]
        await worker_sessions.end_session(session, claim_id="claim-alice", reason="a test")
    async with database.session() as session:
        assert await switches.users_in_scope(session, TradingScope("alice")) == []


@pytest.mark.parametrize(
    "scope",
    [
        TradingScope(),
        TradingScope("u"),
        TradingScope("u", "a"),
        TradingScope("u", by_user=True),
        TradingScope("u", "a", by_user=True),
    ],
)
def test_a_scope_is_found_again_by_its_name(scope: TradingScope) -> None:
    assert TradingScope.parse(scope.name) == scope

"""What quantity changes are confirmed to mean, in PostgreSQL: by version, lot and mode."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import select

from infra.cli.broker import store_meanings
from infra.database import accounts, users
from infra.database.engine import Database
from infra.database.models import AuditEntry, EncryptedCredentials
from infra.database.trading import quantity_changes
from infra.database.trading.models import QuantityChangeConfirmation
from infra.database.trading.quantity_changes import SeenQuantityChange
from worker_runtime.protocol.broker_check import CheckOutcome, CheckStep
from worker_runtime.protocol.order_terms import OrderLot
from worker_runtime.protocol.requests import ConfirmedQuantityChange, QuantityMeaning

SEALED = EncryptedCredentials(ciphertext=b"c", nonce=b"n", wrapped_key=b"w", master_key_id="k")


@pytest.fixture
async def database(migrated_database: str) -> AsyncIterator[Database]:
    database = Database(migrated_database, pool_wait=30.0)
    async with database.session() as session:
        await users.create_user(session, "alice")
        for account_id, broker, simulation in (
            ("sim", "shioaji", True),
            ("real", "shioaji", False),
            ("paper", "paper", True),
        ):
            await accounts.put_account(
                session,
                user_id="alice",
                account_id=account_id,
                broker=broker,
                broker_type="stock",
                simulation=simulation,
                encrypted=SEALED,
            )
    yield database
    await database.close()


def seen(
    meaning: QuantityMeaning, *, simulation: bool, lot: OrderLot = OrderLot.COMMON
) -> SeenQuantityChange:
    return SeenQuantityChange(
        broker="shioaji",
        sdk_version="1.7.9",
        lot=lot,
        futures=False,
        simulation=simulation,
        meaning=meaning,
        evidence={"ordered": 3, "sent": 1, "left": 2},
    )


async def confirmed(database: Database, account_id: str) -> list[ConfirmedQuantityChange]:
    return list(await database.read(quantity_changes.confirmed_for, "alice", account_id))


async def test_a_a_simulation_never_confirms_production(database: Database) -> None:
    async with database.session() as session:
        await quantity_changes.store_confirmation(
            session, seen(QuantityMeaning.REDUCE_BY, simulation=True), actor="cli"
        )
    [change] = await confirmed(database, "sim")
    assert (change.sdk_version, change.lot, change.futures) == ("1.7.9", OrderLot.COMMON, False)
    assert change.meaning is QuantityMeaning.REDUCE_BY
    assert await confirmed(database, "real") == []
    assert await confirmed(database, "paper") == []


async def test_a_of_two_confirmations_of_one_kind_the_newer_one_counts(database: Database) -> None:
    async with database.session() as session:
        for meaning in (QuantityMeaning.NEW_TOTAL, QuantityMeaning.REDUCE_BY):
            await quantity_changes.store_confirmation(
                session, seen(meaning, simulation=False), actor="cli"
            )
        odd = seen(QuantityMeaning.NEW_TOTAL, simulation=False, lot=OrderLot.ODD)
        await quantity_changes.store_confirmation(session, odd, actor="cli")
    meanings = {change.lot: change.meaning for change in await confirmed(database, "real")}
    assert meanings == {
        OrderLot.COMMON: QuantityMeaning.REDUCE_BY,
        OrderLot.ODD: QuantityMeaning.NEW_TOTAL,
    }
    async with database.session() as session:
        acts = (await session.scalars(select(AuditEntry).filter_by(subject="broker:shioaji"))).all()
    assert [entry.action for entry in acts] == ["quantity_change.confirmed"] * 3


async def test_a_what_a_check_has_seen_is_stored_with_its_evidence(
    database: Database, migrated_database: str
) -> None:
    meaning = {
        "broker": "shioaji",
        "sdk_version": "1.7.9",
        "lot": "intraday_odd",
        "futures": False,
        "simulation": False,
        "meaning": "new_total",
    }
    steps = [
        CheckStep(name="login", outcome=CheckOutcome.PASSED, evidence={"sdk_version": "1.7.9"}),
        CheckStep(
            name="quantity: intraday_odd",
            outcome=CheckOutcome.PASSED,
            evidence={"ordered": 3, "sent": 1, "left": 1, "meaning": meaning},
        ),
    ]
    await store_meanings(migrated_database, steps, actor="cli:tester")
    [change] = await confirmed(database, "real")
    assert (change.lot, change.meaning) == (OrderLot.INTRADAY_ODD, QuantityMeaning.NEW_TOTAL)
    async with database.session() as session:
        [row] = (await session.scalars(select(QuantityChangeConfirmation))).all()
    assert (row.actor, row.evidence) == ("cli:tester", {"ordered": 3, "sent": 1, "left": 1})

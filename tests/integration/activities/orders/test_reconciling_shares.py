"""Our books compared with the broker's in shares and under rolling codes: odd lots add up to
lots, and what was never seen blocks nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from sqlalchemy import update

from infra.database.models import Order
from infra.local.servers import TemporalServer
from tests.support.activities.reconciling import (
    age_orders,
    list_reconciliations,
    make_position,
    open_books,
    record_account_report,
    resolve_difference,
    write_filled_order,
)
from tests.support.orders.sweeper import SweeperHarness


@pytest.fixture
async def harness(
    valkey_client: Redis, migrated_database: str, temporal_server: TemporalServer
) -> AsyncIterator[SweeperHarness]:
    async with open_books(valkey_client, migrated_database, temporal_server) as harness:
        yield harness


async def filled(
    harness: SweeperHarness, quantity: int, lot: str = "odd", side: str = "buy"
) -> None:
    await harness.order(
        due=False, state="filled", filled_quantity=quantity, lot=lot, side=side, verify_at=None
    )
    await age_orders(harness)


async def test_odd_lots_add_up_to_lots(harness: SweeperHarness) -> None:
    await record_account_report(harness)
    await filled(harness, 600)
    await record_account_report(harness, make_position("2330", 0, 600))
    await filled(harness, 600, "intraday_odd")
    await record_account_report(harness, make_position("2330", 1, 200))
    await filled(harness, 2, "common")
    await record_account_report(harness, make_position("2330", 3, 200))
    await filled(harness, 1, "fixing", "sell")
    await filled(harness, 300, "odd", "sell")
    await record_account_report(harness, make_position("2330", 1, 900))
    assert await list_reconciliations(harness) == []


async def test_shares_that_nobody_explains_are_a_difference_of_their_own(
    harness: SweeperHarness,
) -> None:
    await record_account_report(harness)
    await filled(harness, 600)
    await record_account_report(harness, make_position("2330", 0, 500))
    [row] = await list_reconciliations(harness)
    assert row.differences == {"odd_shares": [{"symbol": "2330", "ours": 600, "broker": 500}]}
    await resolve_difference(harness, row)
    await record_account_report(harness, make_position("2330", 0, 500))
    await record_account_report(harness, make_position("2330", 2, 400))
    newest, _ = await list_reconciliations(harness)
    assert newest.differences == {
        "positions": [{"symbol": "2330", "ours": 0, "broker": 2}],
        "odd_shares": [{"symbol": "2330", "ours": 500, "broker": 400}],
    }


async def test_what_is_held_short_has_its_sign(harness: SweeperHarness) -> None:
    await record_account_report(harness)
    await filled(harness, 2, "common", "sell")
    await record_account_report(harness, make_position("2330", -2))
    await filled(harness, 100, "odd")
    await record_account_report(harness, make_position("2330", -1, -900))
    assert await list_reconciliations(harness) == []


@pytest.mark.parametrize("blocks", [False, True])
async def test_shares_that_an_earlier_release_never_saw_are_where_the_books_continue(
    harness: SweeperHarness, blocks: bool
) -> None:
    """Release 0.1.0 counted full lots: an account with 2,345 shares has books of 2 lots."""
    await record_account_report(harness, make_position("2330", 2), odd_shown=False)
    await record_account_report(
        harness, make_position("2330", 2, 345), make_position("2317", 0, 7), blocks=blocks
    )
    assert await list_reconciliations(harness) == []
    await harness.order(due=False)  # nothing blocks the account
    await age_orders(harness)
    for _ in range(2):
        await record_account_report(
            harness, make_position("2330", 2, 345), make_position("2317", 0, 7), blocks=blocks
        )
    assert await list_reconciliations(harness) == []
    # The shares of 2317 are gone, and nobody sold.
    await record_account_report(harness, make_position("2330", 2, 345), blocks=blocks)
    [row] = await list_reconciliations(harness)
    assert row.differences == {"odd_shares": [{"symbol": "2317", "ours": 7, "broker": 0}]}
    # A worker of that release, still about, does not see them at all: the difference stays as it
    # is.
    await record_account_report(harness, make_position("2330", 2), odd_shown=False, blocks=blocks)
    [row] = await list_reconciliations(harness)
    assert row.resolved_at is None


async def test_lots_that_differ_at_the_first_look_at_shares_stay_a_difference(
    harness: SweeperHarness,
) -> None:
    await record_account_report(harness, make_position("2330", 2), odd_shown=False)
    await record_account_report(harness, make_position("2330", 4, 345))
    [row] = await list_reconciliations(harness)
    assert row.differences == {"positions": [{"symbol": "2330", "ours": 2, "broker": 4}]}


async def test_a_worker_that_counts_lots_sees_no_difference_in_shares(
    harness: SweeperHarness,
) -> None:
    await record_account_report(harness)
    await filled(harness, 600)
    await record_account_report(harness, make_position("2330", 0, 600))
    await record_account_report(harness, odd_shown=False)
    await filled(harness, 600)
    await record_account_report(harness, make_position("2330", 1), odd_shown=False)
    assert await list_reconciliations(harness) == []


async def test_the_fills_of_a_rolling_code_explain_the_position_in_its_contract(
    harness: SweeperHarness,
) -> None:
    await record_account_report(harness, make_position("TXFA6", 1))
    for symbol, side in (("TXFR1", "buy"), ("TXFA6", "sell")):
        order_id = await write_filled_order(harness, broker_order_id=symbol)
        async with harness.database.session() as session:
            await session.execute(
                update(Order).where(Order.id == order_id).values(symbol=symbol, side=side)
            )
        await record_account_report(harness, make_position("TXFA6", 3 if side == "buy" else 1))
        assert await list_reconciliations(harness) == []
    await record_account_report(harness, make_position("TXFA6", 2))
    assert (await list_reconciliations(harness))[0].differences == {
        "positions": [{"symbol": "TXFR1", "ours": 1, "broker": 2}]
    }

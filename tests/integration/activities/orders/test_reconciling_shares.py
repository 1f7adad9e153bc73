"""Our books beside the broker's in shares and under rolling codes: odd lots add up to lots, and
what was never seen blocks nobody."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from infra.database.models import Order
from tests.integration.activities.orders import test_reconciling as books
from tests.integration.activities.orders.test_reconciling import held, report, rows
from tests.support.orders.sweeper import SweeperStage

stage = books.stage


async def filled(stage: SweeperStage, quantity: int, lot: str = "odd", side: str = "buy") -> None:
    await stage.order(
        due=False, state="filled", filled_quantity=quantity, lot=lot, side=side, verify_at=None
    )
    await books.a_while_passes(stage)


async def test_odd_lots_add_up_to_lots(stage: SweeperStage) -> None:
    await report(stage)
    await filled(stage, 600)
    await report(stage, held("2330", 0, 600))
    await filled(stage, 600, "intraday_odd")
    await report(stage, held("2330", 1, 200))
    await filled(stage, 2, "common")
    await report(stage, held("2330", 3, 200))
    await filled(stage, 1, "fixing", "sell")
    await filled(stage, 300, "odd", "sell")
    await report(stage, held("2330", 1, 900))
    assert await rows(stage) == []


async def test_shares_that_nobody_explains_are_a_difference_of_their_own(
    stage: SweeperStage,
) -> None:
    await report(stage)
    await filled(stage, 600)
    await report(stage, held("2330", 0, 500))
    [row] = await rows(stage)
    assert row.differences == {"odd_shares": [{"symbol": "2330", "ours": 600, "broker": 500}]}
    await books.resolve(stage, row)
    await report(stage, held("2330", 0, 500))
    await report(stage, held("2330", 2, 400))
    newest, _ = await rows(stage)
    assert newest.differences == {
        "positions": [{"symbol": "2330", "ours": 0, "broker": 2}],
        "odd_shares": [{"symbol": "2330", "ours": 500, "broker": 400}],
    }


async def test_what_is_held_short_has_its_sign(stage: SweeperStage) -> None:
    await report(stage)
    await filled(stage, 2, "common", "sell")
    await report(stage, held("2330", -2))
    await filled(stage, 100, "odd")
    await report(stage, held("2330", -1, -900))
    assert await rows(stage) == []


@pytest.mark.parametrize("blocks", [False, True])
async def test_shares_that_an_earlier_release_never_saw_are_where_the_books_go_on(
    stage: SweeperStage, blocks: bool
) -> None:
    """Release 0.1.0 counted full lots: an account with 2,345 shares has books of 2 lots."""
    await report(stage, held("2330", 2), odd_shown=False)
    await report(stage, held("2330", 2, 345), held("2317", 0, 7), blocks=blocks)
    assert await rows(stage) == []
    await stage.order(due=False)  # nothing blocks the account
    await books.a_while_passes(stage)
    for _ in range(2):
        await report(stage, held("2330", 2, 345), held("2317", 0, 7), blocks=blocks)
    assert await rows(stage) == []
    # The shares of 2317 are gone, and nobody sold.
    await report(stage, held("2330", 2, 345), blocks=blocks)
    [row] = await rows(stage)
    assert row.differences == {"odd_shares": [{"symbol": "2317", "ours": 7, "broker": 0}]}
    # A worker of that release, still about, does not see them at all: the difference stays as it
    # is.
    await report(stage, held("2330", 2), odd_shown=False, blocks=blocks)
    [row] = await rows(stage)
    assert row.resolved_at is None


async def test_lots_that_differ_at_the_first_look_at_shares_stay_a_difference(
    stage: SweeperStage,
) -> None:
    await report(stage, held("2330", 2), odd_shown=False)
    await report(stage, held("2330", 4, 345))
    [row] = await rows(stage)
    assert row.differences == {"positions": [{"symbol": "2330", "ours": 2, "broker": 4}]}


async def test_a_worker_that_counts_lots_sees_no_difference_in_shares(stage: SweeperStage) -> None:
    await report(stage)
    await filled(stage, 600)
    await report(stage, held("2330", 0, 600))
    await report(stage, odd_shown=False)
    await filled(stage, 600)
    await report(stage, held("2330", 1), odd_shown=False)
    assert await rows(stage) == []


async def test_the_fills_of_a_rolling_code_explain_the_position_in_its_contract(
    stage: SweeperStage,
) -> None:
    await report(stage, held("TXFA6", 1))
    for symbol, side in (("TXFR1", "buy"), ("TXFA6", "sell")):
        order_id = await books.a_filled_order(stage, broker_order_id=symbol)
        async with stage.database.session() as session:
            await session.execute(
                update(Order).where(Order.id == order_id).values(symbol=symbol, side=side)
            )
        await report(stage, held("TXFA6", 3 if side == "buy" else 1))
        assert await rows(stage) == []
    await report(stage, held("TXFA6", 2))
    assert (await rows(stage))[0].differences == {
        "positions": [{"symbol": "TXFR1", "ours": 1, "broker": 2}]
    }

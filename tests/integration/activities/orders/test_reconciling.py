"""Our books compared with the broker's, after a login."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from decimal import Decimal

import pytest
from msgspec import structs
from redis.asyncio import Redis
from sqlalchemy import text

from activities.events.recorder import Recorder
from activities.orders.reconciliation import MAX_FOREIGN_ORDERS
from infra.database.trading import reconciliations
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
from worker_runtime.protocol.broker_reports import BrokerOrder
from worker_runtime.protocol.errors import AccountBlocked, MalformedMessage
from worker_runtime.protocol.messages import (
    AccountReported,
    Fill,
    OrderEvent,
    OrderState,
    PriceType,
    Side,
    TimeInForce,
)
from worker_runtime.protocol.requests import (
    BooksCompared,
    ControlMessage,
)


@pytest.fixture
async def harness(
    valkey_client: Redis, migrated_database: str, temporal_server: TemporalServer
) -> AsyncIterator[SweeperHarness]:
    async with open_books(valkey_client, migrated_database, temporal_server) as harness:
        yield harness


def listed(broker_order_id: str, *lots: int, state: OrderState = OrderState.FILLED) -> BrokerOrder:
    return BrokerOrder(
        broker_order_id=broker_order_id,
        tag="000001",
        symbol="2330",
        side=Side.BUY,
        quantity=2,
        price_type=PriceType.MARKET,
        price=None,
        time_in_force=TimeInForce.IOC,
        state=state,
        fills=[
            Fill(
                fill_id=f"{broker_order_id}-{at}",
                quantity=many,
                price=Decimal(100),
                at_ms=1_795_410_000_001,
            )
            for at, many in enumerate(lots)
        ],
    )


async def test_books_that_agree_leave_no_trace(harness: SweeperHarness) -> None:
    await record_account_report(harness)
    await write_filled_order(harness)
    await record_account_report(harness, make_position("2330", 2), orders=(listed("B-1", 2),))
    assert await list_reconciliations(harness) == []


async def test_a_position_that_our_fills_do_not_explain_is_written_down_once(
    harness: SweeperHarness,
) -> None:
    await record_account_report(harness)
    await write_filled_order(harness)
    for _ in range(2):
        await record_account_report(harness, make_position("2330", 3), make_position("2317", -1))
    [row] = await list_reconciliations(harness)
    assert row.differences == {
        "positions": [
            {"symbol": "2317", "ours": 0, "broker": -1},
            {"symbol": "2330", "ours": 2, "broker": 3},
        ]
    }
    assert not row.blocks


async def test_what_another_comparison_does_not_find_any_more_is_closed(
    harness: SweeperHarness,
) -> None:
    await record_account_report(harness)
    await record_account_report(harness, make_position("2330", 3))
    await record_account_report(harness, make_position("2330", 4))
    await record_account_report(harness, complete=False)
    newest, older = await list_reconciliations(harness)
    assert (newest.resolved_at, older.resolved_by) == (None, "reconciliation")
    await record_account_report(harness)
    assert [row.resolved_by for row in await list_reconciliations(harness)] == [
        "reconciliation"
    ] * 2


async def test_symbols_in_which_something_is_under_way_are_left_out(
    harness: SweeperHarness,
) -> None:
    await record_account_report(harness)
    await harness.order(state="submitted")
    await record_account_report(harness, make_position("2330", 1))
    assert await list_reconciliations(harness) == []


async def test_an_order_that_is_not_ours_is_a_difference(harness: SweeperHarness) -> None:
    await record_account_report(harness, orders=(listed("P-9", 1),))
    [row] = await list_reconciliations(harness)
    assert row.differences == {"foreign_orders": ["P-9"]}


async def test_no_worker_fills_the_books_with_orders_that_are_not_ours(
    harness: SweeperHarness,
) -> None:
    """Each stays until somebody looks, so they would grow with each report, for the recorder of all
    users."""
    half = MAX_FOREIGN_ORDERS * 2 // 3
    for first in (0, half):
        await record_account_report(
            harness, orders=tuple(listed(f"P-{first + number}", 1) for number in range(half))
        )
    newest, older = await list_reconciliations(harness)
    assert len(older.differences["foreign_orders"]) == half
    assert len(newest.differences["foreign_orders"]) == MAX_FOREIGN_ORDERS
    assert set(older.differences["foreign_orders"]) < set(newest.differences["foreign_orders"])


async def test_fills_that_nobody_heard_of_are_written_and_lost_ones_are_a_difference(
    harness: SweeperHarness,
) -> None:
    order_id = await write_filled_order(harness, lots=1)
    await record_account_report(harness, orders=(listed("B-1", 1, 1),), complete=False)
    assert (await harness.row(order_id)).filled_quantity == 2
    await record_account_report(harness, orders=(listed("B-1", 1),), complete=False)
    assert await list_reconciliations(harness) == []  # the listing may be older than the fill
    await age_orders(harness)
    await record_account_report(harness, orders=(listed("B-1", 1),), complete=False, certain=False)
    assert await list_reconciliations(harness) == []  # this broker's lists lag
    await record_account_report(
        harness, orders=(listed("B-1", state=OrderState.SUBMITTING),), complete=False
    )
    assert await list_reconciliations(harness) == []  # of the day before
    await age_orders(harness)
    await record_account_report(harness, orders=(listed("B-1", 1),), complete=False)
    [row] = await list_reconciliations(harness)
    assert row.differences == {"fills": [{"order": str(order_id), "ours": 2, "broker": 1}]}


async def test_a_difference_blocks_the_account_if_the_settings_say_so_until_somebody_looked(
    harness: SweeperHarness,
) -> None:
    await record_account_report(harness)
    await record_account_report(harness, make_position("2330", 3), blocks=True)
    with pytest.raises(AccountBlocked):
        await harness.order()
    [row] = await list_reconciliations(harness)
    await resolve_difference(harness, row)
    await harness.order()
    with pytest.raises(reconciliations.ReconciliationNotFound):
        async with harness.database.session() as session:
            await reconciliations.resolve_reconciliation(
                session, row.id, actor="key:7", reason="again"
            )


async def test_the_worker_receives_each_comparison_that_may_block_also_a_repeat(
    harness: SweeperHarness,
) -> None:
    told: list[BooksCompared] = []

    async def tell(message: ControlMessage) -> None:
        assert isinstance(message, BooksCompared)
        told.append(message)

    first, differs = (
        await record_account_report(harness),
        await record_account_report(harness, make_position("2330", 3), blocks=True),
    )
    recorder = Recorder(harness.database, differences_block=True, send_control=tell)
    await recorder.handle([first, differs])  # their first answers were lost
    # Nothing waits without the setting.
    await Recorder(harness.database, send_control=tell).handle([differs])
    assert [(message.at_ms, message.blocks) for message in told] == [
        (first.at_ms, True),
        (differs.at_ms, True),
    ]
    [row] = await list_reconciliations(harness)
    await resolve_difference(harness, row)
    await recorder.handle([differs])
    assert (told[-1].account_id, told[-1].epoch, told[-1].blocks) == ("main", 1, False)


async def test_what_an_account_held_before_its_first_comparison_is_where_its_books_begin(
    harness: SweeperHarness,
) -> None:
    order_id = await harness.order(symbol="2454", due=False)  # the order that brought the worker
    await record_account_report(harness, make_position("2454", 5), complete=False)
    await record_account_report(harness, make_position("2330", 10), make_position("2454", 5))
    done = OrderEvent(
        event_id=f"{order_id}:1",
        order_id=str(order_id),
        user_id=harness.user_id,
        epoch=1,
        state=OrderState.FILLED,
        at_ms=int(time.time() * 1000),
        filled_quantity=1,
    )
    await Recorder(harness.database).handle([done])
    await age_orders(harness)
    await record_account_report(harness, make_position("2330", 10), make_position("2454", 6))
    assert await list_reconciliations(harness) == []
    await record_account_report(harness, make_position("2330", 9), make_position("2454", 6))
    [row] = await list_reconciliations(harness)
    assert row.differences == {"positions": [{"symbol": "2330", "ours": 10, "broker": 9}]}


async def test_fills_that_came_after_the_first_comparison_are_not_in_what_it_begins_with(
    harness: SweeperHarness,
) -> None:
    order_id = await harness.order(due=False)
    now = int(time.time() * 1000)
    events = [
        OrderEvent(
            event_id=f"{order_id}:{lots}",
            order_id=str(order_id),
            user_id=harness.user_id,
            epoch=1,
            state=OrderState.PART_FILLED if lots == 1 else OrderState.FILLED,
            at_ms=at_ms,
            filled_quantity=lots,
        )
        for lots, at_ms in ((1, now - 60_000), (2, now))
    ]
    await Recorder(harness.database).handle(events)
    await record_account_report(harness, make_position("2330", 4), ago=30)
    await age_orders(harness)
    await record_account_report(harness, make_position("2330", 5))
    assert await list_reconciliations(harness) == []


async def test_what_a_person_has_closed_is_no_difference_again_but_more_of_it_is(
    harness: SweeperHarness,
) -> None:
    await record_account_report(harness)
    await record_account_report(harness, make_position("2330", 3), orders=(listed("P-1", 1),))
    await resolve_difference(harness, (await list_reconciliations(harness))[0])
    await record_account_report(harness, make_position("2330", 3), orders=(listed("P-1", 1),))
    assert [row.resolved_by for row in await list_reconciliations(harness)] == ["key:7"]
    await record_account_report(
        harness, make_position("2330", 4), orders=(listed("P-1", 1), listed("P-2", 1))
    )
    assert (await list_reconciliations(harness))[0].differences == {
        "foreign_orders": ["P-2"],
        "positions": [{"symbol": "2330", "ours": 3, "broker": 4}],
    }


async def test_a_report_that_shows_nothing_of_a_difference_leaves_it_open(
    harness: SweeperHarness,
) -> None:
    await record_account_report(harness)
    await record_account_report(harness, make_position("2330", 3), orders=(listed("P-1", 1),))
    both = (await list_reconciliations(harness))[0].differences
    await record_account_report(harness, complete=False)
    order_id = await harness.order(state="submitted")
    await record_account_report(
        harness
    )  # something is under way in the symbol, and the day's list is new
    [row] = await list_reconciliations(harness)
    assert (row.differences, row.resolved_at) == (both, None)
    async with harness.database.session() as session:
        await session.execute(
            text("update orders set state = 'cancelled', broker_order_id = 'P-1'")
        )
    await age_orders(harness)
    await record_account_report(harness)  # the order is known as ours by now
    assert [row.resolved_by for row in await list_reconciliations(harness)] == ["reconciliation"]
    assert (await harness.row(order_id)).filled_quantity == 0


@pytest.mark.parametrize("by_tag", [True, False])
async def test_an_order_that_we_hold_for_rejected_and_the_broker_filled_is_a_difference(
    harness: SweeperHarness, by_tag: bool
) -> None:
    await record_account_report(harness)
    order_id = await harness.order(
        due=False, state="rejected", broker_order_id=None if by_tag else "B-1", verify_at=None
    )
    await age_orders(harness)
    tag = (await harness.row(order_id)).tag
    for _ in range(2):
        # The broker's own id is proof enough for the fill; a tag alone is not.
        lots = make_position("2330", 0 if by_tag else 1)
        await record_account_report(
            harness, lots, orders=(structs.replace(listed("B-1", 1), tag=tag, quantity=1),)
        )
        await age_orders(harness)
    [row] = await list_reconciliations(harness)
    assert row.differences == {
        "states": [{"order": str(order_id), "ours": "rejected", "broker": "filled"}]
    }


async def test_an_order_that_has_ended_here_and_works_at_the_broker_is_a_difference(
    harness: SweeperHarness,
) -> None:
    await record_account_report(harness)
    order_id = await harness.order(
        due=False, state="cancelled", broker_order_id="B-1", verify_at=None
    )
    await age_orders(harness)
    works = listed("B-1", state=OrderState.SUBMITTED)
    await record_account_report(harness, orders=(works,), certain=False)
    assert await list_reconciliations(harness) == []
    await age_orders(harness)
    await record_account_report(harness, orders=(works,))
    [row] = await list_reconciliations(harness)
    assert row.differences == {
        "states": [{"order": str(order_id), "ours": "cancelled", "broker": "submitted"}]
    }


async def test_two_comparisons_at_once_leave_one_open_row(harness: SweeperHarness) -> None:
    await record_account_report(harness)
    await asyncio.gather(
        *(record_account_report(harness, make_position("2330", lots)) for lots in range(1, 5))
    )
    assert [row.resolved_at for row in await list_reconciliations(harness)].count(None) == 1
    async with harness.database.session() as session:
        [waiting] = await reconciliations.open_reconciliations(session)
        assert await reconciliations.open_reconciliations(session, after=waiting.id) == []


async def test_a_report_that_cannot_be_read_is_malformed(harness: SweeperHarness) -> None:
    broken = AccountReported(
        worker_id="w",
        user_id=harness.user_id,
        account_id="main",
        epoch=1,
        at_ms=1_795_410_000_000,
        report={"orders": 7},
    )
    with pytest.raises(MalformedMessage):  # so that the stream gives it up
        await Recorder(harness.database).handle([broken])
    assert await list_reconciliations(harness) == []


@pytest.mark.parametrize("epoch", [1, 2], ids=["same worker", "next worker"])
async def test_an_earlier_report_that_comes_again_changes_nothing(
    harness: SweeperHarness, epoch: int
) -> None:
    """Whoever has Valkey can add a genuine report again: of a time when the books agreed, or did
    not."""
    await record_account_report(harness, ago=60)
    agreed = await record_account_report(harness, ago=50)
    differed = await record_account_report(harness, make_position("2330", 5), ago=40, epoch=epoch)
    [row] = await list_reconciliations(harness)
    await Recorder(harness.database).handle([agreed])
    assert [(listed.id, listed.resolved_at) for listed in await list_reconciliations(harness)] == [
        (row.id, None)
    ]
    await record_account_report(harness, ago=30, epoch=epoch)
    for again in (differed, agreed, differed):
        await Recorder(harness.database).handle([again])
    [row] = await list_reconciliations(harness)
    assert row.resolved_by == reconciliations.CLOSED_BY_COMPARISON

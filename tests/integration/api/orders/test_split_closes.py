"""A close above the market's maximum: several orders, written together, each sent once, with one
outcome."""

from __future__ import annotations

import asyncio
import time
from decimal import Decimal
from typing import Any

import httpx
import msgspec
import pytest

from api.http.errors import CloseInvalid
from api.orders.placer import PendingOrder, PlacementResult
from api.orders.schemas import OrderView
from api.positions.closer import PositionClose
from api.positions.parts import MAX_PARTS, part_ids, split_close, whole_of
from api.positions.schemas import ClosePositionRequest
from infra.database.orders import checks as order_checks
from tests.support.api.accounts import switch_body
from tests.support.api.orders import (
    close_position,
    send_intent,
    start_worker_holding,
    submitted_orders,
)
from tests.support.api.scripted_answers import answer_positions, answer_submitted, make_position
from tests.support.systems.api import ServedApi, StartWorker, running_api
from tests.support.workers.api_worker import failed, filled
from worker_runtime.protocol.broker_record import MarketRule
from worker_runtime.protocol.installed_brokers import installed_brokers
from worker_runtime.protocol.messages import Answer, Failure, OrderState, PlaceOrder, Side
from worker_runtime.protocol.order_terms import OrderLot

MARKET = installed_brokers()["paper"].record.market("futures")
MAX_QUANTITY = MARKET.lots[OrderLot.COMMON].max_quantity
WHOLE = [("sell", 499, True), ("sell", 499, True), ("sell", 202, True)]


def market_taking(max_quantity: int) -> MarketRule:
    """The futures market, if it took this many lots in one order."""
    common = msgspec.structs.replace(MARKET.lots[OrderLot.COMMON], max_quantity=max_quantity)
    return msgspec.structs.replace(MARKET, lots={OrderLot.COMMON: common})


async def ids_written(api: ServedApi, name: str = "x-1") -> list[str]:
    async with api.services.database.session() as session:
        orders = await order_checks.orders_by_client_ids(session, api.user, part_ids(name))
    return sorted(orders)


async def test_a_large_close_is_several_orders_with_one_outcome_and_a_repeat_sends_nothing(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, 1200)
    answer = await close_position(user, api)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["state"], body["final"], body["client_order_id"]) == ("filled", True, "x-1")
    assert (body["quantity"], body["filled_quantity"], body["average_price"]) == (1200, 1200, "100")
    assert [part["client_order_id"] for part in body["parts"]] == ["x-1", "x-1#2", "x-1#3"]
    assert {(part["origin"], part["state"]) for part in body["parts"]} == {("close", "filled")}
    assert sorted(submitted_orders(worker)) == sorted(WHOLE)
    again = await close_position(user, api)
    assert again.json() == body
    assert len(worker.popped) == 3
    assert (await close_position(user, api, quantity=1)).json()["code"] == "CLIENT_ORDER_ID_REUSED"
    shown = (await user.get(f"/orders/{body['parts'][1]['id']}")).json()
    assert (shown["quantity"], shown["client_order_id"]) == (499, "x-1#2")


@pytest.mark.parametrize("sent_before", [0, 1, 2])
async def test_a_process_that_dies_between_the_parts_loses_and_doubles_nothing(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker, sent_before: int
) -> None:
    """What it leaves: all parts written, some sent. The caller repeats the close at another
    process."""
    worker = await start_worker_holding(api, start_worker, 1200)
    asked = ClosePositionRequest(client_order_id="x-1")
    plan = PositionClose.of(asked, api.user, "main", "MXFA6", "a test")
    body = asked.order("x-1", "main", "MXFA6", Side.SELL, 1200)
    written: list[PendingOrder | PlacementResult] = []
    async with running_api(api.settings) as dying:
        placer, database = dying.services.placer, api.services.database
        async with database.session() as session:
            for part in split_close(body, MARKET):
                options: dict[str, Any] = {"parent": plan.parent, "session": session}
                written.append(await placer.write_order(api.user, part, "a test", **options))
            assert await ids_written(api) == []  # all of it or nothing
        assert await ids_written(api) == ["x-1", "x-1#2", "x-1#3"]
        for order in written[:sent_before]:
            await placer.follow_order(order, 5)
    assert len(worker.popped) == sent_before
    worker.reply = answer_positions(
        make_position("MXFA6", 1200 - submitted_orders(worker)[0][1] if sent_before else 1200)
    )
    answers = await asyncio.gather(close_position(user, api), close_position(user, api))
    for answer in answers:
        outcome = answer.json()
        assert (outcome["state"], outcome["quantity"], outcome["filled_quantity"]) == (
            "filled",
            1200,
            1200,
        )
    assert sorted(submitted_orders(worker)) == sorted(WHOLE)


async def test_a_repeat_near_the_last_instant_looks_no_younger_than_the_order(
    api: ServedApi,
) -> None:
    """A worker compares the time of acceptance, deadline less lifetime, with the time since when
    Valkey's server is known. A repeat of a signal that had a moment left looked as if the order had
    just been accepted, and was executed a second time by the user's next worker."""
    asked = ClosePositionRequest(client_order_id="x-1")
    plan = PositionClose.of(asked, api.user, "main", "MXFA6", "a test")
    body = asked.order("x-1", "main", "MXFA6", Side.SELL, 2)
    placer, last = api.services.placer, time.monotonic() + 20.0
    first = await placer.write_order(api.user, body, "a test", parent=plan.parent, not_after=last)
    await asyncio.sleep(2.0)
    repeat = await placer.write_order(api.user, body, "a test", parent=plan.parent, not_after=last)
    assert isinstance(first, PendingOrder)
    assert isinstance(repeat, PendingOrder)
    accepted = [order.deadline - order.request.lifetime_ms / 1000 for order in (first, repeat)]
    assert abs(accepted[1] - accepted[0]) < 0.5
    assert repeat.deadline <= last + 0.5


async def test_of_many_large_closes_at_once_one_is_written(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, 1200, answer_submitted)
    async with running_api(api.settings) as other, other.client(api.key) as elsewhere:
        closes = [
            close_position(caller, api, number)
            for number, caller in enumerate([user, elsewhere] * 3)
        ]
        answers = await asyncio.gather(*closes)
    codes = sorted(answer.json().get("code") or "sent" for answer in answers)
    assert codes == ["POSITION_BUSY"] * 5 + ["sent"]
    assert sorted(submitted_orders(worker)) == sorted(WHOLE)


async def test_parts_that_end_differently_make_one_outcome(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    refuse = failed(OrderState.REJECTED, Failure(code="DEADLINE_EXCEEDED", detail="too late"))

    def script(order: PlaceOrder) -> Answer | None:
        return filled(order) if order.quantity == MAX_QUANTITY else refuse(order)

    await start_worker_holding(api, start_worker, 700, script)
    outcome = (await close_position(user, api)).json()
    assert (outcome["state"], outcome["final"], outcome["filled_quantity"]) == (
        "cancelled",
        True,
        499,
    )
    assert (outcome["code"], outcome["reason"]) == ("DEADLINE_EXCEEDED", "too late")
    assert [part["state"] for part in outcome["parts"]] == ["filled", "rejected"]


async def test_a_part_without_an_answer_leaves_the_whole_open(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    def script(order: PlaceOrder) -> Answer | None:
        return filled(order) if order.quantity == MAX_QUANTITY else None

    worker = await start_worker_holding(api, start_worker, 700, script)
    path = f"/users/{api.user}/accounts/main/positions/MXFA6/close?wait=1"
    answer = await user.post(path, json={"client_order_id": "x-1"})
    assert (answer.status_code, answer.json()["final"], answer.json()["filled_quantity"]) == (
        202,
        False,
        499,
    )
    last = next(order for order in worker.popped if order.quantity == 201)
    await worker.answer_later(filled(last))
    answer = await user.post(path, json={"client_order_id": "x-1"})
    assert (answer.status_code, answer.json()["state"], len(worker.popped)) == (200, "filled", 2)


async def test_a_reversal_waits_for_all_parts_and_opens_once(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, -600)
    answer = await send_intent(user, api, "long_entry", quantity=2)
    legs = answer.json()["legs"]
    assert answer.status_code == 200, answer.text
    assert [(leg["client_order_id"], leg["state"], leg["quantity"]) for leg in legs] == [
        ("i-1.close", "filled", 600),
        ("i-1.open", "filled", 2),
    ]
    assert len(legs[0]["parts"]) == 2
    assert submitted_orders(worker)[-1] == ("buy", 2, False)
    again = (await send_intent(user, api, "long_entry", quantity=2)).json()
    assert [leg["quantity"] for leg in again["legs"]] == [600, 2]
    assert len(worker.popped) == 3


async def test_while_reducing_a_large_close_passes_and_while_halted_nothing_of_it_is_written(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    await start_worker_holding(api, start_worker, 600)
    async with api.client(api.admin_key) as admin:
        await admin.put("/switches", json=switch_body(user_id=api.user))
        assert (await close_position(user, api)).json()["code"] == "TRADING_HALTED"
        assert await ids_written(api) == []
        await admin.put("/switches", json=switch_body(user_id=api.user, state="reducing"))
        assert (await close_position(user, api)).json()["state"] == "filled"


@pytest.mark.parametrize(
    ("max_quantity", "quantity", "sizes"),
    [(200, 200, [200]), (200, 450, [200, 200, 50]), (5_000, 4_999, [4_999])],
)
def test_a_close_is_split_by_the_maximum_of_the_accounts_own_market(
    max_quantity: int, quantity: int, sizes: list[int]
) -> None:
    asked = ClosePositionRequest(client_order_id="x-1")
    body = asked.order("x-1", "main", "MXFA6", Side.SELL, quantity)
    assert [part.quantity for part in split_close(body, market_taking(max_quantity))] == sizes


def test_a_close_of_too_many_orders_is_refused_with_the_most_that_can_be_closed() -> None:
    asked = ClosePositionRequest(client_order_id="x-1")
    body = asked.order("x-1", "main", "MXFA6", Side.SELL, 10 * MAX_PARTS + 1)
    with pytest.raises(CloseInvalid, match=f"Close at most {10 * MAX_PARTS} lots at a time"):
        split_close(body, market_taking(10))


async def test_an_id_too_long_for_its_parts_is_refused_only_where_there_are_parts(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, 600)
    path = f"/users/{api.user}/accounts/main/positions/MXFA6/close"
    long = await user.post(path, json={"client_order_id": "x" * 63})
    assert (long.status_code, long.json()["code"]) == (422, "CLOSE_INVALID")
    small = await user.post(path, json={"client_order_id": "x" * 64, "quantity": 499})
    assert (small.status_code, "parts" in small.json(), len(worker.popped)) == (200, False, 1)


async def test_the_whole_is_what_its_parts_come_to(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    await start_worker_holding(api, start_worker, 1000)
    whole = (await close_position(user, api)).json()
    parts = [OrderView.model_validate(part) for part in whole["parts"]]

    def of(*changes: dict[str, Any]) -> tuple[str, bool, int, Decimal | None]:
        changed = [part.model_copy(update=how) for part, how in zip(parts, changes, strict=True)]
        whole = whole_of(changed)
        return whole.state.value, whole.final, whole.filled_quantity, whole.average_price

    nothing = {"filled_quantity": 0, "average_price": None}
    working = nothing | {"state": OrderState.SUBMITTED, "final": False}
    unknown = nothing | {"state": OrderState.UNKNOWN, "final": False}
    cancelled = nothing | {"state": OrderState.CANCELLED}
    assert of({}, {}, {"average_price": Decimal(600)}) == ("filled", True, 1000, Decimal(101))
    assert of({}, working, {}) == ("part_filled", False, 501, Decimal(100))
    assert of({}, working, unknown) == ("unknown", False, 499, Decimal(100))
    assert of(cancelled, cancelled, cancelled) == ("cancelled", True, 0, None)

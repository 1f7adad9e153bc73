"""Pre-trade checks over the API: each mistake has its own code, and a repeat is none."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.database.orders import recording
from infra.database.orders.checks import CheckedTerms
from infra.database.trading import limits as trading_limits
from infra.settings import Settings
from tests.support.api.accounts import put_account, set_account_limits, switch_body
from tests.support.systems.api import ServedApi, StartWorker, an_order, on_one_day, running_api
from tests.support.workers.api_worker import failed, filled
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import OrderTermsRule
from worker_runtime.protocol.messages import Failure, OrderOutcome, OrderState


@pytest.fixture
async def place(api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker) -> Any:
    await start_worker(api.user)

    async def placed(number: int = 1, **changes: Any) -> tuple[int, str]:
        answer = await user.post(f"/users/{api.user}/orders", json=an_order(number, **changes))
        body = answer.json()
        return answer.status_code, body.get("code") or body["state"]

    return placed


async def test_the_settings_limit_holds_without_one_of_the_accounts_own(
    api: ServedApi, place: Any
) -> None:
    assert await place(1, quantity=499, price="100") == (201, "filled")
    assert await place(2, quantity=500) == (422, "QUANTITY_LIMIT")


async def test_an_order_that_only_reduces_has_the_markets_maximum_and_not_the_users(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    await set_account_limits(api, max_quantity=2)
    terms = CheckedTerms(
        user_id=api.user,
        account_id="main",
        symbol="2330",
        quantity=499,
        price_type="MKT",
        price=None,
        time_in_force="IOC",
        trading_day=datetime.now(UTC).date(),
        reduce_only=True,
    )
    checks = api.services.placer.checks
    await checks.check(terms)
    with pytest.raises(OrderTermsRule, match="1 to 499"):
        await checks.check(replace(terms, quantity=500))


async def test_an_account_has_limits_of_its_own(api: ServedApi, place: Any) -> None:
    await on_one_day()
    await set_account_limits(
        api, max_quantity=2, max_notional=Decimal(1_000_000), max_daily_orders=3
    )
    assert await place(1, quantity=3) == (422, "QUANTITY_LIMIT")
    assert await place(2, quantity=1, price="1000.01") == (422, "NOTIONAL_LIMIT")
    assert await place(3, quantity=2, price="500.01") == (422, "NOTIONAL_LIMIT")
    assert await place(4, quantity=2, price="500") == (201, "filled")
    assert await place(5, quantity=2, price_type="MKT", price=None) == (201, "filled")
    # Repeats do not count as orders of the day.
    assert await place(4, quantity=2, price="500") == (200, "filled")
    assert await place(7, price="1") == (201, "filled")
    assert await place(8, price="1") == (429, "DAILY_ORDER_LIMIT")
    assert await place(7, price="1") == (200, "filled")


async def test_a_second_order_for_the_same_is_a_mistake_for_a_while(
    api: ServedApi, place: Any
) -> None:
    await set_account_limits(api, duplicate_window_s=60)
    answers = await asyncio.gather(*(place(number) for number in range(5)))
    assert sorted(answers) == [(201, "filled"), *[(409, "DUPLICATE_ORDER")] * 4]
    assert await place(answers.index((201, "filled"))) == (200, "filled")
    assert await place(10, quantity=2) == (201, "filled")
    assert await place(11, quantity=2) == (409, "DUPLICATE_ORDER")
    assert await place(11, quantity=2, allow_duplicate=True) == (201, "filled")
    assert await place(12, quantity=3, allow_duplicate=True) == (201, "filled")
    assert await place(13, quantity=3) == (409, "DUPLICATE_ORDER")  # nobody said so of this one
    await set_account_limits(api, duplicate_window_s=0)
    async with api.services.database.session() as session:
        assert (await trading_limits.get_limits(session, api.user, "main")).duplicate_window_s == 0


async def test_an_id_that_was_used_before_is_no_twin_of_the_order_that_it_did_not_become(
    api: ServedApi, place: Any
) -> None:
    await set_account_limits(api, duplicate_window_s=60)
    assert await place(1) == (201, "filled")
    assert await place(1, quantity=2) == (409, "CLIENT_ORDER_ID_REUSED")
    assert await place(2, quantity=2) == (201, "filled")


async def test_the_worker_learns_what_to_hold_against_the_brokers_reference_price(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker(api.user)
    await put_account(api, "real", "shioaji", "stock")
    market: dict[str, Any] = {"price_type": "MKT", "price": None, "quantity": 5}
    orders: list[dict[str, Any]] = [
        {},
        market,
        {"account_id": "real", "price": "1005"},
        {"account_id": "real", **market},
    ]
    changed = api.settings.model_copy(update={"check_market_open": "off"})
    async with running_api(changed) as other, other.client(api.key) as caller:
        for number, order in enumerate(orders):
            answer = await caller.post(f"/users/{api.user}/orders", json=an_order(number, **order))
            assert answer.status_code == 201, answer.text
    bounds = [(order.price_band, order.most_price) for order in worker.popped]
    tenth, max_price = Decimal("0.1"), Decimal(50_000_000) / 5000
    assert bounds == [(None, None), (None, max_price), (tenth, None), (tenth, max_price)]
    await set_account_limits(api, price_band=Decimal("0.02"), max_notional=Decimal(0))
    assert (
        await user.post(f"/users/{api.user}/orders", json=an_order(5, **market))
    ).status_code == 422
    await set_account_limits(api, price_band=Decimal("0.02"))
    async with running_api(changed) as other, other.client(api.key) as caller:
        await caller.post(f"/users/{api.user}/orders", json=an_order(6))
    assert worker.popped[-1].price_band == Decimal("0.02")


async def test_a_repeat_that_sends_an_order_after_all_sends_the_bounds_of_its_acceptance(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    await set_account_limits(api, price_band=Decimal("0.02"), max_quantity=5)
    await api.services.valkey.set(keys.mark(api.user), "1:scripted", ex=30)
    body = an_order(quantity=5)
    assert (await user.post(f"/users/{api.user}/orders?wait=0", json=body)).status_code == 202
    # As if that process had died before it queued it.
    for key in await api.services.valkey.keys("trading:*"):
        await api.services.valkey.delete(key)
    await set_account_limits(
        api, price_band=Decimal("0.02"), max_quantity=4
    )  # the checks would refuse it now
    worker = await start_worker(api.user)
    async with running_api(api.settings) as other, other.client(api.key) as caller:
        await caller.post(f"/users/{api.user}/orders", json=body)
    assert [(order.quantity, order.price_band) for order in worker.popped] == [(5, Decimal("0.02"))]


async def test_by_default_a_double_click_is_one_order_at_all_processes_of_the_api(
    api: ServedApi, start_worker: StartWorker
) -> None:
    await start_worker(api.user)
    default = Settings.model_fields["check_duplicate_window"].default
    assert default == 2
    changed = api.settings.model_copy(update={"check_duplicate_window": default})
    async with running_api(changed) as process, running_api(changed) as other:
        clients = [where.client(api.key) for where in (process, other)]
        for turn in range(10):
            bodies = [an_order(f"{turn}-{number}", price=f"{turn + 1}") for number in range(4)]  # type: ignore[arg-type]
            clicks = [
                clients[i % 2].post(f"/users/{api.user}/orders", json=bodies[i]) for i in range(4)
            ]
            answers = await asyncio.gather(*clicks)
            assert sorted(answer.status_code for answer in answers) == [201, 409, 409, 409]
            refused = next(answer.json() for answer in answers if answer.status_code == 409)
            assert refused["code"] == "DUPLICATE_ORDER"
            assert f"order-{turn}-" in refused["detail"]
            (first,) = [i for i, answer in enumerate(answers) if answer.status_code == 201]
            again = await clients[(first + 1) % 2].post(
                f"/users/{api.user}/orders", json=bodies[first]
            )
            assert again.status_code == 200
        for client in clients:
            await client.aclose()


async def test_what_came_to_nothing_has_no_twin(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    await set_account_limits(api, duplicate_window_s=60)
    worker = await start_worker(
        api.user, failed(OrderState.REJECTED, Failure(code="WORKER_LOST", detail=""))
    )
    path = f"/users/{api.user}/orders"
    first = (await user.post(path, json=an_order(1))).json()
    assert first["order"]["state"] == "rejected"
    async with api.services.database.session() as session:
        outcome = OrderOutcome(order_id=first["order"]["id"], state=OrderState.REJECTED)
        await recording.apply_outcome(session, outcome, None)
    worker.script = filled
    assert (await user.post(path, json=an_order(2))).json()["state"] == "filled"
    assert (await user.post(path, json=an_order(3))).json()["code"] == "DUPLICATE_ORDER"
    async with api.client(api.admin_key) as admin:
        await admin.put("/switches", json=switch_body(user_id=api.user))
    assert (await user.post(path, json=an_order(3))).json()["code"] == "TRADING_HALTED"


async def test_taifex_takes_no_market_order_that_rests(api: ServedApi, place: Any) -> None:
    await put_account(api, "futures", "paper", "futures")
    market = {"account_id": "futures", "symbol": "TXFA6", "price_type": "MKT", "price": None}
    assert await place(1, **market, time_in_force="ROD") == (422, "PRICE_TYPE_RULE")
    assert await place(2, **market, time_in_force="IOC") == (201, "filled")
    assert await place(3, price_type="MKT", price=None, time_in_force="ROD") == (201, "filled")


async def test_symbols_and_hours_are_checked_for_real_brokers(
    api: ServedApi, place: Any, tmp_path: Path
) -> None:
    await put_account(api, "real", "shioaji", "stock")
    # The paper exchange trades whatever is asked for.
    assert await place(1, symbol="NOSUCH") == (201, "filled")
    assert await place(2, account_id="real", symbol="NOSUCH") == (422, "UNKNOWN_SYMBOL")
    today = datetime.now(UTC).astimezone().date()
    days = {str(today.fromordinal(today.toordinal() + number)): "closed" for number in (-1, 0, 1)}
    closed = tmp_path / "closed.json"
    closed.write_text(str(days).replace("'", '"'))
    opened = tmp_path / "opened.json"
    opened.write_text(str(dict.fromkeys(days, "00:00-23:59:59.999999")).replace("'", '"'))
    for path, expected in ((closed, "MARKET_CLOSED"), (opened, "CLIENT_ORDER_ID_REUSED")):
        changed = api.settings.model_copy(update={"calendar_file": str(path)})
        async with running_api(changed) as other, other.client(api.key) as user:
            order = an_order(1, account_id="real")
            if path is closed:
                order = an_order(3, account_id="real", price="1005")
            answer = await user.post(f"/users/{api.user}/orders", json=order)
        assert answer.json()["code"] == expected


async def test_an_account_that_does_not_exist_is_still_reported(place: Any) -> None:
    assert await place(1, account_id="nobodys", quantity=9_000) == (422, "UNKNOWN_ACCOUNT")


async def test_operators_set_an_accounts_limits_and_its_user_sees_them(
    api: ServedApi, user: httpx.AsyncClient, place: Any
) -> None:
    path = f"/users/{api.user}/accounts/main/limits"
    limits = {
        "max_quantity": 1,
        "max_notional": "900.50",
        "max_daily_orders": None,
        "duplicate_window_s": None,
        "price_band": None,
    }
    assert (await user.put(path, json=limits)).json()["code"] == "FORBIDDEN"
    async with api.client(api.admin_key) as admin:
        for wrong in (
            {"max_quantity": -1},
            {"max_notional": "NaN"},
            {"max_quantity": 1.5},
            {"other": 1},
            {"price_band": 0},
        ):
            assert (await admin.put(path, json=wrong)).json()["code"] == "INVALID_REQUEST"
        missing = await admin.put(path.replace("main", "nobodys"), json=limits)
        assert missing.json()["code"] == "ACCOUNT_NOT_FOUND"
        assert (await admin.put(path, json=limits)).status_code == 200
    seen = (await user.get(path)).json()
    assert seen | {"max_notional": None} == limits | {"max_notional": None}
    assert Decimal(seen["max_notional"]) == Decimal("900.5")
    assert await place(1, quantity=2) == (422, "QUANTITY_LIMIT")
    assert await place(2, quantity=1, price="0.91") == (422, "NOTIONAL_LIMIT")
    assert await place(3, quantity=1, price="0.9") == (201, "filled")
